"""Memory: starts, an arena, and two models in one memory."""

import math

import pytest

from tests.experiments import policy_fakes
from workbench.bench import memory, search
from workbench.bench.memory import budget_rows, measured_start, overhead_rows, study_rows
from workbench.bench.record import record
from workbench.engine.engine import Engine
from workbench.experiments.plans import PolicyPlan
from workbench.experiments.study import run_policies

PLAN = PolicyPlan(3, 2, (0.5, 2.0), (0.08, 0.2, 0.3), 0, repeats=0)


@pytest.fixture(scope="module")
def studies(root):
    given = {"execute": policy_fakes.execute, "progress": False}
    return [run_policies(policy_fakes.CONFIG, PLAN, root / str(k), **given) for k in range(2)]


@pytest.fixture(scope="module")
def rows(studies):
    return {row.name: row for row in study_rows(studies)}


def test_the_rows_of_the_issue_are_there_at_every_budget(rows):
    """Guards the names that others look up, which peer is named, and the direction of the ratio."""
    for budget in ("0.5W", "2W"):
        for name in ("elastic_vs_best_static", "elastic_vs_static_0.3", "all_vs_baseline"):
            row = rows[f"{name}@{budget}"]
            assert row.ceiling is None, "the uncapped search is no bound for what saves steps"
            assert row.repeats == 2 * len(policy_fakes.CONFIG.seeds)
        for policy in ("static_0.2", "static_0.3", "first_come", "phase_aware", "marginal_value"):
            assert rows[f"{policy}@{budget}"].value > 0
    best, thesis = rows["elastic_vs_best_static@0.5W"], rows["elastic_vs_static_0.3@0.5W"]
    assert (best.peer, best.ratio) == ("static_0.2", pytest.approx(2.3 / 2.32))
    assert thesis.ratio == pytest.approx(2.7 / 2.32)
    assert rows["all_vs_baseline@0.5W"].ratio > thesis.ratio
    assert rows["same_nodes"].value == 1


def test_a_share_that_cannot_be_is_a_row_without_a_value_that_says_why(rows):
    """Guards against infeasible shares dropped without a word; JSON has null for the value."""
    row = rows["static_0.08@0.5W"]
    assert math.isnan(row.value)
    assert row.unit.startswith("infeasible: ")
    assert rows["static_0.08@2W"].value > 0
    values = {each["name"]: each["value"] for each in record("memory", rows.values(), {})["rows"]}
    assert values[row.name] is None


def test_ratios_of_equal_work_are_as_measured(studies):
    """Guards against a loss that a rule hides: the same work in more seconds is no ratio of 1."""
    runs = studies[0].all_runs.query("budget == 2").assign(time=0)
    runs["wall_s"] *= 1 + (runs["setting"] == "2W/marginal_value/none")
    rows = {row.name: row for row in budget_rows(runs)}
    row = rows["elastic_vs_static_0.3@2W"]
    assert (row.ratio, row.peer_value) == (pytest.approx(0.5), rows["static_0.3@2W"].value)
    assert rows["equal_work_differs@2W"].value >= 2


def test_one_node_that_differs_in_any_run_fails(tmp_path):
    """Guards sameness: the uncapped search with all techniques is compared too."""
    for number, wrong in enumerate(("0.5W/static_0.2/none", "uncapped/first_come/all")):

        def other(specs, wrong=wrong):
            for spec, found in policy_fakes.execute(specs):
                if spec.setting == wrong:
                    found.tables["nodes"].loc[0, "score"] = 7.0
                yield spec, found

        given = {"execute": other, "progress": False}
        changed = run_policies(policy_fakes.CONFIG, PLAN, tmp_path / str(number), **given)
        with pytest.raises(AssertionError, match=f"'{wrong}'"):
            list(study_rows([changed]))


def test_an_arena_is_set_against_pools_of_their_own_which_do_all_their_work_too(monkeypatch):
    """Guards the pairing, the lower bound's row, and the side that takes more steps."""
    made = []

    def engine(*given, **settings):
        made.append(Engine(*given, **settings))
        return made[-1]

    monkeypatch.setattr(memory, "BLOCKS", 160)
    monkeypatch.setattr(memory, "Engine", engine)
    ratio, low = overhead_rows(search.TINY, pairs=1, prompts=16)
    assert (ratio.name, ratio.repeats) == ("arena_vs_dedicated", 1)
    assert low.value == ratio.spread[0] <= ratio.ratio
    steps = [len(each.trace.steps) for each in made]
    assert steps[0] < steps[2], "the LLM's"
    assert not any(each.has_work for each in made)


def test_a_start_is_measured_in_a_fresh_process():
    """Guards that seconds and memory are of the engine, whose budget is weights and KV."""
    found = measured_start("tiny-solver", "8MiB", cold=True)
    assert 0 < found["seconds"] < 60
    assert found["budget"] > 8 * 2**20
    assert found["peak"] > 0
