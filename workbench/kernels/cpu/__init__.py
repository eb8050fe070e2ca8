"""The CPU's kernels: numba, float32, each by a pool of threads; `Kernels` says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from weakref import WeakValueDictionary

import numpy as np
import torch

from workbench.kernels import Angles, ForwardContext, Kernels, LayerCache, Part, Quantised
from workbench.kernels.cpu import attention, products, rows
from workbench.kernels.cpu.products import ADD, GATED, PLAIN, Beside, Panels
from workbench.kernels.cpu.thread_pool import ThreadPool
from workbench.kernels.quantised import join

_POOLS: WeakValueDictionary[int, ThreadPool] = WeakValueDictionary()  # by their size


def _kind(part: Part) -> str | None:
    """What a part is stored as: None if it is no quantised one."""
    return part.kind if isinstance(part, Quantised) else None


def _pack(parts: Sequence[Part], gated: bool) -> Panels:
    """Parts of one kind in that kind; of several, in float32."""
    quantised = [part for part in parts if isinstance(part, Quantised)]
    if len(quantised) == len(parts) and len(set(map(_kind, parts))) == 1:
        return products.pack_codes(join(quantised).codes(), gated)
    floats = [
        part.dequantise() if isinstance(part, Quantised) else part.float().numpy() for part in parts
    ]
    return products.pack_floats(np.concatenate(floats), gated)


class CpuKernels(Kernels):
    """float32 on a CPU, by a pool of threads.

    pool: one for all models of the process, as two would spin for the same cores.
    """

    name, batch_invariant = "cpu", True

    def __init__(self, threads: int) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        pool = _POOLS.get(threads) or ThreadPool(threads)
        self.pool = _POOLS[threads] = pool

    def pack(self, parts: Sequence[Part], gated: bool = False) -> Panels | Beside:
        """Quantised parts stay so, each of its kind; a gated pair of two kinds becomes float32."""
        runs = [list(parts)] if gated else [list(run) for _, run in groupby(parts, _kind)]
        packed = tuple(_pack(run, gated) for run in runs)
        return packed[0] if len(packed) == 1 else Beside(packed)

    def multiply(self, x: torch.Tensor, matrix: Panels | Beside, out: torch.Tensor) -> None:
        if isinstance(matrix, Panels):
            self._multiply(x, matrix, out, PLAIN)
        else:
            widths = [part.columns for part in matrix.parts]
            for part, some in zip(matrix.parts, out.split(widths, dim=1)):
                self._multiply(x, part, some, PLAIN)

    def multiply_add(self, x: torch.Tensor, matrix: Panels, out: torch.Tensor) -> None:
        self._multiply(x, matrix, out, ADD)

    def multiply_gated(self, x: torch.Tensor, matrix: Panels, out: torch.Tensor) -> None:
        self._multiply(x, matrix, out, GATED)

    def _multiply(self, x: torch.Tensor, matrix: Panels, out: torch.Tensor, mode: int) -> None:
        count = x.shape[0]  # len() of a tensor takes ten times as long
        pieces = len(matrix.data) * -(-count // products.ROWS)
        per_piece = max(1, pieces // (self.pool.threads * products.PIECES))
        source = x.data_ptr(), x.stride(0) * 4, count
        target = out.data_ptr(), out.stride(0) * 4
        self.pool.run(
            products.product.address, *source, *target, mode, per_piece, *matrix.arguments
        )

    def columns(self, matrix: Panels, numbers: torch.Tensor, out: torch.Tensor) -> None:
        where = numbers.data_ptr(), len(numbers), out.data_ptr()
        self.pool.run(products.columns.address, *where, *matrix.arguments)

    def add_row(self, row: torch.Tensor, out: torch.Tensor) -> None:
        self.pool.run(rows.add_row.address, *out.shape, row.data_ptr(), out.data_ptr())

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        bits = int(np.float32(epsilon).view(np.int32))
        where = x.data_ptr(), out.data_ptr(), weight.data_ptr()
        self.pool.run(rows.rms_norm.address, *x.shape, *where, bits)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        bits = int(np.float32(epsilon).view(np.int32))
        where = x.data_ptr(), out.data_ptr(), weight.data_ptr(), bits
        self.pool.run(rows.layer_norm.address, *x.shape, *where)

    def gelu(self, row: torch.Tensor, out: torch.Tensor) -> None:
        self.pool.run(rows.gelu.address, *out.shape, row.data_ptr(), out.data_ptr())

    def store_kv(
        self, qkv: torch.Tensor, angles: Angles, cache: LayerCache, context: ForwardContext
    ) -> None:
        blocks = context.block_offsets
        self.pool.run(
            rows.store_kv.address,
            *(*qkv.shape, cache.head_dim, cache.kv_heads, cache.block_size),
            *(qkv.data_ptr(), cache.data.data_ptr(), cache.base),
            *(table.data_ptr() for table in angles),
            *(context.positions.ctypes.data, context.sequence.ctypes.data),
            *(blocks.ctypes.data, blocks.shape[1], len(angles[0])),
        )

    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        pieces, table = context.pieces, context.block_offsets
        self.pool.run(
            attention.attend.address,
            *(len(qkv), cache.head_dim, cache.kv_heads),
            *(qkv.data_ptr(), qkv.shape[1], out.data_ptr(), out.shape[1]),
            *(cache.data.data_ptr(), cache.base, cache.block_size),
            *(context.positions.ctypes.data, context.sequence.ctypes.data),
            *(table.ctypes.data, table.shape[1], len(pieces) - 1, pieces.ctypes.data),
        )

    def choose(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        noise: torch.Tensor,
        filters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, "rows of float32"
        found = torch.empty((2, logits.shape[0]), dtype=torch.int64)
        self.pool.run(
            rows.choose.address,
            *(*logits.shape, logits.data_ptr(), logits.stride(0) * 4),
            *(temperature.data_ptr(), noise.data_ptr()),
            *(0 if filters is None else filters.data_ptr(), found.data_ptr()),
        )
        return found

    def likely(self, logits: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.empty((len(logits), most), dtype=torch.int64)
        totals = torch.empty(len(logits), dtype=torch.float64)
        where = logits.data_ptr(), logits.stride(0) * 4, most, ids.data_ptr(), totals.data_ptr()
        self.pool.run(rows.likely.address, *logits.shape, *where)
        return ids, totals

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Launches without Python in between."""
        return self.pool.record(work)

    def do(self, work: Callable[[], None]) -> None:
        """All its launches at once: each would wait for Python, whose code long kernels displace
        from the caches.
        """
        self.pool.record(work)()
