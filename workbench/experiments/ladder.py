"""The ladder of the thesis's modifications: its runs, carried out or found, as tables.

What it does not do: choose the runs (ladder_plan.py), or compare rungs (ladder_rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from workbench.config import SweepConfig
from workbench.errors import RunStoreError
from workbench.experiments.face import face
from workbench.experiments.identity import identify
from workbench.experiments.ladder_plan import (
    BY_KEY,
    COST,
    DEPTH,
    LADDER,
    QUEUE,
    LadderPlan,
    LadderSpec,
    ladder_config,
    ladder_runs,
    queue_runs,
)
from workbench.experiments.ladder_turns import LadderInTurns
from workbench.experiments.noise import Noise, noise_of
from workbench.experiments.paths import runs_folder
from workbench.experiments.profiles import SECONDS_PER_PROBLEM
from workbench.experiments.record import FINISHED
from workbench.experiments.store import RunStore, load_table
from workbench.experiments.sweep import Execute, is_stored, run_sweep
from workbench.experiments.turns import can_take_turns

KEYS = ["run_id", "ladder", "role", "repeat", "seed", "max_depth"]


@dataclass(frozen=True, slots=True)
class LadderStudy:
    """The stored runs of one ladder, read once.

    all_runs: one row a run, failed and infeasible ones too. problems and nodes: rows of the
    finished ones with rung, role, repeat, run_seed and max_depth.
    """

    config: SweepConfig
    plan: LadderPlan
    all_runs: pd.DataFrame
    problems: pd.DataFrame
    nodes: pd.DataFrame

    @property
    def runs(self) -> pd.DataFrame:
        """The finished runs of the rungs, in the ladder's order, repetitions left out.

        Column ladder is the rung's key. RunStoreError where there is none.
        """
        every = self.all_runs
        done = every
        if len(every):
            once = (every["role"] == LADDER) & (every["repeat"] == 0)
            done = every[(every["status"] == FINISHED) & once]
        if done.empty:
            why = sorted(set(every["error"].dropna())) if len(every) else ["none is stored"]
            raise RunStoreError(f"No run of the ladder finished: {'; '.join(why)}.")
        order = done["ladder"].map({key: place for place, key in enumerate(BY_KEY)})
        return done.assign(place=order).sort_values(["place", "seed"], ignore_index=True)

    @property
    def queued(self) -> pd.DataFrame:
        """The finished runs over the longer queue; empty where there are none."""
        every = self.all_runs
        if every.empty:
            return every
        return every[(every["status"] == FINISHED) & (every["role"] == QUEUE)]

    @property
    def rungs(self) -> tuple[str, ...]:
        """Keys of the rungs that were measured, in order."""
        return tuple(dict.fromkeys(self.runs["ladder"]))

    @property
    def noise(self) -> Noise:
        """What runs of equal work differ by: repetitions, and rungs that changed nothing."""
        every = self.all_runs
        if len(every) and every["in_turns"].any():
            # those at a lower limit had minutes of their own
            every = every[every["role"] != DEPTH]
        return noise_of(every)

    def __repr__(self) -> str:
        done = int((self.all_runs["status"] == FINISHED).sum()) if len(self.all_runs) else 0
        return f"LadderStudy({self.config.profile}: {done} of {len(self.all_runs)} runs finished)"


def run_ladder(
    config: SweepConfig,
    plan: LadderPlan,
    runs_dir: str | Path | None = None,
    *,
    compute: bool = True,
    execute: Execute | None = None,
) -> LadderStudy:
    """Carry out every run that is not stored yet and answer all of them, as run_sweep does."""
    own, runs = ladder_config(config, plan), _runs(config, plan)
    if compute and execute is None and runs[0][0].in_turns:
        own = replace(own, warmup_problems=0)  # each process warms itself up
        execute = LadderInTurns(_seeds_left(runs, _store(runs_dir)), progress=True)
    sweeps = [
        run_sweep(
            replace(own, num_problems=specs[0].config.num_problems),
            runs_dir,
            specs=specs,
            execute=execute,
            compute=compute,
        )
        for specs in runs
    ]
    every = pd.concat([sweep.all_runs for sweep in sweeps], ignore_index=True)
    done = every[every["status"] == FINISHED] if len(every) else every
    tables = _table("problems", done), _table("nodes", done)
    return LadderStudy(ladder_config(config, plan), plan, every, *tables)


def ladder_left(config: SweepConfig, plan: LadderPlan, runs_dir: str | Path | None = None) -> str:
    """How many runs are not stored yet and roughly how long they take, in one sentence."""
    store = _store(runs_dir)
    groups = _runs(config, plan)
    ids = [identify(runs[0].config) for runs in groups]
    specs = [(spec, own) for runs, own in zip(groups, ids, strict=True) for spec in runs]
    todo = [spec for spec, own in specs if not is_stored(store, spec, own)]
    costs = (COST.get(spec.rung.key, 1.0) * spec.config.num_problems for spec in todo)
    minutes = SECONDS_PER_PROBLEM[config.profile] * sum(costs) / 60
    return f"{len(todo)} of {len(specs)} runs of the ladder to do, about {minutes:.0f} min (rough)."


def _runs(config: SweepConfig, plan: LadderPlan) -> list[list[LadderSpec]]:
    """Those over the ladder's problems, and those over the longer queue: other problems, an
    identity of their own.
    """
    own = replace(plan, in_turns=plan.in_turns and can_take_turns(config))
    return [runs for runs in (ladder_runs(config, own), queue_runs(config, own)) if runs]


def _seeds_left(runs: list[list[LadderSpec]], store: RunStore) -> list[LadderSpec]:
    """All runs of each seed of which one is not stored: what is missing is measured beside them."""
    left: list[LadderSpec] = []
    for specs in runs:
        identity = identify(specs[0].config)
        seeds = {spec.seed for spec in specs if not is_stored(store, spec, identity)}
        left += [spec for spec in specs if spec.seed in seeds]
    return left


def _store(runs_dir: str | Path | None) -> RunStore:
    return RunStore(Path(runs_dir) if runs_dir is not None else runs_folder())


def ladder_face(study: LadderStudy) -> str:
    """What stands on the figure: models, sample, split, and which seeds the dear rungs have."""
    runs, plan = study.runs, study.plan
    seeds = runs.groupby("ladder")["seed"].nunique()
    fewer = f" (without a score cache {seeds.min()})" if seeds.min() < seeds.max() else ""
    first, second, last = face(runs).splitlines()
    setting = f"LLM share {plan.llm_share:g}, at most {plan.in_flight} of the problems in flight"
    if len(study.queued):
        setting += f" (problem batching: {plan.queue_in_flight} of {plan.queue_problems})"
    if study.runs["in_turns"].any():
        setting += "; searches take turns"
    second = second.replace(", n = ", f"{fewer}, n = ")
    return "\n".join([first, second, f"{setting}; {study.noise}.", last])


def _table(name: str, runs: pd.DataFrame) -> pd.DataFrame:
    if runs.empty:
        return pd.DataFrame(columns=["problem_id", *KEYS])
    rows = load_table(list(runs["folder"]), name)
    return rows.merge(
        runs[KEYS].rename(columns={"seed": "run_seed", "ladder": "rung"}), on="run_id"
    )
