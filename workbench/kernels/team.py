"""Threads that share one kernel's work: a launch costs about a microsecond.

A *kernel* is a compiled function of two addresses, its arguments' (int64 values) and a counter's;
it takes piece numbers from the counter until none is left. Whoever calls takes part, so a launch
never waits for a thread that the system has not scheduled: helpers join while the work lasts, and
the caller waits only for those that did. Which thread takes a piece never changes a result. Helpers
spin for some hundred microseconds after a launch, then sleep, and are woken by a later one.

    mailbox: int64 cells, each on a cache line of its own
    LAUNCH   number of the latest launch          KERNEL, ARGUMENTS   addresses
    JOINED   helpers in it, or CLOSED and below   FINISHED            helpers that have left it
    COUNTER  next piece                           STOP                1 when the team is gone
    ASLEEP   helpers that sleep
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from struct import Struct
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numpy.typing import NDArray

from workbench.kernels.addresses import call, exchange, fetch_add, read, write
from workbench.kernels.compiled import OPTIONS, cached

_LINE = 64  # bytes of a cache line
LAUNCH, KERNEL, ARGUMENTS, JOINED, FINISHED, COUNTER, STOP, ASLEEP = (_LINE * i for i in range(8))
_CLOSED = -(1 << 40)
_SPINS = 200  # looks before a waiting thread offers its core to others
_PATIENCE = 400  # offers before a helper goes to sleep

_NAP_S = 60.0  # a sleeping helper looks whether its team is gone
_MOST_ARGUMENTS = 32
_PACK = [Struct(f"={count}q") for count in range(_MOST_ARGUMENTS + 1)]

_yield = types.ExternalFunction("sched_yield", types.int32())


def kernel(function: Callable[[int, int], None]) -> Any:
    """Compiles a kernel; `.address` is what `Team.run` takes."""
    return cached(cfunc, types.void(types.int64, types.int64), nopython=True)(function)


@njit(error_model="numpy", inline="always")
def take(counter: int) -> int:
    """The next piece's number, for this thread alone."""
    return fetch_add(counter, 1)


@njit(error_model="numpy")
def _wait_for(box: int, count: int) -> None:
    spins = 0
    while read(box + FINISHED) < count:
        spins += 1
        if spins > _SPINS:
            _yield()


@cached(njit, types.boolean(types.int64, types.int64, types.int64), **OPTIONS)
def _launch(box: int, kernel: int, arguments: int) -> bool:
    """Runs a kernel; whether some helper was asleep when it began."""
    write(box + KERNEL, kernel)
    write(box + ARGUMENTS, arguments)
    write(box + FINISHED, 0)
    write(box + COUNTER, 0)
    write(box + JOINED, 0)
    fetch_add(box + LAUNCH, 1)
    call(kernel, arguments, box + COUNTER)
    _wait_for(box, exchange(box + JOINED, _CLOSED))
    return read(box + ASLEEP) != 0


@cached(njit, types.void(types.int64), **OPTIONS)
def _help(box: int) -> None:
    """A helper's life until there has been nothing to do for a while, or the team is gone."""
    seen, offers = 0, 0
    while read(box + STOP) == 0:
        launch = read(box + LAUNCH)
        if launch != seen:
            seen, offers = launch, 0
            if fetch_add(box + JOINED, 1) >= 0:
                call(read(box + KERNEL), read(box + ARGUMENTS), box + COUNTER)
                fetch_add(box + FINISHED, 1)
            continue
        offers += 1
        if offers < _SPINS:
            continue
        _yield()
        if offers > _SPINS + _PATIENCE:
            fetch_add(box + ASLEEP, 1)
            if read(box + LAUNCH) == seen:
                return
            fetch_add(box + ASLEEP, -1)


@cached(njit, types.void(types.int64), **OPTIONS)
def _wake(box: int) -> None:
    if read(box + STOP) == 0:
        fetch_add(box + ASLEEP, -1)


def _live(box: NDArray[np.int64], bell: threading.Condition) -> None:
    """A helper thread: helps, sleeps until the bell, helps again."""
    address = box.ctypes.data
    while not box[STOP // 8]:
        _help(address)
        with bell:
            if not box[STOP // 8]:
                bell.wait(timeout=_NAP_S)
        _wake(address)


def _dismiss(box: NDArray[np.int64], bell: threading.Condition) -> None:
    box[STOP // 8] = 1
    with bell:
        bell.notify_all()


def _address(buffer: bytearray) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


class Team:
    """`threads` threads, the caller's included; one launch at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        box = np.zeros(_LINE, np.int64)
        self._arguments = bytearray(8 * _MOST_ARGUMENTS)
        self._addresses = box.ctypes.data, _address(self._arguments)
        self._bell = threading.Condition()
        self._gone = weakref.finalize(self, _dismiss, box, self._bell)
        for number in range(1, threads):
            name = f"kernel-{number}"
            threading.Thread(target=_live, args=(box, self._bell), name=name, daemon=True).start()

    def run(self, address: int, *arguments: int) -> None:
        """Runs the kernel at an address to its end, with these arguments."""
        box, at = self._addresses
        _PACK[len(arguments)].pack_into(self._arguments, 0, *arguments)
        if _launch(box, address, at):
            with self._bell:
                self._bell.notify_all()
