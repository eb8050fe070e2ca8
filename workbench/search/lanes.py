"""Both engines at work at the same time: the LLM's steps in this thread, the PRM's in another.

Kernels run outside the interpreter, and a decoding step's are launched without it in between, so
on a CPU the two threads compute side by side; each engine gets half of the device's threads while
both are at work, and all of them once the other is done. With fewer than FEWEST_THREADS that loses
(two threads: 2 to 7 %), so there a search is the plain one. Two threads meet at a barrier, and what
they leave is put together there in one order: each engine's events are the same every time. In an
arena two engines take pages as they come, so who evicts what depends on the threads; no token does.
What it does not do: say which searches are served (groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from typing import Any, NamedTuple

from workbench.core import RequestOutput, TokenEngine
from workbench.search.measure import Drained, SpanClock
from workbench.trace import Recorder

LANES = ("llm", "prm")
FEWEST_THREADS = 4  # of a CPU's products: two for each engine
Work = Iterator[list[RequestOutput]]


def lanes_pay(*engines: TokenEngine) -> bool:
    """Whether engines compute no slower side by side than in turns. No clock is read."""
    executors = (getattr(engine, "executor", None) for engine in engines)
    threads = (getattr(executor, "num_threads", None) for executor in executors)
    return all(count is None or count >= FEWEST_THREADS for count in threads)


class _Done(NamedTuple):
    outputs: list[RequestOutput]
    start_s: float
    end_s: float


class Lanes:
    """Two engines, the PRM's with a recorder of its own until the lanes meet. Close them."""

    def __init__(
        self,
        llm: TokenEngine,
        prm: TokenEngine,
        recorder: Recorder,
        spans: SpanClock,
        clock: Callable[[], float],
    ) -> None:
        self._engines, self._recorder = (llm, prm), recorder
        self._spans, self._clock = spans, clock
        self._stopped = Event()
        self._thread = ThreadPoolExecutor(1, "prm-lane")
        self._apart = Recorder(recorder.run_id, recorder.origin)
        self._trace_prm(self._apart)

    def close(self) -> None:
        """One thread again, and one trace."""
        self._thread.shutdown()
        self._merge()
        self._trace_prm(self._recorder)
        self._share(1)

    def drain(self, llm_work: Work, prm_work: Work) -> tuple[Drained, Drained]:
        """Go through both engines' steps to their ends.

        What either raises ends both, once neither is in a step.
        """
        self._stopped.clear()
        start, first = self._spans.switch(""), len(self._recorder.step_rows)
        both = all(engine.has_work for engine in self._engines)
        self._share(2 if both else 1)
        future = self._thread.submit(self._run, prm_work, 1)
        try:
            llm, prm = self._run(llm_work, 0), future.result()
        except BaseException:
            self._stopped.set()
            wait([future])
            raise
        barrier, middle = self._spans.switch("bookkeeping"), len(self._recorder.step_rows)
        self._merge()
        rows = range(first, middle), range(middle, len(self._recorder.step_rows))
        lanes = zip(LANES, (llm, prm), rows)
        drained = [self._account(*lane, start, barrier) for lane in lanes]
        return drained[0], drained[1]

    def _run(self, work: Work, lane: int) -> _Done:
        outputs: list[RequestOutput] = []
        start = self._clock()
        try:
            for finished in work:
                outputs += finished
                if self._stopped.is_set():
                    break
        except BaseException:
            self._stopped.set()
            raise
        self._share(1, self._engines[1 - lane])
        return _Done(outputs, start, self._clock())

    def _account(
        self, lane: str, done: _Done, rows: range, start_s: float, barrier_s: float
    ) -> Drained:
        """Spans of a lane's time outside steps: its loop's, and waiting for the other lane."""
        inside = sum(self._recorder.step_rows[row].duration_s for row in rows)
        outside = max(done.end_s - done.start_s - inside, 0.0)
        for kind, since, seconds in (
            ("waiting", start_s, done.start_s - start_s),
            ("bookkeeping", done.end_s - outside, outside),
            ("waiting", done.end_s, barrier_s - done.end_s),
        ):
            self._recorder.span(lane, kind, since, seconds)
        return Drained(done.outputs, done.end_s - done.start_s, rows)

    def _merge(self) -> None:
        """What the PRM did comes after what the LLM did meanwhile."""
        for name in ("step_rows", "request_rows"):
            rows = getattr(self._apart, name)
            getattr(self._recorder, name).extend(rows)
            rows.clear()

    def _trace_prm(self, recorder: Recorder) -> None:
        prm: Any = self._engines[1]
        if "trace" in prm.capabilities:
            prm.trace_as(recorder, LANES[1])

    def _share(self, parts: int, *engines: TokenEngine) -> None:
        """Each of these engines (default: both) uses one of so many parts of its device."""
        for engine in engines or self._engines:
            executor: Any = getattr(engine, "executor", None)
            if executor is not None:
                executor.share(parts)
