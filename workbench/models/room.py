"""Whether weights fit the memory that is left, the machine's and the container's: asked before any
is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from workbench.config import format_size
from workbench.errors import OutOfMemory

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


def available_memory() -> int:
    """Bytes to be had without swapping: the machine's, or what a container's limit leaves of them.

    As Linux says; elsewhere all there are.
    """
    return min([_of_machine(), *_of_containers()])


def require_room(needed: int, name: str, held: str, smaller: Mapping[str, int]) -> None:
    """OutOfMemory, with the numbers, for weights of more bytes than are available.

    held: what numbers and matrices are held as; smaller: the bytes of each `quantization` that
    takes fewer.
    """
    available = available_memory()
    if needed > available:
        raise OutOfMemory(
            f"{name}'s weights take {format_size(needed)} ({held}; rotary tables included), and "
            f"{format_size(available)} of memory are available: {format_size(needed - available)} "
            f"are missing. {_remedy(smaller, available)}"
        )


def _remedy(smaller: Mapping[str, int], available: int) -> str:
    fitting = [
        f"quantization={quantization!r} ({format_size(size)})"
        for quantization, size in smaller.items()
        if size <= available
    ]
    return f"Take {', '.join([*fitting, 'a smaller model'])}, or a machine with more memory."


def _of_machine() -> int:
    if _MEMINFO.is_file():
        found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_containers() -> Iterator[int]:
    """What is left in each control group of this process, and in those around it, with a limit."""
    lines = _MEMBERSHIP.read_text().splitlines() if _MEMBERSHIP.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(_CGROUPS, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _left(_CGROUPS / "memory", path, _V1)


def _left(root: Path, path: str, names: _Names) -> Iterator[int]:
    """Of each group from `root` down to `path`, so far as they are to be seen from in here."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        folder = root.joinpath(*parts[:depth])
        try:
            limit, usage = (int((folder / name).read_text()) for name in names[:2])
            statistics = (folder / "memory.stat").read_text()
        except (OSError, ValueError):  # no such group here, or "max": none to keep
            continue
        reclaimable = re.findall(rf"^{names.pages} (\d+)$", statistics, re.MULTILINE)
        yield max(0, limit - usage + sum(map(int, reclaimable)))
