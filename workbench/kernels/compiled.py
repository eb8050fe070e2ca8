"""How CPU kernels are compiled: by numba, one explicit signature each, cached where possible.

No fast-math flag is ever given: LLVM may then neither reorder a sum nor fuse a product, so a kernel
computes exactly what its source says, whatever the vector width, the unrolling or the number of
rows.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import FunctionCache

MATRIX, VECTOR = types.float32[:, ::1], types.float32[::1]
_UNCACHED = (
    "Compiled kernels cannot be kept ({}), so every run compiles them anew, which takes half a "
    "minute; set NUMBA_CACHE_DIR to a folder that can be written."
)
_DAMAGED = (
    "A compiled kernel that was kept cannot be read ({}), so every run compiles it anew; delete "
    "the folder {}, which is filled again by itself."
)
_STAMP = "kernels.sha256"  # beside kept kernels: what they were compiled of
OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True}


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
            _forget_stale(FunctionCache(function).cache_path)
            return compiler(signature, cache=True, **options)(function)
        except Exception as error:  # what unpickling damaged bytes raises is anything
            made = compiler(signature, **options)(function)  # a kernel at fault raises again
            warnings.warn(_reason(function, error), RuntimeWarning, stacklevel=2)
            return made

    return wrap


def compiled(*arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit` for one signature without an answer, other threads running meanwhile."""
    return cached(njit, types.void(*arguments), **OPTIONS)


@cache
def _sources() -> str:
    """Names this package's modules by their contents."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _forget_stale(folder: str) -> None:
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
