"""What differs between a CPU and a GPU: staging, choosing tokens where logits are, memory.

On kernels that `selects`, tokens are chosen on the device, and what leaves it is a number a row.
The sums of the device and of the host's sampler (sampling.py) are taken in another order, so what
draws a row depends on that row alone, whatever its batch: the device, unless the row wants a
filter. Logits of rows with filters or log probabilities are copied to the host, a row at a time.

A CPU's memory is the machine's or the container's. A GPU's is as its driver tells: beside what
torch allocates there lie the context and compiled kernels, charged to every engine of a process,
though they share them.
"""

from __future__ import annotations

import math
import os
import tracemalloc
from dataclasses import fields
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.profiler import profile

from workbench.core import SamplingRows
from workbench.engine.sampling import Logprobs, filtered, require_finite_rows, sample, uniform
from workbench.host import total_memory
from workbench.kernels import Kernels

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself otherwise
_GRAIN = 1 << 16  # peaks are rounded up to it: Python's own allocations differ a little each time


def staged(array: NDArray[Any], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device: on a CPU the same memory where it may be, else a copy under way."""
    tensor = torch.from_numpy(np.require(array, dtype, ("C", "W")))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def chosen_tokens(
    kernels: Kernels, logits: torch.Tensor, rows: SamplingRows
) -> tuple[NDArray[np.int64], Logprobs]:
    """Tokens of logits [R, vocab], and log probabilities of rows that want them; waits for both.

    Raises StepError as the sampler does.
    """
    noise = uniform(rows.seeds, rows.positions)
    settings = np.stack([rows.temperature, noise])
    temperature, drawn = staged(settings, np.float64, logits.device)
    chosen: NDArray[np.int64] = kernels.choose(logits, temperature, drawn).cpu().numpy()
    require_finite_rows(chosen[1] != 0, rows.rows)
    tokens = chosen[0]
    found: list[dict[int, float] | None] = [None] * len(rows)
    for at in np.flatnonzero(filtered(rows, logits.shape[1]) | (rows.logprobs >= 0)):
        one = slice(at, at + 1)
        row = SamplingRows(**{f.name: getattr(rows, f.name)[one] for f in fields(rows)})
        own = tokens[one]  # the device's, kept where nothing filters
        sampled, logprobs = sample(logits[one].float().cpu().numpy(), row, lambda *_, t=own: t)
        tokens[at], found[at] = sampled[0], logprobs[0] if logprobs else None
    return tokens, tuple(found) if (rows.logprobs >= 0).any() else ()


def total_of(device: torch.device) -> int:
    """Bytes of the device's memory, of which shares are taken."""
    return total_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]


def free_of(device: torch.device) -> int | None:
    """Bytes to be had now, torch's idle ones included; None where the system promises any."""
    if device.type == "cpu":
        return None
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def beside_torch(device: torch.device) -> int:
    """Bytes taken of a GPU by what is not torch's: contexts, kernels, other processes; a CPU's 0.

    An interpreter of Python is not charged.
    """
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def peak_on(device: torch.device) -> HostPeak | DevicePeak:
    """What measures the most bytes held at one time, born inside a `with`."""
    return HostPeak() if device.type == "cpu" else DevicePeak(device)


class HostPeak:
    """The most bytes that torch, and Python and numpy, held at one time, born inside.

    The two peaks are added although they need not coincide: an upper bound, by little.
    torch's comes from its profiler's list of allocations and releases, so garbage must wait
    meanwhile: its release would count against what is held.
    """

    def __enter__(self) -> HostPeak:
        self._profile = profile(use_cpu=True, profile_memory=True, use_kineto=True)
        self._profile.__enter__()
        tracemalloc.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self._profile.__exit__(*error)

    @property
    def bytes(self) -> int:
        results: Any = self._profile.kineto_results
        events = [e for e in results.events() if e.name() == "[memory]"]
        changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
        highest = max(accumulate(changes, initial=0))
        return math.ceil((highest + self._traced) / _GRAIN) * _GRAIN


class DevicePeak:
    """The most bytes of a GPU that torch held at one time, born inside; the host's do not count."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.bytes = device, 0

    def __enter__(self) -> DevicePeak:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize(self._device)
        highest = torch.cuda.max_memory_allocated(self._device) - self._before
        self.bytes = math.ceil(highest / _GRAIN) * _GRAIN
