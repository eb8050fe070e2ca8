"""What this machine can do at best: fp32 matrix products per second and bytes read per second.

Measured in the same run as whatever is held against it, with the same threads. What it does not do:
look anything up in a table of processors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The two slopes of a roofline."""

    flops_per_s: float
    bytes_per_s: float


def measure_ceiling(repeats: int = 5) -> Ceiling:
    """Median of `repeats`: a 1536-cubed product; the sum of 256 MiB, more than a cache keeps."""
    side = 1536
    left, right = torch.randn(side, side), torch.randn(side, side)
    product = torch.empty(side, side)
    gemm_s = _median_seconds(lambda: torch.mm(left, right, out=product), repeats)
    data = torch.ones(64 << 20)
    read_s = _median_seconds(data.sum, repeats)
    return Ceiling(2 * side**3 / gemm_s, data.numel() * data.element_size() / read_s)


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
