"""Searches that take turns, each in a process of its own: seconds that do not depend on the minute.

The pace of a shared machine wanders by half within seconds, so that of two searches one after the
other either may look the faster. Here every process is stopped (SIGSTOP) while another works, turns
go round many times in a search, and only the seconds in which a process worked are counted: a
process's clock stands still while it is stopped. What it does not do: choose what is compared.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from workbench.config import SweepConfig
from workbench.errors import WorkbenchError
from workbench.experiments.plan import RunSpec
from workbench.experiments.policy_plan import PolicySpec, room
from workbench.experiments.record import RunResult

TURN_S = 0.25
START_S = 180.0  # to import, build both engines and search one problem to warm up, four at once
SEARCH_S = 7200.0  # of turns; who needs more hangs
WARM_UP_PROBLEMS = 1
TAKE_A_CLOCK = {
    *("workbench.engine.executor", "workbench.engine.scheduler"),
    "workbench.search.rounds",
}
"""Modules with perf_counter as a default: to be imported after a process has its own."""
MOST_WEIGHTS = 64 << 20  # bytes of both models that a dozen processes may load


class Timed(NamedTuple):
    """Seconds in which a search worked, from its first problem to its result, and what it found."""

    seconds: float
    result: RunResult


Outcome = Timed | Exception  # what building the engines or searching raised


def take_turns(
    specs: Sequence[RunSpec], progress: bool = False, costs: Sequence[float] | None = None
) -> list[Outcome]:
    """All searches at once, turn by turn; the first turn goes round. progress: show a bar.

    costs: how long each takes beside the others, roughly; so much longer are its turns, so that all
    end in the same minutes. WorkbenchError in the place of one whose process dies or hangs.
    """
    lengths = [TURN_S * cost for cost in costs or [1.0] * len(specs)]
    refused = {spec: error for spec in specs if (error := _refusal(spec))}
    workers: list[_Worker] = []
    bar = tqdm(total=len(specs), desc="taking turns", unit="search", disable=not progress)
    try:
        for spec, length in zip(specs, lengths, strict=True):
            if spec not in refused:
                workers.append(_start(spec, length))
        for worker in workers:
            worker.hear(START_S * max(1, len(workers) / 4))  # that it is ready
        running = [worker for worker in workers if worker.error is None]
        while running:
            running = [worker for worker in running if not worker.turn()]
            running = running[1:] + running[:1]
            bar.update(len(specs) - len(running) - bar.n)
        outcomes = refused | {worker.spec: worker.outcome() for worker in workers}
        return [outcomes[spec] for spec in specs]
    finally:
        bar.close()
        for worker in workers:
            worker.end()


def result_of(outcome: Outcome) -> RunResult:
    """What a search found. Raises what it raised."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.result


def can_take_turns(config: SweepConfig) -> bool:
    """Whether a round of processes may load both models: small ones, on a CPU."""
    needs = room(config)
    return config.device == "cpu" and needs.llm.fixed + needs.prm.fixed <= MOST_WEIGHTS


def _refusal(spec: RunSpec) -> Exception | None:
    """Why there can be no such arena; a process takes seconds to say so."""
    if not isinstance(spec, PolicySpec):
        return None
    from workbench.experiments.policy_run import make_arena  # noqa: PLC0415  with it comes torch

    try:
        make_arena(spec)
    except WorkbenchError as error:
        return error
    return None


@dataclass(eq=False)
class _Worker:
    """One process and what it needed so far."""

    spec: RunSpec
    process: BaseProcess
    pipe: Connection
    stopped_s: Any  # shared with the process: for how long it has been stopped
    turn_s: float
    stopped_at: float = 0.0
    seconds: float = 0.0
    error: Exception | None = None

    def turn(self) -> bool:
        """Let it work for a while. Whether it has finished, or died."""
        start, first = perf_counter(), not self.seconds
        try:
            if first:
                self.pipe.send("go")
            else:
                self.stopped_s.value += start - self.stopped_at
                self._signal(signal.SIGCONT)
            finished = self.pipe.poll(self.turn_s)
            if not finished:
                self._signal(signal.SIGSTOP)
                self.stopped_at = perf_counter()
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
        try:
            said: Any = self.pipe.recv() if self.pipe.poll(most_s) else self._lost()
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


def _start(spec: RunSpec, turn_s: float) -> _Worker:
    context = get_context("spawn")
    here, there = context.Pipe()
    stopped_s = context.Value(ctypes.c_double, lock=False)
    process = context.Process(target=_search, args=(spec, there, stopped_s), daemon=True)
    process.start()
    there.close()
    return _Worker(spec, process, here, stopped_s, turn_s)


def _end_with_parent() -> None:
    """A stopped process would outlive a parent that was killed, and for ever."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, on Linux


def _own_clock(stopped_s: Any) -> Callable[[], float]:
    """A perf_counter that stands still while the process is stopped."""

    def clock() -> float:
        before, now = stopped_s.value, perf_counter()
        while stopped_s.value != before:  # stopped between the two
            before, now = stopped_s.value, perf_counter()
        return float(now - before)

    return clock


def _take_clock(clock: Callable[[], float]) -> None:
    """Make it this process's, before what takes perf_counter as a default is imported."""
    early = sorted(TAKE_A_CLOCK & set(sys.modules))
    if early:
        raise WorkbenchError(
            f"The main module imports {', '.join(early)} before searches can take turns, so that "
            "their clock would count the others' turns. Import them within functions, or run "
            "`workbench figures` or a notebook."
        )
    time.perf_counter = clock


def _search(spec: RunSpec, pipe: Connection, stopped_s: Any) -> None:
    """In the process: warm up, say so, wait, search, say so, and when asked tell the result."""
    _end_with_parent()
    try:
        _take_clock(_own_clock(stopped_s))
        from workbench.experiments import policy_run, run  # noqa: PLC0415  and with them torch
        from workbench.experiments.identity import sweep_problems  # noqa: PLC0415

        make: Any = policy_run.Pair if isinstance(spec, PolicySpec) else run.Pair
        problems = sweep_problems(spec.config)
        make(spec).search(problems[:WARM_UP_PROBLEMS])
        pair = make(spec)
        _wait(pipe, "ready")
        found = pair.search(problems)
        _wait(pipe, "finished")
        pipe.send(pair.result_of(found))
    except Exception as error:  # the parent's to judge
        pipe.send(error)


def _wait(pipe: Connection, said: str) -> None:
    pipe.send(said)
    pipe.recv()
