"""Batch limits: the requests of searches, asked again of one model alone under other limits, of
engines that compute; and of the thesis's pair replayed, where schedulers and caches are real,
tokens are drawn, and seconds are a roofline's.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from workbench.config import SweepConfig
from workbench.core import RequestOutput, SamplingParams, StepPlan, StepResult, TokenEngine
from workbench.engine.engine import Engine
from workbench.engine.executor import StepHandle
from workbench.experiments import plans, settings
from workbench.experiments.execute import (
    DEVICE,
    Pair,
    num_at_once,
    one_by_one,
    replay_identity,
    rung_answers,
)
from workbench.experiments.memory import ENGINES, feasibility
from workbench.experiments.plans import BatchPlan
from workbench.experiments.runs import Outcome, RunResult
from workbench.experiments.settings import REPLAYED, RunSpec
from workbench.experiments.study import Folder, Study, run_study
from workbench.host import collection_paused
from workbench.kvcache.manager import KVCacheManager
from workbench.replay.answers import Answers
from workbench.replay.cost import ModelWork, StepCost, Terms
from workbench.replay.devices import Device, load_device
from workbench.replay.simulator import ReplayEngine, SimulatedClock, play, settings_of
from workbench.search.prm import trie_size
from workbench.search.rounds import Progress
from workbench.trace import Recorder

TURNS = 40
"""Of each cell: a turn of a tenth of a second, after which caches are cold for a thousandth."""


@dataclass(slots=True)
class Asked:
    """One request and what it brought. positions and columns: asked of a PRM; params: of an LLM;
    more: options of both, such as the tag that names it in a recording.
    """

    token_ids: Sequence[int]
    params: SamplingParams | None = None
    positions: Sequence[int] = ()
    columns: Sequence[int] = ()
    sampled: tuple[int, ...] = ()
    logits: Any = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of a forward pass it needs: its last sampled token is never computed."""
        if self.positions:
            return self.positions[-1] + 1
        return len(self.token_ids) + len(self.sampled) - 1

    def queue(self, engine: TokenEngine) -> int:
        """Ask an engine again."""
        if self.params is None:
            return engine.add_score(self.token_ids, self.positions, self.columns, **self.more)
        return engine.add(self.token_ids, self.params, **self.more)

    def is_same(self, output: RequestOutput) -> bool:
        """Whether an output is the recorded one, token by token or bit by bit."""
        told = tuple(output.token_ids) == self.sampled
        return told and np.array_equal(self.logits, output.logits)  # type: ignore[arg-type]


class Listener(Engine):
    """An engine that keeps what it was asked, by request id, and what came of it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.asked: dict[int, Asked] = {}

    def add(self, prompt: Any, params: SamplingParams, **more: Any) -> int:
        number = super().add(prompt, params, **more)
        self.asked[number] = Asked(list(prompt), params)
        return number

    def add_score(self, token_ids: Sequence[int], positions: Any, columns: Any, **more: Any) -> int:
        number = super().add_score(token_ids, positions, columns, **more)
        self.asked[number] = Asked(list(token_ids), None, tuple(positions), tuple(columns))
        return number

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        for output in outputs:
            own = self.asked[output.request_id]
            own.sampled, own.logits = tuple(output.token_ids), output.logits
        return outputs


@dataclass(slots=True)
class Recited:
    """In place of an executor: tokens are the recorded ones, scores zeros; nothing is computed."""

    storage: Any
    asked: dict[int, Asked]  # by seed

    def submit(self, plan: StepPlan) -> StepHandle:
        """The step's recorded tokens."""
        rows = zip(plan.sampling.seeds.tolist(), plan.sampling.positions.tolist())
        own = ((self.asked[seed], position) for seed, position in rows)
        tokens = [each.sampled[position - len(each.token_ids)] for each, position in own]
        wanted = tuple(np.zeros((len(w.rows), len(w.columns)), np.float32) for w in plan.wanted)
        return StepHandle(StepResult(np.array(tokens, np.int64), wanted=wanted))


