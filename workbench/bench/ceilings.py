"""Multiply-adds on registers alone, and what a product's inner loop reaches of them.

In the CPU kernels' instruction set. Needs numba, which a GPU machine may lack.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from workbench.bench.record import Ceiling, measure_ceiling, wall_seconds
from workbench.kernels.cpu.thread_pool import compiled
from workbench.kernels.cpu.tiles import COLUMNS, MOST_ROWS, PANEL, Tile, tile
from workbench.kernels.cpu.vectors import WIDTH, emit_fma
from workbench.kernels.isa import ISA

_ADDS = 5_000_000  # to each sum: ten milliseconds, so that threads overlap
_FLOPS = 2 * MOST_ROWS * COLUMNS  # of an addition to each sum
_DEPTH = 128  # inputs of the tile: its weights are 16 KiB, as in a product
_SHORT, _TILES = _ADDS // 10, 2000  # a millisecond each: between what else the machine does
PEAKS, WINDOWS = 60, 150  # of which the best is taken
_ADDRESS = types.int64


def multiply_add_ceiling(**measured: Any) -> Ceiling:
    """As measure_ceiling, of multiply-adds on registers alone: no product can pass them."""
    adds = [_ADDS] * torch.get_num_threads()
    with ThreadPoolExecutor(len(adds)) as pool:
        seconds = wall_seconds(lambda: list(pool.map(_multiply_add, adds)), PEAKS)
    return replace(measure_ceiling(**measured), flops_per_s=_FLOPS * sum(adds) / min(seconds))


def tile_shares() -> list[float]:
    """What a product's inner loop reaches of multiply-adds alone, one thread.

    In each group the best of both, windows of a millisecond in turn: whoever shares the core slows
    either of them for tenths of a second at a time.
    """
    x, weights = np.ones((MOST_ROWS, _DEPTH), np.float32), np.ones((_DEPTH, PANEL), np.float32)
    out = np.empty((MOST_ROWS, PANEL), np.float32)
    where = x.ctypes.data, weights.ctypes.data, out.ctypes.data
    kinds = (lambda: _multiply_add(_SHORT), lambda: _multiply_tiles(*where, _DEPTH, _TILES))
    flops, shares = 2 * MOST_ROWS * PANEL * _DEPTH * _TILES, []
    for _ in range(5):
        times = [[min(wall_seconds(kind, 1)) for kind in kinds] for _ in range(WINDOWS)]
        alone, tiled = np.min(times, axis=0).tolist()
        shares.append(flops / tiled / (_SHORT * _FLOPS / alone))
    return shares


def _multiply_add(adds: int) -> None:
    """As many sums as a tile has, each multiplied and added to so many times, in registers."""
    numbers = np.zeros(COLUMNS + WIDTH, np.float32)
    _run_fused(numbers.ctypes.data, adds)


@intrinsic
def _fuse(_: Any, numbers: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, count = args
        code = Tile(builder, *ISA.tile)
        number = code.vectors(numbers)[0]

        def add(_: Any, sums: Any) -> Any:
            return [[emit_fma(builder, value, number, number) for value in line] for line in sums]

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
            tile((MOST_ROWS, x, depth * 4, weights + column, there, PANEL * 4, depth, 1))
