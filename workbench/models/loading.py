"""Weights into a LlamaModel: from a folder of safetensors, from the hub, or random ones.

Strict both ways: a tensor that is missing, one that is not known, one of another shape, a file that
is cut short are each an error that names the file and the tensor. The hub is asked only when no
local copy exists.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import torch

from workbench.errors import ConfigError
from workbench.models.folders import DUMMY, find_model, is_gguf, read_spec
from workbench.models.gguf_weights import GGUFWeights
from workbench.models.layers import Linear
from workbench.models.llama import Layer, LlamaModel
from workbench.models.room import require_room
from workbench.models.spec import ModelSpec
from workbench.models.weights import FolderWeights, Weights

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_TURNED_BYTES = 32 * 2**20  # a tied matrix up to this size is held for the output product: faster
Take = Callable[[str, tuple[int, ...]], torch.Tensor]


def load_model(name: str, *, dtype: str = "auto", device: str = "cpu", seed: int = 0) -> LlamaModel:
    """The model of a short name, a folder, a .gguf file, a hub id, or `dummy:` and one of them.

    A dummy has random weights, from `seed`.

    dtype: of the weights and of all arithmetic; "auto" is float32 on a CPU, else the config's.
    Raises ModelError (unknown, incomplete, corrupt or unsupported model), ConfigError (dtype) or
    OutOfMemory (weights larger than the memory available).
    """
    dummy = name.startswith(DUMMY)
    where = find_model(name.removeprefix(DUMMY), weights=not dummy)
    spec = read_spec(where)
    chosen = _dtype(dtype, device, spec)
    if dummy:
        require_room(spec.weight_bytes(chosen.itemsize), name, str(chosen))
        model = _build(spec, _random(seed), chosen, device)
        model.fingerprint = _digest(f"dummy {seed} {spec} {chosen}")
    else:
        weights = open_weights(where)
        require_room(weights.held_bytes(chosen.itemsize), name, str(chosen))
        model = _build(spec, weights.take, chosen, device)
        weights.refuse_leftovers(spec.unused_tensors)
        model.fingerprint = _digest(f"{weights.digest()} {spec} {chosen}")
    model.folder = where
    return model


def open_weights(where: Path) -> Weights:
    """The tensors of a model's folder or .gguf file, by the names Hugging Face gives them."""
    return GGUFWeights(where) if is_gguf(where) else FolderWeights(where)


def _dtype(dtype: str, device: str, spec: ModelSpec) -> torch.dtype:
    wanted = ("float32" if device == "cpu" else spec.dtype) if dtype == "auto" else dtype
    if wanted not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; allowed: 'auto', {', '.join(map(repr, _DTYPES))}.")
    return _DTYPES[wanted]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _random(seed: int) -> Take:
    """Gaussian matrices that keep activations near 1, norms of ones, biases of zeros.

    The same for the same seed.
    """
    generator = torch.Generator().manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
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
    final_norm = norm("model.norm.weight")
    if spec.value_head is not None:
        *inner, head = _value_head(spec, take, embedding)
        return LlamaModel(spec, embedding, layers, final_norm, head, inner)
    embedding, head = _ends(spec, take, embedding)
    return LlamaModel(spec, embedding, layers, final_norm, head)


def _layer(
    spec: ModelSpec,
    take: Take,
    prefix: str,
    norm: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    device: str,
) -> Layer:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def joined(names: dict[str, int], kind: str, *inputs: int) -> torch.Tensor:
        parts = [take(f"{prefix}{name}.{kind}", (rows, *inputs)) for name, rows in names.items()]
        return torch.cat(parts).to(device, dtype)

    def fused(inputs: int, outputs: dict[str, int], bias: bool = False) -> Linear:
        weight = joined(outputs, "weight", inputs).t().contiguous()
        return Linear(weight, joined(outputs, "bias") if bias else None)

    attention = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    mlp = {"mlp.gate_proj": spec.intermediate, "mlp.up_proj": spec.intermediate}
    return Layer(
        attention_norm=norm(prefix + "input_layernorm.weight"),
        qkv=fused(spec.hidden, attention, spec.qkv_bias),
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


def _value_head(spec: ModelSpec, take: Take, like: torch.Tensor) -> list[Linear]:
    """The products of a value head, in order."""
    assert spec.value_head is not None
    *inner, last = spec.value_head.names
    widths = dict.fromkeys(inner, spec.hidden) | {last: spec.outputs}
    return [
        Linear(
            take(f"{name}.weight", (rows, spec.hidden)).to(like).t().contiguous(),
            take(f"{name}.bias", (rows,)).to(like),
        )
        for name, rows in widths.items()
    ]
