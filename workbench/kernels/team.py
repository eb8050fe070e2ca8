"""Threads that share one kernel's work: a launch costs about a microsecond.

A *kernel* is a compiled function of two addresses, its arguments' (int64 values) and a counter's;
it takes piece numbers from the counter until none is left. Whoever calls takes part, so a launch
never waits for a thread that the system has not scheduled: helpers join while the work lasts, and
the caller waits only for those that did. Which thread takes a piece never changes a result. Helpers
look out for some hundred microseconds after a launch, then sleep reading from a pipe, into which a
later launch writes; they run no Python, so none of it waits for the interpreter.

    mailbox: int64 cells, each on a cache line of its own
    LAUNCH   number of the latest launch          KERNEL, ARGUMENTS   addresses
    JOINED   helpers in it, or CLOSED and below   FINISHED            helpers that have left it
    COUNTER  next piece                           STOP                1 when the team is gone
    ASLEEP   helpers that sleep and are not yet woken
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from struct import Struct
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numpy.typing import NDArray

from workbench.kernels.addresses import call, exchange, fetch_add, pause, read, write
from workbench.kernels.compiled import OPTIONS, cached

_LINE = 64  # bytes of a cache line
LAUNCH, KERNEL, ARGUMENTS, JOINED, FINISHED, COUNTER, STOP, ASLEEP = (_LINE * i for i in range(8))
_CLOSED = -(1 << 40)
_LOOKS = 2000  # some 100 us, before a waiting thread offers its core to others
_PATIENCE = 100  # offers before a helper goes to sleep

_MOST_ARGUMENTS = 19
_ROW = 8 * (1 + _MOST_ARGUMENTS)  # bytes of a launch: the kernel's address and its arguments
_PACK = [Struct(f"={1 + count}q") for count in range(_MOST_ARGUMENTS + 1)]

_yield = types.ExternalFunction("sched_yield", types.int32())
_read = types.ExternalFunction("read", types.int64(types.int64, types.int64, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int64, types.int64, types.int64))


def kernel(function: Callable[[int, int], None]) -> Any:
    """Compiles a kernel; `.address` is what `Team.run` takes."""
    return cached(cfunc, types.void(types.int64, types.int64), nopython=True)(function)


@njit(error_model="numpy", inline="always")
def take(counter: int) -> int:
    """The next piece's number, for this thread alone."""
    return fetch_add(counter, 1)


@njit(error_model="numpy")
def _wait_for(box: int, count: int) -> None:
    looks = 0
    while read(box + FINISHED) < count:
        looks += 1
        if looks > _LOOKS:
            _yield()
        else:
            pause()


@njit(error_model="numpy")
def _run(box: int, bell: int, kernel: int, arguments: int) -> None:
    write(box + KERNEL, kernel)
    write(box + ARGUMENTS, arguments)
    write(box + FINISHED, 0)
    write(box + COUNTER, 0)
    write(box + JOINED, 0)
    fetch_add(box + LAUNCH, 1)
    if read(box + ASLEEP) > 0:
        _write(bell, box, exchange(box + ASLEEP, 0))  # as many bytes, of whatever value
    call(kernel, arguments, box + COUNTER)
    _wait_for(box, exchange(box + JOINED, _CLOSED))


@cached(njit, types.void(*[types.int64] * 4), **OPTIONS)
def _launch(box: int, bell: int, launches: int, count: int) -> None:
    """Runs kernels one after the other, each to its end: an address and its arguments a row."""
    for at in range(launches, launches + count * _ROW, _ROW):
        _run(box, bell, read(at), at + 8)


@cached(njit, types.void(types.int64, types.int64), **OPTIONS)
def _help(box: int, bell: int) -> None:
    """A helper's life."""
    seen, looks = 0, 0
    byte = np.empty(1, np.uint8)
    while read(box + STOP) == 0:
        launch = read(box + LAUNCH)
        if launch != seen:
            seen, looks = launch, 0
            if fetch_add(box + JOINED, 1) >= 0:
                call(read(box + KERNEL), read(box + ARGUMENTS), box + COUNTER)
                fetch_add(box + FINISHED, 1)
            continue
        looks += 1
        if looks > _LOOKS + _PATIENCE:
            looks = 0
            fetch_add(box + ASLEEP, 1)  # a launch that did not see this yet is done without us
            _read(bell, byte.ctypes.data, 1)
        elif looks > _LOOKS:
            _yield()
        else:
            pause()


class _Bell:
    """A pipe that is closed when nobody listens any more."""

    def __init__(self) -> None:
        self.listen, self.ring = os.pipe()

    def __del__(self) -> None:
        os.close(self.listen)
        os.close(self.ring)


def _live(box: NDArray[np.int64], bell: _Bell) -> None:
    """A helper thread; holds on to what it reads from."""
    _help(box.ctypes.data, bell.listen)


def _dismiss(box: NDArray[np.int64], bell: _Bell, helpers: int) -> None:
    box[STOP // 8] = 1
    os.write(bell.ring, bytes(helpers))


def _address(buffer: bytearray) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


class Program:
    """Launches that were recorded: `run` does them again, without Python in between.

    Addresses are as they were, what lies there may have changed.
    """

    def __init__(self, team: Team, launches: bytearray, work: Callable[[], None]) -> None:
        self._team, self._launches = team, launches
        self._count = len(launches) // _ROW
        self._work = work  # keeps alive what lies at the addresses

    def run(self) -> None:
        """All of them, in their order, each to its end."""
        if self._count:
            self._team.launch(_address(self._launches), self._count)


class Team:
    """`threads` threads, the caller's included; one launch at a time, also of several callers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lock = threading.RLock()
        box, bell = np.zeros(_LINE, np.int64), _Bell()
        self._one = bytearray(_ROW)
        self._addresses = box.ctypes.data, bell.ring, _address(self._one)
        self._recorded: bytearray | None = None
        self._gone = weakref.finalize(self, _dismiss, box, bell, threads - 1)
        for number in range(1, threads):
            name = f"kernel-{number}"
            threading.Thread(target=_live, args=(box, bell), name=name, daemon=True).start()

    def run(self, address: int, *arguments: int) -> None:
        """Runs the kernel at an address to its end, with these arguments."""
        box, bell, at = self._addresses
        with self._lock:
            _PACK[len(arguments)].pack_into(self._one, 0, address, *arguments)
            if self._recorded is None:
                _launch(box, bell, at, 1)
            else:
                self._recorded += self._one

    def launch(self, launches: int, count: int) -> None:
        """Runs so many launches that lie at an address (see `Program`)."""
        box, bell, _ = self._addresses
        with self._lock:
            _launch(box, bell, launches, count)

    def record(self, work: Callable[[], None]) -> Program:
        """The launches that `work` asks for, none of them run."""
        with self._lock:
            self._recorded = launches = bytearray()
            try:
                work()
            finally:
                self._recorded = None
        return Program(self, launches, work)
