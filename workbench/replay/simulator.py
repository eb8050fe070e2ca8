"""A recorded search, run again: the real runner, strategies, schedulers and caches.

Only the models are missing (answers.py) and the clock is simulated (engine.py, cost.py). With the
recorded settings every event is the measured run's, step by step; with others, what would have
been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from workbench.config import SearchSwitches
from workbench.core import SamplingParams
from workbench.errors import ConfigError, RecordingError
from workbench.host import collection_paused
from workbench.replay.answers import Answers, RecordedPRM, RecordedScores
from workbench.replay.cost import StepCost, Terms
from workbench.replay.devices import Device
from workbench.replay.engine import CacheSettings, Cost, ReplayEngine, SimulatedClock
from workbench.replay.memory import SharedMemory, make_caches
from workbench.replay.work import ModelWork
from workbench.search.prm import ScoreCache
from workbench.search.recording import RecordedEngine, RecordedSettings, Recording
from workbench.search.requests import Strategy
from workbench.search.result import Throughput
from workbench.search.rounds import ActiveSearch, OnRound, Rounds
from workbench.search.strategies import BeamSearch, BestOfN
from workbench.trace import Recorder, Trace

STRATEGIES: dict[str, Any] = {"BeamSearch": BeamSearch, "BestOfN": BestOfN}
UNTOLD = ("forget_pruned",)
Changes = Mapping[str, Any]
Models = tuple[RecordedEngine, RecordedEngine]  # LLM, PRM


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """What a replay brings: the trace of a measured run, in simulated seconds."""

    trace: Trace
    throughput: Throughput
    llm: ReplayEngine
    prm: ReplayEngine


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of both models' steps, and of everything outside them a request."""

    llm: Cost
    prm: Cost
    request_s: float = 0.0

    @classmethod
    def on(cls, models: Iterable[RecordedEngine], device: Device) -> Costs:
        """On a device: its fitted terms where it has some for a model, else its roofline."""
        llm, prm = (
            StepCost(ModelWork.of(engine), device, Terms.on(device, engine.name))
            for engine in models
        )
        return cls(llm, prm, device.terms.get("request", {}).get("seconds", 0.0))


def replay(
    recording: Recording | Answers,
    costs: Costs | Device,
    *,
    llm: Changes | None = None,
    prm: Changes | None = None,
    shared: SharedMemory | None = None,
    models: Models | None = None,
    strategy: Strategy | None = None,
    min_problem_batch: int | None = None,
    score_cache: bool | None = None,
    switches: Changes | None = None,
    on_round: OnRound | None = None,
    log_calls: bool = False,
) -> Replayed:
    """Run a recorded search again. llm, prm: changed fields of CacheSettings; None: as recorded.

    shared: one memory for both, in place of num_blocks. models: others in the place of the recorded
    ones. switches: changed SearchSwitches. on_round: as run_search. log_calls: the caches keep
    their calls, for miss-ratio curves. Answers(recording) may be given in place of a recording: it
    remembers the hashes between replays. Raises RecordingError for what the recording does not
    hold, OutOfMemory and ConfigError as engines do.
    """
    answers = recording if isinstance(recording, Answers) else Answers(recording)
    recording = answers.recording
    models = (recording.llm, recording.prm) if models is None else models
    costs = Costs.on(models, costs) if isinstance(costs, Device) else costs
    engines = _engines(answers, models, (llm, prm), costs, shared, log_calls)
    settings = recording.settings
    batch = settings.min_problem_batch if min_problem_batch is None else min_problem_batch
    if batch < 1:
        raise ConfigError(f"min_problem_batch is {batch}; allowed: whole numbers >= 1.")
    cached = settings.score_cache if score_cache is None else score_cache
    strategy = recorded_strategy(recording) if strategy is None else strategy
    cache = ScoreCache() if cached else None
    used = replayed_switches(settings, switches or {})
    llm_engine, prm_engine = engines
    recorder = Recorder("replay", llm_engine.clock())
    with collection_paused():
        speed = play(
            answers,
            *(llm_engine, prm_engine, recorder),
            strategy=strategy,
            batch=batch,
            cache=cache,
            switches=used,
            clock=llm_engine.clock,
            on_round=on_round,
        )
    return Replayed(recorder.trace(), speed, llm_engine, prm_engine)


