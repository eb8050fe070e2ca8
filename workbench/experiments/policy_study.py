"""The study of policies: its runs, carried out or found, as tables, and how two settings compare.

The working set is measured first, with memory uncapped; budgets are multiples of it. What it does
not do: choose runs (policy_plan.py), or carry one out (policy_run.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.config import SweepConfig, format_size
from workbench.errors import RunStoreError
from workbench.experiments.face import face
from workbench.experiments.identity import identify
from workbench.experiments.noise import Noise, noise_of
from workbench.experiments.paths import runs_folder
from workbench.experiments.peak import Rates, draw_rates
from workbench.experiments.plan import RunSpec
from workbench.experiments.policy_plan import (
    REFERENCE,
    PolicyPlan,
    PolicySpec,
    WorkingSet,
    policy_config,
    policy_name,
    reference_runs,
    settings_at,
    tight_runs,
)
from workbench.experiments.policy_techniques import NONE, TECHNIQUES
from workbench.experiments.profiles import SECONDS_PER_PROBLEM
from workbench.experiments.record import FINISHED, RunResult
from workbench.experiments.statistics import Interval
from workbench.experiments.store import RunStore, load_table
from workbench.experiments.sweep import Execute, is_stored, run_sweep
from workbench.experiments.turns import can_take_turns

SECONDS = ("wall_s", "llm_busy_s", "prm_busy_s")
RATES = (
    *("tokens_per_s", "problems_per_min", "steady_tokens_per_s", "steady_problems_per_min"),
    *("llm_tokens_per_busy_s", "prm_tokens_per_busy_s"),
)
KEYS = ["run_id", "setting", "repeat", "seed"]


@dataclass(frozen=True, slots=True)
class PolicyStudy:
    """The stored runs of one study; of those that took turns at one pace (`at_one_pace`).

    all_runs: one row a run, failed and infeasible ones too; column setting is
    BUDGET/POLICY/TECHNIQUE, e.g. "0.5W/static_0.3/none". problems and nodes: rows of the finished
    ones with setting, repeat and run_seed.
    """

    config: SweepConfig
    plan: PolicyPlan
    working_set: WorkingSet
    all_runs: pd.DataFrame
    problems: pd.DataFrame
    nodes: pd.DataFrame

    @property
    def runs(self) -> pd.DataFrame:
        """The finished runs under a budget, the first time each. RunStoreError: there is none."""
        every = self.all_runs
        done = every[(every["status"] == FINISHED) & (every["repeat"] == 0)]
        tight = done[done["role"] != REFERENCE]
        if tight.empty:
            reasons = "; ".join(sorted(set(every["error"].dropna().astype(str))))
            raise RunStoreError(f"No run of the study of policies finished: {reasons}.")
        return tight.sort_values(["budget", "setting", "seed"], ignore_index=True)

    @property
    def noise(self) -> Noise:
        """What runs of equal work differ by; of those that took turns, where runs do."""
        runs = self.all_runs
        return noise_of(_apart(runs[runs["role"] != REFERENCE] if self.plan.in_turns else runs))

    def runs_of(self, setting: str, repeats: Sequence[int] = (0,)) -> pd.DataFrame:
        """The finished runs of one setting, by seed."""
        every = self.all_runs
        wanted = (every["setting"] == setting) & every["repeat"].isin(list(repeats))
        return every[wanted & (every["status"] == FINISHED)].sort_values(["seed", "repeat"])

    def has(self, setting: str) -> bool:
        """Whether every seed of a setting finished."""
        return len(self.runs_of(setting)) == len(self.config.seeds)

    def __repr__(self) -> str:
        done = int((self.all_runs["status"] == FINISHED).sum())
        total = format_size(self.working_set.total)
        return f"PolicyStudy({done} of {len(self.all_runs)} runs finished, W = {total})"


def setting_of(budget: float | None, policy: str, kv_share: float | None, technique: str) -> str:
    """BUDGET/POLICY/TECHNIQUE."""
    name = "uncapped" if budget is None or pd.isna(budget) else f"{budget:g}W"
    share = None if kv_share is None or pd.isna(kv_share) else kv_share
    return f"{name}/{policy_name(policy, share)}/{technique}"


def run_policies(
    config: SweepConfig,
    plan: PolicyPlan,
    runs_dir: str | Path | None = None,
    *,
    execute: Execute | None = None,
    progress: bool = True,
) -> PolicyStudy:
    """Carry out every run that is not stored yet and answer all of them, as run_sweep does.

    Raises RunStoreError where the searches do not even finish with memory uncapped.
    """
    own, plan = policy_config(config, plan), _own_plan(config, plan)
    carry_out = execute or (_in_turns(plan, progress) if plan.in_turns else _execute_here())
    shown: dict[str, Any] = {"execute": carry_out, "progress": progress}
    store, identity = _store(runs_dir), identify(own)
    new = not all(is_stored(store, spec, identity) for spec in reference_runs(own))
    first = run_sweep(own, runs_dir, specs=reference_runs(own), **shown)
    warmed_up = new or plan.in_turns
    warm = replace(own, warmup_problems=0) if warmed_up else own
    working_set = working_set_of(first.all_runs)
    specs = tight_runs(own, plan, working_set)
    sweep = run_sweep(warm, runs_dir, specs=specs, **shown)
    every = pd.concat([first.all_runs, sweep.all_runs], ignore_index=True)
    columns = ("budget", "policy", "kv_share", "technique")
    every["setting"] = [setting_of(*row) for row in every[list(columns)].itertuples(index=False)]
    done = every[every["status"] == FINISHED]
    every, problems = at_one_pace(every, _table("problems", done))
    return PolicyStudy(own, plan, working_set, every, problems, _nodes(done))


def at_one_pace(runs: pd.DataFrame, problems: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Seconds of runs that took turns as if all rounds of a seed had had one pace: the median of
    the bound's, which took turns in all of them.
    """
    if "bound_tokens_per_s" not in runs:
        return runs, problems
    bound = runs["bound_tokens_per_s"]
    usual = bound.groupby(runs["seed"]).transform("median").where(bound.notna())
    pace = (bound / usual).fillna(1.0)
    own = problems["run_id"].map(dict(zip(runs["run_id"], pace)))
    seconds = {name: runs[name] * pace for name in runs if name in SECONDS}
    rates = {name: runs[name] / pace for name in runs if name in RATES}
    return (
        runs.assign(**seconds, **rates, bound_tokens_per_s=usual),
        problems.assign(wall_part_s=problems["wall_part_s"] * own),
    )


