"""Where a running search can be paused and stopped: before every step of either engine.

A GatedEngine is the engine it wraps in all but `step`, which first passes a gate and afterwards
tells what it saw. So a search stops within one step, whatever it was doing, and the engines stay
usable: a step is never interrupted. What it does not do: start threads (live_search.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition
from typing import Any

from workbench.core import RequestOutput, TokenEngine
from workbench.errors import WorkbenchError


class SearchStopped(WorkbenchError):
    """Raised by a step that is not taken, because the search was stopped before it."""


class Gate:
    """Open, closed (a step waits), or shut for good (a step raises SearchStopped).

    `clock` leaves out the time in which a step waited: the step in flight when it is closed is
    still carried out, so its seconds count as its tokens do.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._now = clock
        self._changed = Condition()
        self._origin = clock()
        self._waits_since: float | None = None
        self._waited_s = 0.0
        self.is_closed = self.is_shut = False

    def clock(self) -> float:
        """Seconds since it was made, those in which a step waited left out."""
        with self._changed:
            now = self._now() if self._waits_since is None else self._waits_since
            return now - self._origin - self._waited_s

    def close(self) -> None:
        """The next step waits."""
        with self._changed:
            self.is_closed = True

    def open(self) -> None:
        """Steps go on."""
        with self._changed:
            self._reopen()

    def shut(self) -> None:
        """No further step is taken, ever; one that waits raises SearchStopped."""
        with self._changed:
            self.is_shut = True
            self._reopen()

    def pass_through(self) -> None:
        """Wait while it is closed. Raises SearchStopped once it is shut."""
        with self._changed:
            while self.is_closed and not self.is_shut:
                if self._waits_since is None:
                    self._waits_since = self._now()
                self._changed.wait()
            if self.is_shut:
                raise SearchStopped("The search was stopped before this step.")

    def _reopen(self) -> None:
        self.is_closed = False
        if self._waits_since is not None:
            self._waited_s += self._now() - self._waits_since
            self._waits_since = None
        self._changed.notify_all()


Seen = Callable[[str, float, float, list[RequestOutput]], None]
"""Told after a step: the engine's role, start and end in seconds of the gate's clock, outputs."""


class GatedEngine:
    """A TokenEngine whose every step passes a gate; all else is the engine's own."""

    def __init__(self, engine: TokenEngine, role: str, gate: Gate, seen: Seen) -> None:
        self.engine, self.role = engine, role
        self._gate, self._seen = gate, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self) -> list[RequestOutput]:
        """The engine's step. Raises SearchStopped instead, once the gate is shut."""
        self._gate.pass_through()
        start = self._gate.clock()
        outputs = self.engine.step()
        self._seen(self.role, start, self._gate.clock(), outputs)
        return outputs
