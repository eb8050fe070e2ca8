"""Searches that take turns, each in a process of its own: seconds that do not depend on the minute.

The pace of a shared machine wanders by half within seconds, so that of two searches one after the
other either may look the faster. Here every process is stopped (SIGSTOP) while another works, turns
are much shorter than such a mood, and only the seconds in which a process worked are counted; times
in the tables of a result include the others' turns. What it does not do: choose what is compared.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any, NamedTuple

from workbench.errors import WorkbenchError
from workbench.experiments.policy_plan import PolicySpec
from workbench.experiments.record import RunResult

TURN_S = 0.25
START_S = 180.0  # to build both engines and search one problem to warm up
WARM_UP_PROBLEMS = 1
IMPORTED_ONCE = ["workbench.experiments.policy_run", "workbench.experiments.identity", __name__]


class Timed(NamedTuple):
    """Seconds in which a search worked, and what it found."""

    seconds: float
    result: RunResult


Outcome = Timed | Exception  # what building the engines or searching raised


def take_turns(specs: Sequence[PolicySpec]) -> list[Outcome]:
    """All searches at once, turn by turn; the first turn goes round.

    WorkbenchError if a process dies.
    """
    workers = [_start(spec) for spec in specs]
    try:
        for worker in workers:
            worker.hear(START_S)  # that it is ready
        running = [worker for worker in workers if worker.error is None]
        while running:
            running = [worker for worker in running if not worker.turn()]
            running = running[1:] + running[:1]
        return [worker.outcome() for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


@dataclass(eq=False)
class _Worker:
    """One process and what it needed so far."""

    spec: PolicySpec
    process: BaseProcess
    pipe: Connection
    seconds: float = 0.0
    error: Exception | None = None

    def turn(self) -> bool:
        """Let it work for a while. Whether it has finished."""
        start = perf_counter()
        if self.seconds:
            os.kill(self.process.pid or 0, signal.SIGCONT)
        else:
            self.pipe.send("go")
        finished = self.pipe.poll(TURN_S)
        if not finished:
            os.kill(self.process.pid or 0, signal.SIGSTOP)
        self.seconds += perf_counter() - start
        if finished:
            self.hear(0.0)
        return finished

    def outcome(self) -> Outcome:
        """Asked for when nobody's seconds are counted any more: tables take some to be made."""
        if self.error is None:
            self.pipe.send("tell")
            found = self.hear(START_S)
            if isinstance(found, RunResult):
                return Timed(self.seconds, found)
        assert self.error is not None
        return self.error

    def hear(self, most_s: float) -> Any:
        """What it says next; an exception is kept."""
        try:
            if self.pipe.poll(most_s):
                said = self.pipe.recv()
                self.error = said if isinstance(said, Exception) else None
                return said
        except EOFError:
            pass
        raise WorkbenchError(f"The process of {self.spec.name} ended or hung; run it by itself.")


def _start(spec: PolicySpec) -> _Worker:
    context = get_context("forkserver")  # of a process that has imported and done nothing else
    context.set_forkserver_preload(IMPORTED_ONCE)
    here, there = context.Pipe()
    process = context.Process(target=_search, args=(spec, there), daemon=True)
    process.start()
    there.close()
    return _Worker(spec, process, here)


def _end_with_parent() -> None:
    """A stopped process would outlive a parent that was killed, and for ever."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, on Linux


def _search(spec: PolicySpec, pipe: Connection) -> None:
    """In the process: warm up, say so, wait, search, say so, and when asked tell the result."""
    _end_with_parent()
    from workbench.experiments.identity import sweep_problems  # noqa: PLC0415
    from workbench.experiments.policy_run import Pair  # noqa: PLC0415  torch, in this process alone

    problems = sweep_problems(spec.config)
    try:
        Pair(spec).search(problems[:WARM_UP_PROBLEMS])
        pair = Pair(spec)
        _wait(pipe, "ready")
        found = pair.search(problems)
        _wait(pipe, "finished")
        pipe.send(pair.result_of(found))
    except Exception as error:  # the parent's to judge
        pipe.send(error)


def _wait(pipe: Connection, said: str) -> None:
    pipe.send(said)
    pipe.recv()
