"""How CPU kernels are compiled: numba, cached on disk where that is possible, and arithmetic that says what it does.

No fast-math flag is ever given: LLVM may then neither reorder a sum nor contract a product, so a kernel's result is
exactly what its source says, whatever the vector width, the unrolling or the number of rows. Fused multiply-add is
asked for by name (`fma`). `exponential` is a polynomial because numba's own calls the C library once an element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # exact in 10 bits, so n * _LN2_HIGH is exact
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds a float32 to an integer
_SMALLEST = np.float32(-87.0)  # below it exp is answered as exactly 0
_LARGEST = np.float32(88.0)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
# Minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Cephes expf, S. Moshier); 2 units in the last place.
_P5, _P4, _P3 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_P2, _P1, _P0 = (
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)


def compiled(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit` for one explicit signature; cached on disk, or only in memory where no folder can be written."""

    def wrap(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, cache=True, error_model="numpy", **options)(function)
        except (RuntimeError, OSError):  # numba found no writable cache folder: compile each run
            return njit(signature, error_model="numpy", **options)(function)

    return wrap


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
    """a * b + c with one rounding (IEEE 754 fusedMultiplyAdd), float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@njit(inline="always", error_model="numpy")
def exponential(x: np.float32) -> np.float32:
    """exp(x) of a float32; 0 below -87, exp(88) above 88; exp(0) is exactly 1."""
    bounded = min(max(x, _SMALLEST), _LARGEST)
    shifted = fma(bounded, _LOG2_E, _ROUND)
    n = shifted - _ROUND
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, bounded))
    p = fma(fma(fma(fma(fma(_P5, r, _P4), r, _P3), r, _P2), r, _P1), r, _P0)
    mantissa = fma(p, r * r, r) + _ONE
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return mantissa * power if x >= _SMALLEST else _ZERO
