"""Noise that is a function of seed and position alone: nobody else's tokens enter.

Counter-based (Salmon et al. 2011): splitmix64's finaliser (Steele, Lea and Flood 2014), applied to
the seed and then to seed and position together. No state is kept. Not for cryptography.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = (np.uint64(n) for n in (30, 27, 31, 11))


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: a bijection of 64 bits in which every bit depends on every bit."""
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 in [0, 1), a multiple of 2^-53, one for each pair (seeds[i], positions[i])."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = mix(mix(seeds + _GOLDEN) + counters)
    return (bits >> _11).astype(np.float64) * 2.0**-53
