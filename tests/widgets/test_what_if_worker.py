"""The process behind the widget: exact answers, cancelling, errors in words, no torch."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from tests.widgets.small_search import SmallSearch
from workbench.errors import ConfigError
from workbench.widgets import what_if_worker
from workbench.widgets.what_if_answers import EXACT, exact, moved
from workbench.widgets.what_if_position import Position
from workbench.widgets.what_if_worker import TAKEN, Desk, Request, Worker, in_words

PATIENCE_S = 60


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return SmallSearch(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def heard():
    return queue.Queue()


@pytest.fixture(scope="module")
def worker(small, heard):
    worker = Worker(list(small.kept), heard.put)
    yield worker
    process = worker._process
    worker.close()
    assert process.exitcode == 0


def replies(heard, number):
    """Those of one request, in order, to the last."""
    found = []
    while not found or found[-1].kind not in ("done", "error"):
        reply = heard.get(timeout=PATIENCE_S)
        found += [reply] if reply.number == number else []
    return found


class Number:
    """What the process sees of the newest request."""

    def __init__(self, value):
        self.value = value


def tight(position, **change):
    """A position that a replay refuses: no room for one request."""
    return Position(**{**position.to_dict(), "llm_share": 0.9, **change})


def test_the_process_answers_what_was_asked_in_order(small, worker, heard):
    """The position itself, its basis, then the others; equal to a replay in this process."""
    other = moved(small.position, 0.2)
    number = worker.ask(small.position, wants_basis=True, others=[other])
    found = replies(heard, number)
    assert [r.kind for r in found] == ["exact", "basis", "other", "done"]
    here = exact(small.first, small.position, small.answers)
    assert found[0].content.kind == EXACT
    assert found[0].content.tokens_per_s == here.tokens_per_s
    assert found[0].content.llm == here.llm
    assert found[0].content.blocks.equals(here.blocks)
    position, basis = found[1].content
    assert (position, basis.llm.peak) == (small.position, small.basis.llm.peak)
    assert found[2].content.position == other


def test_a_newer_request_supersedes_the_running_one(small, worker, heard):
    """Only the newest is answered to its end, whatever was asked before it in a row."""
    many = [moved(small.position, 0.15 + k / 100) for k in range(15)]
    first = worker.ask(small.position, wants_basis=True, others=many)
    time.sleep(0.3)  # it has begun
    last = worker.ask(moved(small.position, 0.25))
    assert last > first
    kinds = [reply.kind for reply in replies(heard, last)]
    assert kinds == ["exact", "done"]
    assert heard.empty()


def test_errors_come_back_in_words_and_the_process_goes_on(small, worker, heard):
    """The engine's own sentence, and the next request is answered."""
    found = replies(heard, worker.ask(tight(small.position)))
    assert [reply.kind for reply in found] == ["error"]
    assert "its weights take" in found[0].content or "cannot hold" in found[0].content
    assert replies(heard, worker.ask(small.position))[-1].kind == "done"


def test_a_process_that_was_lost_is_told_and_started_again(small, worker, heard):
    """Killed from outside: an error in words, then the next request finds a new one."""
    worker.ask(small.position)
    worker._process.kill()
    reply = heard.get(timeout=PATIENCE_S)
    while reply.kind != "error":
        reply = heard.get(timeout=PATIENCE_S)
    assert "ended unexpectedly" in reply.content
    assert replies(heard, worker.ask(small.position))[-1].kind == "done"


def test_a_process_lost_a_moment_ago_is_started_again_too(small, worker, heard, monkeypatch):
    """Its end of the pipe is closed, yet it still counts as alive: a new one is asked."""
    replies(heard, worker.ask(small.position))
    lost = worker._process
    lost.kill()
    assert "ended unexpectedly" in heard.get(timeout=PATIENCE_S).content
    with monkeypatch.context() as patched:
        patched.setattr(lost, "is_alive", lambda: True)
        number = worker.ask(small.position)
    assert worker._process is not lost
    assert replies(heard, number)[-1].kind == "done"


def test_an_interrupted_cell_leaves_the_process_alone(small, worker, heard):
    """Ctrl-C goes to it too where both share a terminal; the same process answers on."""
    replies(heard, worker.ask(small.position))
    process = worker._process
    os.kill(process.pid, signal.SIGINT)
    assert replies(heard, worker.ask(small.position))[-1].kind == "done"
    assert worker._process is process and heard.empty()


def test_one_process_runs_however_often_the_cell_does(small, worker, heard):
    """A second worker's first request ends the first's process, and whoever waits there is told."""
    replies(heard, worker.ask(small.position))
    before, process = set(multiprocessing.active_children()), worker._process
    again = queue.Queue()
    second = Worker(list(small.kept), again.put)
    assert replies(again, second.ask(small.position))[-1].kind == "done"
    assert process.exitcode == 0
    assert set(multiprocessing.active_children()) == before - {process} | {second._process}
    assert heard.get(timeout=PATIENCE_S).content == TAKEN
    assert replies(heard, worker.ask(small.position))[-1].kind == "done"  # and back
    assert not second.is_alive


def test_closing_ends_a_process_that_does_not_listen(small, worker, heard, monkeypatch):
    """Stopped by force it neither reads nor minds a friendly signal; close() is done with it."""
    replies(heard, worker.ask(small.position))
    process = worker._process
    monkeypatch.setattr(what_if_worker, "JOIN_S", 0.6)
    os.kill(process.pid, signal.SIGSTOP)
    worker.close()
    monkeypatch.undo()
    assert process.exitcode == -signal.SIGKILL
    assert replies(heard, worker.ask(small.position))[-1].kind == "done"


def test_a_running_replay_stops_between_two_rounds(small):
    """Superseded before it began or while it runs, a request yields nothing more."""
    newest = Number(2)
    desk = Desk(small.kept, newest)
    assert list(desk.replies(Request(1, small.position, False))) == []
    running = desk.replies(Request(2, small.position, True))
    assert next(running).kind == "exact"
    newest.value = 3
    assert list(running) == []


def test_what_is_nobodys_fault_says_where_it_happened():
    """A named error gives its sentence, any other its kind and place too."""
    with pytest.raises(KeyError) as caught:
        {}["lost"]
    assert "KeyError in test_what_if_worker.py" in in_words(caught.value)
    assert in_words(ConfigError("Give one.")) == "Give one."


def test_the_process_loads_no_torch():
    """What the worker imports is light: a fresh process shows it."""
    code = (
        "import sys, workbench.widgets.what_if_worker\n"
        "heavy = ('torch', 'numba', 'safetensors', 'ipywidgets', 'IPython')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
