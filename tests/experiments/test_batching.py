"""The batching study: what is said of cells that ran, of those that cannot be, and of waste."""

import dataclasses
import statistics
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.experiments.fake_sweep import FakeSweep
from workbench import plots
from workbench.errors import OutOfMemory, RunStoreError
from workbench.experiments import plans
from workbench.experiments.batching import Cell, Cells, run_batches, run_batches_replayed
from workbench.experiments.execute import one_by_one, rung_answers
from workbench.experiments.plans import replayed_config
from workbench.experiments.rows import balance_rows, batch_rows, cell_ratios, cells_provenance
from workbench.experiments.runs import RunResult, compare
from workbench.experiments.settings import CONTINUOUS, COUNTED, STATIC_BATCH, TIMED, UNCACHED
from workbench.experiments.study import provenance_of
from workbench.search.rounds import Progress

CONFIG = plans.sweep_config("quick", n=4, max_depth=3, seeds=(0, 1, 2))
PLAN = plans.BatchPlan((4, 32), (16, 256), (4, 32), 2, (4, 16), 2, num_seeds=2)


@one_by_one
def fake_cell(spec):
    """A cell that is faster the more sequences it has; a padded batch of 32 does not fit."""
    if spec.role == COUNTED:
        return RunResult({"waste": spec.config.block_size / 100})
    kind, seqs = spec.get("kind"), spec.config.max_num_seqs
    if kind == STATIC_BATCH and seqs == 32:
        raise OutOfMemory("A batch needs 99 KV blocks; there are 9. Give more memory.")
    rate = {CONTINUOUS: 10.0, UNCACHED: 4.0, STATIC_BATCH: 2.0}[kind] * seqs
    rate *= 1.1 if spec.seed else 0.9
    measured = {"tokens_per_s": 20 * rate, "steps_per_s": rate, "same_answers": True}
    measured |= {"padding": 0.25, "waste": 0.5, "requests": 40, "most_running": 4}
    return RunResult(measured)


@pytest.fixture(scope="module")
def study(root):
    return run_batches(CONFIG, PLAN, root, execute=fake_cell, progress=False)


def test_a_study_without_runs_and_cells_beside_searches_are_told(study, root, tmp_path):
    nothing = run_batches(CONFIG, PLAN, tmp_path, compute=False)
    with pytest.raises(RunStoreError, match="No run of the study finished"):
        _ = nothing.runs
    with pytest.raises(RunStoreError, match="Side a holds no finished search"):
        compare(root, root)


def test_rows_hold_what_cannot_be_with_its_reason(study):
    rows = batch_rows(study, "llm")
    without = rows[rows["steps_per_s"].isna()]
    assert list(without["kind"]) == [CONTINUOUS, STATIC_BATCH]
    assert "not all could decode" in without["error"].iloc[0]
    assert "99 KV blocks" in without["error"].iloc[1]
    assert set(rows["model"]) == {"llm"}


def test_a_cell_s_rate_is_the_mean_over_seeds_and_its_ratio_to_the_greatest_limits(study):
    rows = batch_rows(study, "prm")
    static = rows[(rows["kind"] == STATIC_BATCH) & (rows["max_num_seqs"] == 4)]
    assert len(static) == 1
    rates = static[["steps_per_s", "ratio_low", "ratio", "ratio_high"]].iloc[0]
    np.testing.assert_allclose(rates, [8.0, 0.025, 0.025, 0.025])
    cells, own = study.all_runs.copy(), {"kind": STATIC_BATCH, "max_num_seqs": 4, "model": "prm"}
    first = cells[(cells[list(own)] == own).all(axis=1)].index[0]
    cells.loc[first, ["status", "error", "steps_per_s"]] = ["failed", "no cable", np.nan]
    rows = batch_rows(SimpleNamespace(all_runs=cells), "prm")
    row = rows.query("kind == @STATIC_BATCH and max_num_seqs == 4").iloc[0]
    assert row["status"] == "finished" and pd.isna(row["error"]), "its other seed did"


