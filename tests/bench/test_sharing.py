"""Rows of two models in one memory: ratios of turns taken together, nothing silently missing."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest

from tests.experiments import policy_fakes
from workbench.bench import arena, memory, sharing
from workbench.bench.record import record
from workbench.errors import OutOfMemory, WorkbenchError
from workbench.experiments import in_turns as in_turns_module
from workbench.experiments.in_turns import InTurns, runs_beside
from workbench.experiments.policy_plan import (
    PolicyPlan,
    WorkingSet,
    policy_config,
    tight_runs,
)
from workbench.experiments.policy_study import run_policies
from workbench.experiments.turns import Timed

PLAN = PolicyPlan(3, 2, 1, (0.5, 2.0), (0.08, 0.2, 0.3), ())


def quick_turns(specs):
    """All searches at twice the pace of the runs alone."""

    def outcome(spec):
        try:
            result = policy_fakes.execute(spec)
        except OutOfMemory as error:
            return error
        return Timed(result.measured["wall_s"] / 2, result)

    return [outcome(spec) for spec in specs]


@pytest.fixture(scope="module")
def in_turns():
    return InTurns(PLAN, 2, quick_turns, alone=policy_fakes.execute)


@pytest.fixture(scope="module")
def study(tmp_path_factory, in_turns):
    folder = tmp_path_factory.mktemp("runs")
    return run_policies(policy_fakes.CONFIG, PLAN, folder, execute=in_turns)


@pytest.fixture(scope="module")
def timed(study, in_turns):
    return in_turns.timed


@pytest.fixture(scope="module")
def rows(study, timed):
    return {row.name: row for row in sharing.study_rows(study, timed)}


def test_the_rows_of_the_issue_are_there_at_every_budget(rows):
    """Guards the names that others look up."""
    for budget in ("0.5W", "2W"):
        for name in ("elastic_vs_best_static", "elastic_vs_static_0.3", "all_vs_baseline"):
            row = rows[f"{name}@{budget}"]
            assert row.ceiling == pytest.approx(2 * rows["measured_bound"].value)
            assert row.share_of_ceiling == pytest.approx(row.value / row.ceiling)
        for policy in ("static_0.2", "static_0.3", "first_come", "phase_aware", "marginal_value"):
            assert rows[f"{policy}@{budget}"].value > 0
            assert f"recomputed_{policy}@{budget}" in rows
    assert rows["working_set_bytes"].value == sum(policy_fakes.PEAK.values())
    assert rows["same_nodes"].value == 1


def test_the_elastic_row_is_against_the_fastest_share(rows):
    """Guards which peer is named, and the direction of the ratio."""
    best, thesis = rows["elastic_vs_best_static@0.5W"], rows["elastic_vs_static_0.3@0.5W"]
    assert best.peer == "static_0.2"
    assert best.ratio == pytest.approx(2.3 / 2.32)
    assert thesis.ratio == pytest.approx(2.7 / 2.32)
    assert rows["all_vs_baseline@0.5W"].ratio > thesis.ratio


def test_a_share_that_cannot_be_is_a_row_without_a_value_that_says_why(rows):
    """Guards against infeasible shares dropped without a word; JSON has null for the value."""
    row = rows["static_0.08@0.5W"]
    assert math.isnan(row.value)
    assert row.unit.startswith("infeasible: ")
    assert rows["static_0.08@2W"].value > 0
    content = record("memory", rows.values(), {})
    values = {each["name"]: each["value"] for each in json.loads(json.dumps(content))["rows"]}
    assert values["static_0.08@0.5W"] is None


def test_all_of_a_budget_take_turns_and_those_close_to_the_best_again(study, timed):
    """Guards that no share is the best, or is not looked at again, by luck of a minute."""
    tight = timed[timed["budget"] == 0.5]
    first, again = (tight[tight["repeat"] == repeat] for repeat in (0, 1))
    assert set(first["setting"]) == {
        *(f"0.5W/{policy}/none" for policy in ("static_0.2", "static_0.3", "marginal_value")),
        *("0.5W/first_come/none", "0.5W/phase_aware/none", "0.5W/marginal_value/all"),
        "uncapped/first_come/all",
    }
    assert set(again["setting"]) == {"0.5W/static_0.2/none", "0.5W/marginal_value/none"}
    assert set(timed["seed"]) == set(study.config.seeds)


def test_equal_work_counts_as_one(timed, rows):
    """Guards a ratio of 1 where there is nothing to tell apart, and turns saved."""
    ample = timed[timed["budget"] == 2.0]
    assert rows["elastic_vs_static_0.3@2W"].ratio == 1
    assert rows["elastic_vs_static_0.3@2W"].peer_value == rows["static_0.3@2W"].value, "measured"
    assert rows["equal_work_differs@2W"].value > 1
    assert set(ample["repeat"]) == {0}


def test_equal_work_is_told_seed_by_seed(tmp_path):
    """Guards a ratio of 1 for the one seed, and a measured one for the other."""
    plan = replace(PLAN, budgets=(0.5,), num_seeds=2)
    own = InTurns(plan, 1, quick_turns, alone=policy_fakes.execute)
    study = run_policies(policy_fakes.CONFIG, plan, tmp_path, execute=own)
    runs = study.all_runs.copy()
    ours, theirs = "0.5W/marginal_value/none", "0.5W/static_0.3/none"
    kinds = [f"{engine}_prefill_tokens" for engine in ("llm", "prm")]
    equal, same = ((runs["setting"] == s) & (runs["seed"] == 0) for s in (ours, theirs))
    runs.loc[same, kinds] = runs.loc[equal, kinds].to_numpy()
    row = sharing._ratio(replace(study, all_runs=runs), own.timed, "x", ours, theirs)
    assert row.spread == (1.0, pytest.approx(2.7 / 2.32))
    assert row.ratio == pytest.approx((1 + 2.7 / 2.32) / 2)


def test_statics_of_equal_work_take_second_turns_once():
    """Guards that turns are not spent on what nobody reads, and ours is always among them."""
    need = WorkingSet(2**21, 2**23, 600)
    specs = tight_runs(policy_config(policy_fakes.CONFIG, PLAN), PLAN, need)
    ample = next(spec for spec in specs if spec.budget == 2.0)
    found = {spec: Timed(1.0, policy_fakes.execute(spec)) for spec in runs_beside(ample, PLAN)}
    for spec, timed in found.items():
        if spec.policy == "marginal_value":
            measured = dict(timed.result.measured) | {"llm_steps": 41}
            found[spec] = Timed(1.0, replace(timed.result, measured=measured))
    close = [spec.policy_name for spec in in_turns_module._close(found)]
    assert close == ["marginal_value", "static_0.08"]


def test_a_setting_that_fails_is_a_run_that_failed_and_the_others_stand(tmp_path):
    """Guards that a process that died in its turns, or in its second ones, is named by its row."""
    calls = []

    def dying(specs):
        calls.append([spec.policy_name for spec in specs])
        failing = "first_come" if len(calls) == 1 else "static_0.2"
        outcomes = quick_turns(specs)
        dead = WorkbenchError("The process ended or hung")
        return [
            dead if s.policy_name == failing and s.budget else o for s, o in zip(specs, outcomes)
        ]

    plan = replace(PLAN, budgets=(0.5,), num_seeds=1)
    again = InTurns(plan, 2, dying, alone=policy_fakes.execute)
    study = run_policies(policy_fakes.CONFIG, plan, tmp_path, execute=again)
    failed = study.all_runs[study.all_runs["status"] == "failed"]
    assert set(failed["setting"]) == {"0.5W/first_come/none", "0.5W/static_0.2/none"}
    assert failed["error"].str.contains("ended or hung").all()
    assert len(calls) == 2, "turns are not taken again for each setting"


def test_an_infeasible_baseline_leaves_ratios_without_value(study, timed):
    """Guards the record of a memory in which the thesis's share cannot be."""
    sides = "0.5W/marginal_value/none", "0.5W/static_0.08/none"
    row = sharing._ratio(study, timed, "x@0.5W", *sides)
    assert math.isnan(row.value)
    assert (row.peer, row.ratio) == ("static_0.08", None)


