"""Run folders: whole or absent, found by fingerprint, never mixed up, readable one by one."""

import os
import subprocess
import sys

import pandas as pd
import pytest

from tests.experiments.fakes import IDENTITY, store_fake
from workbench.errors import RunStoreError
from workbench.experiments.plan import RunSpec
from workbench.experiments.profiles import sweep_config
from workbench.experiments.record import run_config, run_tables
from workbench.experiments.store import (
    CONFIG,
    TEMPORARY,
    RunStore,
    load_runs,
    load_table,
    read_config,
    status_of,
)

CONFIGURATION = sweep_config("quick", num_problems=3)
SPEC = RunSpec(CONFIGURATION, 0.3, 0)


def failed_tables(error="boom"):
    return run_tables(SPEC, IDENTITY, "failed", error=error)


def test_a_run_is_stored_whole_and_found_by_its_fingerprint(tmp_path):
    folder = store_fake(tmp_path, SPEC)
    store = RunStore(tmp_path)
    assert store.find(SPEC.fingerprint(IDENTITY)) == folder
    assert folder.name == f"split-0.300-seed0-{SPEC.fingerprint(IDENTITY)}"
    files = {"runs", "problems", "steps", "requests", "nodes", "spans"}
    assert {p.name for p in folder.iterdir()} == {f"{t}.parquet" for t in files} | {CONFIG}
    assert read_config(folder)["parameters"]["llm_share"] == 0.3
    assert [p for p in tmp_path.iterdir() if p.name.startswith(TEMPORARY)] == []


def test_the_runs_row_has_every_parameter_memory_machine_versions_and_status(tmp_path):
    store_fake(tmp_path, SPEC)
    row = load_runs(tmp_path).iloc[0]
    assert set(SPEC.parameters) <= set(row.index)
    wanted = ["status", "error", "machine", "versions", "git_commit", "llm_kv_tokens", "accuracy"]
    wanted += ["tokens_per_s", "problems_per_min", "machine_cpu", "machine_threads", "profile"]
    assert set(wanted) <= set(row.index)
    assert row["status"] == "finished"
    assert pd.isna(row["error"])
    assert row["llm_bytes"] + row["prm_bytes"] == row["total_memory"]


def test_tables_of_several_runs_carry_their_run_s_id(tmp_path):
    for seed in (0, 1):
        store_fake(tmp_path, RunSpec(CONFIGURATION, 0.3, seed))
    nodes = load_table(tmp_path, "nodes")
    assert nodes["run_id"].nunique() == 2
    assert set(nodes["run_id"]) == set(load_runs(tmp_path)["run_id"])
    assert load_table(tmp_path, "requests").empty
    with pytest.raises(RunStoreError, match="Did you mean 'nodes'"):
        load_table(tmp_path, "node")


def test_a_failed_run_is_replaced_a_finished_one_never(tmp_path):
    store, config = RunStore(tmp_path), run_config(SPEC, IDENTITY)
    folder = store.write(SPEC.name, config, failed_tables())
    assert status_of(folder) == "failed"
    assert store_fake(tmp_path, SPEC) == folder
    assert status_of(folder) == "finished"
    before = (folder / "runs.parquet").read_bytes()
    store.write(SPEC.name, config, failed_tables())
    assert (folder / "runs.parquet").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_leftovers_of_dead_processes_go_those_of_living_ones_stay(tmp_path):
    store = RunStore(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    own = store._temporary("run-abc")
    gone = tmp_path / own.name.replace(f"+{os.getpid()}+", f"+{dead.pid}+")
    elsewhere = tmp_path / gone.name.replace(TEMPORARY, f"{TEMPORARY}other-host-")
    for folder in (own, gone, elsewhere):
        folder.mkdir()
    assert store.clear_leftovers() == [gone]
    assert own.is_dir()
    assert elsewhere.is_dir()
    assert store.folders() == []


def test_a_damaged_run_is_named_and_hides_no_other(tmp_path):
    damaged = store_fake(tmp_path, SPEC)
    store_fake(tmp_path, RunSpec(CONFIGURATION, 0.3, 1))
    file = damaged / "runs.parquet"
    file.write_bytes(file.read_bytes()[:200])
    runs = load_runs(tmp_path).set_index("folder")
    assert runs.loc[str(damaged), "status"] == "unreadable"
    assert "runs.parquet" in runs.loc[str(damaged), "error"]
    assert (runs["status"] == "finished").sum() == 1
    store_fake(tmp_path, SPEC)  # and it can be made again
    assert status_of(damaged) == "finished"


def test_a_missing_folder_is_an_error_an_empty_one_has_no_runs(tmp_path):
    with pytest.raises(RunStoreError, match="workbench runs list"):
        load_runs(tmp_path / "nowhere")
    assert load_runs(tmp_path).empty
    assert load_table(tmp_path, "steps").empty