def rates_of(values, kinds=CONTINUOUS):
    """Rates [cells, seeds]: cells of 8, 16, ... sequences."""
    number = range(len(values))
    limits = {"max_num_seqs": [8 << k for k in number], "max_num_batched_tokens": 256}
    index = pd.DataFrame({"model": "llm", "kind": kinds} | limits, number)
    return pd.DataFrame(values, pd.MultiIndex.from_frame(index))


def test_ratios_of_cells_are_paired_and_have_student_s_interval():
    """An independent oracle: the table of Student's t, of 95 % and two degrees of freedom."""
    logs = np.random.default_rng(1).normal(0, 0.1, (5, 3)) + np.arange(5)[:, None]
    found = np.log(cell_ratios(rates_of(np.exp(logs))))
    for cell, own in enumerate(logs[:4]):
        apart = [one - other for one, other in zip(own, logs[4])]
        middle, half = statistics.mean(apart), 4.3027 * statistics.stdev(apart) / 3**0.5
        told = found.iloc[cell]
        assert told["ratio"] == pytest.approx(middle)
        bounds = told["ratio_low"], told["ratio_high"]
        assert bounds == pytest.approx((middle - half, middle + half), abs=0.02 * half)
    assert (found.iloc[4] == 0).all(), "over itself"


def test_cells_of_one_seed_have_no_interval_and_without_a_reference_there_is_no_ratio():
    values = np.exp(np.random.default_rng(2).normal(0, 0.1, (6, 3)))
    alone = cell_ratios(rates_of(values[:, :1]))
    assert (-alone["ratio_low"][:5] == np.inf).all() and (alone["ratio_high"][:5] == np.inf).all()
    padded = cell_ratios(rates_of(values, STATIC_BATCH))
    assert padded["ratio"].isna().all(), "nothing continuous"
    values[5] = np.nan
    assert cell_ratios(rates_of(values))["ratio"].isna().all(), "the greatest limits failed"


def test_where_a_run_failed_all_cells_are_of_the_seeds_that_all_have(study):
    """Searches differ: a mean over other seeds would be compared with other searches."""
    cells = study.all_runs.copy()
    own = (cells["model"] == "llm") & (cells["max_num_seqs"] == 4) & (cells["seed"] == 1)
    failed = cells.index[own & (cells["kind"] == CONTINUOUS) & (cells["role"] == TIMED)][0]
    cells.loc[failed, ["status", "steps_per_s"]] = ["failed", np.nan]
    rows = batch_rows(SimpleNamespace(all_runs=cells), "llm").dropna(subset="steps_per_s")
    rate = {CONTINUOUS: 10.0, UNCACHED: 4.0, STATIC_BATCH: 2.0}
    wanted = 0.9 * rows["kind"].map(rate) * rows["max_num_seqs"]
    np.testing.assert_allclose(rows["steps_per_s"], wanted)
    great = (cells["max_num_seqs"] == 32) & (cells["max_num_batched_tokens"] == 256)
    great &= (cells["kind"] == CONTINUOUS) & (cells["model"] == "llm")
    cells.loc[great, ["status", "steps_per_s"]] = ["failed", np.nan]
    rows = batch_rows(SimpleNamespace(all_runs=cells), "llm")
    assert rows["ratio"].isna().all() and rows["steps_per_s"].notna().any()
    assert plots.batch_limits(rows).layout.meta["caption"]


def test_balance_is_steps_over_busy_seconds_and_waste_by_block_size(study):
    sweep, cells = FakeSweep(), study.all_runs.iloc[::-1].replace({"seed": {0: 2, 1: 0}})
    cells.loc[cells["seed"] == 0, "waste"] = 9.0  # of the other search: nothing of it is told
    rows = balance_rows(sweep, cells)
    assert not (rows["value"] == 9.0).any()
    busy = rows[(rows["metric"] == "steps_per_busy_s") & (rows["model"] == "prm")]
    runs = sweep.runs.groupby("llm_share")["prm_busy_s"].first()
    nodes = len(sweep.table("nodes", llm_share=0.3, seed=0))
    np.testing.assert_allclose(busy.set_index("llm_share")["value"], nodes / runs)
    waste = rows[(rows["metric"] == "waste") & (rows["kind"] == CONTINUOUS)]
    assert len(waste) == 2 * len(PLAN.grid_seqs) * len(PLAN.block_sizes)
    np.testing.assert_allclose(waste["value"], waste["block_size"] / 100)


