"""How long work takes on a GPU, and what that GPU can do at best.

Work is recorded as a CUDA graph and timed by the device's own clock, so what Python and launching
cost is left out: a decode step replays a graph too. Ceilings are measured, in the same run as what
is held against them. What it does not do: look anything up in a table of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from workbench.bench.machine_ceiling import Ceiling
from workbench.errors import ConfigError, OutOfMemory
from workbench.models.loading import require_device

Work = Callable[[], object]
Timer = Callable[[Work, int], list[float]]  # seconds of so many repeats
_WARM = 3
_CEILING_BYTES = 2 << 30
_SIDE = 8192


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
        for _ in range(_WARM):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return [_replay(graph) for _ in range(repeats)]


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@dataclass(frozen=True, slots=True)
class CeilingSizes:
    """What the ceilings are measured with: bytes to read, and the side of square matrices."""

    read_bytes: int = _CEILING_BYTES
    side: int = _SIDE


def measure_gpu_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    timer: Timer = graph_seconds,
    repeats: int = 10,
    sizes: CeilingSizes | None = None,
) -> Ceiling:
    """A large square product of this type; the faster of summing up and of copying a large tensor.

    A copy moves each byte twice.
    """
    sizes = sizes or CeilingSizes()
    left = torch.randn(sizes.side, sizes.side, device=device).to(dtype)
    product = torch.empty_like(left)
    product_s = median(timer(lambda: torch.mm(left, left, out=product), repeats))
    data = torch.ones(sizes.read_bytes // 4, device=device)
    half = len(data) // 2
    total = torch.empty((), device=device)
    sum_s = median(timer(lambda: torch.sum(data, dim=0, out=total), repeats))
    copy_s = median(timer(lambda: data[:half].copy_(data[half : 2 * half]), repeats))
    flops_per_s = 2 * sizes.side**3 / product_s
    return Ceiling(flops_per_s, data.nbytes / min(sum_s, copy_s), flops_per_s)
