"""A Llama forward pass (Touvron et al. 2023) over one flat batch and a paged KV cache.

Rows of all sequences lie one after the other; only attention knows where one ends. Buffers are made
once, for the largest step; every product's weight is [inputs, outputs], queries, keys and values
fused, gate and up fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.kernels import ForwardContext, Kernels, LayerCache, load_kernels
from workbench.models.layers import UNTILED, Linear, RowTiles, find_row_tiles, rotary_tables
from workbench.models.spec import ModelSpec

_SPARE_ROWS = 64  # what padding to row tiles may need beyond the largest step
_MLP_ROWS = 256  # rows widened to `intermediate` at a time: they stay in cache, and buffers small


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer's weights."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear  # [hidden, (heads + 2 kv_heads) head_dim]
    output: Linear  # [heads head_dim, hidden]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # [hidden, 2 intermediate]
    down: Linear  # [intermediate, hidden]

    @property
    def products(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class Buffers:
    """Room for a step of `tokens` rows, of which `logits` rows reach the vocabulary."""

    def __init__(self, spec: ModelSpec, tokens: int, logits: int, like: torch.Tensor) -> None:
        def room(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros(rows + _SPARE_ROWS, columns, dtype=like.dtype, device=like.device)

        self.tokens, self.logit_rows = tokens, logits
        self.residual = room(tokens, spec.hidden)
        self.normed = room(tokens, spec.hidden)
        self.delta = room(tokens, spec.hidden)
        self.qkv = room(tokens, spec.qkv_columns)
        self.attended = room(tokens, spec.heads * spec.head_dim)
        self.gate_up = room(min(tokens, _MLP_ROWS), 2 * spec.intermediate)
        self.gated = room(min(tokens, _MLP_ROWS), spec.intermediate)
        self.wanted = room(logits, spec.hidden)
        self.logits = room(logits, spec.outputs)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))


class LlamaModel:
    """Weights and the forward pass; one step at a time, on one device.

    folder: where config and tokenizer lie; fingerprint: of weights and shapes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        embedding: torch.Tensor,  # [vocab, hidden]
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        head: Linear,  # [hidden, outputs]
        inner: Sequence[Linear] = (),  # of a value head, each [hidden, hidden] and followed by ReLU
        folder: Path = Path(),
        fingerprint: str = "",
    ) -> None:
        self.spec = spec
        self.embedding, self.layers, self.final_norm, self.head = (
            embedding,
            tuple(layers),
            final_norm,
            head,
        )
        self.inner = tuple(inner)
        self.folder, self.fingerprint = folder, fingerprint
        self.device, self.dtype = embedding.device, embedding.dtype
        self.kernels: Kernels = load_kernels(self.device, self.dtype)
        tables = rotary_tables(spec, spec.max_model_len)
        self.cosine, self.sine = (table.to(embedding) for table in tables)

    @property
    def products(self) -> tuple[Linear, ...]:
        """Every matrix product of a forward pass."""
        return (*(p for layer in self.layers for p in layer.products), *self.inner, self.head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and tables held, each counted once."""
        held = [
            self.embedding,
            self.final_norm,
            self.cosine,
            self.sine,
            *(tensor for product in self.products for tensor in product.tensors),
        ]
        held += [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())

    def choose_row_tiles(self, batch_invariant: bool) -> None:
        """Fixes how products are cut: by trial for each shape, or not at all."""
        found: dict[tuple[int, ...], RowTiles] = {}
        for product in self.products:
            shape = tuple(product.weight.shape)
            if batch_invariant and shape not in found:
                found[shape] = find_row_tiles(product.weight)
            product.cut(found.get(shape, UNTILED))

    def forward(
        self,
        tokens: torch.Tensor,  # int64 [T]
        caches: Sequence[LayerCache],
        context: ForwardContext,
        buffers: Buffers,
    ) -> torch.Tensor:
        """Stores the rows' keys and values; their last hidden states, normed [T, hidden]."""
        kernels, rows, epsilon = self.kernels, len(tokens), self.spec.rms_epsilon
        b = buffers
        residual, normed, delta = b.residual[:rows], b.normed[:rows], b.delta[:rows]
        qkv, attended = b.qkv[:rows], b.attended[:rows]
        torch.index_select(self.embedding, 0, tokens, out=residual)
        kernels.rms_norm(residual, self.layers[0].attention_norm, epsilon, normed)
        following = (*(layer.attention_norm for layer in self.layers[1:]), self.final_norm)
        for layer, cache, next_norm in zip(self.layers, caches, following, strict=True):
            layer.qkv(b.normed, rows, b.qkv)
            kernels.store_kv(qkv, self.cosine, self.sine, cache, context)
            kernels.attend(qkv, attended, cache, context)
            layer.output(b.attended, rows, b.delta)
            kernels.add_rms_norm(residual, delta, layer.mlp_norm, epsilon, normed)
            self._mlp(layer, rows, b)
            kernels.add_rms_norm(residual, delta, next_norm, epsilon, normed)
        return normed

    def _mlp(self, layer: Layer, rows: int, b: Buffers) -> None:
        """SwiGLU (Shazeer 2020) of b.normed into b.delta, some rows at a time."""
        for start in range(0, rows, _MLP_ROWS):
            count = min(_MLP_ROWS, rows - start)
            layer.gate_up(b.normed[start:], count, b.gate_up)
            self.kernels.silu_mul(b.gate_up[:count], b.gated[:count])
            layer.down(b.gated, count, b.delta[start:])

    def head_inputs(self, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """What the head multiplies, of so many hidden states: themselves where nothing lies before.

        hidden: [rows and padding, hidden], as is what comes back.
        """
        for product in self.inner:
            out = torch.zeros_like(hidden)
            product(hidden, rows, out)
            hidden = out.relu_()
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """Logits of some rows of the hidden states: [rows, vocab], a buffer's view."""
        count = len(rows)
        torch.index_select(hidden, 0, rows, out=buffers.wanted[:count])
        self.head(buffers.wanted, count, buffers.logits)
        return buffers.logits[:count]
