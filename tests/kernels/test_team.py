"""A team of threads: every piece is worked on once, whoever comes late; it sleeps and goes away."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from workbench.kernels.addresses import integers
from workbench.kernels.team import Team, kernel, take


@kernel
def count_pieces(arguments: int, counter: int) -> None:
    """Adds one to cell i for each time piece i is taken."""
    a = integers(arguments, 2)
    cells = integers(a[0], a[1])
    piece = take(counter)
    while piece < a[1]:
        cells[piece] += 1
        piece = take(counter)


def launch(team: Team, pieces: int, times: int) -> np.ndarray:
    cells = np.zeros(pieces, np.int64)
    for _ in range(times):
        team.run(count_pieces.address, cells.ctypes.data, pieces)
    return cells


def helpers() -> int:
    return sum(thread.name.startswith("kernel-") for thread in threading.enumerate())


def test_every_piece_is_taken_once() -> None:
    """Many launches in a row, with more threads than cores: no piece lost, none done twice."""
    for threads in (1, 2, 5):
        team = Team(threads)
        assert (launch(team, 100, 500) == 500).all()


def test_recorded_launches_run_again_and_only_then() -> None:
    """Recording runs nothing; each later run does every launch once more; the next is direct."""
    team, cells = Team(2), np.zeros((2, 100), np.int64)

    def work() -> None:
        for row in cells:
            team.run(count_pieces.address, row.ctypes.data, 100)
        team.run(count_pieces.address, cells.ctypes.data, 100)

    program = team.record(work)
    assert not cells.any()
    for _ in range(20):
        program.run()
    assert (cells == [[40], [20]]).all()
    work()
    assert (cells == [[42], [21]]).all()


def test_recording_that_fails_leaves_the_team_usable() -> None:
    """An error in recorded work is the caller's; launches are direct again."""
    team = Team(2)
    with pytest.raises(IndexError):
        team.record(lambda: [][0])
    assert (launch(team, 10, 5) == 5).all()


def test_helpers_sleep_and_are_woken() -> None:
    """After a pause the work is still done, and pauses cost no processor time."""
    team = Team(3)
    launch(team, 10, 10)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1
    assert (launch(team, 10, 50) == 50).all()


def test_a_team_that_is_gone_leaves_no_thread() -> None:
    """Helpers end when nobody holds their team any more."""
    gc.collect()
    before = helpers()
    team = Team(4)
    assert helpers() == before + 3
    del team
    gc.collect()
    deadline = time.monotonic() + 5
    while helpers() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert helpers() == before


def test_launches_of_several_threads_come_one_after_the_other() -> None:
    """One team serves all models of a process: no piece is lost when two threads launch at once."""
    team, found = Team(2), []
    callers = [threading.Thread(target=lambda: found.append(launch(team, 50, 300))) for _ in "ab"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 2
    assert all((cells == 300).all() for cells in found)
