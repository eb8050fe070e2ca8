"""Memory: starts, beams and arenas, and two models in one memory."""

import math

import pandas as pd
import pytest

from tests.experiments import policy_fakes
from workbench.bench import memory, search
from workbench.bench.memory import (
    BLOCK_SIZE,
    FullArena,
    beam_rows,
    blocks_used,
    budget_rows,
    longest_beams,
    measured_start,
    overhead_rows,
    resplit_row,
    study_rows,
)
from workbench.bench.record import record
from workbench.bench.search import make_workload
from workbench.engine.engine import Engine
from workbench.experiments.settings import PolicyPlan
from workbench.experiments.study import run_policies

PLAN = PolicyPlan(3, 2, (0.5, 2.0), (0.08, 0.2, 0.3), 0, repeats=0)


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    given = {"execute": policy_fakes.execute, "progress": False}
    return [run_policies(policy_fakes.CONFIG, PLAN, folder / str(k), **given) for k in range(2)]


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


def test_a_re_split_is_timed_until_it_is_reached_and_without_zeroing(monkeypatch):
    """Guards that blocks in use move, pages are zeroed on first use; not to be reached fails."""
    row = resplit_row(6, num_pages=160)
    assert (row.name, row.repeats) == ("resplit_p95_ms", 6)
    assert 0 < row.spread[0] <= row.value <= row.spread[1]
    full = FullArena(160)
    full.fill()
    stats = [cache.stats for cache in full.caches]
    zeroed, copied = full.arena.storage.bytes_zeroed, sum(each.copied for each in stats)
    for share in (0.3, 0.7, 0.3):
        full.resplit(share)
    assert sum(each.copied for each in stats) > copied
    assert full.arena.target["tiny-solver"] == 48
    assert full.arena.storage.bytes_zeroed == zeroed
    full.fill()
    assert full.arena.storage.bytes_zeroed > zeroed
    monkeypatch.setattr(full, "settle", lambda: None)
    with pytest.raises(AssertionError, match="tiny-prm holds more than its split"):
        full.resplit(0.7)


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


def test_beams_share_the_blocks_of_their_path_and_nothing_else():
    """Guards the count behind kv_beams_saving, on beams whose blocks can be counted by hand."""
    path = list(range(100, 101 + 2 * BLOCK_SIZE))
    alike = [(path, [7] * BLOCK_SIZE), (path, [7] * BLOCK_SIZE)]
    assert blocks_used(alike) == 2 + 2 + 2  # the path's full blocks once, the rest though equal
    assert blocks_used([([1, 2], [3]), ([4, 5], [6])]) == 2  # nothing in common


def test_the_longest_beams_of_a_search_share_their_past():
    """Guards that they are all n, with all they grew from, of the last iteration that has n."""
    workload = make_workload("tiny-solver", limit=2, n=8, beam_width=4, max_depth=6)
    rows = {row.name: row for row in beam_rows(workload, "16MiB", 0)}
    assert list(rows) == ["kv_beams_saving", "kv_beams_over_distinct"]
    assert all(row.value >= 1 for row in rows.values())
    nodes = [("a", "", 1, (1,)), ("b", "", 1, (2,)), ("aa", "a", 2, (3,) * 9)]
    tree = pd.DataFrame(nodes, columns=["node_id", "parent_id", "depth", "token_ids"])
    assert longest_beams(tree, [5], 2) == [([5], [1]), ([5], [2])]
    assert longest_beams(tree, [5], 1) == [([5, 1], [3] * 9)]
    assert longest_beams(tree, [5], 3) == []


def test_a_start_is_measured_in_a_fresh_process():
    """Guards that seconds and memory are of the engine, whose budget is weights and KV."""
    found = measured_start("tiny-solver", "8MiB", cold=True)
    assert 0 < found["seconds"] < 60
    assert found["budget"] > 8 * 2**20
    assert found["peak"] > 0
