"""Whether weights fit this machine's memory: asked before any is read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from workbench.config import format_size
from workbench.errors import OutOfMemory

_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Bytes that may be taken without swapping, as Linux says; elsewhere all there are."""
    if _MEMINFO.is_file():
        found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_room(needed: int, name: str, dtype: str) -> None:
    """OutOfMemory, with the numbers, for weights of more bytes than are available."""
    available = available_memory()
    if needed > available:
        raise OutOfMemory(
            f"{name}'s weights take {format_size(needed)} ({dtype}; quantised ones as they are "
            f"stored), and {format_size(available)} of memory are available: "
            f"{format_size(needed - available)} are missing. Take a .gguf file of the model in "
            "fewer bits, a smaller model, or a machine with more memory."
        )
