"""A recorded search run again: the real runner, strategies, schedulers and caches, without models.

The models' outputs are the recorded ones (answers.py), and a step lasts as long as its cost says
(cost.py). With the recorded settings every event is the measured run's, step by step; with others,
what would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.config import POLICIES as POLICY_NAMES
from workbench.config import Checked, EngineConfig, SearchSwitches, require_known
from workbench.core import CacheRoom, RequestOutput, SamplingParams, ScoreParams, Sequence, Tag
from workbench.engine.requests import Ids, Prompt
from workbench.engine.static_batch import make_scheduler
from workbench.errors import ConfigError, RecordingError
from workbench.host import collection_paused
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, Policy, StaticSplit
from workbench.replay.answers import (
    Answers,
    RecordedExecutor,
    RecordedPRM,
    RecordedScores,
    SampledNode,
    TriePath,
)
from workbench.replay.cost import (
    MeteredCost,
    ModelWork,
    StepCost,
    StepWork,
    Terms,
    block_size_of,
    fit,
    recorded,
    spec_of,
    work_of,
)
from workbench.replay.devices import Device
from workbench.replay.miss_ratio import CacheCalls, LoggedCache
from workbench.search.prm import ScoreCache
from workbench.search.recording import RecordedEngine, Recording
from workbench.search.result import Throughput
from workbench.search.rounds import ActiveSearch, OnRound, Rounds
from workbench.search.strategies import Strategy
from workbench.search.variants import STRATEGIES
from workbench.trace import Recorder, Trace

POLICIES: dict[str, type[Policy]] = dict(
    zip(POLICY_NAMES, (StaticSplit, FirstCome, PhaseAware, MarginalValue), strict=True)
)
Changes = Mapping[str, Any]
Cost = Callable[[StepWork], float]
Models = tuple[RecordedEngine, RecordedEngine]  # LLM, PRM
CHANGEABLE = ["num_blocks", "block_size", "enable_prefix_caching", "reuse_partial_blocks"]
CHANGEABLE += ["max_num_seqs", "max_num_batched_tokens", "watermark", "batching"]
"""Fields of EngineConfig, of the cache and the limits of a step, that a replay may change."""


def settings_of(engine: RecordedEngine, changes: Changes | None = None) -> EngineConfig:
    """The recorded engine's own of CHANGEABLE, with these changes; ConfigError for other names.

    A block size other than the recorded one keeps the memory: num_blocks follows. num_blocks is
    None where the memory says it, or it is not known.
    """
    changes, recorded_ones = changes or {}, engine.config or {}
    require_known(changes, CHANGEABLE, f"A replay of {engine.name}")
    names = (*CHANGEABLE, "use_kv_cache")
    own = {n: recorded_ones[n] for n in names if recorded_ones.get(n) is not None}
    own["num_blocks"] = engine.num_blocks
    if "block_size" in changes and engine.num_blocks:
        size = EngineConfig(block_size=changes["block_size"]).block_size  # refused if it is none
        own["num_blocks"] = engine.num_blocks * block_size_of(engine) // size
    return EngineConfig(**own | dict(changes))


# -- caches: each model has its own, or both lease pages of one arena --


@dataclass(frozen=True, slots=True)
class SharedMemory(Checked):
    """One arena for both models, as KVArena takes it. policy: a name in POLICIES."""

    memory: int | str
    policy: Annotated[str, POLICY_NAMES] = "marginal_value"
    kv_share: float | None = None

    @property
    def keeps_split(self) -> bool:
        """Whether a share means anything to the policy."""
        return POLICIES[self.policy]().keeps_split


def _caches(
    models: Models, settings: list[EngineConfig], shared: SharedMemory | None, log_calls: bool
) -> list[KVCacheManager]:
    """Each model's cache, with the settings that the engine gave it."""
    names = ("block_size", "enable_prefix_caching", "reuse_partial_blocks")
    options: list[dict[str, Any]] = [{n: getattr(own, n) for n in names} for own in settings]
    for model, option in zip(models, options, strict=True):
        weights, *_ = model.fingerprint.rsplit("/", 2)  # then tokenizer and mode
        option["namespace"] = weights.encode()  # equal namespaces make equal hashes
    if shared is not None and log_calls:
        raise ConfigError("An arena keeps no calls; log_calls needs a cache for each model.")
    if shared is not None:
        shapes = []
        for model, own in zip(models, settings, strict=True):  # as engine.memory.block_shape
            spec, size = spec_of(model), own.block_size
            element = recorded(model, "block_bytes") // spec.block_bytes(block_size_of(model), 1)
            cell, floor = spec.block_bytes(size, element), -(-model.max_model_len // size)
            sizes = spec.layers, cell // spec.layers, element, floor
            shapes.append(BlockShape(model.name, *sizes, block_cost=float(spec.flops(size, 0))))
        share = shared.kv_share if shared.keeps_split else None
        arena = KVArena(shared.memory, shapes, POLICIES[shared.policy](), share)
        return [arena.cache(model.name, **each) for model, each in zip(models, options)]
    blocks = [require_blocks(*each) for each in zip(models, (own.num_blocks for own in settings))]
    kind = LoggedCache if log_calls else KVCacheManager
    return [kind(count, **each) for count, each in zip(blocks, options, strict=True)]


def require_blocks(model: RecordedEngine, num_blocks: int | None) -> int:
    """ConfigError where the blocks of a model's cache are neither recorded nor given."""
    if num_blocks is None:
        raise ConfigError(
            f"The recording does not say how many blocks {model.name} had, or they changed in the "
            "search; give num_blocks, or a memory and what share of it the LLM has."
        )
    return num_blocks


# -- an engine without a model --


class SimulatedClock:
    """Seconds since the start of a replay; steps and requests move it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ReplayEngine:
    """A TokenEngine: the real scheduler and cache, recorded tokens, a simulated clock.

    request_s: seconds that queueing a request takes, outside steps.
    """

    capabilities = frozenset({"token_identity", "trace"})
    tokenizer = None

    def __init__(
        self,
        model: RecordedEngine,
        settings: EngineConfig,
        cache: KVCacheManager,
        cost: Cost,
        answers: Answers,
        clock: SimulatedClock,
        request_s: float = 0.0,
    ) -> None:
        self.name, self.architecture = model.name, model.architecture
        self.fingerprint, self.value_outputs = model.fingerprint, model.value_outputs
        self.max_model_len = model.max_model_len
        self.settings, self.cache, self.clock = settings, cache, clock
        self._answers, self._cost, self._request_s = answers, cost, request_s
        self._executor = RecordedExecutor(answers.tokens)
        offsets = np.arange(len(cache.pool.blocks), dtype=np.int64)
        own = {"max_model_len": self.max_model_len, "stops": self._executor, "clock": clock}
        self.scheduler = make_scheduler(settings, cache, offsets, **own)
        self._nodes: dict[int, SampledNode] = {}
        self._next_id = self._next_step = 0
        self._recorder, self._trace_name = Recorder("replay", clock()), self.name

    @property
    def cache_room(self) -> CacheRoom:
        """Blocks that its cache may come to hold under the present split."""
        return CacheRoom(self.cache.room, self.cache.block_size)

    def trace_as(self, recorder: Recorder, name: str) -> tuple[Recorder, str]:
        before = self._recorder, self._trace_name
        self._recorder, self._trace_name = recorder, name
        return before

    def add(self, prompt: Prompt, params: SamplingParams, *, tag: Tag | None = None) -> int:
        """Queue the node that the tag names; RecordingError if it was never sampled."""
        tag = Tag() if tag is None else tag
        node = self._answers.sampled(params, tag)
        before = node.trie.length - len(node.step.tokens)
        if len(prompt) != before:
            raise RecordingError(
                f"Node {tag.node_id!r} of problem {tag.problem_id!r} was sampled after "
                f"{before} tokens; the replay has {len(prompt)}."
            )
        if params.max_tokens < (count := len(node.step.tokens)):
            raise RecordingError(
                f"Node {tag.node_id!r} of problem {tag.problem_id!r} has {count} tokens; the "
                f"replay leaves it {params.max_tokens}. A shorter one was not recorded: give a "
                "greater max_model_len."
            )
        self._nodes[self._next_id] = node
        return self._queue(TriePath(node.trie, before), tag, params=params)

    def add_score(
        self, token_ids: Ids, positions: Ids, columns: Ids, *, tag: Tag | None = None
    ) -> int:
        """Queue a scoring request for a recorded solution."""
        score = ScoreParams(tuple(positions), tuple(columns))
        return self._queue(token_ids, Tag() if tag is None else tag, score=score)

    def _queue(self, token_ids: Any, tag: Tag, **wanted: Any) -> int:
        self.clock.now += self._request_s
        number = self._next_id
        sequence = Sequence(number, token_ids, len(token_ids), tag=tag, **wanted)
        sequence.arrival_s = self.clock()
        self.scheduler.require_servable(sequence)
        self.scheduler.add(sequence)
        self._next_id += 1
        return number

    def abort(self, request_id: int) -> None:
        """Drop a request; an unknown or finished id is ignored."""
        sequence = self.scheduler.abort(request_id)
        if sequence is not None:
            self._recorder.request(self._trace_name, sequence, "abort", self.clock())

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """One scheduling step; the clock moves on by its cost."""
        start = self.clock.now
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        self.cache.take_moves()  # there are no bytes to be copied
        duration = self._cost(work_of(plan, self.settings.max_num_seqs))
        self.clock.now += duration
        finished = self.scheduler.update(plan, self._executor.run(plan))
        outputs = [self._finish(sequence, reason) for sequence, reason in finished]
        counts = self.scheduler.counts
        assert counts is not None
        told = start, duration, 0.0, counts  # planning takes no simulated time
        target = self.cache.target
        self._recorder.step(self._trace_name, self._next_step, *told, blocks_target=target)
        self._next_step += 1
        return outputs

    def _finish(self, sequence: Sequence, reason: str) -> RequestOutput:
        tokens: tuple[int, ...] = ()
        text, told = "", reason
        if sequence.score is None:
            step = self._nodes.pop(sequence.request_id).step
            tokens, text, told = step.tokens, step.text, step.finish_reason
            reason = step.request_reason
        self._recorder.request(self._trace_name, sequence, reason, self.clock())
        number, cached = sequence.request_id, sequence.num_cached_tokens
        return RequestOutput(number, tokens, text, told, cached)


# -- a search on two of them --


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A replay's result: the trace of a measured run, in simulated seconds. go_on: replays the rest
    of a search that max_rounds ended, and returns the whole.
    """

    trace: Trace
    throughput: Throughput
    llm: ReplayEngine
    prm: ReplayEngine
    go_on: Callable[[], Replayed]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of both models' steps, and of everything outside them a request."""

    llm: Cost
    prm: Cost
    request_s: float = 0.0


def replay(
    recording: Recording | Answers,
    costs: Costs | Device,
    *,
    llm: Changes | None = None,
    prm: Changes | None = None,
    shared: SharedMemory | None = None,
    models: Models | None = None,
    log_calls: bool = False,
    max_rounds: int | None = None,
    on_round: OnRound | None = None,
    **search: Any,
) -> Replayed:
    """Run a recorded search again. llm, prm: changed fields of CHANGEABLE; None: as recorded.

    costs: a device's are its fitted terms where it has some for a model, else its roofline. shared:
    one memory for both, in place of num_blocks. models: others in the place of the recorded ones.
    log_calls: each model's own cache keeps its calls, for miss-ratio curves. The others are play's.
    Answers(recording) in place of a recording keeps the block hashes between replays. Raises
    RecordingError for what the recording does not hold, OutOfMemory and ConfigError as engines do.
    """
    answers = recording if isinstance(recording, Answers) else Answers(recording)
    models = (answers.recording.llm, answers.recording.prm) if models is None else models
    if isinstance(costs, Device):
        each = [StepCost(ModelWork.of(m), costs, Terms.on(costs, m.name)) for m in models]
        is_fitted = costs.is_fitted_to(*(model.name for model in models))
        outside = costs.terms.get("request", {}).get("seconds", 0.0) if is_fitted else 0.0
        costs = Costs(each[0], each[1], outside)
    settings = [settings_of(*each) for each in zip(models, (llm, prm), strict=True)]
    caches = _caches(models, settings, shared, log_calls)
    clock, seconds, request_s = SimulatedClock(), (costs.llm, costs.prm), costs.request_s
    llm_engine, prm_engine = (
        ReplayEngine(*own, answers, clock, request_s)
        for own in zip(models, settings, caches, seconds, strict=True)
    )
    recorder = Recorder("replay", clock())
    begun = Play.of(answers, (llm_engine, prm_engine), recorder, clock, **search)

    def played(max_rounds: int | None = None) -> Replayed:
        with collection_paused():
            speed = begun.until(max_rounds, on_round)
        return Replayed(recorder.trace(), speed, llm_engine, prm_engine, played)

    return played(max_rounds)


def search_calls(
    answers: Answers, costs: Costs | Device, changes: Changes | None = None
) -> list[CacheCalls]:
    """The order of both models' cache calls in a replay. changes: keyword arguments of replay."""
    done = replay(answers, costs, log_calls=True, **(changes or {}))
    caches: tuple[Any, ...] = (done.llm.cache, done.prm.cache)
    return [cache.calls for cache in caches]


def play(
    answers: Answers,
    engines: tuple[Any, Any],
    recorder: Recorder,
    clock: Callable[[], float],
    *,
    max_rounds: int | None = None,
    on_round: OnRound | None = None,
    **search: Any,
) -> Throughput:
    """All rounds, or the first max_rounds, of a recorded search on two engines that sample what was
    recorded. on_round: as run_search. search: as Play.of.
    """
    return Play.of(answers, engines, recorder, clock, **search).until(max_rounds, on_round)


class Play(NamedTuple):
    """A recorded search as far as it was played."""

    rounds: Rounds
    searches: list[ActiveSearch]

    @classmethod
    def of(
        cls,
        answers: Answers,
        engines: tuple[Any, Any],
        recorder: Recorder,
        clock: Callable[[], float],
        *,
        strategy: Strategy | None = None,
        min_problem_batch: int | None = None,
        score_cache: bool | None = None,
        switches: Changes | None = None,
    ) -> Play:
        """engines: LLM, PRM, with `trace_as`. recorder: gets steps, requests and nodes, in the
        seconds of the clock. What is None is as recorded. switches: changed SearchSwitches.
        """
        recording, (llm, prm) = answers.recording, engines
        settings = recording.settings
        batch = settings.min_problem_batch if min_problem_batch is None else min_problem_batch
        _require_count("min_problem_batch", batch)
        cached = settings.score_cache if score_cache is None else score_cache
        used = strategy or recorded_strategy(recording)
        llm.trace_as(recorder, "llm")
        prm.trace_as(recorder, "prm")
        used_switches = SearchSwitches.from_dict({**settings.switches, **(switches or {})})
        if used_switches.forget_pruned:
            raise ConfigError(
                "A replay has no forget_pruned: a recording does not tell what a cache then "
                "forgets. Replay with forget_pruned=False."
            )
        scorer, cache = RecordedPRM(prm, recording), ScoreCache() if cached else None
        names = ("temperature", "top_p", "top_k", "min_p")
        sampling = {name: getattr(settings, name) for name in names}
        rounds = Rounds(
            llm,
            scorer,
            seed=settings.seed,
            params=SamplingParams(max_tokens=settings.max_step_tokens, **sampling),
            min_problem_batch=batch,
            recorder=recorder,
            clock=clock,
            switches=used_switches,
        )
        searches, shuffle = [], settings.score_shuffle_seed
        for each in recording.problems:
            scores = RecordedScores(scorer, each, answers, cache)
            searches.append(ActiveSearch(each.problem, list(each.prompt), used, scores, shuffle))
        rounds.queue.extend(searches)
        return cls(rounds, searches)

    def until(self, max_rounds: int | None, on_round: OnRound | None = None) -> Throughput:
        """Of all rounds so far, of which there are max_rounds then at most (None: no limit)."""
        rounds, recorder = self.rounds, self.rounds.recorder
        _require_count("max_rounds", max_rounds)
        while rounds.play_round(on_round) and rounds.round != max_rounds:
            pass
        recorder.node_rows.clear()
        for search in self.searches:
            recorder.node_rows += search.tree.rows(recorder.run_id, search.problem.id)
        return Throughput.of(rounds.marks, rounds.llm_busy_s, rounds.prm_busy_s)


def _require_count(name: str, count: int | None) -> None:
    whole = isinstance(count, Integral) and not isinstance(count, bool)
    if count is not None and not (whole and int(count) >= 1):
        raise ConfigError(f"{name} is {count!r}; allowed: whole numbers >= 1.")


def recorded_strategy(recording: Recording) -> Strategy:
    """The strategy that was recorded; RecordingError where it is none of this package."""
    settings = recording.settings
    kinds = {kind.__name__: kind for kind in STRATEGIES.values()}
    kind = kinds.get(settings.strategy)
    if kind is None:
        raise RecordingError(
            f"The recording's strategy is {settings.strategy!r}; known: {', '.join(kinds)}. "
            "Give the same one: replay(..., strategy=...)."
        )
    found: Strategy = kind(**settings.strategy_settings)
    return found


def events(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps table without its times: what measured and replayed runs must have alike."""
    times = ["run_id", "start_s", "duration_s", "schedule_s"]
    return steps.drop(columns=times).reset_index(drop=True)


# -- from measured runs to the terms of a device --


class MeasuredRun(NamedTuple):
    """A trace of a recorded search, and how its settings differed from the recording's."""

    answers: Answers
    trace: Trace
    llm: Changes = {}
    prm: Changes = {}


def calibrated(device: Device, runs: Iterable[MeasuredRun]) -> Device:
    """The device with terms for the runs' models, fitted to all of their steps together.

    ConfigError for runs of several pairs of models; RecordingError where a trace has other steps
    than a replay of the recording.
    """
    runs, meters = list(runs), (MeteredCost(), MeteredCost())
    if not runs:
        raise ConfigError("A device is calibrated with no run; give one or more.")
    recordings = [run.answers.recording for run in runs]
    if len(pairs := {(each.llm.name, each.prm.name) for each in recordings}) > 1:
        raise ConfigError(f"Runs of {sorted(pairs)} have no terms in common; calibrate each alone.")
    for run in runs:
        found = replay(run.answers, Costs(*meters), llm=run.llm, prm=run.prm).trace.steps
        if not events(found).equals(events(run.trace.steps)):
            raise RecordingError(
                f"The trace has {len(run.trace.steps)} steps and the replay of the recording "
                f"{len(found)}, or they differ in what they did: give the trace of the "
                "same search with the same settings."
            )
    steps = pd.concat([run.trace.steps for run in runs])
    recording, terms = recordings[-1], {}
    engines = {"llm": recording.llm, "prm": recording.prm}
    for engine in engines.values():  # one model in both roles has one fit, to the steps of both
        works, seconds = list[Any](), list[float]()
        for (role, other), meter in zip(engines.items(), meters):
            if other.name == engine.name:
                works += meter
                seconds += steps.loc[steps["engine"] == role, "duration_s"].tolist()
        terms[engine.name] = asdict(fit(ModelWork.of(engine), device, works, seconds))
    outside = sum(float(run.trace.spans["duration_s"].sum()) for run in runs)
    requests = sum(len(run.trace.requests) for run in runs)
    return replace(device, terms=terms | {"request": {"seconds": outside / max(requests, 1)}})
