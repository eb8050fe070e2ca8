"""Drawing tokens on a CPU: the inverse CDF of a softmax, in float64, a row at a time.

Weights are added in eight interleaved sums a run of 256, runs one after the other; the run in which
the noise falls is then gone through token by token. A piece of work is one row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from workbench.kernels.addresses import doubles, integers, numbers
from workbench.kernels.lanes import WIDTH, largest, load, store
from workbench.kernels.team import Team, kernel, take

_RUN = 256
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_SMALLEST = -708.0  # exp of less is taken for 0: it is no normal number
_COLDEST = 1e-300  # of a temperature: its reciprocal is finite, and all but equal logits weigh 0
_inlined = njit(error_model="numpy", inline="always")


@intrinsic
def _power_of_two(_: Any, exponent: Any) -> Any:
    """2.0 ** exponent, of an int64 from -1022 to 1023."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.IntType(64)
        biased = builder.add(args[0], whole(1023))
        return builder.bitcast(builder.shl(biased, whole(52)), ir.DoubleType())

    return types.float64(types.int64), generate


@_inlined
def _exponential(x: float) -> float:
    """exp(x) of x <= 0 within 2 units in the last place: 2^k times a Taylor series of 14 terms."""
    within = max(x, _SMALLEST)
    whole = np.int64(within * _LOG2_E - 0.5)  # cut off towards 0: rounded
    k = np.float64(whole)
    r = (within - k * _LN2_HIGH) - k * _LN2_LOW
    p = 1.0 / 6227020800
    p = p * r + 1.0 / 479001600
    p = p * r + 1.0 / 39916800
    p = p * r + 1.0 / 3628800
    p = p * r + 1.0 / 362880
    p = p * r + 1.0 / 40320
    p = p * r + 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * _power_of_two(whole) if x >= _SMALLEST else 0.0


@_inlined
def _weigh(logits: Any, begin: int, top: float, cooling: float, weights: Any) -> None:
    """Weights of a run of tokens; zeros behind the last token."""
    count = min(_RUN, len(logits) - begin)
    for i in range(count):
        weights[i] = _exponential((np.float64(logits[begin + i]) - top) * cooling)
    weights[count:] = 0.0


@_inlined
def _top(logits: Any) -> float:
    """The largest logit; of sixteen at a time, the last sixteen once more."""
    if len(logits) < WIDTH:
        return np.float64(logits.max())
    lanes = load(logits, len(logits) - WIDTH)
    for i in range(0, len(logits) - WIDTH, WIDTH):
        lanes = largest(lanes, load(logits, i))
    sixteen = np.empty(WIDTH, np.float32)
    store(sixteen, 0, lanes)
    return np.float64(sixteen.max())


@_inlined
def _sum(weights: Any) -> float:
    a = b = c = d = e = f = g = h = 0.0
    for i in range(0, _RUN, 8):
        a, b, c, d = a + weights[i], b + weights[i + 1], c + weights[i + 2], d + weights[i + 3]
        e, f = e + weights[i + 4], f + weights[i + 5]
        g, h = g + weights[i + 6], h + weights[i + 7]
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@_inlined
def _draw_row(logits: Any, cooling: float, noise: float, sums: Any, weights: Any) -> int:
    """The first token whose weights up to and with it exceed noise times all of them."""
    top = _top(logits)
    total, runs = 0.0, (len(logits) + _RUN - 1) // _RUN
    for run in range(runs):
        _weigh(logits, run * _RUN, top, cooling, weights)
        sums[run] = _sum(weights)
        total += sums[run]
    target, before, run = noise * total, 0.0, 0
    while run < runs - 1 and before + sums[run] <= target:
        before += sums[run]
        run += 1
    _weigh(logits, run * _RUN, top, cooling, weights)
    last = 0
    for i in range(_RUN):
        if weights[i] > 0.0:
            before, last = before + weights[i], i
            if before > target:
                break
    return run * _RUN + last  # the last of any weight where these sums, rounded, fell short


@kernel
def _draw(arguments: int, counter: int) -> None:
    a = integers(arguments, 7)
    count, width = a[0], a[1]
    cooling, noise, tokens = doubles(a[4], count), doubles(a[5], count), integers(a[6], count)
    sums, weights = np.empty((width + _RUN - 1) // _RUN, np.float64), np.empty(_RUN, np.float64)
    row = take(counter)
    while row < count:
        logits = numbers(a[2] + row * a[3], width)
        tokens[row] = _draw_row(logits, cooling[row], noise[row], sums, weights)
        row = take(counter)


def draw(
    team: Team, logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """`Kernels.draw` by a team."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    cooling = temperature.clamp(min=_COLDEST).reciprocal()
    team.run(
        _draw.address,
        *(*logits.shape, logits.data_ptr(), logits.stride(0) * 4),
        *(cooling.data_ptr(), noise.data_ptr(), tokens.data_ptr()),
    )
    return tokens
