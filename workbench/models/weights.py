"""The tensors of a model's files, each taken once and by the name that Hugging Face gives it.

Strict both ways: a tensor that is missing, one that is not known, one of another shape, a file that
is cut short are each an error that names the file and the tensor. What it does not do: build a
model (loading.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.errors import ModelError
from workbench.kernels.quantised import Quantised
from workbench.models.rounding import Listed, held_bytes

_IGNORED = (".rotary_emb.inv_freq",)  # older files keep what follows from the config
Stored = torch.Tensor | Quantised


class Weights(ABC):
    """Named tensors of one place; what is taken is crossed out, and what is left refused."""

    def __init__(self, where: Path, names: Iterable[str]) -> None:
        self.where = where
        self.names = frozenset(names)
        self.left = set(self.names)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, dequantised; ModelError when it is not there or has another shape."""
        stored = self.take_stored(name, shape)
        if isinstance(stored, Quantised):
            return torch.from_numpy(stored.dequantise())
        return stored

    def take_stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The tensor `name` as the file holds it: Quantised where its kind is one of those."""
        if name not in self.names:
            raise ModelError(f"{self.where} lacks the tensor {name!r} of shape {list(shape)}.")
        stored = self.read(name)
        if tuple(stored.shape) != shape:
            raise ModelError(
                f"{self.file(name)}: {name} has shape {list(stored.shape)}; its config says "
                f"{list(shape)}."
            )
        if not (stored.is_finite if isinstance(stored, Quantised) else _is_finite(stored)):
            raise ModelError(
                f"{self.file(name)}: {name} holds numbers that are not finite; the file is "
                "corrupt: fetch the model again."
            )
        self.left.discard(name)
        return stored

    def refuse_leftovers(self, unused: Collection[str] = ()) -> None:
        """ModelError when a tensor was in a file that no part of the model asked for.

        unused: names that the architecture knows and has no use for.
        """
        left = self.left.difference(unused)
        unknown = sorted(name for name in left if not name.endswith(_IGNORED))
        if unknown:
            raise ModelError(
                f"{self.file(unknown[0])} holds {len(unknown)} tensors that this architecture "
                f"does not know, first {unknown[0]!r}; nothing is dropped silently: the config "
                "does not belong to these weights."
            )

    @abstractmethod
    def file(self, name: str) -> Path:
        """The file that holds a tensor."""

    @abstractmethod
    def read(self, name: str) -> Stored:
        """The tensor of a name that is there, as stored."""

    @abstractmethod
    def listed(self) -> list[Listed]:
        """Every tensor's name, kind of number and shape, by the files' headers."""

    @abstractmethod
    def held_bytes(self, itemsize: int) -> int:
        """Bytes of all tensors once held: numbers of `itemsize` bytes, quantised ones as stored."""

    @abstractmethod
    def digest(self) -> str:
        """sha256 over the bytes of all files."""


class FolderWeights(Weights):
    """The safetensors files of a folder: one, or those that an index names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = self._index()
        super().__init__(folder, self.file_of)

    def _index(self) -> dict[str, Path]:
        """The file that holds each tensor: from a sharded model's index, or the single file."""
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if single.is_file():
            files = [single]
        elif index.is_file():
            try:
                listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError) as error:
                raise ModelError(f"{index} has no readable weight_map: {error}.") from error
            files = sorted({self.folder / name for name in listed.values()})
        else:
            raise ModelError(
                f"{self.folder} has neither model.safetensors nor model.safetensors.index.json."
            )
        return {name: file for file in files for name in self._names(file)}

    def _names(self, file: Path) -> list[str]:
        with self._open(file) as opened:
            return list(opened.keys())

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is missing, cut short or corrupt ({error}); fetch the model again."
            ) from error

    def file(self, name: str) -> Path:
        return self.file_of[name]

    def read(self, name: str) -> torch.Tensor:
        with self._open(self.file_of[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def listed(self) -> list[Listed]:
        found = []
        for file in sorted(set(self.file_of.values())):
            with self._open(file) as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                for name, part in slices.items():
                    found.append(Listed(name, part.get_dtype(), tuple(part.get_shape())))
        return found

    def held_bytes(self, itemsize: int) -> int:
        return held_bytes(self.listed(), itemsize)

    def digest(self) -> str:
        """sha256 over the bytes of all files."""
        total = hashlib.sha256()
        for file in sorted(set(self.file_of.values())):
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
        return total.hexdigest()


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether it holds neither NaN nor infinity; a tenth of isfinite's time, as ends carry both."""
    if not tensor.is_floating_point():
        return True
    return all(math.isfinite(end) for end in map(float, torch.aminmax(tensor)))
