"""What this process may use: cores, and memory, where a container's limit may be less.

Of memory all there is (`total_memory`), of which shares are taken, and what is left of it now
(`available_memory`), which says whether something fits. Linux tells both, with control groups of
either version; elsewhere the machine's memory is the answer. What it does not do: know GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")  # the control groups that this process is in
_CGROUPS = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """How a version of control groups calls its files, and its counts of file pages."""

    limit: str
    usage: str
    pages: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file")
_V2 = _Names("memory.max", "memory.current", "(?:in)?active_file")


class _Group(NamedTuple):
    """A control group around this process that limits memory, in bytes."""

    folder: Path
    names: _Names
    limit: int


def total_memory() -> int:
    """Bytes of the machine, or of the smallest limit of a container around this process."""
    return min([_physical_memory(), *(group.limit for group in _groups())])


def available_memory() -> int:
    """Bytes to be had without swapping: the machine's, or what a container leaves of them."""
    return min([_left_on_machine(), *map(_left_in, _groups())])


def usable_cores() -> int:
    """Cores this process may run on (its affinity, not what the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_on_machine() -> int:
    if _MEMINFO.is_file():
        found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        if found:
            return int(found[1]) * 1024
    return _physical_memory()


def _left_in(group: _Group) -> int:
    """What is used of files can be given back. All of the limit where nobody tells what is used."""
    folder, names, limit = group
    try:
        used = int((folder / names.usage).read_text())
        statistics = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return limit
    pages = re.findall(rf"^{names.pages} (\d+)$", statistics, re.MULTILINE)
    return max(0, limit - used + sum(map(int, pages)))


def _groups() -> Iterator[_Group]:
    """The groups this process is in, and those around them, that limit memory."""
    lines = _MEMBERSHIP.read_text().splitlines() if _MEMBERSHIP.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _lineage(_CGROUPS, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _lineage(_CGROUPS / "memory", path, _V1)


def _lineage(root: Path, path: str, names: _Names) -> Iterator[_Group]:
    """The groups from `root` down to `path`, so far as they are to be seen from in here."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        folder = root.joinpath(*parts[:depth])
        try:
            yield _Group(folder, names, int((folder / names.limit).read_text()))
        except (OSError, ValueError):  # no such group here, or "max": none to keep
            continue
