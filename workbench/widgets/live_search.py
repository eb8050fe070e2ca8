"""A search on real engines in a thread of its own, to be paused, re-split and stopped as it runs.

    pair = shared_pair(memory="8MiB", kv_share=0.5)
    live = LiveSearch(problems, pair, strategy=BeamSearch(n=16), seed=0)
    live.start();  live.resplit(0.3);  live.pause();  live.resume();  live.stop()
    live.snapshot()       # what it does now, at any time, from any thread
    live.wait().answers   # what run_search would have returned

Before every step of either engine the search waits while it is paused, and ends once it is stopped:
so within one step, and with engines that can be used again. No token depends on any of this.
"""

from __future__ import annotations

import atexit
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.core import RequestOutput, TokenEngine
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import ConfigError, WorkbenchError, nearest
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import (
    FirstCome,
    KVShare,
    MarginalValue,
    PhaseAware,
    Policy,
    StaticSplit,
)
from workbench.kvcache.pool import ResizeAnswer
from workbench.search.prm import PRM
from workbench.search.problems import Problem
from workbench.search.requests import Strategy
from workbench.search.result import SearchResult
from workbench.search.rounds import Progress
from workbench.search.search import run_search

ROLES = ("llm", "prm")
STATES = ("ready", "running", "paused", "stopped", "finished", "failed")
BLOCK_STATES = ("free", "llm_active", "llm_cached", "prm_active", "prm_cached")
"""What a cell of a block map shows, by its number."""
POLICIES: dict[str, Callable[[], Policy]] = {
    "static": StaticSplit,
    "first-come": FirstCome,
    "phase-aware": PhaseAware,
    "marginal-value": MarginalValue,
}
MOST_UNITS = 24  # cells of a page, where the models' blocks divide a page too differently
MEAN_S = 2.0  # tokens/s is a mean over so many seconds, or over one bucket where that is longer
MOST_BUCKETS, LEAST_BUCKET_S = 240, 0.1


# -- two engines in one arena --


@dataclass(frozen=True, slots=True)
class SharedPair:
    """An arena and the two engines whose caches lie in it. prm_format: None is the model's own."""

    arena: KVArena
    llm: Engine
    prm: Engine
    prm_format: str | None = None

    @property
    def engines(self) -> tuple[Engine, Engine]:
        """In the order of ROLES."""
        return self.llm, self.prm

    @property
    def keeps_split(self) -> bool:
        """Whether a split that a user asks for means anything to the arena's policy."""
        return self.arena.policy.keeps_split

    @property
    def policy(self) -> str:
        """The name of the arena's policy."""
        return type(self.arena.policy).__name__

    @property
    def lowest_share(self) -> float:
        """The LLM's, below which one request of it would not fit."""
        return self.arena.pools[0].floor_pages / self.arena.num_pages

    @property
    def highest_share(self) -> float:
        """The LLM's, above which one request of the PRM would not fit."""
        return 1 - self.arena.pools[1].floor_pages / self.arena.num_pages


def shared_pair(
    llm: str = "tiny-solver",
    prm: str = "tiny-prm",
    memory: int | str = "8MiB",
    kv_share: float = 0.5,
    policy: str = "static",
    *,
    max_model_len: int = 768,
    prm_format: str | None = None,
    **settings: Any,
) -> SharedPair:
    """Both engines over one arena of `memory`, which the KV caches alone take.

    kv_share: the LLM's, of the arena's pages, where the policy keeps a split. policy: one of
    POLICIES. max_model_len: what the arena guarantees each model. settings: further fields of
    EngineConfig, of both. Raises ConfigError for a policy that is unknown, and what KVArena and
    Engine raise.
    """
    if policy not in POLICIES:
        known = list(POLICIES)
        raise ConfigError(
            f"policy is {policy!r}; allowed: {', '.join(known)}.{nearest(policy, known)}"
        )
    shapes = [block_shape(name, max_model_len=max_model_len) for name in (llm, prm)]
    chosen = POLICIES[policy]()
    arena = KVArena(memory, shapes, chosen, kv_share if chosen.keeps_split else None)
    engines = [
        Engine(name, arena=arena, max_model_len=max_model_len, **settings) for name in (llm, prm)
    ]
    return SharedPair(arena, engines[0], engines[1], prm_format)


