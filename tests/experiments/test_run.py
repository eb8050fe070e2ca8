"""One small sweep with the embedded models: what is stored is what was measured."""

import pandas as pd
import pytest

from workbench.experiments import run
from workbench.experiments.compare import compare
from workbench.experiments.profiles import sweep_config
from workbench.experiments.run import COUNTS
from workbench.experiments.sweep import run_sweep

SMALL = {"num_problems": 3, "levels": (1, 2), "n": 4, "beam_width": 2, "max_depth": 5}
SMALL |= {"shares": (0.08, 0.3), "seeds": (0,), "warmup_problems": 0, "max_num_seqs": 8}
SMALL |= {"max_num_batched_tokens": 256, "max_step_tokens": 48}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return run_sweep(
        sweep_config("quick", **SMALL), tmp_path_factory.mktemp("runs"), progress=False
    )


def test_both_shares_finish_and_find_the_same_answers(sweep):
    assert list(sweep.runs["llm_share"]) == [0.08, 0.3]
    found = compare(*sweep.runs["folder"])
    assert found.identical, found.first_difference
    assert list(found.parameters["name"]) == ["llm_share"]


def test_the_row_adds_up(sweep):
    for row in sweep.runs.to_dict("records"):
        for role in ("llm", "prm"):
            parts = row[f"{role}_weights_bytes"] + row[f"{role}_kv_bytes"]
            assert parts == row[f"{role}_bytes"]  # activations lie outside the total
            assert row[f"{role}_activations_bytes"] > 0
            assert row[f"{role}_blocks"] == row[f"{role}_kv_bytes"] // row[f"{role}_block_bytes"]
            assert row[f"{role}_lacks_bytes"] == 0
        assert row["tokens_per_s"] == pytest.approx(row["sampled_tokens"] / row["wall_s"])
        assert 0 < row["llm_busy_s"] + row["prm_busy_s"] <= row["wall_s"]
        assert row["steady_tokens_per_s"] > 0
        assert 0 <= row["accuracy"] <= 1
        assert row["llm_tokens_per_busy_s"] > 0 < row["prm_tokens_per_busy_s"]


def test_tables_agree_with_the_row_and_with_each_other(sweep):
    for row in sweep.runs.to_dict("records"):
        share = row["llm_share"]
        problems, nodes, steps, requests = (
            sweep.table(name, llm_share=share)
            for name in ("problems", "nodes", "steps", "requests")
        )
        assert len(problems) == 3
        assert problems["wall_part_s"].sum() == pytest.approx(row["wall_s"])
        assert problems["tokens"].sum() == nodes["step_tokens"].sum() == row["sampled_tokens"]
        assert nodes["step_tokens"].equals(nodes["token_ids"].map(len))
        for role in ("llm", "prm"):
            own = steps[steps["engine"] == role]
            assert len(own) == row[f"{role}_steps"]
            assert all(own[name].sum() == row[f"{role}_{name}"] for name in COUNTS)
            total = own[["blocks_active", "blocks_cached", "blocks_free"]].sum(axis=1)
            assert (total == row[f"{role}_blocks"]).all()
        generated = requests[requests["kind"] == "generate"]
        assert generated["output_tokens"].sum() == row["sampled_tokens"]
        assert set(requests["engine"]) == {"llm", "prm"}


def test_steps_and_spans_fill_the_wall_time(sweep):
    steps, spans = (sweep.table(name, llm_share=0.3) for name in ("steps", "spans"))
    both = pd.concat([steps, spans])
    first, last = both["start_s"].min(), (both["start_s"] + both["duration_s"]).max()
    assert both["duration_s"].sum() == pytest.approx(last - first, rel=0.02)


def test_every_table_of_the_contract_is_there_with_its_columns(sweep):
    expected = {
        "nodes": {"node_id", "parent_id", "path", "depth", "beam", "score", "kept", "finished"},
        "problems": {"level", "subject", "predicted", "correct", "tokens", "iterations"},
        "spans": {"lane", "kind", "start_s", "duration_s"},
    }
    expected["problems"] |= {"seconds", "finished"}
    for name, columns in expected.items():
        table = sweep.table(name)
        assert columns | {"run_id", "llm_share", "run_seed"} <= set(table.columns)
        assert set(table["run_id"]) == set(sweep.runs["run_id"])
    assert sweep.table("nodes")["score"].notna().all()


def test_a_sweeps_switches_reach_the_search(monkeypatch):
    """Every switch that a sweep sets is one of run_search, under the same name and value."""
    given = {"request_order": "prefix", "problem_batching": "static", "forget_pruned": True}
    config = sweep_config("quick", finish_at_limit=True, **given).search()
    called = {}
    monkeypatch.setattr(run, "run_search", lambda problems, **named: called.update(named))
    monkeypatch.setattr(run, "PRM", lambda engine, format: engine)
    run.search([], None, None, config, seed=0)
    assert {name: called[name] for name in given} == given
    assert called["strategy"].finish_at_limit
