"""Searches that take turns, each in a process of its own: seconds that do not depend on the minute.

The pace of a shared machine wanders by half within seconds, so that of two searches one after the
other either may look the faster. Here every process is stopped (SIGSTOP) while another works, turns
are much shorter than such a mood, and only the seconds in which a process worked are counted. What
it does not do: choose what is compared.
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
from typing import NamedTuple

from workbench.errors import WorkbenchError
from workbench.experiments.policy_plan import PolicySpec

TURN_S = 0.25
START_S = 180.0  # to build both engines and search one problem to warm up
WARM_UP_PROBLEMS = 1
IMPORTED_ONCE = ["workbench.experiments.policy_run", "workbench.experiments.identity", __name__]


class Timed(NamedTuple):
    """Seconds in which a search worked, and the tokens it sampled."""

    seconds: float
    tokens: int


def take_turns(specs: Sequence[PolicySpec]) -> list[Timed]:
    """All searches at once, turn by turn; the first turn goes round. WorkbenchError if one dies."""
    workers = [_start(spec) for spec in specs]
    try:
        for worker in workers:
            worker.hear(START_S)  # that it is ready
        running = list(workers)
        while running:
            running = [worker for worker in running if not worker.turn()]
            running = running[1:] + running[:1]
        return [Timed(worker.seconds, worker.tokens) for worker in workers]
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
    tokens: int = -1

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
            self.tokens = self.hear(0.0)
        return finished

    def hear(self, most_s: float) -> int:
        """What it says next."""
        try:
            if self.pipe.poll(most_s):
                return int(self.pipe.recv())
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
    """In the process: warm up, say so, wait, search, say how many tokens were sampled."""
    _end_with_parent()
    from workbench.experiments import policy_run, run  # noqa: PLC0415  torch, in this process alone
    from workbench.experiments.identity import sweep_problems  # noqa: PLC0415

    problems = sweep_problems(spec.config)
    for asked in (problems[:WARM_UP_PROBLEMS], problems):
        arena = policy_run.make_arena(spec)
        llm, prm = (policy_run.make_engine(spec, role, arena) for role in run.ENGINES)
        if asked is problems:
            pipe.send(0)
            pipe.recv()
        result = run.search(asked, llm, prm, spec.search, spec.seed)
    pipe.send(result.throughput.tokens)
