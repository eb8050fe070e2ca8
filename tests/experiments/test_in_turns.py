"""The study of policies in turns: what is held against each other is of the same minutes."""

from dataclasses import replace

import pytest

from tests.experiments.policy_fakes import CONFIG, PLAN, execute
from workbench.experiments import in_turns, policy_plan
from workbench.experiments.in_turns import InTurns
from workbench.experiments.policy_ceiling import bound_seconds, ceiling_tokens_per_s
from workbench.experiments.policy_study import policies_face, run_policies, setting_of, speed_up
from workbench.experiments.record import RunResult
from workbench.experiments.run import ENGINES
from workbench.experiments.turns import Timed

ALL_UNCAPPED = "uncapped/first_come/all"
TIMES = ("wall_s", *(f"{engine}_busy_s" for engine in ENGINES))


def at_half_pace(specs):
    """All searches, each taking twice as long as alone."""
    found = [execute(spec) for spec in specs]
    slow = [{**each.measured, **{t: 2 * each.measured[t] for t in TIMES}} for each in found]
    return [Timed(1.0, replace(each, measured=row)) for each, row in zip(found, slow)]


def test_bound_and_noise_are_of_the_turns(tmp_path):
    """Guards a share of a bound of other minutes, and equal work of other rounds as noise."""
    plan = replace(PLAN, kv_shares=(0.2, 0.3), num_seeds=2, repeats=1, in_turns=True)
    turns = InTurns(plan, turns=at_half_pace, alone=execute)
    study = run_policies(CONFIG, plan, tmp_path, execute=turns, progress=False)
    alone = [run for run in study.all_runs.to_dict("records") if run["setting"] == ALL_UNCAPPED]
    rate = sum(r["sampled_tokens"] for r in alone) / sum(map(bound_seconds, alone))
    assert ceiling_tokens_per_s(study) == pytest.approx(rate / 2)
    ours = setting_of(0.5, "marginal_value", None, "none")
    assert sorted(study.runs_of(ours, (0, 1))["repeat"]) == [0, 0, 1, 1]
    ample = study.runs[(study.runs["budget"] == 2.0) & (study.runs["technique"] == "none")]
    tight = 4 + 4  # the default policy, and the two that miss as much
    assert study.noise.runs == len(ample) + 2 + tight, "no uncapped search, which took no turns"
    assert "take turns" in policies_face(study)
    again = InTurns(plan, turns=at_half_pace, alone=execute)
    run_policies(CONFIG, plan, tmp_path, execute=again, progress=False)
    assert again.timed.empty, "what is stored takes no turns"


def test_rounds_of_different_minutes_are_told_at_one_pace(tmp_path, monkeypatch):
    """Guards a technique that looks slow for the round it was in; every round has its bound."""
    for module in (policy_plan, in_turns):
        monkeypatch.setattr(module, "ROUND", 3)
    rounds = []

    def slower_and_slower(specs):
        rounds.append([spec.name for spec in specs])
        found = [execute(spec) for spec in specs]
        times = [{t: len(rounds) * each.measured[t] for t in TIMES} for each in found]
        for each, row in zip(found, times):
            row["tokens_per_s"] = each.measured["sampled_tokens"] / row["wall_s"]
        problems = [each.tables["problems"] for each in found]
        parts = [table.assign(wall_part_s=len(rounds) * table["wall_part_s"]) for table in problems]
        return [
            Timed(1.0, RunResult({**r.measured, **t}, {**r.tables, "problems": p}))
            for r, t, p in zip(found, times, parts)
        ]

    plan = replace(PLAN, kv_shares=(0.2, 0.3), in_turns=True)
    turns = InTurns(plan, turns=slower_and_slower, alone=execute)
    study = run_policies(CONFIG, plan, tmp_path, execute=turns, progress=False)
    alone = run_policies(CONFIG, plan, tmp_path / "alone", execute=execute, progress=False)
    assert len(rounds) > 2
    assert max(map(len, rounds)) == 4
    ratios = [speed_up(each, *technique_pair()).estimate for each in (study, alone)]
    assert ratios[0] == pytest.approx(ratios[1])
    tight = study.all_runs[study.all_runs["budget"].notna()]
    told = tight["tokens_per_s"] * tight["wall_s"] / tight["sampled_tokens"]
    assert told.to_numpy() == pytest.approx(1.0), "rates are told at the pace of the seconds"


def technique_pair():
    return tuple(setting_of(0.5, "static", 0.3, technique) for technique in ("none", "all"))


def test_a_study_that_is_gone_on_with_has_a_bound_too(tmp_path):
    """Guards a bound that is missing where the uncapped searches were stored before."""
    plan = replace(PLAN, kv_shares=(0.2, 0.3), budgets=(0.5,), in_turns=True)
    run_policies(CONFIG, replace(plan, in_turns=False), tmp_path, execute=execute, progress=False)
    turns = InTurns(plan, turns=at_half_pace, alone=execute)
    study = run_policies(CONFIG, plan, tmp_path, execute=turns, progress=False)
    assert study.runs["in_turns"].all()
    assert study.runs["bound_tokens_per_s"].notna().all()
