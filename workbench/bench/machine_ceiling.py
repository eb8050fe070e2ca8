"""What this machine can do at best: fused multiply-adds and bytes read per second.

Measured in the same run as whatever is held against it, with the same threads, never looked up in a
table of processors. `fma_flops_per_s` are multiply-adds on registers alone, in the set that the
kernels are compiled for: what no product can pass. torch's own product is a peer, not a ceiling.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from workbench.kernels.compiled import compiled
from workbench.kernels.isa import ISA
from workbench.kernels.lanes import WIDTH
from workbench.kernels.tiles import COLUMNS, MOST_ROWS, PANEL, Tile, tile

_DEPTH = 128  # inputs of the tile: its weights are 16 KiB, as in a product
_ADDS = 5_000_000  # of each sum: ten milliseconds, so that threads overlap
_SHORT, _TILES = _ADDS // 10, 400  # a millisecond each: between what else the machine does
_ADDRESS = types.int64


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The two slopes of a roofline, and what torch's products reach of the first."""

    flops_per_s: float
    bytes_per_s: float
    gemm_flops_per_s: float

    def seconds(self, flops: float, read_bytes: float) -> float:
        """The least that work can take."""
        return max(flops / self.flops_per_s, read_bytes / self.bytes_per_s)

    def best(self, other: Ceiling) -> Ceiling:
        """Of two measurements the faster: a shared machine is never faster than it is."""
        return Ceiling(*map(max, astuple(self), astuple(other)))


def measure_ceiling(threads: int, repeats: int = 5) -> Ceiling:
    """Multiply-adds: the best of `repeats`; reading: the best of 256 MiB, more than a cache keeps.

    torch's product: the median, 1536 cubed.
    """
    side = 1536
    left, right = torch.randn(side, side), torch.randn(side, side)
    product = torch.empty(side, side)
    gemm_s = _seconds(lambda: torch.mm(left, right, out=product), repeats)
    data = torch.ones(64 << 20)
    read_s = _seconds(data.sum, repeats)
    with ThreadPoolExecutor(threads) as pool:
        fused_s = _seconds(lambda: list(pool.map(_fused, [_ADDS] * threads)), 12 * repeats)
    return Ceiling(
        threads * _ADDS * _FUSED_FLOPS / min(fused_s),
        data.numel() * data.element_size() / min(read_s),
        2 * side**3 / statistics.median(gemm_s),
    )


def tile_shares(repeats: int = 30) -> list[float]:
    """What a product's inner loop reaches of multiply-adds alone: pairs in turn, one thread."""
    x, weights = np.ones((MOST_ROWS, _DEPTH), np.float32), np.ones((_DEPTH, PANEL), np.float32)
    out = np.empty((MOST_ROWS, PANEL), np.float32)
    where = x.ctypes.data, weights.ctypes.data, out.ctypes.data

    def tiles() -> None:
        _multiply_tiles(*where, _DEPTH, _TILES)

    flops, shares = 2 * MOST_ROWS * PANEL * _DEPTH * _TILES, []
    for _ in range(repeats):
        alone, tiled = min(_seconds(lambda: _fused(_SHORT), 5)), min(_seconds(tiles, 5))
        shares.append(flops / tiled / (_SHORT * _FUSED_FLOPS / alone))
    return shares


@intrinsic
def _fuse(_: Any, numbers: Any, count: Any) -> Any:
    """As many sums as a tile has, each multiplied and added to so many times, in registers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, count = args
        code = Tile(builder, *ISA.tile)
        number = code.vectors(numbers)[0]

        def add(_: Any, sums: Any) -> Any:
            return [[code.fma(value, number, number) for value in line] for line in sums]

        sums = code.loop([[number] * code.columns for _ in range(code.rows)], count, add)
        total = number
        for value in (value for line in sums for value in line):
            total = builder.fadd(total, value)
        Tile(builder, 1, 1).store([numbers], [[total]])
        return context.get_dummy_value()

    return types.void(_ADDRESS, _ADDRESS), generate


@compiled(_ADDRESS, _ADDRESS)
def _run_fused(numbers: int, count: int) -> None:
    _fuse(numbers, count)


@compiled(*[_ADDRESS] * 5)
def _multiply_tiles(x: int, weights: int, out: int, depth: int, times: int) -> None:
    for _ in range(times):
        for column in range(0, PANEL * 4, COLUMNS * 4):
            there = out + column
            tile(MOST_ROWS, x, depth * 4, weights + column, there, PANEL * 4, depth, 1)


_FUSED_FLOPS = 2 * MOST_ROWS * COLUMNS  # of an addition to each sum


def _fused(adds: int) -> None:
    numbers = np.zeros(COLUMNS + WIDTH, np.float32)
    _run_fused(numbers.ctypes.data, adds)


def _seconds(work: Callable[[], object], repeats: int) -> list[float]:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times
