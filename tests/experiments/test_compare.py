"""Two runs side by side: settings, paired differences, the first node that differs, warnings."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from tests.experiments.fakes import store_fake
from workbench.errors import RunStoreError
from workbench.experiments.compare import compare
from workbench.experiments.settings import RunSpec, sweep_config
from workbench.trace import write_table

CONFIG = sweep_config("quick", num_problems=6)


def edit(folder, table, change):
    file = folder / f"{table}.parquet"
    write_table(change(pd.read_parquet(file)), file)


@pytest.fixture
def pair(tmp_path):
    return [store_fake(tmp_path, RunSpec(CONFIG, share, 0)) for share in (0.3, 0.5)]


def test_only_what_was_set_differently_is_listed_and_differences_are_paired(pair):
    found = compare(*pair)
    assert found.parameters.to_dict("records") == [{"name": "llm_share", "a": "0.3", "b": "0.5"}]
    assert found.identical
    assert found.first_difference is None
    assert all("uncommitted" in text for text in found.warnings)
    rows = found.differences.set_index("metric")
    speed = rows.loc["tokens_per_s"]
    assert speed["a"] == pytest.approx(1000)
    assert speed["b"] == pytest.approx(1000 / 1.8)
    assert speed["low"] <= speed["difference"] <= speed["high"] < 0
    assert rows.loc["accuracy", "difference"] == 0
    assert rows.loc["seconds", "low"] > 0
    assert (rows["pairs"] == 6).all()


def test_several_seeds_pair_by_problem_and_seed(tmp_path):
    sides = [
        [store_fake(tmp_path, RunSpec(CONFIG, share, seed)) for seed in (0, 1)]
        for share in (0.3, 0.5)
    ]
    assert compare(*sides).differences["pairs"].tolist() == [12, 12, 12, 12, 12]
    whole = compare(tmp_path, tmp_path)  # a sweep with itself pairs by share too
    assert whole.identical
    assert whole.differences["pairs"].max() == 24


def test_the_first_node_that_differs_is_named(pair):
    def other_token(nodes):
        where = nodes.index[(nodes["problem_id"] == "p2") & (nodes["node_id"] == "1")][0]
        nodes.at[where, "token_ids"] = [1, 2, 999]
        return nodes

    edit(pair[1], "nodes", other_token)
    found = compare(*pair)
    assert not found.identical
    first = found.first_difference
    assert (first.problem_id, first.node_id, first.what) == ("p2", "1", "tokens")
    assert first.b == [1, 2, 999]
    assert "problem p2, seed 0, node 1: tokens differ, a has [" in found._repr_html_()
    hostile = "<img src=x onerror=alert(1)>"
    told = replace(found, first_difference=replace(first, problem_id=hostile), warnings=(hostile,))
    assert told._repr_html_().count("&lt;img") == 2 and "<img" not in told._repr_html_()


def test_a_score_or_a_missing_node_counts_as_a_difference(pair):
    edit(pair[1], "nodes", lambda nodes: nodes.assign(score=[0.123, *nodes["score"][1:]]))
    assert compare(*pair).first_difference.what == "score"
    edit(pair[1], "nodes", lambda nodes: nodes.drop(index=0))
    assert compare(*pair).first_difference.what == "missing"


def test_another_machine_or_version_is_a_warning(pair):
    elsewhere = {"machine": "NVIDIA H200, 16 cores", "versions": json.dumps({"torch": "2.11"})}
    edit(pair[1], "runs", lambda runs: runs.assign(**elsewhere))
    text = " ".join(compare(*pair).warnings)
    assert "machine differs" in text
    assert "H200" in text
    assert "versions differs" in text


def test_runs_without_pairs_are_refused(tmp_path, pair):
    other = store_fake(tmp_path, RunSpec(CONFIG, 0.3, 1))
    with pytest.raises(RunStoreError, match="no problem in common"):
        compare(pair[0], other)
    with pytest.raises(RunStoreError, match="no finished search"):
        compare(pair[0], [])
