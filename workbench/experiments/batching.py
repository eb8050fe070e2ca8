"""Batch limits of the thesis's pair, replayed: the requests of one search, asked again of one model
alone under other limits. execute.Cells does so with engines that compute; here schedulers and
caches are real, tokens are drawn, and seconds are a roofline's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from workbench.config import SweepConfig
from workbench.experiments import plans, settings
from workbench.experiments.execute import (
    DEVICE,
    Asked,
    replay_identity,
    rung_answers,
    timed_cell,
)
from workbench.experiments.memory import ENGINES, feasibility
from workbench.experiments.plans import BatchPlan
from workbench.experiments.runs import RunResult
from workbench.experiments.settings import REPLAYED, RunSpec
from workbench.experiments.study import Folder, Study, run_study, seed_by_seed
from workbench.kvcache.manager import KVCacheManager
from workbench.replay.answers import Answers
from workbench.replay.cost import ModelWork, StepCost, Terms
from workbench.replay.devices import Device, load_device
from workbench.replay.simulator import ReplayEngine, SimulatedClock, play, settings_of
from workbench.trace import Recorder


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
        self._asked: dict[str, list[Asked]] = {}

    def __call__(self, spec: RunSpec) -> RunResult:
        """All requests of a cell at once, one engine. OutOfMemory: no room for a padded batch."""
        answers = rung_answers(spec.config, spec.seed)
        if not self._asked:
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
        self._asked = dict(zip(ENGINES, (llm.asked, prm.asked)))

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


def run_batches_replayed(
    config: SweepConfig, plan: BatchPlan, runs_dir: Folder = None, **options: Any
) -> Study:
    """Each model alone over its batch limits, replayed; options: of run_study."""
    device = load_device(DEVICE)
    specs = [run for run in plans.batch_runs(config, plan) if run.role == settings.TIMED]
    given: dict[str, Any] = {"execute": seed_by_seed(partial(ReplayedCells, device))}
    given["identity"] = replay_identity(device, config)
    return run_study(config, specs, runs_dir, plan=plan, **given | options)
