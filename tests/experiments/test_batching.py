"""The batching study: which cells it has, what each is asked, and what is said of them."""

import numpy as np
import pandas as pd
import pytest

from tests.experiments.fake_sweep import FakeSweep
from workbench.errors import ConfigError, OutOfMemory, RunStoreError
from workbench.experiments import batch_sentences
from workbench.experiments.batch_plan import (
    CONTINUOUS,
    COUNTED,
    GRIDS,
    STATIC,
    TIMED,
    UNCACHED,
    BatchGrid,
    BatchSpec,
    batch_cells,
)
from workbench.experiments.batch_run import BatchRuns, wasted_share
from workbench.experiments.batch_study import balance_rows, batch_grid, batch_rows, run_batches
from workbench.experiments.compare import compare
from workbench.experiments.identity import identify
from workbench.experiments.profiles import sweep_config
from workbench.experiments.record import RunResult

CONFIG = sweep_config("quick", n=4, max_depth=3)
GRID = BatchGrid((4, 32), (16, 256), (4, 32), 2, (4, 16), 2)


def fake_cell(spec):
    """A cell that is faster the more sequences it has; a padded batch of 32 does not fit."""
    if spec.role == COUNTED:
        return RunResult({"waste": spec.cell["block_size"] / 100})
    if spec.kind == STATIC and spec.max_num_seqs == 32:
        raise OutOfMemory("A batch needs 99 KV blocks; there are 9. Give more memory.")
    rate = {CONTINUOUS: 10.0, UNCACHED: 4.0, STATIC: 2.0}[spec.kind] * spec.max_num_seqs
    rate *= 1.1 if spec.repeat else 0.9
    measured = {"tokens_per_s": 20 * rate, "steps_per_s": rate, "same_answers": True}
    measured |= {"padding": 0.25, "waste": 0.5, "requests": 40, "kv_blocks": 9, "most_running": 4}
    return RunResult(measured)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return run_batches(CONFIG, GRID, tmp_path_factory.mktemp("runs"), execute=fake_cell)


def test_every_cell_is_one_run_with_its_own_name_and_fingerprint():
    cells = batch_cells(CONFIG, GRIDS["default"])
    identity = identify(CONFIG)
    assert len({cell.name for cell in cells}) == len(cells)
    assert len({cell.fingerprint(identity) for cell in cells}) == len(cells)
    grid = [c for c in cells if c.role == TIMED and c.kind == CONTINUOUS and c.model == "llm"]
    assert len(grid) == 2 * 8, "512 sequences do not fit 256 tokens"
    repeats = [cell.repeat for cell in cells]
    assert repeats == sorted(repeats), "every cell once before any is repeated"


def test_a_cell_differs_from_the_study_in_its_limits_only():
    spec = BatchSpec(CONFIG, 0.3, 0, TIMED, 0, "prm", 8, 256, STATIC)
    usual, own = BatchSpec(CONFIG, 0.3, 0, model="llm").engine("prm"), spec.engine("prm")
    changed = {k for k, v in own.to_dict().items() if v != usual.to_dict()[k]}
    limits = {"max_num_seqs", "max_num_batched_tokens"}
    assert changed == limits | {"batching", "enable_prefix_caching"}
    assert spec.engine("llm") == BatchSpec(CONFIG, 0.3, 0, model="prm").engine("llm")


def test_a_grid_takes_lists_and_refuses_nonsense_and_the_full_one_is_the_thesis_s():
    assert batch_grid("quick", max_num_seqs=[2, 4], compared=None).max_num_seqs == (2, 4)
    full = GRIDS["full"]
    assert (full.max_num_seqs[0], full.max_num_seqs[-1]) == (8, 512)
    assert (full.max_num_batched_tokens[0], full.max_num_batched_tokens[-1]) == (256, 16384)
    assert full.block_sizes == (1, 2, 4, 8, 16, 32, 64)
    with pytest.raises(ConfigError, match=r"block_sizes is \(0,\)"):
        BatchGrid(block_sizes=(0,))
    with pytest.raises(ConfigError, match="compared_every=0"):
        BatchGrid(compared_every=0)


def test_stored_cells_are_found_again(study, tmp_path):
    def refuse(spec):
        raise AssertionError(spec.name)

    root = study.sweep.folders[0].parent
    again = run_batches(CONFIG, GRID, root, execute=refuse)
    assert set(again.sweep.folders) == set(study.sweep.folders)
    nothing = run_batches(CONFIG, GRID, tmp_path, execute=refuse)
    with pytest.raises(RunStoreError, match="No cell of the batching study finished"):
        _ = nothing.runs


def test_rows_hold_what_cannot_be_with_its_reason(study):
    rows = batch_rows(study, "llm")
    without = rows[rows["steps_per_s"].isna()]
    assert list(without["kind"]) == [CONTINUOUS, STATIC]
    assert "not all could decode" in without["error"].iloc[0]
    assert "99 KV blocks" in without["error"].iloc[1]
    assert set(rows["model"]) == {"llm"}


