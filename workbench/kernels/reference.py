"""The kernels in plain torch: what is meant, and what runs where no faster one does.

One sequence at a time, its keys and values gathered into one tensor. Neither fast nor
batch-invariant: a row's sums may depend on how many rows torch was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.kernels import Angles, ForwardContext, Kernels, LayerCache, Part, Quantised


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix as torch multiplies it: weight [inputs, outputs]; gated, both parts' outputs."""

    weight: torch.Tensor
    gated: bool

    @property
    def shape(self) -> tuple[int, int]:
        inputs, outputs = self.weight.shape
        return inputs, outputs // (2 if self.gated else 1)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class ReferenceKernels(Kernels):
    """The reference on any device, in any floating point type."""

    name, batch_invariant = "reference", False

    def __init__(
        self, device: torch.device, dtype: torch.dtype, keys_by_position: bool = False
    ) -> None:
        self.device, self.dtype, self.keys_by_position = device, dtype, keys_by_position

    def pack(self, parts: Sequence[Part], gated: bool = False) -> Dense:
        """Quantised parts are dequantised."""
        return Dense(self.joined(parts).t().contiguous(), gated)

    def joined(self, parts: Sequence[Part]) -> torch.Tensor:
        """[outputs, inputs] of all parts, here and in this type."""
        tensors = [
            torch.from_numpy(part.dequantise()) if isinstance(part, Quantised) else part
            for part in parts
        ]
        return torch.cat([tensor.to(self.device, self.dtype) for tensor in tensors])

    def multiply(self, x: torch.Tensor, matrix: Dense, out: torch.Tensor) -> None:
        torch.mm(x, matrix.weight, out=out)

    def multiply_add(self, x: torch.Tensor, matrix: Dense, out: torch.Tensor) -> None:
        out.addmm_(x, matrix.weight)

    def multiply_gated(self, x: torch.Tensor, matrix: Dense, out: torch.Tensor) -> None:
        gate, up = (x @ matrix.weight).chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out)

    def columns(self, matrix: Dense, numbers: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(matrix.weight[:, numbers].t())

    def add_row(self, row: torch.Tensor, out: torch.Tensor) -> None:
        out += row

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """Computed in float32 at least, as Llama does."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        out.copy_(weight * (wide * scale).to(x.dtype))

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        out.copy_(torch.nn.functional.layer_norm(x, x.shape[1:], weight[0], weight[1], epsilon))

    def gelu(self, row: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.nn.functional.gelu(out + row, approximate="tanh"))

    def store_kv(
        self, qkv: torch.Tensor, angles: Angles, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Rotates queries and keys in place, then writes keys and values to the cache."""
        heads = qkv.view(len(qkv), -1, cache.head_dim)
        positions = torch.from_numpy(context.positions).to(qkv.device)
        cosine, sine = (table[positions, None] for table in angles)
        turned = heads[:, : -cache.kv_heads]
        first, second = turned.chunk(2, dim=-1)
        rotated = first * cosine - second * sine, second * cosine + first * sine
        turned.copy_(torch.cat(rotated, dim=-1))
        width = cache.kv_heads * cache.head_dim
        key, value = qkv[:, -2 * width : -width], qkv[:, -width:]
        for s, count in enumerate(context.context_len):
            rows = slice(context.query_start[s], context.query_start[s + 1])
            new = context.positions[rows]
            keys, values = self._addresses(cache, context, s, int(count))
            cache.data[keys[new]] = key[rows]
            cache.data[values[new]] = value[rows]

    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Sequence by sequence, over keys and values gathered from their blocks."""
        heads = qkv.view(len(qkv), -1, cache.head_dim)[:, : -2 * cache.kv_heads]
        group = heads.shape[1] // cache.kv_heads
        for s, count in enumerate(context.context_len):
            rows = slice(context.query_start[s], context.query_start[s + 1])
            shape = (int(count), cache.kv_heads, cache.head_dim)
            key, value = (
                cache.data[at].view(shape).repeat_interleave(group, dim=1)
                for at in self._addresses(cache, context, s, int(count))
            )
            scores = torch.einsum("thd,chd->htc", heads[rows], key) / math.sqrt(cache.head_dim)
            positions = torch.from_numpy(context.positions[rows]).to(scores.device)
            hidden = torch.arange(int(count), device=scores.device) > positions[:, None]
            weights = scores.float().masked_fill(hidden, -math.inf).softmax(-1).to(value.dtype)
            out[rows] = torch.einsum("htc,chd->thd", weights, value).reshape(-1, out.shape[1])

    def choose(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        noise: torch.Tensor,
        filters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All weights of all rows at once."""
        warm, largest = temperature > 0, logits.amax(dim=1)
        heat = torch.where(warm, temperature, 1.0)
        kept = logits if filters is None else leave_out(logits, heat, filters)
        sums = _weights(kept, heat).cumsum(dim=1)
        drawn = (sums <= (noise * sums[:, -1])[:, None]).sum(dim=1)
        last = (sums < sums[:, -1:]).sum(dim=1)  # of any weight, where noise * sum rounded up
        tokens = torch.where(warm, torch.minimum(drawn, last), logits.argmax(dim=1))
        return torch.stack([tokens, largest.isfinite().long()])

    def _addresses(
        self, cache: LayerCache, context: ForwardContext, sequence: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Addresses of keys and values of first positions: [count, kv_heads * head_dim] each."""
        size, positions = cache.block_size, torch.arange(count)
        offsets = torch.from_numpy(context.block_offsets[sequence])[positions // size]
        block, slot = (cache.base + offsets)[:, None, None], (positions % size)[:, None, None]
        head = torch.arange(cache.kv_heads)[:, None]
        dimension = torch.arange(cache.head_dim)
        by_position = block + (head * size + slot) * cache.head_dim + dimension
        by_dimension = block + (head * cache.head_dim + dimension) * size + slot
        keys = by_position if self.keys_by_position else by_dimension
        values = by_position + size * cache.kv_heads * cache.head_dim
        device = cache.data.device
        return keys.flatten(1).to(device), values.flatten(1).to(device)


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Softmax without its denominator, float64 [R, vocab]: the largest is 1."""
    wide = logits.double()
    return ((wide - wide.amax(dim=1, keepdim=True)) / temperature[:, None]).exp_()


def leave_out(
    logits: torch.Tensor, temperature: torch.Tensor, filters: torch.Tensor
) -> torch.Tensor:
    """The logits with -inf for what `Kernels.choose` says that the filters leave out; any device.

    temperature: above 0. Weights are added as integers, whose sums are the same in every order: a
    row's cut depends neither on the batch nor on how a device adds.
    """
    ordered, ids = _weights(logits, temperature).sort(dim=1, descending=True, stable=True)
    top_k, top_p, min_p = (column[:, None] for column in filters.T)
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = (rank < top_k) | (top_k <= 0)
    fine = 2.0 ** (62 - logits.shape[1].bit_length())  # no sum overflows
    units = (ordered * kept * fine).long()
    before = units.cumsum(dim=1) - units
    kept &= (before < top_p * units.sum(dim=1, keepdim=True)) | (top_p >= 1)
    kept &= ordered >= min_p
    kept |= ordered.isnan()  # of a row that is not finite, as all must see
    return logits.masked_fill(~torch.zeros_like(kept).scatter_(1, ids, kept), -math.inf)