def test_what_was_asked_stands_on_the_figure(study):
    said = cells_provenance(study.all_runs)
    assert "2 searches, each with its seed, of 2 problems, 80 to the LLM and 80 to the PRM" in said
    assert "one in 2 of them" in said
    one = cells_provenance(study.all_runs.query("seed == 0"))
    assert "requests of one search of 2 problems, 40 to the LLM and 40 to the PRM" in one


# -- cells that compute --

CELLS = plans.sweep_config(
    "quick", n=4, max_depth=2, levels=(1,), max_num_seqs=8, max_num_batched_tokens=128, seeds=(0, 1)
)


def carried_out_by(cells, specs):
    """Outcomes as a group of runs has them, and what each call carried out together."""
    found, calls, left = {}, [], list(specs)
    while left:
        told = [(s, outcome) for s, outcome in cells(left) if not isinstance(outcome, Progress)]
        found |= told
        calls.append([spec for spec, _ in told])
        left = [spec for spec in left if spec not in found]
    return found, calls


def planned(*sizes, **more):
    return plans.batch_runs(CELLS, plans.BatchPlan(*sizes, **more))


@pytest.fixture(scope="module")
def carried_out():
    """Cells of a small search: by role, model, kind, block size."""
    specs, cells, found = planned((4,), (128,), (4,), 1, (4, 16), 1), Cells(CELLS), {}
    for role in (TIMED, COUNTED):  # as the groups are
        found |= carried_out_by(cells, [spec for spec in specs if spec.role == role])[0]
    keys = ((s.role, s.get("model"), s.get("kind"), s.config.block_size) for s in found)
    return dict(zip(keys, found.values()))


def test_every_cell_gives_the_recorded_answers(carried_out):
    timed = [result for cell, result in carried_out.items() if cell[0] == TIMED]
    assert len(timed) == 2 * len((CONTINUOUS, UNCACHED, STATIC_BATCH))
    assert all(result.measured["same_answers"] for result in timed)


@pytest.mark.parametrize("model", ["llm", "prm"])
def test_counting_without_a_model_counts_what_the_engine_does(carried_out, model):
    both = (carried_out[role, model, CONTINUOUS, 16] for role in (TIMED, COUNTED))
    timed, counted = (each.measured for each in both)
    for name in ("waste", "num_steps", "most_running", "preempted", "requests"):
        assert counted[name] == timed[name], name
    assert 0 < carried_out[COUNTED, model, CONTINUOUS, 4].measured["waste"] < counted["waste"]


@pytest.mark.parametrize("model", ["llm", "prm"])
def test_padding_is_what_the_trace_counts_beyond_the_requests_own_rows(carried_out, model):
    static = carried_out[TIMED, model, STATIC_BATCH, 16]
    steps, requests = static.tables["steps"], static.tables["requests"]
    rows = steps[["prefill_tokens", "decode_tokens"]].to_numpy().sum()
    own = requests["prompt_tokens"].sum() + (requests["output_tokens"] - 1).clip(lower=0).sum()
    assert static.measured["padding"] == pytest.approx(1 - own / rows)
    assert static.measured["padding"] > 0
    unpadded = carried_out[TIMED, model, UNCACHED, 16]
    assert static.measured["waste"] > unpadded.measured["waste"]


