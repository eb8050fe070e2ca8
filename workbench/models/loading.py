"""Weights into a LlamaModel: from a folder of safetensors, from the hub, or random ones.

Strict both ways: a tensor that is missing, one that is not known, one of another shape, a file that
is cut short are each an error that names the file and the tensor. The hub is asked only when no
local copy exists.
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
from workbench.models.folders import find_folder, read_spec
from workbench.models.layers import Linear
from workbench.models.llama import Layer, LlamaModel
from workbench.models.spec import ModelSpec

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_IGNORED = (".rotary_emb.inv_freq",)  # older files keep what follows from the config
_TURNED_BYTES = 32 * 2**20  # a tied matrix up to this size is held for the output product: faster
Take = Callable[[str, tuple[int, ...]], torch.Tensor]


def load_model(name: str, *, dtype: str = "auto", device: str = "cpu", seed: int = 0) -> LlamaModel:
    """The model of a short name, a folder, a hub id, or `dummy:` and one of them.

    A dummy has random weights, from `seed`.

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

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`; ModelError when it is not there or has another shape."""
        if name not in self.file_of:
            raise ModelError(f"{self.folder} lacks the tensor {name!r} of shape {list(shape)}.")
        with self._open(self.file_of[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.file_of[name]}: {name} has shape {list(tensor.shape)}; config.json says "
                f"{list(shape)}."
            )
        self.left.discard(name)
        return tensor

    def refuse_leftovers(self) -> None:
        """ModelError when a tensor was in a file that no part of the model asked for."""
        unknown = sorted(name for name in self.left if not name.endswith(_IGNORED))
        if unknown:
            raise ModelError(
                f"{self.file_of[unknown[0]]} holds {len(unknown)} tensors that this architecture "
                f"does not know, first {unknown[0]!r}; nothing is dropped silently: the config "
                "does not belong to these weights."
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
    embedding, head = _ends(spec, take, embedding)
    return LlamaModel(spec, embedding, layers, norm("model.norm.weight"), head)


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


def _ends(spec: ModelSpec, take: Take, embedding: torch.Tensor) -> tuple[torch.Tensor, Linear]:
    """Embedding [vocab, hidden] and output matrix [hidden, vocab]; tied ones share their bytes.

    A small tied matrix lies as the output product wants it and is looked up in columns; a large one
    lies as the file has it, since columns of a wide matrix are slow to gather.
    """
    if not spec.tied:
        given = take("lm_head.weight", (spec.vocab, spec.hidden)).to(embedding)
        return embedding, Linear(given.t().contiguous())
    if embedding.nbytes > _TURNED_BYTES:
        return embedding, Linear(embedding.t())
    turned = embedding.t().contiguous()
    return turned.t(), Linear(turned)
