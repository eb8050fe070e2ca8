"""Weights into a LlamaModel: from a folder of safetensors, from the hub, or random ones of the right shapes.

Strict both ways: a tensor that is missing, one that is not known, one of another shape, a file that is cut short are
each an error that names the file and the tensor. The hub is asked only when no local copy exists.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.errors import ConfigError, ModelError
from workbench.models.layers import Linear
from workbench.models.llama import Layer, LlamaModel
from workbench.models.names import resolve
from workbench.models.spec import ModelSpec

_FILES = (
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "generation_config.json",
)
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_IGNORED = (".rotary_emb.inv_freq",)  # older files keep what follows from the config
_COPIED_HEAD_BYTES = (
    32 * 2**20
)  # a tied output matrix up to this size is held a second time, transposed: faster
Take = Callable[[str, tuple[int, ...]], torch.Tensor]


def load_model(name: str, *, dtype: str = "auto", device: str = "cpu", seed: int = 0) -> LlamaModel:
    """The model of a short name, a folder, a hub id, or `dummy:` and one of them (random weights from `seed`).

    dtype: of the weights and of all arithmetic; "auto" is float32 on a CPU, else the config's.
    Raises ModelError (unknown, incomplete, corrupt or unsupported model) or ConfigError (dtype).
    """
    dummy = name.startswith("dummy:")
    folder = find_folder(name.removeprefix("dummy:"), weights=not dummy)
    spec = read_spec(folder)
    chosen = _dtype(dtype, device, spec)
    if dummy:
        model = _build(spec, _random(seed), chosen, device)
        model.fingerprint = _digest(f"dummy {seed} {spec} {chosen}")
    else:
        weights = Weights(folder)
        model = _build(spec, weights.take, chosen, device)
        weights.refuse_leftovers()
        model.fingerprint = _digest(f"{weights.digest()} {spec} {chosen}")
    model.folder = folder
    return model


def find_folder(name: str, *, weights: bool = True) -> Path:
    """The local folder of a model, brought from the hub when it is on no disk here. `weights=False`: config only."""
    where = resolve(name)
    if isinstance(where, Path):
        if not (where / "config.json").is_file():
            raise ModelError(
                f"{where} has no config.json; a model folder holds config.json and *.safetensors."
            )
        return where
    return _from_hub(
        where, _FILES if weights else tuple(f for f in _FILES if "safetensors" not in f)
    )


def _from_hub(hub_id: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(files), local_files_only=True))
        if _complete(folder, files):
            return folder
    except (LocalEntryNotFoundError, ValueError):
        pass  # not in the cache
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files)))
    except GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is gated: accept its licence at https://huggingface.co/{hub_id}, then set HF_TOKEN to a token "
            "of that account (https://huggingface.co/settings/tokens)."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {hub_id!r} (or it is private: set HF_TOKEN)."
        ) from error
    except (
        Exception
    ) as error:  # whatever the network raised: no route, no name, time-out, a proxy's answer
        raise ModelError(
            f"{hub_id} is not in the local cache and the hub cannot be reached ({type(error).__name__}: {error}). "
            "Give a local folder, or fetch it once where there is a network: "
            f"`hf download {hub_id}`."
        ) from error


def _complete(folder: Path, files: tuple[str, ...]) -> bool:
    """Whether a cached snapshot has what is asked for: its config, and its weights where they are wanted."""
    wants_weights = any("safetensors" in pattern for pattern in files)
    return (folder / "config.json").is_file() and (
        not wants_weights or any(folder.glob("*.safetensors"))
    )


def read_spec(folder: Path) -> ModelSpec:
    """The ModelSpec of a folder's config.json."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    return ModelSpec.from_config(config, str(path))


def _dtype(dtype: str, device: str, spec: ModelSpec) -> torch.dtype:
    wanted = ("float32" if device == "cpu" else spec.dtype) if dtype == "auto" else dtype
    if wanted not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; allowed: 'auto', {', '.join(map(repr, _DTYPES))}.")
    return _DTYPES[wanted]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Weights:
    """The safetensors files of a folder, each tensor taken once and by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = self._index()
        self.left = set(self.file_of)

    def _index(self) -> dict[str, Path]:
        """The file that holds each tensor, from the index of a sharded model or from the single file."""
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

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`; ModelError when it is not there or has another shape."""
        if name not in self.file_of:
            raise ModelError(f"{self.folder} lacks the tensor {name!r} of shape {list(shape)}.")
        with self._open(self.file_of[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.file_of[name]}: {name} has shape {list(tensor.shape)}; config.json says {list(shape)}."
            )
        self.left.discard(name)
        return tensor

    def refuse_leftovers(self) -> None:
        """ModelError when a tensor was in a file that no part of the model asked for."""
        unknown = sorted(name for name in self.left if not name.endswith(_IGNORED))
        if unknown:
            raise ModelError(
                f"{self.file_of[unknown[0]]} holds {len(unknown)} tensors that this architecture does not know, "
                f"first {unknown[0]!r}; nothing is dropped silently: the config does not belong to these weights."
            )

    def digest(self) -> str:
        """sha256 over the bytes of all files."""
        total = hashlib.sha256()
        for file in sorted(set(self.file_of.values())):
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
        return total.hexdigest()


def _random(seed: int) -> Take:
    """Gaussian matrices that keep activations near 1, norms of ones; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        scale = 1.0 if "embed_tokens" in name else 1 / math.sqrt(shape[1])
        return torch.randn(shape, generator=generator) * scale

    return take


def _build(spec: ModelSpec, take: Take, dtype: torch.dtype, device: str) -> LlamaModel:
    """The model from tensors named as Hugging Face names them."""

    def norm(name: str) -> torch.Tensor:
        return take(name, (spec.hidden,)).to(device, dtype).contiguous()

    embedding = take("model.embed_tokens.weight", (spec.vocab, spec.hidden)).to(device, dtype)
    layers = [
        _layer(spec, take, f"model.layers.{i}.", norm, dtype, device) for i in range(spec.layers)
    ]
    return LlamaModel(
        spec, embedding, layers, norm("model.norm.weight"), _head(spec, take, embedding)
    )


def _layer(
    spec: ModelSpec,
    take: Take,
    prefix: str,
    norm: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    device: str,
) -> Layer:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def fused(inputs: int, outputs: dict[str, int]) -> Linear:
        parts = [take(f"{prefix}{name}.weight", (rows, inputs)) for name, rows in outputs.items()]
        return Linear(torch.cat(parts).to(device, dtype).t().contiguous())

    attention = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    mlp = {"mlp.gate_proj": spec.intermediate, "mlp.up_proj": spec.intermediate}
    return Layer(
        attention_norm=norm(prefix + "input_layernorm.weight"),
        qkv=fused(spec.hidden, attention),
        output=fused(queries, {"self_attn.o_proj": spec.hidden}),
        mlp_norm=norm(prefix + "post_attention_layernorm.weight"),
        gate_up=fused(spec.hidden, mlp),
        down=fused(spec.intermediate, {"mlp.down_proj": spec.hidden}),
    )


def _head(spec: ModelSpec, take: Take, embedding: torch.Tensor) -> Linear:
    """The output matrix; a tied one is the embedding itself, held again only where that is small."""
    if not spec.tied:
        given = take("lm_head.weight", (spec.vocab, spec.hidden)).to(embedding)
        return Linear(given.t().contiguous())
    if embedding.nbytes <= _COPIED_HEAD_BYTES:
        return Linear(embedding.t().contiguous())
    return Linear(embedding.t())
