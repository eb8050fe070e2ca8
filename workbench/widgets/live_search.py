"""A search on real engines in a thread of its own, to be paused, re-split and stopped as it runs.

    pair = shared_pair(memory="8MiB", kv_share=0.5)
    live = LiveSearch(problems, pair, strategy=BeamSearch(n=16), seed=0)
    live.start();  live.resplit(0.3);  live.pause();  live.resume();  live.stop()
    live.snapshot()       # what it does now, at any time, from any thread
    live.wait().answers   # what run_search would have answered

Everything a person sees of it comes from `snapshot`; live.py draws that. No token depends on what
is done to it.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

import pandas as pd

from workbench.core import RequestOutput
from workbench.errors import ConfigError
from workbench.kvcache.policies import KVShare
from workbench.kvcache.pool import ResizeAnswer
from workbench.search.prm import PRM
from workbench.search.problems import Problem
from workbench.search.requests import Strategy
from workbench.search.result import SearchResult
from workbench.search.rounds import Progress
from workbench.search.search import run_search
from workbench.widgets.live_blocks import BlockMap, block_map
from workbench.widgets.live_gate import Gate, GatedEngine, SearchStopped
from workbench.widgets.live_pair import ROLES, SharedPair
from workbench.widgets.live_timeline import Move, Timeline

STATES = ("ready", "running", "paused", "stopped", "finished", "failed")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A search at one moment. Shares are of the arena's pages; seconds leave pauses out.

    phase: the model that stepped last ("llm" or "prm"), "" while none steps. steps, tokens: since
    the start, tokens of finished requests. window_s: over which the time line's tokens/s are means.
    problem: what ended a failed search.
    """

    state: str
    seconds: float
    phase: str
    steps: int
    tokens: int
    round: int
    answered: int
    problems: int
    target: dict[str, float]
    actual: dict[str, float]
    timeline: pd.DataFrame
    window_s: float
    moves: tuple[Move, ...]
    blocks: BlockMap
    problem: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second since the start."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class LiveSearch:
    """One search at a time over the two engines of a pair; it can be started again once it ended.

    settings: further keywords of run_search. Its methods may be called from any thread.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        pair: SharedPair,
        *,
        strategy: Strategy,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.problems, self.pair, self.seed = list(problems), pair, seed
        self.strategy, self._settings = strategy, settings
        self._stepped = Condition()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._gate, self._timeline = Gate(), Timeline()
        self._thread: Thread | None = None
        self._progress: Progress | None = None
        self._phase, self._steps, self._tokens = "", 0, 0
        self._ended_s: float | None = None
        self.result: SearchResult | None = None
        self.error: Exception | None = None

    # -- what a person does --

    def start(self) -> None:
        """Begin, or begin anew after an end; paused if `pause` came first.

        ConfigError while it runs, or while others run.
        """
        if self.is_alive:
            raise ConfigError("This search runs already; stop it before it is started again.")
        if any(engine.has_work for engine in self.pair.engines):
            raise ConfigError(
                "The pair's engines have requests of another search; stop that one, or wait for it."
            )
        waits = self.is_paused
        self._begin_anew()
        if waits:
            self._gate.close()
        self._thread = Thread(target=self._run, name="live search", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    def pause(self) -> None:
        """No step until `resume`, of a search not yet started too; one in flight is carried out."""
        self._gate.close()

    def resume(self) -> None:
        """Go on after a pause."""
        self._gate.open()

    def stop(self) -> None:
        """End within one step and wait for that; requests are aborted, the engines stay usable."""
        self._gate.shut()
        if self._thread is not None:
            self._thread.join()

    def resplit(self, kv_share: KVShare) -> ResizeAnswer:
        """Ask the arena for another split, and mark it on the time axis; see KVArena.resplit."""
        answer = self.pair.arena.resplit(kv_share)
        if self.is_alive:
            share = answer.target / self.pair.arena.num_pages
            self._timeline.move(Move(self._gate.clock(), share, answer.outcome))
        return answer

    # -- what it does --

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs, paused or not."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        """Whether no step is taken before `resume`."""
        return self._gate.is_closed

    @property
    def state(self) -> str:
        """One of STATES."""
        if self._thread is None:
            return "ready"
        if self._ended_s is None:
            return "paused" if self.is_paused else "running"
        if self.error is not None:
            return "failed"
        return "stopped" if self.result is None else "finished"

    def wait(self) -> SearchResult:
        """The result, once it is finished. Raises what ended it: SearchStopped after `stop`."""
        if self._thread is None:
            raise ConfigError("This search was not started; call start() first.")
        self._thread.join()
        if self.result is None:
            raise self.error or SearchStopped(
                "The search was stopped; start it again for a result."
            )
        return self.result

    def wait_for_steps(self, more: int) -> bool:
        """Wait until so many more steps were taken; False if the search ended before."""
        with self._stepped:
            wanted = self._steps + more
            self._stepped.wait_for(lambda: self._steps >= wanted or self._ended_s is not None)
            return self._steps >= wanted

    def snapshot(self) -> Snapshot:
        """What it does now; a few milliseconds, whatever the search does meanwhile."""
        arena, progress = self.pair.arena, self._progress
        with arena.lock:
            levels, blocks = self.pair.levels(), block_map(arena)
        state = self.state
        return Snapshot(
            state=state,
            seconds=self._gate.clock() if self._ended_s is None else self._ended_s,
            phase=self._phase if state == "running" else "",
            steps=self._steps,
            tokens=self._tokens,
            round=progress.round if progress else 0,
            answered=progress.answered if progress else 0,
            problems=len(self.problems),
            target={role: levels[f"{role}_target"] for role in ROLES},
            actual={role: levels[f"{role}_actual"] for role in ROLES},
            timeline=self._timeline.frame(),
            window_s=self._timeline.window_s,
            moves=self._timeline.moves,
            blocks=blocks,
            problem="" if self.error is None else f"{type(self.error).__name__}: {self.error}",
        )

    # -- in its thread --

    def _run(self) -> None:
        llm, prm = (
            GatedEngine(engine, role, self._gate, self._saw)
            for role, engine in zip(ROLES, self.pair.engines, strict=True)
        )
        try:
            self.result = run_search(
                self.problems,
                llm=llm,
                prm=PRM(prm, self.pair.prm_format),
                strategy=self.strategy,
                seed=self.seed,
                on_round=self._on_round,
                **self._settings,
            )
        except SearchStopped:
            pass
        except Exception as problem:  # whoever looks at it is told; a thread has nobody to raise to
            self.error = problem
        finally:
            atexit.unregister(self.stop)
            self._ended_s = self._gate.clock()
            self._gate.open()  # a pause that came too late is not one of the next search
            with self._stepped:
                self._stepped.notify_all()

    def _on_round(self, progress: Progress) -> None:
        self._progress = progress

    def _saw(self, role: str, start_s: float, end_s: float, outputs: list[RequestOutput]) -> None:
        tokens = sum(len(output.token_ids) for output in outputs)
        with self.pair.arena.lock:
            levels = self.pair.levels()
        self._timeline.add(role, start_s, end_s, tokens, levels)
        with self._stepped:
            self._phase, self._steps, self._tokens = role, self._steps + 1, self._tokens + tokens
            self._stepped.notify_all()
