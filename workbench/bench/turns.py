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
START_S = 180.0  # to import, build both engines and search one problem to warm up
SEARCH_S = 7200.0  # of turns; who needs more hangs
WARM_UP_PROBLEMS = 1


class Timed(NamedTuple):
    """Seconds in which a search worked, from its first problem to its result, and what it found."""

    seconds: float
    result: RunResult


Outcome = Timed | Exception  # what building the engines or searching raised


def take_turns(specs: Sequence[PolicySpec]) -> list[Outcome]:
    """All searches at once, turn by turn; the first turn goes round.

    WorkbenchError in the place of one whose process dies or hangs.
    """
    workers: list[_Worker] = []
    try:
        for spec in specs:
            workers.append(_start(spec))
        for worker in workers:
            worker.hear(START_S)  # that it is ready
        running = [worker for worker in workers if worker.error is None]
        while running:
            running = [worker for worker in running if not worker.turn()]
            running = running[1:] + running[:1]
        return [worker.outcome() for worker in workers]
    finally:
        for worker in workers:
            worker.end()


@dataclass(eq=False)
class _Worker:
    """One process and what it needed so far."""

    spec: PolicySpec
    process: BaseProcess
    pipe: Connection
    seconds: float = 0.0
    error: Exception | None = None

    def turn(self) -> bool:
        """Let it work for a while. Whether it has finished, or died."""
        start, first = perf_counter(), not self.seconds
        try:
            self.pipe.send("go") if first else self._signal(signal.SIGCONT)
            finished = self.pipe.poll(TURN_S)
            if not finished:
                self._signal(signal.SIGSTOP)
        except OSError:
            self.error = self._lost()
            return True
        self.seconds += perf_counter() - start
        if self.seconds > SEARCH_S:
            self.error = self._lost()
        elif finished:
            self.hear(0.0)
        return finished or self.error is not None

    def outcome(self) -> Outcome:
        """Asked for when nobody's seconds are counted any more: tables take some to be made."""
        found: Any = None
        if self.error is None:
            with suppress(OSError):
                self.pipe.send("tell")
            found = self.hear(START_S)
        return Timed(self.seconds, found) if self.error is None else self.error

    def hear(self, most_s: float) -> Any:
        """What it says next; an exception is kept."""
        said: Any = None
        try:
            said = self.pipe.recv() if self.pipe.poll(most_s) else self._lost()
        except (EOFError, OSError):
            said = self._lost()
        self.error = said if isinstance(said, Exception) else None
        return said

    def end(self) -> None:
        """Nothing of it is left."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid, "the process was started"
        os.kill(self.process.pid, number)

    def _lost(self) -> WorkbenchError:
        return WorkbenchError(f"The process of {self.spec.name} ended or hung; run it by itself.")


def _start(spec: PolicySpec) -> _Worker:
    context = get_context("spawn")
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

    try:
        problems = sweep_problems(spec.config)
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