def working_set_of(reference: pd.DataFrame) -> WorkingSet:
    """Of the first seed without techniques; the longest sequence is that of all reference runs."""
    done = reference[reference["status"] == FINISHED]
    plain = done[done["technique"] == NONE].sort_values("seed")
    if plain.empty:
        reasons = "; ".join(sorted(set(reference["error"].dropna().astype(str))))
        raise RunStoreError(f"No search with memory uncapped finished: {reasons}.")
    row = plain.iloc[0]
    peaks = int(row["llm_active_bytes"]), int(row["prm_active_bytes"])
    return WorkingSet(*peaks, longest=int(done["longest"].max()))


def policies_left(config: SweepConfig, plan: PolicyPlan, runs_dir: str | Path | None = None) -> str:
    """How many runs are not stored yet and roughly how long they take, in one sentence."""
    own, plan = policy_config(config, plan), _own_plan(config, plan)
    store = _store(runs_dir)
    identity, first = identify(own), reference_runs(own)
    each = sum(len(list(settings_at(budget, plan))) + plan.repeats for budget in plan.budgets)
    total = len(first) + each * len(own.seeds)
    todo = [spec for spec in first if not is_stored(store, spec, identity)]
    left = total if todo else len(_missing(own, plan, store, first))
    minutes = left * SECONDS_PER_PROBLEM[config.profile] * plan.num_problems / 60
    return f"{left} of {total} runs of the policies to do, about {minutes:.0f} min (rough)."


def _own_plan(config: SweepConfig, plan: PolicyPlan) -> PolicyPlan:
    return replace(plan, in_turns=plan.in_turns and can_take_turns(config))


def _store(runs_dir: str | Path | None) -> RunStore:
    return RunStore(Path(runs_dir) if runs_dir is not None else runs_folder())