def _engines(
    answers: Answers,
    models: Models,
    changes: Iterable[Changes | None],
    costs: Costs,
    shared: SharedMemory | None,
    log_calls: bool,
) -> list[ReplayEngine]:
    settings = [CacheSettings.of(*pair) for pair in zip(models, changes, strict=True)]
    pairs = list(zip(models, settings, strict=True))
    caches, clock = make_caches(pairs, shared, log_calls), SimulatedClock()
    return [
        ReplayEngine(*pair, cache, answers, clock, cost, costs.request_s)
        for pair, cache, cost in zip(pairs, caches, (costs.llm, costs.prm), strict=True)
    ]


def recorded_strategy(recording: Recording) -> Strategy:
    """The strategy that was recorded; RecordingError where it is none of this package."""
    settings = recording.settings
    kind = STRATEGIES.get(settings.strategy)
    if kind is None:
        raise RecordingError(
            f"The recording's strategy is {settings.strategy!r}; known: {', '.join(STRATEGIES)}. "
            "Give the same one: replay(..., strategy=...)."
        )
    found: Strategy = kind(**settings.strategy_settings)
    return found


def replayed_switches(settings: RecordedSettings, changes: Changes) -> SearchSwitches:
    """As recorded, with these changes; ConfigError for what no recording can tell."""
    found = SearchSwitches.from_dict({**settings.switches, **changes})
    for name in UNTOLD:
        if getattr(found, name):
            raise ConfigError(
                f"A replay has no {name}: a recording does not tell what a cache then forgets. "
                f"Replay with {name}=False."
            )
    return found


def play(
    answers: Answers,
    llm: Any,
    prm: Any,
    recorder: Recorder,
    *,
    strategy: Strategy,
    batch: int,
    cache: ScoreCache | None,
    switches: SearchSwitches,
    clock: Callable[[], float],
    on_round: OnRound | None = None,
) -> Throughput:
    """All rounds of a recorded search on two engines that sample what was recorded.

    llm, prm: TokenEngines with a trace. recorder: gets steps, requests and nodes, in the seconds of
    the clock.
    """
    recording = answers.recording
    llm.trace_as(recorder, "llm")
    prm.trace_as(recorder, "prm")
    asked = RecordedPRM(prm, recording)
    rounds = Rounds(
        llm,
        asked,
        seed=recording.settings.seed,
        params=recorded_params(recording),
        min_problem_batch=batch,
        recorder=recorder,
        clock=clock,
        switches=switches,
    )
    shuffle = recording.settings.score_shuffle_seed
    searches = [
        ActiveSearch(
            kept.problem,
            list(kept.prompt),
            strategy,
            RecordedScores(asked, kept, answers, cache),
            shuffle,
        )
        for kept in recording.problems
    ]
    rounds.run(searches, on_round)
    for search in searches:
        for row in search.tree.rows(search.problem.id):
            del row["finish_reason"], row["text"]
            recorder.node(**row)
    return Throughput.of(rounds.marks, rounds.llm_busy_s, rounds.prm_busy_s)


def recorded_params(recording: Recording) -> SamplingParams:
    """How every node was sampled."""
    kept = asdict(recording.settings)
    names = ("temperature", "top_p", "top_k", "min_p")
    return SamplingParams(max_tokens=kept["max_step_tokens"], **{n: kept[n] for n in names})


TIMES = ("run_id", "start_s", "duration_s", "schedule_s")


def events(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps table without its times: what measured and replayed runs must have alike."""
    return steps.drop(columns=list(TIMES)).reset_index(drop=True)