class Cells:
    """Carries out cells that compute. The search they repeat is recorded with the sweep's own
    limits when the first of its seed needs it. Every engine asked again must give the same tokens.

    Cells of one model take turns, each until another part of its requests is answered: a slow
    minute of the machine is a slow minute of all.
    """

    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        self._seed: int | None = None
        self._asked: dict[str, tuple[list[Asked], Any]] = {}  # requests and weights of each model

    def __call__(self, specs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Outcome | Progress]]:
        """The cells of the first one's model, as many as fit."""
        model = specs[0].get("model")
        try:
            self._listen(specs[0])
        except Exception as problem:  # a study outlives whatever one of its runs raises
            yield specs[0], problem
            return
        own = [spec for spec in specs if spec.get("model") == model][: num_at_once(specs)]
        yield from self._in_turn(own, *self._asked[model])
        gc.collect()  # the next must not pay for the memory of these

    def _in_turn(
        self, specs: Sequence[RunSpec], asked: Sequence[Asked], weights: Any
    ) -> Iterator[tuple[RunSpec, Outcome | Progress]]:
        running = list[Cell]()
        for spec in specs:
            try:
                running.append(Cell(spec, asked, weights))
            except Exception as problem:
                yield spec, problem
        for turn in range(1, TURNS + 1):
            for cell in [*running]:
                try:
                    cell.go_on(turn / TURNS)
                    yield cell.spec, cell.progress if turn < TURNS else cell.result()
                except Exception as problem:
                    running.remove(cell)
                    yield cell.spec, problem
            running = running[1:] + running[:1]

    def _listen(self, spec: RunSpec) -> None:
        if spec.seed == self._seed:
            return
        usual = replace(self._config, num_problems=spec.config.num_problems)
        pair = Pair(RunSpec(usual, spec.llm_share, spec.seed), kind=Listener)
        pair.search().play()
        for role, each in pair.engines.items():
            assert isinstance(each, Listener)
            self._asked[role] = list(each.asked.values()), each.weights
        self._seed = spec.seed
        del pair, each
        gc.collect()


class Cell:
    """All requests of a cell queued at once, of one engine. Of a TIMED one it tells rates, rows
    computed for nothing, blocks wasted; a COUNTED one computes nothing, since its blocks depend on
    the recorded tokens alone. OutOfMemory when a padded batch cannot fit.
    """

    def __init__(self, spec: RunSpec, requests: Sequence[Asked], weights: Any) -> None:
        model, self._is_timed = spec.get("model"), spec.role != settings.COUNTED
        self.spec, self._asked = spec, requests[:: spec.get("every")]
        config = spec.engine(model)
        if not self._is_timed:
            config = replace(config, memory=None, num_blocks=feasibility(spec).blocks(model))
        self._engine = Engine(**config.to_dict(), weights=weights)
        if not self._is_timed:
            # by the seeds of a plan
            by_seed = {a.params.seed & (2**64 - 1): a for a in self._asked if a.params}
            computes_nothing: Any = Recited(self._engine.executor.storage, by_seed)
            self._engine.executor = computes_nothing
        self._recorder, self._seconds = Recorder(), 0.0
        self._engine.trace_as(self._recorder, model)
        self._numbers: list[int] = []
        self._outputs: dict[int, RequestOutput] = {}

    def go_on(self, part: float) -> None:
        """Until so large a part of the requests is answered."""
        with collection_paused():
            start = time.perf_counter()
            self._numbers = self._numbers or [each.queue(self._engine) for each in self._asked]
            while self._engine.has_work and len(self._outputs) < part * len(self._asked):
                self._outputs |= {output.request_id: output for output in self._engine.step()}
            self._seconds += time.perf_counter() - start

    @property
    def progress(self) -> Progress:
        """How far it is, in problems as a search's."""
        count, part = self.spec.config.num_problems, len(self._outputs) / len(self._asked)
        return Progress(0, count, int(part * count), count, 0, self._seconds)

    def result(self) -> RunResult:
        """Of all requests answered."""
        if not self._is_timed:
            return RunResult(counts_of_cell(self.spec, self._recorder.steps, len(self._asked)))
        pairs = zip(self._numbers, self._asked, strict=True)
        same = all(each.is_same(self._outputs[number]) for number, each in pairs)
        told = {"same_answers": same}
        return timed_cell(self.spec, self._asked, self._recorder, self._seconds, **told)


def timed_cell(
    spec: RunSpec, asked: Sequence[Asked], recorder: Recorder, seconds: float, **told: Any
) -> RunResult:
    """Rates and counts of a cell. padding: the part of its rows that static batches, which neither
    cache nor preempt, compute for nothing.
    """
    steps, sampled = recorder.steps, sum(len(each.sampled) for each in asked)
    tokens = sampled or trie_size(array("i", each.token_ids) for each in asked)
    measured: dict[str, Any] = {
        "engine_s": seconds,
        "tokens_per_s": tokens / seconds if spec.get("every") == 1 else float("nan"),
        "steps_per_s": sum(len(each.positions) or 1 for each in asked) / seconds,
        "padding": 0.0,
    }
    if spec.get("kind") == settings.STATIC_BATCH:
        rows = int(steps[["prefill_tokens", "decode_tokens"]].to_numpy().sum())
        measured["padding"] = 1 - sum(each.num_rows for each in asked) / rows
    measured |= told | counts_of_cell(spec, steps, len(asked))
    return RunResult(measured, {"steps": steps, "requests": recorder.requests})


