"""What the machine can do at best, and how long work takes: of this CPU, and of a GPU.

Ceilings are measured in the same run as whatever is held against them, with the same threads, never
looked up in a table of processors. Work on a GPU is recorded as a CUDA graph and timed by the
device's own clock, so what Python and launching cost is left out: a decode step replays a graph.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace

import torch

from workbench.errors import ConfigError, OutOfMemory
from workbench.models.loading import require_device

Work = Callable[[], object]
Timer = Callable[[Work, int], list[float]]  # seconds of so many repeats


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


def measured_seconds(work: Work, repeats: int) -> list[float]:
    """Of each repeat, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


# -- a CPU --


def measure_ceiling(repeats: int = 5) -> Ceiling:
    """Operations: the median of torch's product, 1536 cubed. Reading: the best of 256 MiB, more
    than a cache keeps.
    """
    side = 1536
    left, right = torch.randn(side, side), torch.randn(side, side)
    product = torch.empty(side, side)
    gemm_s = measured_seconds(lambda: torch.mm(left, right, out=product), repeats)
    data = torch.ones(64 << 20)
    read_s = measured_seconds(data.sum, repeats)
    flops_per_s = 2 * side**3 / statistics.median(gemm_s)
    return Ceiling(flops_per_s, data.numel() * data.element_size() / min(read_s), flops_per_s)


def multiply_add_ceiling(repeats: int = 60) -> Ceiling:
    """As measure_ceiling, of multiply-adds on registers alone instead of torch's product: no
    product can pass them.
    """
    from workbench.bench import tile_peak  # noqa: PLC0415 - needs numba, a GPU does not

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        adds = [tile_peak.ADDS] * threads
        seconds = measured_seconds(lambda: list(pool.map(tile_peak.fused, adds)), repeats)
    return replace(measure_ceiling(), flops_per_s=tile_peak.FLOPS * sum(adds) / min(seconds))


# -- a GPU --


@dataclass(frozen=True, slots=True)
class CeilingSizes:
    """What a GPU's ceilings are measured with: bytes to read, and the side of square matrices."""

    read_bytes: int = 2 << 30
    side: int = 8192


def require_gpu(needed_bytes: int, bench: str = "kernels", name: str | None = None) -> torch.device:
    """The CUDA device of a name, or the current one.

    Raises ConfigError where it is not there, OutOfMemory when it has not the room.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"bench {bench} measures a GPU, and torch finds no CUDA device here. Run it on a "
            "machine with one and a CUDA build of torch; bench engine with --device cpu measures "
            "the CPU."
        )
    named = () if name is None else (require_device(name),)
    free, total = torch.cuda.mem_get_info(*named)
    if free < needed_bytes:
        raise OutOfMemory(
            f"bench {bench} needs {needed_bytes:,} bytes of GPU memory; {free:,} of {total:,} are "
            "free. End what else uses the GPU, or give --profile quick."
        )
    return torch.device(name or "cuda")


def graph_seconds(work: Work, repeats: int) -> list[float]:
    """Seconds of each of `repeats` replays of the work, recorded once after warming up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def measure_gpu_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    timer: Timer = graph_seconds,
    repeats: int = 10,
    sizes: CeilingSizes | None = None,
) -> Ceiling:
    """A large square product of this type; the faster of summing up and of copying a large tensor,
    which moves each byte twice.
    """
    sizes = sizes or CeilingSizes()
    left = torch.randn(sizes.side, sizes.side, device=device).to(dtype)
    product = torch.empty_like(left)
    product_s = statistics.median(timer(lambda: torch.mm(left, left, out=product), repeats))
    data = torch.ones(sizes.read_bytes // 4, device=device)
    half = len(data) // 2
    total = torch.empty((), device=device)
    sum_s = timer(lambda: torch.sum(data, dim=0, out=total), repeats)
    copy_s = timer(lambda: data[:half].copy_(data[half : 2 * half]), repeats)
    flops_per_s = 2 * sizes.side**3 / product_s
    read_s = min(statistics.median(sum_s), statistics.median(copy_s))
    return Ceiling(flops_per_s, data.nbytes / read_s, flops_per_s)
