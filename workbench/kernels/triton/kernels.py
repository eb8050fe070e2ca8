"""The kernels of a GPU, in Triton, behind the signatures of `Kernels`.

Products are torch's, or in fixed tiles where bits must not depend on the batch. What is not written
in Triton is the reference's.
Float32, float16 and bfloat16; under the interpreter no bfloat16, whose products it gets wrong
without a word. Every launch is asynchronous, and nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from workbench.errors import ConfigError
from workbench.kernels import ForwardContext, LayerCache, Part, Quantised
from workbench.kernels.reference import ReferenceKernels
from workbench.kernels.triton import columns, rows
from workbench.kernels.triton.choosing import choose
from workbench.kernels.triton.fixed_tiles import fixed_tiles
from workbench.kernels.triton.launch import AttentionLaunch
from workbench.kernels.triton.placing import DeviceWork, place
from workbench.kernels.triton.products import ADD, GATED, PLAIN
from workbench.kernels.triton.recorded import (
    Capture,
    GraphCapture,
    RecordedWork,
    Shape,
    as_it_is,
)
from workbench.kernels.triton.taken import (
    require_block_size,
    require_head_dim,
    require_runs,
    require_takes,
)
from workbench.kernels.triton.tuning import SMALLEST, Tuning, chosen
from workbench.kernels.triton.work import StepWork, plan_work

_FEW_ROWS = 8
_HEADS_AT_ONCE, _OUTPUTS_AT_ONCE, _DIMENSIONS_AT_ONCE = 8, 1024, 512


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix as files have it: weight [outputs, inputs]; gated, both parts' outputs."""

    weight: torch.Tensor
    gated: bool

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.weight.shape
        return inputs, outputs // (2 if self.gated else 1)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class TritonKernels(ReferenceKernels):
    """One GPU's kernels for one floating point type.

    batch_invariant: products in fixed tiles, and attention's tiles the same in every kernel.
    tuning: the tiles of attention, else the table's. keys_by_position: how blocks keep keys; the
    default has a position's dimensions side by side. A new key is then one piece to write, and keys
    are loaded 16 bytes at a time, where a decode over the transpose compiles, for Hopper, to loads
    of two bytes. fuse: prefill and decode in one launch; share: what siblings have in common is
    worked on once.
    """

    name, selects = "triton", True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tuning: Tuning | None = None,
        keys_by_position: bool = True,
        fuse: bool = True,
        share: bool = True,
        batch_invariant: bool = False,
        head_dim: int | None = None,
    ) -> None:
        """Raises ConfigError for a dtype, a device or a head_dim that they do not run on.

        And for tiles that differ from kernel to kernel, where bits must not.
        """
        require_runs(device, dtype)
        if head_dim is not None:
            require_head_dim(head_dim)
        if batch_invariant and tuning is not None and not tuning.same_bits:
            raise ConfigError(
                f"batch_invariant=True with {tuning}; it takes joined=True, one number of lanes "
                "and of warps for all, or the table's tiles."
            )
        super().__init__(device, dtype, keys_by_position)
        self.tuning, self.fuse, self.share = tuning, fuse, share
        self.batch_invariant, self.products = batch_invariant, fixed_tiles(dtype.itemsize)
        self.held: tuple[ForwardContext, Shape, DeviceWork] | None = None
        self._capture: Capture = GraphCapture(device) if device.type == "cuda" else as_it_is

    def pack(self, parts: Sequence[Part], gated: bool = False) -> Any:
        """Rows; quantised parts are dequantised."""
        tensors = [
            torch.from_numpy(part.dequantise()) if isinstance(part, Quantised) else part
            for part in parts
        ]
        return Rows(torch.cat([t.to(self.device, self.dtype) for t in tensors]), gated)

    def multiply(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        if self.batch_invariant:
            self.products.multiply(x, matrix.weight, out, PLAIN.value)
        else:
            torch.mm(x, matrix.weight.t(), out=out)

    def multiply_add(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        if self.batch_invariant:
            self.products.multiply(x, matrix.weight, out, ADD.value)
        else:
            out.addmm_(x, matrix.weight.t())

    def multiply_gated(self, x: torch.Tensor, matrix: Any, out: torch.Tensor) -> None:
        if self.batch_invariant:
            self.products.multiply(x, matrix.weight, out, GATED.value)
            return
        size = matrix.shape[1]
        grid = (len(x), triton.cdiv(size, _OUTPUTS_AT_ONCE))
        rows.gate[grid](
            x @ matrix.weight.t(), out, out.stride(0), SIZE=size, TAKEN=_OUTPUTS_AT_ONCE
        )

    def columns(self, matrix: Any, numbers: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(matrix.weight, 0, numbers, out=out)

    def selected_logits(
        self,
        hidden: torch.Tensor,
        wanted: torch.Tensor,
        matrix: Any,
        numbers: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """out [R, C] = hidden[wanted] @ the outputs `numbers` of matrix; both int64, not gated."""
        count = min(SMALLEST, triton.next_power_of_2(len(numbers)))
        columns.selected_logits[(len(wanted), triton.cdiv(len(numbers), count))](
            *(hidden, hidden.stride(0), wanted, matrix.weight, numbers, out),
            SIZE=hidden.shape[1],
            COUNT=len(numbers),
            COLUMNS=count,
            TAKEN=_DIMENSIONS_AT_ONCE,
        )

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """Computed in float32, as Llama does."""
        size = x.shape[1]
        rows.rms_norm[(len(x),)](
            *(x, x.stride(0), weight, out, out.stride(0), epsilon),
            SIZE=size,
            PADDED=triton.next_power_of_2(size),
            num_warps=8 if size > 2048 else 4,
        )

    def store_kv(
        self,
        qkv: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: LayerCache,
        context: ForwardContext,
    ) -> None:
        """One kernel rotates and stores."""
        heads = qkv.shape[1] // cache.head_dim - 2 * cache.kv_heads
        work = self._work(context, cache, heads)
        half = cache.head_dim // 2
        rows.rotate_and_store[(len(qkv), triton.cdiv(heads + cache.kv_heads, _HEADS_AT_ONCE))](
            *(qkv, qkv.stride(0), cosine, sine, work.positions, work.sequence),
            *(work.tables, work.tables.shape[1], cache.data[cache.base :]),
            HEADS=heads,
            KV_HEADS=cache.kv_heads,
            HALF=half,
            PADDED=triton.next_power_of_2(half),
            BLOCK_SIZE=cache.block_size,
            TAKEN=_HEADS_AT_ONCE,
            BY_POSITION=self.keys_by_position,
        )

    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Prefill in tiles of rows, decode in spans, what siblings share once for all of them."""
        heads = out.shape[1] // cache.head_dim
        work = self._work(context, cache, heads)
        tuning = self.tiles(cache.head_dim, heads // cache.kv_heads)
        AttentionLaunch(tuning, self.keys_by_position, self.fuse)(qkv, out, cache, work)

    def choose(
        self, logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """In pieces of the vocabulary, added up in order."""
        return choose(logits, temperature, noise)

    def rows_launched(self, rows: int) -> int:
        """A power of two up to eight, then a multiple of eight: few graphs serve all sizes."""
        if rows <= _FEW_ROWS:
            return int(triton.next_power_of_2(rows))
        return int(triton.cdiv(rows, _FEW_ROWS)) * _FEW_ROWS

    def require_takes(self, block_size: int, head_dim: int) -> None:
        """Head sizes and block sizes that tiles and spans have room for."""
        require_head_dim(head_dim)
        require_block_size(block_size, self.tiles(head_dim, 1))

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph for each size of step. work: of one row a sequence, over one context."""
        return RecordedWork(self, work, self._capture)

    def tiles(self, head_dim: int, group: int) -> Tuning:
        """The tiles for a head size, with room for a row of all heads of a group."""
        tuning = self.tuning or chosen(head_dim, self.dtype.itemsize, self.batch_invariant)
        lanes = triton.next_power_of_2(group)
        return replace(
            tuning,
            prefill_lanes=max(lanes, tuning.prefill_lanes),
            span_lanes=max(lanes, tuning.span_lanes),
            shared_lanes=max(lanes, tuning.shared_lanes),
        )

    def plan(self, context: ForwardContext, shape: Shape) -> StepWork:
        """A step's lists."""
        group, block_size, tuning = shape
        return plan_work(context, group, block_size, tuning, self.share)

    def _work(self, context: ForwardContext, cache: LayerCache, heads: int) -> DeviceWork:
        """A step's lists on the device: made for its first layer, kept for the others."""
        group = heads // cache.kv_heads
        shape = (group, cache.block_size, self.tiles(cache.head_dim, group))
        if self.held is None or self.held[0] is not context or self.held[1] != shape:
            require_takes(cache, self.dtype, shape[-1])
            lists = self.plan(context, shape)
            self.held = (context, shape, place(lists, context, self.device))
        return self.held[2]
