"""The replayed rung: a sweep like any other, that says it was not measured."""

import pytest

from workbench.experiments import replayed
from workbench.experiments.profiles import sweep_config
from workbench.experiments.replayed import (
    NOTHING_WAS_RUN,
    REPLAY_CODE,
    RUNG,
    code_digest,
    identity_on,
    replayed_config,
    replayed_face,
    replayed_sweep,
)
from workbench.experiments.store import load_runs
from workbench.experiments.views import (
    block_rows,
    memory_split_rows,
    prefix_hit_rows,
    thrashing_rows,
)
from workbench.replay.devices import PRESETS

SMALL = {"num_problems": 2, "n": 4, "max_depth": 4, "shares": [0.08, 0.5]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def sweep(folder):
    return replayed_sweep("quick", folder, **SMALL)


def test_the_rung_is_the_thesis_scale_over_the_profiles_shares() -> None:
    """Its models, memory and limits, at the shares that the measured rung has."""
    config, thesis = replayed_config("default"), sweep_config("thesis")
    for name in ("llm", "prm", "total_memory", "n", "beam_width", "max_depth", "max_num_seqs"):
        assert getattr(config, name) == getattr(thesis, name)
    assert config.shares == sweep_config("default").shares


def test_every_view_of_the_study_reads_it(sweep) -> None:
    """Throughput, blocks, hits and thrashing come from the same functions as measured ones."""
    rows = memory_split_rows(sweep)
    assert set(rows["llm_share"]) == {0.08, 0.5}
    rate = rows[rows["metric"] == "tokens_per_s"].set_index("llm_share")["value"]
    assert (rate > 0).all()
    assert prefix_hit_rows(sweep)["value"].between(0, 1).all()
    assert (thrashing_rows(sweep)["value"] >= 0).all()
    assert len(block_rows(sweep, 0.5, beside=(0.08,))) > 3


def test_a_problems_parts_add_up_to_the_run(sweep) -> None:
    """Wall time and tokens of a run are those of its problems."""
    problems, runs = sweep.table("problems"), sweep.runs
    sums = problems.groupby("llm_share")[["tokens", "wall_part_s"]].sum()
    assert sums["wall_part_s"].tolist() == pytest.approx(runs["wall_s"].tolist())
    assert sums["tokens"].tolist() == runs["sampled_tokens"].tolist()
    assert sums["tokens"].nunique() == 1, "the split changes no token"


def test_blocks_are_the_memorys(sweep) -> None:
    """What weights leave of 40 GiB, in blocks of each model's size."""
    for row in sweep.runs.to_dict("records"):
        for engine in ("llm", "prm"):
            left = row[f"{engine}_bytes"] - row[f"{engine}_weights_bytes"]
            assert row[f"{engine}_blocks"] == left // row[f"{engine}_block_bytes"]


def test_its_face_says_that_nothing_was_run(sweep) -> None:
    """Rung, device and assumptions stand on every figure; the machine is the simulated one."""
    text = replayed_face(sweep)
    assert RUNG in text
    assert NOTHING_WAS_RUN in text
    assert "simulated NVIDIA A100 40 GB" in text


def test_other_code_is_another_run(tmp_path, monkeypatch) -> None:
    """A changed constant of cost or workload is not answered with runs stored before it."""
    for name in ("cost.py", "workload.py", "devices.py"):
        (tmp_path / name).write_bytes((REPLAY_CODE / name).read_bytes())
    before = code_digest(tmp_path)
    assert before == code_digest(tmp_path) != code_digest()
    for file in sorted(tmp_path.iterdir()):
        file.write_text(file.read_text() + "CHANGED = 1\n")
        before, last = code_digest(tmp_path), before
        assert before != last
    now = identity_on(PRESETS["h100"])
    assert now == identity_on(PRESETS["h100"])
    monkeypatch.setattr(replayed, "code_digest", lambda: before)
    assert identity_on(PRESETS["h100"]) != now


def test_runs_are_found_again_and_not_mixed_up(sweep, folder) -> None:
    """The same question finds the stored runs; another device is another run."""
    again = replayed_sweep("quick", folder, **SMALL)
    assert again.folders == sweep.folders
    other = replayed_sweep("quick", folder, device=PRESETS["h100"], **SMALL)
    assert not set(other.folders) & set(sweep.folders)
    assert len(load_runs(folder)) == 4
    assert other.runs["wall_s"].max() < sweep.runs["wall_s"].min()
