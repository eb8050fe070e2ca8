"""How CPU kernels are compiled, and the threads that share one's work: a launch costs about 1 us.

Compiled by numba, for one explicit signature each, kept on disk where possible. No fast-math flag
is ever set: LLVM may then neither reorder a sum nor fuse a product, so a kernel computes exactly
what its source says, on every machine, whatever the vector width or the number of rows.

A *kernel* is a compiled function of two addresses, its arguments' (int64 values) and a counter's;
it takes piece numbers from the counter until none is left. The calling thread takes part, so a
launch never waits for a thread that the system has not scheduled: helpers join while the work
lasts, and the caller waits only for those that did. Which thread takes a piece never changes a
result. Helpers poll for some hundred microseconds after a launch, then sleep reading from a pipe,
into which a later launch writes; they run no Python, so none of it waits for the interpreter.

    mailbox: int64 cells, each on a cache line of its own
    LAUNCH   number of the latest launch          KERNEL, ARGUMENTS   addresses
    JOINED   helpers in it, or CLOSED and below   FINISHED            helpers that have left it
    COUNTER  next piece                           STOP                1 when the pool is gone
    ASLEEP   helpers that sleep and are not yet woken
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.core.caching import FunctionCache

from workbench.kernels.cpu.vectors import call, exchange, fetch_add, inlined, pause, read, write

_UNCACHED = (
    "Compiled kernels cannot be kept ({}), so every run compiles them anew, which takes half a "
    "minute; set NUMBA_CACHE_DIR to a folder that can be written."
)
_DAMAGED = (
    "A compiled kernel that was kept cannot be read ({}), so every run compiles it anew; delete "
    "the folder {}, which is filled again by itself."
)
_STAMP = "kernels.sha256"  # beside kept kernels: what they were compiled of


def cached(
    compiler: Callable[..., Any], signature: Any, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """`compiler` (numba's njit or cfunc) for one signature, kept on disk.

    Kept kernels are those of the sources as they are: numba looks at a kernel's own file only, and
    much of its code is of others. Where no cache folder can be written, or what lies in it is
    damaged or of a module that has moved, it is compiled in memory, each run anew, and a
    RuntimeWarning says so.
    """

    def wrap(function: Callable[..., Any]) -> Any:
        try:
            forget_stale(FunctionCache(function).cache_path)
            return compiler(signature, cache=True, **options)(function)
        except Exception as error:  # what unpickling damaged bytes raises is anything
            made = compiler(signature, **options)(function)  # a kernel at fault raises again
            warnings.warn(_reason(function, error), RuntimeWarning, stacklevel=2)
            return made

    return wrap


def compiled(*arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit` for one signature that returns nothing, without the interpreter's lock."""
    return cached(njit, types.void(*arguments), error_model="numpy", nogil=True)


@cache
def _sources() -> str:
    """A name for the CPU kernels' sources as they are."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in [*sorted(here.glob("*.py")), here.parent / "isa.py"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def forget_stale(folder: str) -> None:
    """Once a folder: what was compiled of other sources is thrown away."""
    stamp = Path(folder, _STAMP)
    if stamp.is_file() and stamp.read_text() == _sources():
        return
    for file in Path(folder).glob("*.nb[ic]"):
        file.unlink(missing_ok=True)
    stamp.write_text(_sources())


def _reason(function: Callable[..., Any], error: Exception) -> str:
    """Why a kernel was not kept or not found, and what to do."""
    said = f"{type(error).__name__}: {error}"
    try:
        folder = FunctionCache(function).cache_path
    except (RuntimeError, OSError):  # there is no folder
        return _UNCACHED.format(said)
    return _UNCACHED.format(said) if isinstance(error, OSError) else _DAMAGED.format(said, folder)


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
    """Compiles a kernel; `.address` is what `ThreadPool.run` takes."""
    return cached(cfunc, types.void(types.int64, types.int64), nopython=True)(function)


@inlined
def take(counter: int) -> int:
    """The next piece's number, for this thread alone."""
    return fetch_add(counter, 1)


@compiled(*[types.int64] * 4)
def _launch(box: int, bell: int, launches: int, count: int) -> None:
    """Runs kernels one after the other, each to its end: an address and its arguments a row."""
    for at in range(launches, launches + count * _ROW, _ROW):
        write(box + KERNEL, read(at))
        write(box + ARGUMENTS, at + 8)
        write(box + FINISHED, 0)
        write(box + COUNTER, 0)
        write(box + JOINED, 0)
        fetch_add(box + LAUNCH, 1)
        if read(box + ASLEEP) > 0:
            _write(bell, box, exchange(box + ASLEEP, 0))  # as many bytes, of whatever value
        call(read(at), at + 8, box + COUNTER)
        helpers, looks = exchange(box + JOINED, _CLOSED), 0
        while read(box + FINISHED) < helpers:
            looks += 1
            if looks > _LOOKS:
                _yield()
            else:
                pause()


@compiled(types.int64, types.int64)
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


def _address(buffer: bytearray) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


class ThreadPool:
    """`threads` threads, the caller's included; one launch at a time, also of several callers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lock = threading.RLock()
        box, (listen, ring) = np.zeros(_LINE, np.int64), Pipe(duplex=False)
        self._one = bytearray(_ROW)
        self._addresses = box.ctypes.data, ring.fileno(), _address(self._one)
        self._recorded: bytearray | None = None

        def live() -> None:  # a helper's, which holds on to what it reads from
            _help(box.ctypes.data, listen.fileno())

        def dismiss() -> None:
            box[STOP // 8] = 1
            os.write(ring.fileno(), bytes(threads - 1))

        weakref.finalize(self, dismiss)
        for number in range(1, threads):
            threading.Thread(target=live, name=f"kernel-{number}", daemon=True).start()

    def run(self, address: int, *arguments: int) -> None:
        """Runs the kernel at an address to its end, with these arguments."""
        box, bell, at = self._addresses
        with self._lock:
            _PACK[len(arguments)].pack_into(self._one, 0, address, *arguments)
            if self._recorded is None:
                _launch(box, bell, at, 1)
            else:
                self._recorded += self._one

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """The launches that `work` asks for, none of them run: what is returned does them all, each
        to its end, without Python in between. Addresses are as they were, what lies there may have
        changed.
        """
        launches = bytearray()
        with self._lock:
            try:
                self._recorded = launches
                work()
            finally:
                self._recorded = None
        box, bell, _ = self._addresses
        at, count = _address(launches), len(launches) // _ROW

        def again(_: object = (launches, work)) -> None:  # alive, and with it what is read
            with self._lock:
                _launch(box, bell, at, count)

        return again
