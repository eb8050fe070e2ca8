"""Every piece of a kernel is worked on once, and kept kernels that are damaged cost a warning."""

import gc
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numba.core.caching
import numba.core.config
import numpy as np
import pytest
from numba import cfunc, types

from workbench.kernels.cpu.thread_pool import (
    ThreadPool,
    cached,
    compiled,
    forget_stale,
    kernel,
    take,
)
from workbench.kernels.cpu.vectors import integers


@kernel
def count_pieces(arguments: int, counter: int) -> None:
    """Adds one to cell i for each time piece i is taken."""
    a = integers(arguments, 2)
    cells = integers(a[0], a[1])
    piece = take(counter)
    while piece < a[1]:
        cells[piece] += 1
        piece = take(counter)


def launch(pool: ThreadPool, pieces: int, times: int) -> np.ndarray:
    cells = np.zeros(pieces, np.int64)
    for _ in range(times):
        pool.run(count_pieces.address, cells.ctypes.data, pieces)
    return cells


def test_every_piece_is_taken_once() -> None:
    """Many launches in a row, with more threads than cores: no piece lost, none done twice."""
    for threads in (1, 2, 5):
        pool = ThreadPool(threads)
        assert (launch(pool, 100, 500) == 500).all()


def test_recorded_launches_run_again_and_only_then() -> None:
    """Recording runs nothing; each later run does every launch once more; the next is direct."""
    pool, cells = ThreadPool(2), np.zeros((2, 100), np.int64)

    def work() -> None:
        for row in cells:
            pool.run(count_pieces.address, row.ctypes.data, 100)
        pool.run(count_pieces.address, cells.ctypes.data, 100)

    program = pool.record(work)
    assert not cells.any()
    for _ in range(20):
        program()
    assert (cells == [[40], [20]]).all()
    work()
    assert (cells == [[42], [21]]).all()


def test_recording_that_fails_leaves_the_pool_usable() -> None:
    """An error in recorded work is the caller's; launches are direct again."""
    pool = ThreadPool(2)
    with pytest.raises(IndexError):
        pool.record(lambda: [][0])
    assert (launch(pool, 10, 5) == 5).all()


def test_helpers_sleep_and_are_woken() -> None:
    """After a pause the work is still done, and pauses cost no processor time."""
    pool = ThreadPool(3)
    launch(pool, 10, 10)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1
    assert (launch(pool, 10, 50) == 50).all()


def test_a_pool_that_is_gone_leaves_no_thread() -> None:
    """Helpers end when nobody holds their pool any more."""
    before = set(threading.enumerate())  # of pools that go meanwhile, too
    pool = ThreadPool(4)
    helpers = set(threading.enumerate()) - before
    assert {helper.name for helper in helpers} == {"kernel-1", "kernel-2", "kernel-3"}
    del pool
    gc.collect()
    for helper in helpers:
        helper.join(5)
    assert not any(helper.is_alive() for helper in helpers)


def test_launches_of_several_threads_come_one_after_the_other() -> None:
    """One pool serves all models of a process: no piece is lost when two threads launch at once."""
    pool, found = ThreadPool(2), []
    callers = [threading.Thread(target=lambda: found.append(launch(pool, 50, 300))) for _ in "ab"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 2
    assert all((cells == 300).all() for cells in found)


def double(x: Any) -> None:
    for i in range(len(x)):
        x[i] *= np.float32(2)


def product(x: int, y: int) -> int:
    return x * y


def doubled() -> bool:
    values = np.ones(3, np.float32)
    compiled(types.float32[::1])(double)(values)
    return values.tolist() == [2, 2, 2]


def multiplies() -> bool:
    """As the teams' kernels are compiled: a C function's address."""
    signature = types.int64(types.int64, types.int64)
    return bool(cached(cfunc, signature, nopython=True)(product).ctypes(6, 7) == 42)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", ["nothing", "a half", "other bytes"])
def test_a_damaged_file_is_compiled_around_and_its_folder_named(kind, left, folder) -> None:
    """As a full disk leaves it: once what was named is deleted, all are kept again."""
    assert multiplies()
    (file,) = folder.rglob(f"*.{kind}")
    held = file.read_bytes()
    damaged = {"nothing": b"", "a half": held[: len(held) // 2], "other bytes": b"no pickle at all"}
    file.write_bytes(damaged[left])
    with pytest.warns(RuntimeWarning, match=rf"cannot be read .*delete the folder {file.parent}"):
        assert multiplies()
    shutil.rmtree(file.parent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert multiplies()
        assert multiplies()
    assert len(list(folder.rglob("*.nbc"))) == 1


def test_kernels_compile_where_no_cache_folder_can_be_written(monkeypatch) -> None:
    """A read-only installation and home: compiled in memory, with the same results."""
    for locator in numba.core.caching.CacheImpl._locator_classes:
        monkeypatch.setattr(locator, "from_function", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR"):
        assert doubled()


def test_a_kernel_at_fault_is_not_laid_to_the_cache(folder: Path) -> None:
    """It raises what numba says of it, and no warning about files."""

    def wrong(x: Any) -> None:
        x[0] = "text"

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(numba.core.errors.TypingError):
            compiled(types.float32[::1])(wrong)


def test_kernels_of_other_sources_are_compiled_anew(folder: Path) -> None:
    """Guards against code of a module that changed since, in a kernel whose own file did not."""
    assert doubled()
    (stamp,) = folder.rglob("kernels.sha256")
    kept = {file: file.stat().st_mtime_ns for file in stamp.parent.glob("*.nbi")}
    assert kept
    forget_stale.cache_clear()
    assert doubled()
    assert {file: file.stat().st_mtime_ns for file in kept} == kept  # the same sources: nothing new
    stamp.write_text("other sources")
    forget_stale.cache_clear()
    assert doubled()
    assert all(file.stat().st_mtime_ns > before for file, before in kept.items())
