"""A Llama forward pass (Touvron et al. 2023) over one flat batch and a paged KV cache.

Rows of all sequences lie one after the other; only attention sees where one ends. Buffers are
allocated once, for the largest step; queries, keys and values are one product, gate and up one that
includes SwiGLU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.kernels import ForwardContext, Kernels, LayerCache, Part, Quantised
from workbench.models.gguf import GGUFFile
from workbench.models.spec import ModelSpec


class Linear:
    """out = x @ weight + bias, weight [inputs, outputs] packed for the kernels of its device."""

    def __init__(
        self,
        kernels: Kernels,
        parts: Sequence[Part],  # each [outputs, inputs], as files have them
        bias: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        self.kernels, self.bias = kernels, bias
        self.matrix: Any = kernels.pack(parts, gated)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return int(self.matrix.nbytes) + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.kernels.multiply(x, self.matrix, out)
        if self.bias is not None:
            self.kernels.add_row(self.bias, out)

    def add_to(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += the product."""
        self.kernels.multiply_add(x, self.matrix, out)
        if self.bias is not None:
            self.kernels.add_row(self.bias, out)

    def gated(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(x @ first part) * (x @ second part); of a layer packed so."""
        self.kernels.multiply_gated(x, self.matrix, out)


class Embedding:
    """Rows of a matrix [vocab, hidden] by token: as the file has it, or out of a tied output."""

    def __init__(self, source: torch.Tensor | Quantised | Linear) -> None:
        self._source = source

    @property
    def nbytes(self) -> int:
        """Bytes held beside the output's."""
        return 0 if isinstance(self._source, Linear) else self._source.nbytes

    def __call__(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, hidden] = the tokens' (int64 [T]) rows."""
        source = self._source
        if isinstance(source, Linear):
            source.kernels.columns(source.matrix, tokens, out)
        elif isinstance(source, Quantised):
            out.copy_(torch.from_numpy(source.pick(tokens.cpu().numpy()).dequantise()))
        else:
            torch.index_select(source, 0, tokens, out=out)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer's weights."""

    attention_norm: torch.Tensor  # what `LlamaModel.norm` takes: [hidden]
    qkv: Linear  # [hidden, (heads + 2 kv_heads) head_dim]
    output: Linear  # [heads head_dim, hidden]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # [hidden, intermediate], gated
    down: Linear  # [intermediate, hidden]

    @property
    def products(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class Rows(NamedTuple):
    """A step's rows in `Buffers`."""

    residual: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gated: torch.Tensor


class Buffers:
    """Room for a step of `tokens` rows, of which `logits` rows reach the vocabulary."""

    def __init__(
        self, spec: ModelSpec, tokens: int, logits: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def room(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        self.tokens, self.logit_rows = tokens, logits
        self.residual = room(tokens, spec.hidden)
        self.normed = room(tokens, spec.hidden)
        self.qkv = room(tokens, spec.qkv_columns)
        self.attended = room(tokens, spec.heads * spec.head_dim)
        self.gated = room(tokens, spec.intermediate)
        self.wanted = room(logits, spec.hidden)
        self.logits = room(logits, spec.outputs)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))

    def of(self, rows: int) -> Rows:
        """So many rows of each."""
        return Rows(*(getattr(self, name)[:rows] for name in Rows._fields))

    def chosen(self, room: Rows, rows: torch.Tensor) -> Rows:
        """Some rows' residuals and queries, and room for what becomes of them; rows: int64."""
        count = len(rows)
        residual = torch.index_select(room.residual, 0, rows, out=self.wanted[:count])
        return self.of(count)._replace(residual=residual, qkv=room.qkv.index_select(0, rows))


class LlamaModel:
    """Weights and the forward pass; one step at a time, on one device.

    source: what holds config and tokenizer; fingerprint: of weights and shapes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        embedding: Embedding,
        layers: Sequence[Layer],
        final_norm: torch.Tensor,  # of the dtype and on the device of all arithmetic
        head: Linear,  # [hidden, outputs]
        inner: Sequence[Linear] = (),  # of a value head, each [hidden, hidden] and followed by ReLU
    ) -> None:
        self.spec, self.kernels = spec, kernels
        self.embedding, self.layers = embedding, tuple(layers)
        self.final_norm, self.head, self.inner = final_norm, head, tuple(inner)
        self.source: Path | GGUFFile = Path()
        self.fingerprint = ""
        self.device, self.dtype = final_norm.device, final_norm.dtype
        radians = torch.arange(spec.max_model_len).float()[:, None] * rotary_frequencies(spec)
        exact = radians.double()  # torch's own float32 depends on the host's processor
        self.angles = exact.cos().float().to(final_norm), exact.sin().float().to(final_norm)

    @property
    def products(self) -> tuple[Linear, ...]:
        """Every matrix product of a forward pass."""
        return (*(p for layer in self.layers for p in layer.products), *self.inner, self.head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and tables held, each counted once."""
        norms = [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        tensors = (self.final_norm, *self.angles, *norms)
        packed = self.embedding.nbytes + sum(product.nbytes for product in self.products)
        return packed + sum(tensor.nbytes for tensor in tensors)

    def first_layers(self, count: int) -> LlamaModel:
        """The same model, cut off behind so many layers."""
        shallow = copy.copy(self)
        shallow.layers = self.layers[:count]
        return shallow

    def buffers(self, tokens: int, logits: int) -> Buffers:
        """Room for steps of up to `tokens` rows, `logits` of them wanted at the output."""
        return Buffers(self.spec, tokens, logits, self.dtype, self.device)

    def forward(
        self,
        tokens: torch.Tensor,  # int64 [T]
        caches: Sequence[LayerCache],
        context: ForwardContext,
        buffers: Buffers,
        needed: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Stores the rows' keys and values; their last hidden states, normed [T, hidden].

        needed: of these rows only [R], ascending, at most as many as the buffers' logits. Others
        end with the last layer's keys and values.
        """
        rows = len(tokens)
        self.embed(tokens, context.positions, buffers.residual[:rows])
        self.run_layers(rows, caches, context, buffers, needed)
        return buffers.normed[: rows if needed is None else len(needed)]

    def embed(self, tokens: torch.Tensor, positions: NDArray[np.int64], out: torch.Tensor) -> None:
        """out [T, hidden] = what enters the first layer, of tokens at positions, int64 [T] each."""
        self.embedding(tokens, out)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, hidden] = x, normed as its layers' products take it."""
        self.kernels.rms_norm(x, weight, self.spec.rms_epsilon, out)

    def run_layers(
        self,
        rows: int,
        caches: Sequence[LayerCache],
        context: ForwardContext,
        buffers: Buffers,
        needed: NDArray[np.int64] | None = None,
    ) -> None:
        """From embeddings in buffers.residual to normed hidden states; see `forward`.

        Calls kernels and no more, where all are needed.
        """
        *lower, last = zip(self.layers, caches, strict=True)
        room = buffers.of(rows)

        def before_last_attention() -> None:
            for layer, cache in lower:
                self._store_keys(layer, cache, context, room)
                self._attend(layer, cache, context, room)
            self._store_keys(*last, context, room)

        if needed is None:
            before_last_attention()
            self._attend(*last, context, room)
        else:
            self.kernels.do(before_last_attention)
            if not len(needed):
                return
            room = buffers.chosen(room, torch.from_numpy(needed).to(self.device))
            self._attend(*last, context.of_rows(needed), room)
        self.norm(room.residual, self.final_norm, room.normed)

    def _store_keys(
        self, layer: Layer, cache: LayerCache, context: ForwardContext, room: Rows
    ) -> None:
        """A layer's queries, keys and values; the latter two into the cache."""
        self.norm(room.residual, layer.attention_norm, room.normed)
        layer.qkv(room.normed, room.qkv)
        self.kernels.store_kv(room.qkv, self.angles, cache, context)

    def _attend(self, layer: Layer, cache: LayerCache, context: ForwardContext, room: Rows) -> None:
        """The rest of a layer."""
        self.kernels.attend(room.qkv, room.attended, cache, context)
        layer.output.add_to(room.attended, room.residual)
        self.norm(room.residual, layer.mlp_norm, room.normed)
        layer.gate_up.gated(room.normed, room.gated)
        layer.down.add_to(room.gated, room.residual)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """Logits of some rows of the hidden states: [rows, outputs], a buffer's view.

        rows: in ascending order, so that as many as there are hidden states are all of them.
        """
        wanted, out = hidden, buffers.logits[: len(rows)]
        if len(rows) < len(hidden):
            wanted = buffers.wanted[: len(rows)]
            torch.index_select(hidden, 0, rows, out=wanted)
        self.head(self.head_inputs(wanted), out)
        return out

    def selected_logits(
        self, hidden: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out [R, C] = logits of some rows and outputs, both int64; of the rows' hidden states."""
        if self.inner:
            hidden = self.head_inputs(hidden.index_select(0, rows))
            rows = torch.arange(len(rows), device=rows.device)
        self.kernels.selected_logits(hidden, rows, self.head.matrix, columns, out)
        if self.head.bias is not None:
            self.kernels.add_row(self.head.bias[columns], out)

    def head_inputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head multiplies, of hidden states: themselves where nothing lies before."""
        for product in self.inner:
            out = torch.empty_like(hidden)
            product(hidden, out)
            hidden = out.relu_()
        return hidden


def rotary_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians a position of each pair of dimensions: float32 [head_dim / 2].

    Su et al. 2021; with `rope_scaling` Llama 3.1's: slow rotations are divided by `factor`, fast
    ones kept, those between blended, by how often each turns within the original context. None
    turns in a GPT-2: multiplied by 1, less 0, queries and keys stay bit for bit what they are.
    """
    if spec.gpt2:
        return torch.zeros(spec.head_dim // 2)
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequency = 1.0 / (spec.rope_theta ** exponents.double()).float()
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency
