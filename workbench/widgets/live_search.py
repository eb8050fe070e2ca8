"""A search on real engines in a thread of its own, to be paused, re-split and stopped as it runs.

    pair = SharedPair(memory="8MiB", kv_share=0.5)
    live = LiveSearch(problems, pair, strategy=BeamSearch(n=16), seed=0)
    live.start();  live.resplit(0.3);  live.pause();  live.resume();  live.stop()
    live.snapshot()       # what it does now, at any time, from any thread
    live.wait().answers   # what run_search would have returned

Before every step of either engine the search waits while it is paused, and ends once it is stopped:
so within one step, and with engines that can be used again. No token depends on any of this.
"""

from __future__ import annotations

import atexit
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Lock, Thread
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.config import SweepConfig, parse_size
from workbench.core import RequestOutput, TokenEngine
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.execute import Pair
from workbench.experiments.settings import make_run
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import KVShare
from workbench.kvcache.pool import ResizeAnswer
from workbench.replay.simulator import POLICIES
from workbench.search.prm import PRM
from workbench.search.problems import Problem
from workbench.search.result import SearchResult
from workbench.search.search import Search

ROLES = ("llm", "prm")
BLOCK_STATES = ("free", "llm_active", "llm_cached", "prm_active", "prm_cached")
MEAN_S = 2.0  # tokens/s is a mean over so many seconds, or over one bucket where that is longer
MOST_BUCKETS, LEAST_BUCKET_S = 240, 0.1


# -- two engines in one arena --


class SharedPair(Pair):
    """Both engines over one arena of `memory`, which the KV caches alone take.

    kv_share: the LLM's, of the arena's pages, where the policy keeps a split. settings: further
    fields of SweepConfig. in_use: held by the search that runs over them.
    """

    arena: KVArena

    def __init__(
        self,
        llm: str = "tiny-solver",
        prm: str = "tiny-prm",
        memory: int | str = "8MiB",
        kv_share: float = 0.5,
        policy: str = "static",
        **settings: Any,
    ) -> None:
        sizes = {"max_model_len": 768, **settings}
        config = SweepConfig(llm=llm, prm=prm, policy=policy, **sizes)
        share = kv_share if POLICIES[policy].keeps_split else None
        super().__init__(make_run(config, 0.5, 0, kv_bytes=parse_size(memory), kv_share=share))
        self.in_use = Lock()

    @property
    def share_limits(self) -> tuple[float, float]:
        """The LLM's, between which a request of either model fits."""
        llm, prm = (pool.floor_pages / self.arena.num_pages for pool in self.arena.pools)
        return llm, 1 - prm


# -- what is seen of it --


class Move(NamedTuple):
    """A re-split asked for. outcome: ResizeAnswer's (reached | later | refused)."""

    time_s: float
    share: float
    outcome: str


class StepSeen(NamedTuple):
    """One step of an engine: its seconds, tokens of finished requests, blocks that each cache has
    evicted since the start, and the split after it.

    Of the arena's pages: the LLM's target, what it holds or could have at once, what each holds.
    """

    is_prm: float
    start_s: float
    end_s: float
    tokens: float
    llm_evicted: float
    prm_evicted: float
    llm_target: float
    llm_actual: float
    llm_held: float
    prm_held: float


LEVELS = StepSeen._fields[-4:]


def window_s(seconds: float, least: float = MEAN_S) -> float:
    """Over how many seconds a time line of so many takes a mean of tokens/s.

    At least a bucket: LEAST_BUCKET_S, doubled until MOST_BUCKETS hold that many seconds.
    """
    needed = max(seconds / (MOST_BUCKETS * LEAST_BUCKET_S), 1.0)
    return max(least, LEAST_BUCKET_S * 2.0 ** math.ceil(math.log2(needed)))


