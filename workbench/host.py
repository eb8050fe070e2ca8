"""What this process may use: cores, memory (a container's limit may be less), garbage collection.

Linux tells memory, with control groups of either version; elsewhere the machine's count.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")  # the control groups that this process is in
_CGROUPS = Path("/sys/fs/cgroup")


class _Group(NamedTuple):
    """A control group around this process that limits memory, in bytes."""

    folder: Path
    limit: int
    usage: str  # name of the file that holds it
    pages: str  # of files, as memory.stat counts them


# Of either version of control groups: names of the files with limit and usage, and _Group.pages.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file")
_V2 = ("memory.max", "memory.current", "(?:in)?active_file")


def total_memory() -> int:
    """Bytes of the machine, or of the smallest limit of a container around this process."""
    return min([_physical_memory(), *(group.limit for group in _groups())])


def available_memory() -> int:
    """Bytes to be had without swapping: the machine's, or what a container leaves of them."""
    table = _MEMINFO.read_text() if _MEMINFO.is_file() else ""
    found = re.search(r"MemAvailable:\s+(\d+) kB", table)
    machine = int(found[1]) * 1024 if found else _physical_memory()
    return min([machine, *map(_left_in, _groups())])


def usable_cores() -> int:
    """Cores this process may run on (its affinity, not what the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def _left_in(group: _Group) -> int:
    """What is used of files can be given back. All of the limit where the usage is not told."""
    try:
        used = int((group.folder / group.usage).read_text())
        statistics = (group.folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return group.limit
    pages = re.findall(rf"^{group.pages} (\d+)$", statistics, re.MULTILINE)
    return max(0, group.limit - used + sum(map(int, pages)))


def _groups() -> Iterator[_Group]:
    """The groups this process is in, and those around them, that limit memory."""
    lines = _MEMBERSHIP.read_text().splitlines() if _MEMBERSHIP.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, *names = _V1 if controllers else _V2
        folder = _CGROUPS / "memory" if controllers else _CGROUPS
        for part in ("", *(part for part in path.split("/") if part not in ("", ".."))):
            folder /= part
            try:
                yield _Group(folder, int((folder / limit).read_text()), *names)
            except (OSError, ValueError):  # no such group seen from here, or "max": none to keep
                continue
