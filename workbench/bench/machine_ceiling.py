"""What this machine can do at best: floating point operations and bytes read per second.

Measured in the same run as whatever is held against it, with the same threads, never looked up in a
table of processors.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The two slopes of a roofline, and what torch's products reach of the first."""

    flops_per_s: float
    bytes_per_s: float
    gemm_flops_per_s: float = math.nan

    def seconds(self, flops: float, read_bytes: float) -> float:
        """The least that work can take."""
        return max(flops / self.flops_per_s, read_bytes / self.bytes_per_s)

    def best(self, other: Ceiling) -> Ceiling:
        """Of two measurements the faster: a shared machine is never faster than it is."""
        return Ceiling(*map(max, astuple(self), astuple(other)))


def measure_ceiling(repeats: int = 5) -> Ceiling:
    """Operations: the median of torch's product, 1536 cubed (`multiply_adds` may replace them).

    Reading: the best of 256 MiB, more than a cache keeps.
    """
    side = 1536
    left, right = torch.randn(side, side), torch.randn(side, side)
    product = torch.empty(side, side)
    gemm_s = measured_seconds(lambda: torch.mm(left, right, out=product), repeats)
    data = torch.ones(64 << 20)
    read_s = measured_seconds(data.sum, repeats)
    flops_per_s = 2 * side**3 / statistics.median(gemm_s)
    return Ceiling(flops_per_s, data.numel() * data.element_size() / min(read_s), flops_per_s)


def measured_seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Of each repeat, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times
