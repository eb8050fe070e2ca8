"""What this process may use: cores, memory (a container's limit may be less), garbage collection;
and memory that begins where a cache line does.

Linux tells memory, with control groups of either version; elsewhere the machine's count.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CACHE_LINE = 64  # bytes; as many as the widest vector, so that an aligned one lies in one line

_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")  # the control groups that this process is in
_CGROUPS = Path("/sys/fs/cgroup")
# Of either version: files with limit and usage, and what memory.stat calls pages of files.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file")
_V2 = ("memory.max", "memory.current", "(?:in)?active_file")


def total_memory() -> int:
    """Bytes of the machine, or of the smallest limit of a container around this process."""
    return min([_physical_memory(), *(limit for limit, _ in _groups())])


def available_memory() -> int:
    """Bytes to be had without swapping: the machine's, or what a container leaves of them."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _text(_MEMINFO))
    machine = int(found[1]) * 1024 if found else _physical_memory()
    return min([machine, *(left for _, left in _groups())])


def usable_cores() -> int:
    """Cores this process may run on (its affinity, not what the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def aligned_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins with a cache line, in large pages where the system has them.

    numpy's own begins 16 bytes behind one: every load of a whole line then touches two.
    """
    whole = np.zeros(num_bytes + CACHE_LINE, np.uint8)
    start = -whole.ctypes.data % CACHE_LINE
    return whole[start : start + num_bytes]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Garbage waits meanwhile: where much is made and little thrown away, looking is wasted."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(file: Path) -> str:
    """The content of a file; nothing of one that is not there or must not be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _groups() -> Iterator[tuple[int, int]]:
    """Limit, and what is left of it, of each group around this process that limits memory.

    What is used of files can be given back. All is left where the usage is not told.
    """
    for line in _text(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, usage, pages = _V1 if controllers else _V2
        folder = _CGROUPS / "memory" if controllers else _CGROUPS
        for part in ("", *(part for part in path.split("/") if part not in ("", ".."))):
            folder /= part
            most, used, told = (_text(folder / file) for file in (limit, usage, "memory.stat"))
            if not most.strip().isdigit():  # no such group seen from here, or "max": none to keep
                continue
            files = re.findall(rf"^{pages} (\d+)$", told, re.MULTILINE)
            in_use = int(used) - sum(map(int, files)) if used and told else 0
            yield int(most), max(0, int(most) - in_use)