def timeline(steps: Sequence[StepSeen] | NDArray[np.float64]) -> pd.DataFrame:
    """Steps, rows of StepSeen by their ends, in at most MOST_BUCKETS buckets of equal width.

    Columns: time_s (a bucket's middle), tokens_per_s (a mean over the last MEAN_S), llm_evicted and
    prm_evicted (blocks within it), llm_busy and prm_busy (fractions of its time), LEVELS (as they
    were last). The last bucket ends with the last step.
    """
    table = pd.DataFrame(steps, columns=StepSeen._fields)
    until = float(table["end_s"].max()) if len(table) else 0.0
    width, window = window_s(until, least=0.0), window_s(until)
    edges = np.append(np.arange(0.0, until, width), until)
    starts, ends = edges[:-1], edges[1:]
    done = np.concatenate([[0.0], table["tokens"].cumsum()])

    since = np.maximum(ends - window, 0.0)
    by_end = np.searchsorted(table["end_s"], ends, side="right")
    before = np.searchsorted(table["end_s"], since, side="right")
    columns = {
        "time_s": (starts + ends) / 2,
        "tokens_per_s": (done[by_end] - done[before]) / np.maximum(ends - since, 1e-9),
    }
    for is_prm, role in enumerate(ROLES):
        moments = table.loc[table["is_prm"] == is_prm, ["start_s", "end_s"]].to_numpy()
        lasted = np.diff(moments, axis=1).ravel()
        busy = np.column_stack([lasted.cumsum() - lasted, lasted.cumsum()]).ravel()
        spent = np.diff(np.interp(edges, np.append(0.0, moments), np.append(0.0, busy)))
        gone = np.append(table[f"{role}_evicted"], 0.0)[by_end - 1]  # of none the 0 at the end
        columns[f"{role}_evicted"] = np.diff(gone, prepend=0.0)
        columns[f"{role}_busy"] = np.minimum(spent / np.maximum(ends - starts, 1e-9), 1.0)
    levels = table[list(LEVELS)].to_numpy()[np.maximum(by_end - 1, 0)]
    return pd.DataFrame(columns | dict(zip(LEVELS, levels.T, strict=True)))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A search at one moment. Shares are of the arena's pages; seconds leave pauses out.

    state: of LiveSearch. phase: the model that stepped last, "" while none steps. tokens: of
    finished requests. target, actual: what the LLM should have, and holds or could have.
    steps_seen: [steps, fields of StepSeen]. blocks: those of every page as numbers of BLOCK_STATES,
    none where no model holds it. evicted: blocks, since the start. problem: what ended a failed
    search.
    """

    state: str
    seconds: float
    phase: str
    steps: int
    tokens: int
    answered: int
    problems: int
    target: float
    actual: float
    steps_seen: NDArray[np.float64]
    moves: tuple[Move, ...]
    blocks: list[list[int]]
    evicted: dict[str, int]
    problem: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second since the start."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def block_counts(self) -> dict[str, int]:
        """Blocks by state; those of held pages that are free, and pages of no model, are free."""
        states = Counter(state for page in self.blocks for state in page or [0])
        return {name: states[number] for number, name in enumerate(BLOCK_STATES)}


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

    settings: the keywords of Search. Its methods may be called from any thread.
    """

    def __init__(self, problems: Sequence[Problem], pair: SharedPair, **settings: Any) -> None:
        self.problems, self.pair, self._settings = list(problems), pair, settings
        self._changed = Condition()  # guards all that follows
        self.is_paused = False
        self._thread: Thread | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._origin = time.perf_counter()  # moved on by every wait
        self._waits_since: float | None = None
        self._is_stopped = False
        self._rows, self._moves = array("d"), list[Move]()
        self._search: Search | None = None
        self._evicted_before = [pool.stats.evicted for pool in self.pair.arena.pools]
        self._ended_s: float | None = None
        self.result: SearchResult | None = None
        self.error: Exception | None = None  # what ended it early, SearchStopped too

    def _evicted(self) -> list[int]:
        """Blocks that the LLM's and the PRM's cache have evicted since the start."""
        pools = zip(self.pair.arena.pools, self._evicted_before, strict=True)
        return [pool.stats.evicted - before for pool, before in pools]

    def start(self) -> None:
        """Begin, or begin anew after an end; paused if `pause` came first.

        ConfigError while it runs, or while others run.
        """
        if self.is_alive:
            raise ConfigError("This search runs already; stop it before it is started again.")
        if not self.pair.in_use.acquire(blocking=False):
            raise ConfigError(
                "The pair's engines have requests of another search; stop that one, or wait for it."
            )
        thread = Thread(target=self._run, name="live search", daemon=True)
        try:
            self._begin_anew()
            atexit.register(self.stop)
            thread.start()
        finally:
            if thread.ident is not None:
                self._thread = thread
            else:  # interrupted before it ran: it will not give the engines back
                self.pair.in_use.release()

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
            return now - self._origin

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs, paused or not."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def state(self) -> str:
        """ready | running | paused | stopped | finished | failed."""
        if self._thread is None:
            return "ready"
        if self._ended_s is None:
            return "paused" if self.is_paused else "running"
        if self.result is not None:
            return "finished"
        return "stopped" if isinstance(self.error, SearchStopped) else "failed"

    def wait(self) -> SearchResult:
        """The result, once it is finished. Raises what ended it: SearchStopped after `stop`.

        Its `.result` is that of the problems answered by then, or None.
        """
        if self._thread is None:
            raise ConfigError("This search was not started; call start() first.")
        self._thread.join()
        if self.result is None:
            assert self.error is not None
            raise self.error
        return self.result

    def wait_for_steps(self, more: int) -> bool:
        """Wait until so many more steps were taken; False if the search ended before."""
        with self._changed:
            wanted = len(self._rows) + more * len(StepSeen._fields)
            self._changed.wait_for(lambda: len(self._rows) >= wanted or self._ended_s is not None)
            return len(self._rows) >= wanted

    def snapshot(self) -> Snapshot:
        """What it does now; a few milliseconds, whatever the search does meanwhile."""
        arena, llm = self.pair.arena, self.pair.arena.models[0]
        blocks: list[list[int]] = [[] for _ in range(arena.num_pages)]
        with arena.lock:
            target, actual = arena.target[llm], arena.actual[llm]
            for active, pool in zip((1, 3), arena.pools, strict=True):
                for page in pool.pages:
                    held = pool.blocks[page * pool.per_page : (page + 1) * pool.per_page]
                    blocks[page] = [
                        active if block.ref_count else active + 1 if block.digest else 0
                        for block in held
                    ]
        with self._changed:
            rows = np.array(self._rows).reshape(-1, len(StepSeen._fields))
        state, search = self.state, self._search
        last = StepSeen(*rows[-1].tolist() if len(rows) else [0] * rows.shape[1])
        return Snapshot(
            state=state,
            seconds=self.seconds if self._thread else 0.0,
            phase=ROLES[int(last.is_prm)] if state == "running" and len(rows) else "",
            steps=len(rows),
            tokens=int(rows[:, StepSeen._fields.index("tokens")].sum()),
            answered=search.progress.answered if search else 0,
            problems=len(self.problems),
            target=target / arena.num_pages,
            actual=actual / arena.num_pages,
            steps_seen=rows,
            moves=tuple(self._moves),
            blocks=blocks,
            evicted=dict(zip(ROLES, (int(last.llm_evicted), int(last.prm_evicted)))),
            problem=f"{type(self.error).__name__}: {self.error}" if state == "failed" else "",
        )

    def _run(self) -> None:
        llm, prm = (
            _SteppedBy(engine, partial(self._step, role, engine))
            for role, engine in self.pair.engines.items()
        )
        try:
            scorer = PRM(prm, self._settings.get("prm_format"))
            self._search = Search(self.problems, llm=llm, prm=scorer, **self._settings)
            self.result = self._search.play()
        except Exception as problem:  # `wait` raises it and a snapshot shows it
            self.error = problem
        finally:
            atexit.unregister(self.stop)
            self.pair.in_use.release()
            self._ended_s = self.seconds
            self.resume()  # a pause that came too late is not the next search's

    def _step(self, role: str, engine: Engine) -> list[RequestOutput]:
        """A step of an engine, once none is held back. Raises SearchStopped after `stop`."""
        with self._changed:
            if self.is_paused and not self._is_stopped:
                self._waits_since = time.perf_counter()
                self._changed.wait_for(lambda: not self.is_paused or self._is_stopped)
                self._origin += time.perf_counter() - self._waits_since
                self._waits_since = None
            if self._is_stopped:
                raise SearchStopped("The search was stopped; start it again for a whole result.")
        start_s = self.seconds
        outputs = engine.step()
        end_s, arena = self.seconds, self.pair.arena
        tokens = sum(len(output.token_ids) for output in outputs)
        with arena.lock:
            llm = arena.models[0]
            pages = (arena.target[llm], arena.actual[llm], *(pool.held for pool in arena.pools))
            evicted = self._evicted()
        levels = (each / arena.num_pages for each in pages)
        with self._changed:
            step = StepSeen(float(role == "prm"), start_s, end_s, tokens, *evicted, *levels)
            self._rows.extend(step)
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
