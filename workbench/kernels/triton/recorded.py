"""Decoding steps launched again without Python in between: CUDA graphs, one for each size of step.

A graph launches what was captured, over the same addresses. So a step's lists are put where those
of the captured step were, with room for more (`Capacity`); a step that does not fit is launched one
by one, and captured for the steps to come. A size whose capture fails goes on being launched one by
one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from workbench.host import collection_paused
from workbench.kernels.context import ForwardContext
from workbench.kernels.triton.placing import Capacity, DeviceWork, is_aligned, padded, place
from workbench.kernels.triton.tuning import Tuning
from workbench.kernels.triton.work import StepWork

Work = Callable[[], None]
Capture = Callable[[Work], Work]  # what launches the same again
Shape = tuple[int, int, Tuning]  # query heads of a key-value head, block size, tiles


class StepHolder(Protocol):
    """Kernels that keep the lists of the step they are at."""

    device: torch.device
    held: tuple[ForwardContext, Shape, DeviceWork] | None

    def plan(self, context: ForwardContext, shape: Shape) -> StepWork:
        """The lists of a step."""


class RecordedWork:
    """Work of one row a sequence, over a context whose arrays change in place."""

    def __init__(self, kernels: StepHolder, work: Work, capture: Capture) -> None:
        self._kernels, self._work, self._capture = kernels, work, capture
        self._about: tuple[ForwardContext, Shape] | None = None
        self._recorded: dict[tuple[Capacity, bool], tuple[DeviceWork, Work]] = {}

    def __call__(self) -> None:
        """Do the work once."""
        if self._about is None:  # which context it is about is seen when it is done
            self._kernels.held = None
            self._work()
            assert self._kernels.held is not None, "recorded work that attends to nothing"
            self._about = self._kernels.held[:2]
            return
        context, shape = self._about
        lists = self._kernels.plan(context, shape)
        capacity = Capacity.of(lists)
        lists, key = padded(lists, capacity), (capacity, is_aligned(context))
        if key in self._recorded:
            placed, again = self._recorded[key]
            placed.refill(lists, context)
            self._kernels.held = (context, shape, placed)
            again()
            return
        placed = place(lists, context, self._kernels.device)
        self._kernels.held = (context, shape, placed)
        self._work()  # this step; and every kernel is compiled before one is captured
        self._recorded[key] = placed, self._captured()

    def _captured(self) -> Work:
        """What launches the work again: as it is where the device cannot capture it."""
        try:
            return self._capture(self._work)
        except RuntimeError as problem:  # torch.OutOfMemoryError among them
            warnings.warn(
                f"Decoding steps are launched one by one, slower: no CUDA graph ({problem}).",
                RuntimeWarning,
                stacklevel=2,
            )
            return self._work


def as_it_is(work: Work) -> Work:
    """The capture of a device that has no graphs."""
    return work


class GraphCapture:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time.

    Nobody waits for the device, as the context manager `torch.cuda.graph` would: that is an error
    while another engine's thread captures.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, work: Work) -> Work:
        """Captures the work, without doing it."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), collection_paused():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # it fails too where the work has broken the capture
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Work = graph.replay
        return replay
