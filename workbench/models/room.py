"""Whether weights fit the memory that is left, the machine's and the container's: asked before any
is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.config import format_size
from workbench.errors import OutOfMemory
from workbench.host import available_memory


def require_room(
    needed: int, name: str, held: str, smaller: Mapping[str, int], available: int | None = None
) -> None:
    """OutOfMemory, with the numbers, for weights of more bytes than are available.

    held: what numbers and matrices are held as; smaller: the bytes of each `quantization` that
    takes fewer; available: of a GPU, else the host's.
    """
    if available is None:
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