def counts_of_cell(spec: RunSpec, steps: pd.DataFrame, requests: int) -> dict[str, Any]:
    """Counts of a cell's steps; waste: the part of its active blocks' tokens never held."""
    room = steps["blocks_active"].sum() * spec.engine(spec.get("model")).block_size
    waste = float(1 - steps["tokens_held"].sum() / room) if room else 0.0
    counts = {"num_steps": len(steps), "preempted": int(steps["preempted"].sum())}
    counts |= {"most_running": int(steps["running"].max()), "requests": requests}
    return {"waste": waste} | counts


# -- the thesis's pair --


class ReplayListener(ReplayEngine):
    """A replayed engine that keeps what it is asked."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: list[Asked] = []

    def add(self, prompt: Any, params: Any, **more: Any) -> int:
        number = super().add(prompt, params, **more)
        sampled = tuple(self._nodes[number].step.tokens)
        self.asked.append(Asked(prompt, params, sampled=sampled, more=more))
        return number

    def add_score(self, token_ids: Any, positions: Any, columns: Any, **more: Any) -> int:
        self.asked.append(Asked(token_ids, None, tuple(positions), tuple(columns), more=more))
        return super().add_score(token_ids, positions, columns, **more)


class ReplayedCells:
    """Carries out cells of the batching study on a device that is a table of numbers; the search
    whose requests they ask again is replayed, with the study's own limits, when the first needs it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seed: int | None = None
        self._asked: dict[str, list[Asked]] = {}

    def __call__(self, spec: RunSpec) -> RunResult:
        """All requests of a cell at once, one engine. OutOfMemory: no room for a padded batch."""
        answers = rung_answers(spec.config, spec.seed)
        if spec.seed != self._seed:
            self._listen(spec, answers)
        model, clock, recorder = spec.get("model"), SimulatedClock(), Recorder("replay", 0.0)
        engine = self._engine(ReplayEngine, spec, model, answers, clock)
        engine.trace_as(recorder, model)
        asked = self._asked[model][:: spec.get("every")]
        for each in asked:
            each.queue(engine)
        while engine.has_work:
            engine.step()
        told = {"rung": REPLAYED, "machine": f"simulated {self._device.name}"}
        return timed_cell(spec, asked, recorder, clock.now, **told)

    def _listen(self, spec: RunSpec, answers: Answers) -> None:
        """Replay the search that asks, with the limits that the study takes everywhere else."""
        usual, clock = plans.PROFILES["thesis"], SimulatedClock()
        config = replace(spec.config, **{name: usual[name] for name in plans.LIMITS[:2]})
        search = RunSpec(config, spec.llm_share, spec.seed)
        llm, prm = (self._engine(ReplayListener, search, role, answers, clock) for role in ENGINES)
        own: dict[str, Any] = {n: getattr(config, n) for n in ("min_problem_batch", "score_cache")}
        play(answers, (llm, prm), Recorder("replay", 0.0), clock, **own)
        self._asked, self._seed = dict(zip(ENGINES, (llm.asked, prm.asked))), spec.seed

    def _engine(
        self, kind: Any, spec: RunSpec, role: str, answers: Answers, clock: SimulatedClock
    ) -> Any:
        """One model's engine with the run's settings and its part of the memory."""
        model, wanted = getattr(answers.recording, role), spec.engine(role)
        own = (*plans.LIMITS, "batching", "enable_prefix_caching")
        changes = {name: getattr(wanted, name) for name in own}
        changes["num_blocks"] = feasibility(spec).blocks(role)
        settings_ = settings_of(model, changes)
        options = {n: getattr(settings_, n) for n in ("block_size", "enable_prefix_caching")}
        cache = KVCacheManager(changes["num_blocks"], namespace=role.encode(), **options)
        cost = StepCost(ModelWork.of(model), self._device, Terms.on(self._device, model.name))
        return kind(model, settings_, cache, cost, answers, clock)


def run_batches(
    config: SweepConfig, plan: BatchPlan, runs_dir: Folder = None, **options: Any
) -> Study:
    """Each model alone over its batch limits."""
    given: dict[str, Any] = {"execute": Cells(config)} | options
    return run_study(config, plans.batch_runs(config, plan), runs_dir, plan=plan, **given)


def run_batches_replayed(
    config: SweepConfig, plan: BatchPlan, runs_dir: Folder = None, **options: Any
) -> Study:
    """The same, replayed; options: of run_study."""
    device = load_device(DEVICE)
    specs = [run for run in plans.batch_runs(config, plan) if run.role == settings.TIMED]
    given: dict[str, Any] = {"execute": one_by_one(ReplayedCells(device))}
    given["identity"] = replay_identity(device, config)
    return run_study(config, specs, runs_dir, plan=plan, **given | options)