def _missing(
    config: SweepConfig, plan: PolicyPlan, store: RunStore, first: list[PolicySpec]
) -> list[PolicySpec]:
    """Runs under a budget that are not stored; the reference runs are."""
    identity = identify(config)
    folders = [store.find(spec.fingerprint(identity)) for spec in first]
    table = load_table([f for f in folders if f is not None], "runs")
    specs = tight_runs(config, plan, working_set_of(table))
    return [spec for spec in specs if not is_stored(store, spec, identity)]


def policies_face(study: PolicyStudy) -> str:
    """What stands on the figure: models, sample, W, and how noisy the machine was."""
    lines = face(study.runs.assign(total_memory=study.working_set.total)).splitlines()
    first = lines[0].split("; total memory")[0]
    need, plan = study.working_set, study.plan
    budget = (
        f"{first}; KV in multiples of W = {format_size(need.total)} (LLM {format_size(need.llm)}, "
        f"PRM {format_size(need.prm)}), weights and activations beside it."
    )
    how = "; searches of a budget and seed take turns" if plan.in_turns else ""
    setting = (
        f"At most {plan.in_flight} problems in flight, max_model_len "
        f"{need.max_model_len(study.config.block_size)} for both{how}; {study.noise}."
    )
    return "\n".join([budget, lines[1], setting, lines[-1]])


def rates_of(study: PolicyStudy, settings: Sequence[str], repeats: Sequence[int] = (0,)) -> Rates:
    """Tokens a second of these settings, drawn together; a setting stands where a share does."""
    place = {setting: float(number) for number, setting in enumerate(settings)}
    runs = pd.concat([study.runs_of(setting, repeats) for setting in settings])
    rows = study.problems[study.problems["run_id"].isin(runs["run_id"])]
    rows, runs = (frame.assign(llm_share=frame["setting"].map(place)) for frame in (rows, runs))
    rows = rows.drop(columns="seed", errors="ignore").rename(columns={"run_seed": "seed"})
    return draw_rates(rows, "tokens", "wall_part_s", noise=study.noise, runs=_apart(runs))


def _apart(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with steps numbered by technique: as many of another technique are no equal work."""
    numbers = {key: 10**9 * place for place, key in enumerate(TECHNIQUES)}
    return runs.assign(llm_steps=runs["llm_steps"] + runs["technique"].map(numbers))


def speed(study: PolicyStudy, setting: str, repeats: Sequence[int] = (0,)) -> Interval:
    """Generated tokens a second of a setting."""
    return rates_of(study, [setting], repeats).at(0.0)


def speed_up(
    study: PolicyStudy, before: str, after: str, repeats: Sequence[int] = (0,)
) -> Interval:
    """How many times the tokens a second of `before` has `after`.

    Problems are drawn anew, the same for both, and seconds vary as those of equal work do. Settings
    that did the same work are one: exactly 1.
    """
    rates = rates_of(study, (before, after), repeats)
    ratio = float(rates.pooled[1] / rates.pooled[0])
    if rates.problems == 1 or not rates.tells_noise:
        return Interval(ratio, -np.inf, np.inf, rates.problems)
    low, high = np.quantile(rates.pooled_drawn[:, 1] / rates.pooled_drawn[:, 0], (0.025, 0.975))
    return Interval(ratio, float(low), float(high), rates.problems)


def _table(name: str, runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of a trace table of these runs, with what tells them apart."""
    rows = load_table(list(runs["folder"]), name)
    return rows.merge(runs[KEYS].rename(columns={"seed": "run_seed"}), on="run_id")


def _nodes(runs: pd.DataFrame) -> pd.DataFrame:
    """What every run sampled: few columns, since there are many runs."""
    rows = _table("nodes", runs)
    kept = ["problem_id", "node_id", "token_ids", "score"]
    return rows[["run_id", "setting", "repeat", "run_seed", *kept]]


def _in_turns(plan: PolicyPlan, progress: bool) -> Execute:
    execute: Execute = import_module("workbench.experiments.in_turns").InTurns(
        plan, progress=progress
    )
    return execute


def _execute_here() -> Execute:
    """Runs in this process; the module that loads models comes with the first."""

    def execute(spec: RunSpec) -> RunResult:
        result: RunResult = import_module("workbench.experiments.policy_run").execute(spec)
        return result

    return execute