def test_the_cells_of_a_model_take_turns_and_one_that_cannot_be_leaves_the_others(monkeypatch):
    """Guards that a slow minute is one of all."""
    specs = [s for s in planned((4, 8), (128,), (8,), 1, (16,), 1) if s.role == TIMED]
    turns, go_on = [], Cell.go_on

    def told(cell, part):
        turns.append((cell.spec.setting, part))
        if cell.spec.get("kind") == STATIC_BATCH and part > 0.5:
            raise OutOfMemory("no room")
        go_on(cell, part)

    monkeypatch.setattr(Cell, "go_on", told)
    found, calls = carried_out_by(Cells(CELLS), specs)
    models = [{s.get("model") for s in call} for call in calls]
    assert models in ([{"llm"}, {"prm"}], [{"prm"}, {"llm"}])
    first = [part for _, part in turns[: turns.index((calls[0][-1].setting, 1.0))]]
    assert first == sorted(first), "no cell is a turn ahead of another"
    failed = [s for s, outcome in found.items() if isinstance(outcome, OutOfMemory)]
    assert {s.get("kind") for s in failed} == {STATIC_BATCH} and len(failed) == 2
    done = [outcome for s, outcome in found.items() if s not in failed]
    assert len(done) == 6 and all(each.measured["same_answers"] for each in done)


def test_each_seed_s_requests_are_those_of_its_search():
    specs = planned((8,), (128,), (8,), 1, (16,), 2, num_seeds=2)
    wanted = [s for s in specs if s.role == TIMED and s.get("kind") == CONTINUOUS]
    cells, told = Cells(CELLS), {}
    for seed in (0, 1, 0):
        own = [s for s in wanted if s.seed == seed]
        found, _ = carried_out_by(cells, own)
        rows = {s.get("model"): each.measured["num_steps"] for s, each in found.items()}
        assert told.setdefault(seed, rows) == rows
    assert told[0] != told[1]


# -- the thesis's pair --


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The thesis's pair over a small grid: two problems' requests."""
    config = replayed_config("quick", n=4, max_depth=4)
    plan = plans.BatchPlan((4, 32), (16, 256), (4, 32), 1, (16,), 2)
    runs = tmp_path_factory.mktemp("replayed")
    return run_batches_replayed(config, plan, runs, progress=False)


@pytest.mark.parametrize("model", ["llm", "prm"])
def test_replayed_cells_answer_the_same_requests_faster_with_looser_limits(replayed, model):
    """Seconds follow from the batch alone: the same requests, the same tokens, in every cell."""
    runs = replayed.all_runs.query("model == @model")
    assert set(runs["status"]) == {"finished"} and set(runs["rung"]) == {"replayed 1B + 8B"}
    assert runs["requests"].nunique() == 1
    whole = runs[runs["kind"] == CONTINUOUS].assign(tokens=runs["tokens_per_s"] * runs["engine_s"])
    assert whole["tokens"].round(6).nunique() == 1 and len(whole) == 3
    seconds = whole.set_index(["max_num_seqs", "max_num_batched_tokens"])["engine_s"]
    assert seconds[32, 256] < seconds[4, 256] <= seconds[4, 16]
    beside = runs[runs["max_num_seqs"] == 32].set_index("kind")
    assert beside.loc[UNCACHED, "engine_s"] < beside.loc[STATIC_BATCH, "engine_s"]
    assert beside.loc[STATIC_BATCH, "padding"] > 0.1
    rows = batch_rows(replayed, model)
    assert "not all could decode" in rows[rows["steps_per_s"].isna()]["error"].iloc[0]


def test_what_is_replayed_are_the_requests_of_the_search(replayed):
    """One request of the LLM for each step that was sampled, and their tokens."""
    config = dataclasses.replace(replayed.config, num_problems=2)
    problems = rung_answers(config, 0).recording.problems
    llm = replayed.all_runs.query("model == 'llm' and kind == @CONTINUOUS").iloc[0]
    assert llm["requests"] == sum(len(problem.steps) for problem in problems)
    tokens = sum(len(step.tokens) for problem in problems for step in problem.steps)
    assert llm["tokens_per_s"] * llm["engine_s"] == pytest.approx(tokens)


def test_both_rungs_are_told_below_their_figure(study, replayed):
    said = provenance_of(study, replayed, told=lambda each: cells_provenance(each.all_runs))
    assert said.count("Each model alone") == said.count("LLM tiny") + said.count("LLM llama") == 2
    assert "simulated NVIDIA A100" in said and "Nothing was run" in said
