"""Multiply-adds on registers alone, in the CPU kernels' instruction set.

Needs numba, which a GPU machine may lack.
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
from workbench.kernels.cpu.tiles import COLUMNS, MOST_ROWS, Tile
from workbench.kernels.cpu.vectors import WIDTH, emit_fma
from workbench.kernels.isa import ISA

_ADDS = 5_000_000  # to each sum: ten milliseconds, so that threads overlap
_FLOPS = 2 * MOST_ROWS * COLUMNS  # of an addition to each sum
_ADDRESS = types.int64


def multiply_add_ceiling(**measured: Any) -> Ceiling:
    """As measure_ceiling, of multiply-adds on registers alone: no product can pass them."""
    adds = [_ADDS] * torch.get_num_threads()
    with ThreadPoolExecutor(len(adds)) as pool:
        seconds = wall_seconds(lambda: list(pool.map(_multiply_add, adds)), repeats=60)
    return replace(measure_ceiling(**measured), flops_per_s=_FLOPS * sum(adds) / min(seconds))


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
