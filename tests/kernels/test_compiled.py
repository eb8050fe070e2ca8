"""A damaged cache of compiled kernels costs time and a warning, never the package."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numba.core.config
import numpy as np
import pytest
from numba import cfunc, types

from workbench.kernels.compiled import VECTOR, _forget_stale, cached, compiled


def double(x: Any) -> None:
    for i in range(len(x)):
        x[i] *= np.float32(2)


def product(x: int, y: int) -> int:
    return x * y


def doubles() -> bool:
    values = np.ones(3, np.float32)
    compiled(VECTOR)(double)(values)
    return values.tolist() == [2, 2, 2]


def multiplies() -> bool:
    """As the teams' kernels are compiled: a C function's address."""
    signature = types.int64(types.int64, types.int64)
    return bool(cached(cfunc, signature, nopython=True)(product).ctypes(6, 7) == 42)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    """As a full disk or a machine that lost power leaves it."""
    held = file.read_bytes()
    file.write_bytes(held[: len(held) // 2])


def overwritten(file: Path) -> None:
    file.write_bytes(b"no pickle at all")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("works", [doubles, multiplies])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [empty, cut, overwritten])
def test_a_damaged_file_is_compiled_around_and_its_folder_named(
    works: Any, kind: str, damage: Any, folder: Path
) -> None:
    """Index or code: once what was named is deleted, kernels are kept again, without a word."""
    assert works()
    (file,) = folder.rglob(f"*.{kind}")
    damage(file)
    with pytest.warns(RuntimeWarning, match=rf"cannot be read .*delete the folder {file.parent}"):
        assert works()
    shutil.rmtree(file.parent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert works()
        assert works()
    assert len(list(folder.rglob("*.nbc"))) == 1


def test_a_kernel_at_fault_is_not_laid_to_the_cache(folder: Path) -> None:
    """It raises what numba says of it, and no warning about files."""

    def wrong(x: Any) -> None:
        x[0] = "text"

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(numba.core.errors.TypingError):
            compiled(VECTOR)(wrong)


def test_kernels_of_other_sources_are_compiled_anew(folder: Path) -> None:
    """Guards against code of a module that changed since, in a kernel whose own file did not."""
    assert doubles()
    (stamp,) = folder.rglob("kernels.sha256")
    kept = {file: file.stat().st_mtime_ns for file in stamp.parent.glob("*.nbi")}
    assert kept
    _forget_stale.cache_clear()
    assert doubles()
    assert {file: file.stat().st_mtime_ns for file in kept} == kept  # the same sources: nothing new
    stamp.write_text("other sources")
    _forget_stale.cache_clear()
    assert doubles()
    assert all(file.stat().st_mtime_ns > before for file, before in kept.items())