def test_a_cell_s_rate_is_the_median_of_its_repetitions_with_their_range(study):
    rows = batch_rows(study, "prm")
    static = rows[(rows["kind"] == STATIC) & (rows["max_num_seqs"] == 4)]
    assert len(static) == 1
    rates = static[["steps_per_s_low", "steps_per_s", "steps_per_s_high"]].iloc[0]
    np.testing.assert_allclose(rates, [7.2, 8.0, 8.8])


def test_balance_is_steps_over_busy_seconds_and_waste_by_block_size(study):
    sweep = FakeSweep()
    rows = balance_rows(sweep, study)
    busy = rows[(rows["metric"] == "steps_per_busy_s") & (rows["model"] == "prm")]
    runs = sweep.runs.groupby("llm_share")["prm_busy_s"].first()
    nodes = len(sweep.table("nodes", llm_share=0.3, seed=0))
    np.testing.assert_allclose(busy.set_index("llm_share")["value"], nodes / runs)
    waste = rows[(rows["metric"] == "waste") & (rows["kind"] == CONTINUOUS)]
    assert len(waste) == 2 * len(GRID.max_num_seqs) * len(GRID.block_sizes)
    np.testing.assert_allclose(waste["value"], waste["block_size"] / 100)


def test_sentences_hold_the_numbers_of_the_rows(study):
    rows = batch_rows(study, "prm")
    assert "**320.0** reasoning steps judged a second" in batch_sentences.limits_sentence(rows)
    said = batch_sentences.static_sentence(rows)
    assert "static batches of 4 the PRM has **8.0**" in said
    for words in ("**2.0** times as fast", "**5.0** times as fast", "25% of the rows"):
        assert words in said
    assert "Padded batches of 32 do not fit" in said
    assert f"**{len(study.runs)} of" in batch_sentences.sameness_sentence(study.runs)
    drawn = balance_rows(FakeSweep(), study)
    assert "at an LLM share of 0.50" in batch_sentences.balance_sentence(drawn)
    assert "16.0% in blocks of 16" in batch_sentences.waste_sentence(drawn)


def test_waste_is_the_room_without_tokens_over_all_steps():
    steps = pd.DataFrame({"blocks_active": [2, 6], "tokens_held": [8, 8]})
    assert wasted_share(steps, 4) == pytest.approx(0.5)


SMALL = sweep_config(
    "quick", n=4, max_depth=2, levels=(1,), max_num_seqs=8, max_num_batched_tokens=128
)


@pytest.fixture(scope="module")
def carried_out():
    """Real cells of a small search, all by one BatchRuns: by role, model, kind, block size."""
    runs, found = BatchRuns(), {}
    for spec in batch_cells(SMALL, BatchGrid((4,), (128,), (4,), 1, (4, 16), 1, 1)):
        found[spec.role, spec.model, spec.kind, spec.cell["block_size"]] = runs(spec)
    return found


def test_every_cell_gives_the_recorded_answers(carried_out):
    timed = [result for cell, result in carried_out.items() if cell[0] == TIMED]
    assert len(timed) == 2 * len((CONTINUOUS, UNCACHED, STATIC))
    assert all(result.measured["same_answers"] for result in timed)


@pytest.mark.parametrize("model", ["llm", "prm"])
def test_counting_without_a_model_counts_what_the_engine_does(carried_out, model):
    timed, counted = (
        carried_out[role, model, CONTINUOUS, 16].measured for role in (TIMED, COUNTED)
    )
    for name in ("waste", "num_steps", "most_running", "preempted", "requests"):
        assert counted[name] == timed[name], name
    assert 0 < carried_out[COUNTED, model, CONTINUOUS, 4].measured["waste"] < counted["waste"]


@pytest.mark.parametrize("model", ["llm", "prm"])
def test_padding_is_what_the_trace_counts_beyond_the_requests_own_rows(carried_out, model):
    static = carried_out[TIMED, model, STATIC, 16]
    steps, requests = static.tables["steps"], static.tables["requests"]
    rows = steps[["prefill_tokens", "decode_tokens"]].to_numpy().sum()
    own = requests["prompt_tokens"].sum() + (requests["output_tokens"] - 1).clip(lower=0).sum()
    assert static.measured["padding"] == pytest.approx(1 - own / rows)
    assert static.measured["padding"] > 0
    assert static.measured["waste"] > carried_out[TIMED, model, UNCACHED, 16].measured["waste"]


def test_cells_beside_searches_do_not_disturb_a_comparison(study):
    root = study.sweep.folders[0].parent
    with pytest.raises(RunStoreError, match="Side a holds no finished search"):
        compare(root, root)