@pytest.mark.parametrize(
    ("column", "changed", "which"),
    [
        ("token_ids", [1, 2], {"setting": "0.5W/static_0.2/none", "repeat": 0}),
        ("score", 7.0, {"setting": "uncapped/first_come/all", "repeat": 0}),
        ("score", 7.0, {"setting": "2W/phase_aware/none", "repeat": 0}),
    ],
)
def test_one_node_that_differs_in_any_run_fails(study, timed, column, changed, which):
    """Guards sameness: the uncapped search with all techniques is compared too."""
    nodes = study.nodes.copy()
    own = (nodes[list(which)] == pd.Series(which)).all(axis=1)
    nodes.at[nodes.index[own][0], column] = changed
    with pytest.raises(AssertionError, match=f"'{which['setting']}': 1"):
        list(sharing.study_rows(replace(study, nodes=nodes), timed))


def test_the_record_says_what_was_shared():
    """Guards that budgets, shares and sample stand beside the rows."""
    settings = {"model": "tiny-solver", "profile": "default", "seeds": None}
    mode = memory.mode_of(settings)
    assert (mode["shared_problems"], mode["shared_seeds"]) == (16, 2)
    assert mode["kv_shares"] == (0.08, 0.2, 0.3, 0.5)
    assert "kv_shares" not in memory.mode_of(settings | {"model": "smollm2-135m"})


def test_a_re_split_moves_live_blocks_and_counts_their_bytes():
    """Guards that what is timed is a whole re-split: a tenth of the pages, with blocks in use."""
    rows = {row.name: row for row in arena.resplit_rows(6, num_pages=160)}
    assert rows["resplit_p95_ms"].value > 0
    assert rows["resplit_copied_bytes"].value > 0
    assert rows["resplit_blocks"].value == 400


def test_a_re_split_is_timed_until_it_is_reached_and_without_zeroing(monkeypatch):
    """Guards what the docstring says: pages are zeroed on first use; not to be reached fails."""
    full = arena.FullArena(160)
    full.fill()
    zeroed = full.arena.storage.bytes_zeroed
    full.resplit(0.3)
    assert full.arena.target["tiny-solver"] == 48
    assert full.arena.storage.bytes_zeroed == zeroed
    full.fill()
    assert full.arena.storage.bytes_zeroed > zeroed
    monkeypatch.setattr(full, "settle", lambda: None)
    with pytest.raises(AssertionError, match="tiny-prm holds more than its split"):
        full.resplit(0.7)


def test_one_model_in_an_arena_is_set_against_a_pool_of_its_own(monkeypatch):
    """Guards the pairing and the lower bound's row."""
    monkeypatch.setattr(arena, "BLOCKS", 256)
    ratio, low = arena.overhead_rows(pairs=2, prompts=1)
    assert (ratio.name, ratio.repeats) == ("arena_vs_dedicated", 2)
    assert low.value == ratio.spread[0] <= ratio.ratio