# -- what is seen of it --


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Every block of every page: cells [pages, units] of BLOCK_STATES, per_page [pages] blocks.

    A page is held by one model or by none (per_page 0); a block is units / per_page cells wide, so
    that its area is its bytes.
    """

    cells: NDArray[np.int8]
    per_page: NDArray[np.int16]
    counts: dict[str, int]  # blocks by state; free: those in held pages, and pages of no model


def block_map(arena: KVArena) -> BlockMap:
    """The arena's blocks now; its first model is the LLM, the second the PRM. Takes its lock."""
    common = int(np.lcm.reduce([pool.per_page for pool in arena.pools]))
    units = common if common <= MOST_UNITS else max(pool.per_page for pool in arena.pools)
    cells = np.zeros((arena.num_pages, units), dtype=np.int8)
    per_page = np.zeros(arena.num_pages, dtype=np.int16)
    counts = dict.fromkeys(BLOCK_STATES, 0)
    with arena.lock:
        counts["free"] = arena.num_free
        for role, pool in enumerate(arena.pools):
            per, active = pool.per_page, 2 * role + 1
            edges = [units * k // per for k in range(per + 1)]
            for page in pool.pages:
                per_page[page] = per
                for k, block in enumerate(pool.blocks[page * per : (page + 1) * per]):
                    state = active if block.ref_count else active + 1 if block.digest else 0
                    cells[page, edges[k] : edges[k + 1]] = state
                    counts[BLOCK_STATES[state]] += 1
    return BlockMap(cells, per_page, counts)


class Move(NamedTuple):
    """A re-split asked for. outcome: ResizeAnswer's (reached | later | refused)."""

    time_s: float
    share: float
    outcome: str


class StepSeen(NamedTuple):
    """One step of an engine: its seconds, tokens of what it finished, and the split after it.

    Levels are shares of the arena's pages: the LLM's target, what it holds or could have at once,
    and what each model holds.
    """

    is_prm: float
    start_s: float
    end_s: float
    tokens: float
    llm_target: float
    llm_actual: float
    llm_held: float
    prm_held: float


LEVELS = ("llm_target", "llm_actual", "llm_held", "prm_held")


def bucket_width(seconds: float) -> float:
    """LEAST_BUCKET_S, doubled until MOST_BUCKETS hold so many seconds."""
    width = LEAST_BUCKET_S
    while seconds > MOST_BUCKETS * width:
        width *= 2
    return width


def timeline(steps: Sequence[Sequence[float]] | NDArray[np.float64]) -> pd.DataFrame:
    """Steps in buckets of equal width, at most MOST_BUCKETS: time_s (a bucket's middle),
    tokens_per_s (a mean over the last MEAN_S), llm_busy and prm_busy (fractions of its time),
    LEVELS (as they were last).

    steps: rows of StepSeen, by their ends. The last bucket ends with the last step.
    """
    table = pd.DataFrame(np.reshape(steps, (-1, len(StepSeen._fields))), columns=StepSeen._fields)
    until = float(table["end_s"].max()) if len(table) else 0.0
    width = bucket_width(until)
    edges = np.append(np.arange(0.0, until, width), until)
    starts, ends = edges[:-1], edges[1:]
    done = np.concatenate([[0.0], table["tokens"].cumsum()])

    def tokens_by(times: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(done[np.searchsorted(table["end_s"], times, side="right")])

    since = np.maximum(ends - max(MEAN_S, width), 0.0)
    columns = {
        "time_s": (starts + ends) / 2,
        "tokens_per_s": (tokens_by(ends) - tokens_by(since)) / np.maximum(ends - since, 1e-9),
    }
    for is_prm, role in enumerate(ROLES):
        own = table[table["is_prm"] == is_prm]
        moments = own[["start_s", "end_s"]].to_numpy().ravel()
        busy = np.repeat((own["end_s"] - own["start_s"]).cumsum().to_numpy(), 2)
        busy[::2] -= (own["end_s"] - own["start_s"]).to_numpy()
        spent = np.diff(np.interp(edges, moments, busy)) if len(own) else 0.0 * starts
        columns[f"{role}_busy"] = np.minimum(spent / np.maximum(ends - starts, 1e-9), 1.0)
    last = np.searchsorted(table["end_s"], ends, side="right") - 1
    levels = table[list(LEVELS)].to_numpy()[np.maximum(last, 0)]
    return pd.DataFrame(columns | dict(zip(LEVELS, levels.T, strict=True)))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A search at one moment. Shares are of the arena's pages; seconds leave pauses out.

    phase: the model that stepped last ("llm" or "prm"), "" while none steps. steps, tokens: since
    the start, tokens of finished requests. steps_seen: [steps, fields of StepSeen]. problem: what
    ended a failed search.
    """

    state: str
    seconds: float
    phase: str
    steps: int
    tokens: int
    answered: int
    problems: int
    target: dict[str, float]
    actual: dict[str, float]
    steps_seen: NDArray[np.float64]
    moves: tuple[Move, ...]
    blocks: BlockMap
    problem: str = ""

    @property
    def timeline(self) -> pd.DataFrame:
        """What it did so far; see `timeline`."""
        return timeline(self.steps_seen)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second since the start."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


# -- the search --


class SearchStopped(WorkbenchError):
    """Raised by a step that is not taken, because the search was stopped before it."""


class _SteppedBy:
    """A TokenEngine whose `step` is another function; all else is the engine's own."""

    def __init__(self, engine: TokenEngine, step: Callable[[], list[RequestOutput]]) -> None:
        self._engine, self.step = engine, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


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
        self.problems, self.pair = list(problems), pair
        self._settings = {**settings, "strategy": strategy, "seed": seed}
        self._changed = Condition()  # guards all that follows
        self.is_paused = False
        self._thread: Thread | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._origin, self._waited_s = time.perf_counter(), 0.0
        self._waits_since: float | None = None
        self._is_stopped = False
        self._rows, self._moves = array("d"), list[Move]()
        self._phase, self._steps, self._tokens, self._answered = "", 0, 0, 0
        self._ended_s: float | None = None
        self.result: SearchResult | None = None
        self.error: Exception | None = None

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
        self._begin_anew()
        self._thread = Thread(target=self._run, name="live search", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    def pause(self) -> None:
        """No step until `resume`, of a search not yet started too; one in flight is carried out."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on after a pause."""
        with self._changed:
            self.is_paused = False
            self._changed.notify_all()

    def stop(self) -> None:
        """End within one step and wait for that; requests are aborted, the engines stay usable."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def resplit(self, kv_share: KVShare) -> ResizeAnswer:
        """Ask the arena for another split, and mark it on the time axis; see KVArena.resplit."""
        answer = self.pair.arena.resplit(kv_share)
        if self.is_alive:
            share = answer.target / self.pair.arena.num_pages
            self._moves.append(Move(self.seconds, share, answer.outcome))
        return answer

    @property
    def seconds(self) -> float:
        """Since the start, those in which a step waited left out.

        A step in flight at a pause is carried out, so its seconds count as its tokens do.
        """
        with self._changed:
            if self._ended_s is not None:
                return self._ended_s
            now = time.perf_counter() if self._waits_since is None else self._waits_since
            return now - self._origin - self._waited_s

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs, paused or not."""
        return self._thread is not None and self._thread.is_alive()

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
            stopped = SearchStopped("The search was stopped; start it again for a result.")
            raise self.error or stopped
        return self.result

    def wait_for_steps(self, more: int) -> bool:
        """Wait until so many more steps were taken; False if the search ended before."""
        with self._changed:
            wanted = self._steps + more
            self._changed.wait_for(lambda: self._steps >= wanted or self._ended_s is not None)
            return self._steps >= wanted

    def snapshot(self) -> Snapshot:
        """What it does now; a few milliseconds, whatever the search does meanwhile."""
        arena = self.pair.arena
        with arena.lock:
            parts = [
                dict(zip(ROLES, (levels[name] / arena.num_pages for name in arena.models)))
                for levels in (arena.target, arena.actual)
            ]
            blocks = block_map(arena)
        with self._changed:
            rows, steps, tokens = np.array(self._rows), self._steps, self._tokens
        state = self.state
        return Snapshot(
            state=state,
            seconds=self.seconds if self._thread else 0.0,
            phase=self._phase if state == "running" else "",
            steps=steps,
            tokens=tokens,
            answered=self._answered,
            problems=len(self.problems),
            target=parts[0],
            actual=parts[1],
            steps_seen=rows,
            moves=tuple(self._moves),
            blocks=blocks,
            problem="" if self.error is None else f"{type(self.error).__name__}: {self.error}",
        )

    def _run(self) -> None:
        llm, prm = (
            _SteppedBy(engine, partial(self._step, role, engine))
            for role, engine in zip(ROLES, self.pair.engines, strict=True)
        )
        scorer = PRM(prm, self.pair.prm_format)
        try:
            self.result = run_search(
                self.problems, llm=llm, prm=scorer, on_round=self._on_round, **self._settings
            )
        except SearchStopped:
            pass
        except Exception as problem:  # `wait` raises it and a snapshot shows it
            self.error = problem
        finally:
            atexit.unregister(self.stop)
            self._ended_s = self.seconds
            self.resume()  # a pause that came too late is not the next search's

    def _on_round(self, progress: Progress) -> None:
        self._answered = progress.answered

    def _step(self, role: str, engine: Engine) -> list[RequestOutput]:
        """A step of an engine, once none is held back. Raises SearchStopped after `stop`."""
        with self._changed:
            if self.is_paused and not self._is_stopped:
                self._waits_since = time.perf_counter()
                self._changed.wait_for(lambda: not self.is_paused or self._is_stopped)
                self._waited_s += time.perf_counter() - self._waits_since
                self._waits_since = None
            if self._is_stopped:
                raise SearchStopped("The search was stopped before this step.")
        start_s = self.seconds
        outputs = engine.step()
        end_s, arena = self.seconds, self.pair.arena
        tokens = sum(len(output.token_ids) for output in outputs)
        with arena.lock:
            llm = arena.models[0]
            pages = (arena.target[llm], arena.actual[llm], *(pool.held for pool in arena.pools))
        levels = (each / arena.num_pages for each in pages)
        with self._changed:
            self._rows.extend(StepSeen(float(role == "prm"), start_s, end_s, tokens, *levels))
            self._phase, self._steps, self._tokens = role, self._steps + 1, self._tokens + tokens
            self._changed.notify_all()
        return outputs


# -- by a script --


def move_while_it_runs(live: LiveSearch, shares: Sequence[float], every: int) -> SearchResult:
    """Start it, ask for each share after `every` more steps, and wait for its end.

    What does not fit into the search any more is left out; `live.snapshot().moves` tells.
    """
    live.start()
    for share in shares:
        if live.wait_for_steps(every):
            live.resplit(share)
    return live.wait()


def different_nodes(a: SearchResult, b: SearchResult) -> int:
    """Nodes whose tokens or score differ between two searches, those that one lacks included."""
    first, second = (
        {
            (row["problem_id"], row["node_id"]): (tuple(row["token_ids"]), row["score"])
            for row in result.tree.to_dict("records")
        }
        for result in (a, b)
    )
    return sum(first.get(name) != second.get(name) for name in first.keys() | second.keys())
