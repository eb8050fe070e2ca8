"""Run folders: whole or absent, found by fingerprint, never mixed up, readable one by one."""

import io
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from dataclasses import replace
from unittest.mock import Mock, patch

import pandas as pd
import pytest

from tests.experiments.fakes import IDENTITY, store_fake
from tests.models.gguf_making import random_tensors, write_gguf
from workbench.errors import ConfigError, DeviceOutOfMemory, OutOfMemory, RunStoreError
from workbench.experiments import runs as run_store
from workbench.experiments.memory import feasibility
from workbench.experiments.plans import sweep_config
from workbench.experiments.runs import RunResult, RunStore, compare, held, load_runs, status_of
from workbench.experiments.settings import COUNTED, TIMED, RunSpec
from workbench.experiments.statistics import WORK
from workbench.trace import write_table

TEMPORARY = run_store.TEMPORARY
CONFIGURATION = sweep_config("quick", num_problems=3)
SPEC = RunSpec(CONFIGURATION, 0.3, 0)


def test_a_run_is_stored_whole_with_its_settings_and_found_by_its_fingerprint(tmp_path):
    folder = store_fake(tmp_path, SPEC)
    store = RunStore(tmp_path)
    assert store.stored(SPEC, IDENTITY) == folder
    assert folder.name == f"split-0.300-seed0-{SPEC.fingerprint(IDENTITY)}"
    files = {"runs", "problems", "steps", "requests", "nodes", "spans"}
    own = {p.name for p in folder.iterdir()}
    assert own == {f"{table}.parquet" for table in files} | {run_store.CONFIG}
    assert run_store.read_config(folder)["parameters"]["llm_share"] == 0.3
    assert [p for p in tmp_path.iterdir() if p.name.startswith(TEMPORARY)] == []
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
    nodes = run_store.load_table(tmp_path, "nodes")
    assert nodes["run_id"].nunique() == 2
    assert set(nodes["run_id"]) == set(load_runs(tmp_path)["run_id"])
    assert run_store.load_table(tmp_path, "requests").empty
    with pytest.raises(RunStoreError, match="Did you mean 'nodes'"):
        run_store.load_table(tmp_path, "node")


def test_a_failed_run_is_replaced_a_finished_one_never(tmp_path):
    store, failed = RunStore(tmp_path), (SPEC, IDENTITY, RuntimeError("boom"))
    folder = store.write(*failed)
    assert status_of(folder) == "failed"
    assert store_fake(tmp_path, SPEC) == folder
    assert status_of(folder) == "finished"
    before = (folder / "runs.parquet").read_bytes()
    store.write(*failed)
    assert (folder / "runs.parquet").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_leftovers_of_dead_processes_go_those_of_living_ones_stay(tmp_path):
    store = RunStore(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())
    own, gone = (tmp_path / f"{TEMPORARY}{host}+{p}+run-abc+1" for p in (os.getpid(), dead.pid))
    elsewhere = tmp_path / gone.name.replace(TEMPORARY, f"{TEMPORARY}other-host-")
    for folder in (own, gone, elsewhere):
        folder.mkdir()
    store.clear_leftovers()
    assert own.is_dir() and not gone.exists()
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
    assert run_store.load_table(tmp_path, "steps").empty


# -- archives --


@pytest.fixture
def two_runs(tmp_path):
    return [store_fake(tmp_path / "here", RunSpec(CONFIGURATION, 0.3, seed)) for seed in (0, 1)]


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz"])
def test_runs_arrive_as_they_left_and_only_once(tmp_path, two_runs, ending, monkeypatch):
    """A second time they change nothing."""
    unpack, scratch = run_store._unpack, []
    monkeypatch.setattr(run_store, "_unpack", lambda *to: scratch.append(to[1]) or unpack(*to))
    archive, there = tmp_path / f"runs{ending}", tmp_path / "there"
    assert run_store.export_runs(tmp_path / "here", archive) == [folder.name for folder in two_runs]
    assert run_store.import_runs(archive, there) == ([folder.name for folder in two_runs], [])
    columns = ["run_id", "status", "tokens_per_s", "machine"]
    left, arrived = (load_runs(root)[columns] for root in (tmp_path / "here", there))
    pd.testing.assert_frame_equal(left, arrived)
    stored, already_there = run_store.import_runs(archive, there)
    assert (stored, len(already_there)) == ([], 2)
    assert sorted(p.name for p in there.iterdir()) == sorted(f.name for f in two_runs)
    name = scratch[0].name.replace(f"+{os.getpid()}+", "+99999999+")  # of a process that was killed
    (there / name).mkdir()
    RunStore(there).clear_leftovers()
    assert not (there / name).exists()


def test_that_no_answer_changed_is_certain_of_equal_nodes_alone():
    sides = {f"correct_{side}": [1, 0, 1] for side in "ab"}
    problems = pd.DataFrame({"problem_id": list("abc"), **sides})
    (told,), (sure,) = (list(run_store._means(problems, same)) for same in (False, True))
    assert told["low"] < 0 < told["high"] and sure["low"] == sure["high"] == 0


def test_runs_of_a_light_archive_are_compared_but_for_their_nodes(tmp_path):
    for share in (0.3, 0.5):
        store_fake(tmp_path / "here", replace(SPEC, llm_share=share))
    run_store.export_runs(tmp_path / "here", tmp_path / "a.tar", light=True)
    names, _ = run_store.import_runs(tmp_path / "a.tar", tmp_path / "there")
    found = compare(*(tmp_path / "there" / name for name in names))
    assert not found.has_nodes and "tokens_per_s" in set(found.differences["metric"])


def test_a_light_archive_has_what_each_run_brought_and_says_what_it_lacks(tmp_path, two_runs):
    archive, there = tmp_path / "runs.tar.gz", tmp_path / "there"
    run_store.export_runs(two_runs, archive, light=True)
    run_store.import_runs(archive, there)
    for table in ("runs", "problems"):
        left, arrived = (run_store.load_table(root, table) for root in (tmp_path / "here", there))
        pd.testing.assert_frame_equal(left, arrived)
    with pytest.raises(RunStoreError, match=r"seed0-.* has no steps: it came in a light archive"):
        run_store.load_table(there, "steps")


def test_a_different_run_of_the_same_name_is_never_overwritten(tmp_path, two_runs):
    run_store.export_runs(two_runs, tmp_path / "runs.tar")
    there = tmp_path / "there"
    other = store_fake(there, RunSpec(CONFIGURATION, 0.3, 0))
    frame = pd.read_parquet(two_runs[0] / "problems.parquet")
    frame.assign(tokens=0).to_parquet(other / "problems.parquet")
    before = (other / "problems.parquet").read_bytes()
    with pytest.raises(RunStoreError, match="Nothing was imported"):
        run_store.import_runs(tmp_path / "runs.tar", there)
    assert (other / "problems.parquet").read_bytes() == before
    assert [p.name for p in there.iterdir()] == [other.name]


def test_a_run_that_is_not_what_its_name_says_is_refused(tmp_path, two_runs):
    config = json.loads((two_runs[0] / "config.json").read_text())
    config["parameters"]["temperature"] = 0.1
    for number, changed in enumerate((config, config | {"fingerprint": {}})):
        (two_runs[0] / "config.json").write_text(json.dumps(changed))
        archive = tmp_path / f"{number}.tar"
        run_store.export_runs(two_runs[0], archive)
        with pytest.raises(RunStoreError, match="not what it says"):
            run_store.import_runs(archive, tmp_path / "there")
    assert load_runs(tmp_path / "there").empty


@pytest.mark.parametrize("name", ["../evil/config.json", "/config.json", "a/b/config.json"])
def test_links_and_members_outside_a_run_folder_are_refused(tmp_path, name):
    with tarfile.open(tmp_path / "evil.tar", "w") as out:
        out.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(RunStoreError, match="allowed"):
        run_store.import_runs(tmp_path / "evil.tar", tmp_path / "there")
    assert not (tmp_path / "evil").exists()
    link = tarfile.TarInfo("run/config.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    with tarfile.open(tmp_path / "evil.tar", "w") as out:
        out.addfile(link)
    with pytest.raises(RunStoreError, match="no plain file"):
        run_store.import_runs(tmp_path / "evil.tar", tmp_path / "there")


def test_an_archive_larger_than_the_limit_is_refused(tmp_path, two_runs, monkeypatch):
    """Before anything is written, and of a packed one before all of it is unpacked."""
    monkeypatch.setattr("workbench.experiments.runs.LARGEST_ARCHIVE", 1000)
    for archive in (tmp_path / "runs.tar.gz", tmp_path / "runs.tar"):
        run_store.export_runs(two_runs, archive)
        with pytest.raises(RunStoreError, match="unpacks to more than 1000"):
            run_store.import_runs(archive, tmp_path / "there")
    assert load_runs(tmp_path / "there").empty


def test_two_processes_replace_one_failed_run(tmp_path, two_runs, monkeypatch):
    """The other one moves the failed run aside just before; what was measured last stays."""
    store, target = RunStore(tmp_path / "here"), two_runs[0]
    shutil.copytree(target, fresh := tmp_path / "here" / ".fresh")
    really = os.replace

    def beaten(source, aside):
        monkeypatch.setattr(os, "replace", really)
        shutil.rmtree(target)
        really(source, aside)

    monkeypatch.setattr("workbench.experiments.runs.status_of", lambda _: "failed")
    monkeypatch.setattr(os, "replace", beaten)
    store.publish(fresh, target)
    monkeypatch.undo()
    assert status_of(target) == "finished" and not fresh.exists()


def test_a_run_that_another_process_finishes_meanwhile_is_kept(tmp_path, two_runs, monkeypatch):
    """It had failed when it was looked at, and has finished when it is moved aside."""
    store, target = RunStore(tmp_path / "here"), two_runs[0]
    shutil.copytree(target, late := tmp_path / "here" / ".late")
    (late / "late").touch()
    really, told = run_store.status_of, iter(["failed"])
    monkeypatch.setattr(run_store, "status_of", lambda of: next(told, None) or really(of))
    store.publish(late, target)
    assert status_of(target) == "finished" and not (target / "late").exists()
    assert not [*(tmp_path / "here").glob(".*")]


def test_what_found_too_little_memory_free_is_retried_what_cannot_fit_is_not(tmp_path):
    store = RunStore(tmp_path)
    busy = store.write(SPEC, IDENTITY, DeviceOutOfMemory("Another process holds the memory."))
    assert (held(busy), held(busy, retry_failed=True)) == ("failed", None)
    padded = replace(SPEC, seed=1)
    never = store.write(padded, IDENTITY, OutOfMemory("A padded batch has no room."))
    assert held(never) == held(never, retry_failed=True) == "infeasible"
    small = replace(SPEC, config=replace(CONFIGURATION, total_memory="8MiB"))
    lacks = store.write(small, IDENTITY, feasibility(small))
    assert held(lacks) == held(lacks, retry_failed=True) == "infeasible"


def test_more_problems_than_there_are_and_what_a_recording_fixes_are_refused():
    recorded = {"problems": "tiny-16-n16", "num_problems": 16}
    assert run_store.identify(sweep_config("quick", **recorded))
    for change, said in (
        ({"num_problems": 17}, "is 17; allowed: at most 16, as 'tiny-16-n16' has no more"),
        ({"levels": (1,)}, r"levels is \(1,\); allowed: none: a recording has its own problems"),
        ({"problem_seed": 3}, "problem_seed is 3; allowed: none"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_store.identify(sweep_config("quick", **recorded | change))


def test_a_cell_whose_blocks_were_counted_has_no_table_and_is_in_nobody_s_way(tmp_path, two_runs):
    """A timed cell of a light archive lacks its tables."""
    store = RunStore(tmp_path / "here")
    cell = store.write(replace(SPEC, role=COUNTED, seed=7), IDENTITY, RunResult({"waste": 0.1}))
    assert len(run_store.load_table(tmp_path / "here", "steps"))
    store.write(replace(SPEC, role=TIMED, seed=7), IDENTITY, RunResult({"waste": 0.1}))
    with pytest.raises(RunStoreError, match="has no steps: it came in a light archive"):
        run_store.load_table(tmp_path / "here", "steps")
    assert status_of(cell) == "finished"


def test_a_truncated_archive_and_wrong_names_are_named(tmp_path, two_runs):
    archive = tmp_path / "runs.tar.gz"
    run_store.export_runs(two_runs, archive)
    with pytest.raises(RunStoreError, match="exists already"):
        run_store.export_runs(two_runs, archive)
    full = Mock(side_effect=OSError("disk full"))
    with patch("tarfile.TarFile.add", full), pytest.raises(OSError, match="disk"):
        run_store.export_runs(two_runs, tmp_path / "half.tar")
    assert not [file for file in tmp_path.iterdir() if "half" in file.name]
    archive.write_bytes(archive.read_bytes()[:-400])
    for found, said in ((archive, "damaged"), (tmp_path / "nothing.tar", "no archive")):
        with pytest.raises(RunStoreError, match=said):
            run_store.import_runs(found, tmp_path / "there")
    for runs, name, said in ((two_runs, "runs.rar", "must end"), ([], "none.tar", "no runs to")):
        with pytest.raises(RunStoreError, match=said):
            run_store.export_runs(runs, tmp_path / name)


# -- what a run depends on --


def test_a_gguf_file_is_told_apart_by_its_content(tmp_path):
    one, two = (
        write_gguf(tmp_path / f"{name}.gguf", random_tensors(), about={"general.name": name})
        for name in ("one", "two")
    )
    other = tmp_path / "there" / one.name
    other.parent.mkdir()
    other.write_bytes(one.read_bytes())
    assert run_store.model_fingerprint(str(one)) == run_store.model_fingerprint(str(other))
    assert run_store.model_fingerprint(str(one)) != run_store.model_fingerprint(str(two))


def test_dummies_of_known_sizes_have_fingerprints_without_a_network():
    names = ("llama-3.2-1b", "llama-3.1-8b-prm", "qwen2.5-1.5b-instruct")
    found = [run_store.model_fingerprint(f"dummy:{name}") for name in names]
    assert len(set(found)) == len(names)
    assert all(text.startswith("dummy-") for text in found)


# -- two runs side by side: settings, paired differences, the first node that differs --

SEARCHED = sweep_config("quick", num_problems=6)


def edit(folder, table, change):
    file = folder / f"{table}.parquet"
    write_table(change(pd.read_parquet(file)), file)


@pytest.fixture
def pair(tmp_path):
    return [store_fake(tmp_path, RunSpec(SEARCHED, share, 0)) for share in (0.3, 0.5)]


def worked(folder, steps, slower=1.0):
    """The fake run as of so many steps of each model, and so many times slower."""
    counts = dict.fromkeys(WORK, steps) | {"wall_s": slower}
    edit(folder, "runs", lambda runs: runs.assign(**counts))
    edit(folder, "problems", lambda p: p.assign(wall_part_s=p["tokens"] * slower / 1000))
    return folder


def test_only_what_was_set_differently_is_listed_and_differences_are_paired(pair):
    """Rates have an interval only where runs beside them tell the machine's noise."""
    found = compare(*pair)
    assert found.parameters.to_dict("records") == [{"name": "llm_share", "a": "0.3", "b": "0.5"}]
    assert found.identical and not found.same_work
    assert all("uncommitted" in text for text in found.warnings)
    rows = found.differences.set_index("metric")
    speed = rows.loc["tokens_per_s"]
    assert speed["a"] == pytest.approx(1000)
    assert speed["b"] == pytest.approx(1000 / 1.8)
    assert (speed["low"], speed["high"]) == (-math.inf, math.inf)
    assert "noise is not known" in found.findings[1]
    assert rows.loc["accuracy", "difference"] == 0
    assert rows.loc["llm_hit_rate", "a"] == 0.9 and math.isnan(rows.loc["llm_hit_rate", "low"])
    assert found.accuracy["level"].tolist() == ["all", "1", "2", "3", "4", "5"]
    row = found.accuracy.iloc[0]
    assert row["problems"] == 6 and row["a_low"] < row["a"] == row["b"] == 0.5 < row["a_high"]
    measured, levels, settings = found.tables
    assert settings.to_dict("records") == [{"setting": "llm_share", "A": "0.3", "B": "0.5"}]
    shown = measured.set_index("metric").loc[["tokens_per_s", "llm_hit_rate", "accuracy"]]
    assert shown.to_numpy().tolist() == [
        ["1,000", "555.6", "-444.4", "not known"],
        ["0.9", "0.9", "0", "exact"],
        ["0.5", "0.5", "0", "0 to 0"],
    ]
    assert levels.iloc[0].tolist() == ["all", "6", *["0.500 (0.188 to 0.812)"] * 2]


def test_problems_without_a_level_are_one(pair):
    """An accuracy of problems whose level is not given, beside that of all; none is left out."""
    for folder in pair:
        edit(folder, "problems", lambda problems: problems.assign(level=None))
    assert compare(*pair).tables[1]["level"].tolist() == ["all", "not given"]


def test_replays_are_compared_without_what_they_have_not(pair):
    """They answer and sample nothing: neither accuracy nor sameness is told, of one side either."""
    for folder in pair:
        edit(folder, "problems", lambda problems: problems.drop(columns=["correct", "iterations"]))
        (folder / "nodes.parquet").unlink()
        found = compare(*pair)
        measured, _ = found.tables
        assert "accuracy" not in set(measured["metric"]) >= {"tokens", "tokens_per_s"}
        assert not found.identical and found.findings[2].endswith("a replay samples none.")


def test_the_machine_s_noise_is_in_the_interval_and_equal_work_is_no_difference(tmp_path, pair):
    """Equal work 1.2 times slower: no difference; half the speed: one that noise does not hide."""
    worked(pair[0], 7)
    worked(pair[1], 7, 1.2)
    again = store_fake(tmp_path, RunSpec(SEARCHED, 0.4, 0, "sentinel", repeat=1))
    worked(again, 7, 1.1)
    found = compare(*pair)
    assert found.same_work and "same work" in found.findings[0] and "1.20" in found.findings[1]
    speed = found.differences.set_index("metric").loc["tokens_per_s"]
    assert tuple(speed[["a", "difference", "low", "high"]]) == pytest.approx((1000, 0, 0, 0))
    shown = found.tables[0].set_index("metric").loc["tokens_per_s"]
    assert shown.tolist() == ["1,000", "833.3", "0", "the same work"]
    slow = worked(store_fake(tmp_path, RunSpec(SEARCHED, 0.2, 0)), 8, 4.0)
    found = compare(pair[0], slow)
    speed = found.differences.set_index("metric").loc["tokens_per_s"]
    assert not found.same_work and speed["low"] < -750 < speed["high"] < 0
    edit(pair[1], "runs", lambda runs: runs.assign(machine="another"))
    assert not compare(*pair).same_work, "equal work on another machine tells of the machine"


def test_counts_of_other_problems_are_not_set_beside_each_other(tmp_path):
    """Guards a difference called exact that is of two problems more."""
    sides = [
        worked(store_fake(tmp_path, RunSpec(replace(SEARCHED, num_problems=count), 0.3, 0)), 7)
        for count in (SEARCHED.num_problems, SEARCHED.num_problems + 2)
    ]
    found, alike = compare(*sides), compare(sides[0], sides[0])
    assert "the two searched different problems" in found.warnings[0]
    metrics, all_metrics = (set(each.differences["metric"]) for each in (found, alike))
    assert all_metrics - metrics == {"llm_recomputed_tokens", "prm_recomputed_tokens"}


def test_several_seeds_pair_by_problem_and_seed(tmp_path):
    specs = ([RunSpec(SEARCHED, share, seed) for seed in (0, 1)] for share in (0.3, 0.5))
    sides = [[store_fake(tmp_path, spec) for spec in side] for side in specs]
    assert compare(*sides).accuracy["problems"].max() == 6
    assert compare(tmp_path, tmp_path).identical  # a sweep with itself pairs by share too


def test_the_first_node_that_differs_is_named(pair):
    def other_token(nodes):
        where = nodes.index[(nodes["problem_id"] == "p2") & (nodes["node_id"] == "1")][0]
        nodes.at[where, "token_ids"] = [1, 2, 999]
        return nodes

    edit(pair[1], "nodes", other_token)
    found = compare(*pair)
    assert not found.identical
    assert found.first_difference.endswith(", b has [1, 2, 999]")
    assert "problem p2, seed 0, node 1: tokens differ, a has [" in found._repr_html_()
    hostile = "<img src=x onerror=alert(1)>"
    told = replace(found, first_difference=hostile, warnings=(hostile,))._repr_html_()
    assert told.count("&lt;img") == 2 and "<img" not in told
    edit(pair[1], "nodes", lambda nodes: nodes.assign(score=[0.123, *nodes["score"][1:]]))
    assert "node 0: scores differ, a has 0." in compare(*pair).first_difference
    edit(pair[1], "nodes", lambda nodes: nodes.drop(index=0))
    assert compare(*pair).first_difference.endswith(", b has None")


def test_another_machine_or_version_is_a_warning(pair):
    elsewhere = {"machine": "NVIDIA H200, 16 cores", "versions": json.dumps({"torch": "2.11"})}
    edit(pair[1], "runs", lambda runs: runs.assign(**elsewhere))
    text = " ".join(compare(*pair).warnings)
    assert "machine differs" in text
    assert "H200" in text
    assert "versions differ:" in text


def test_runs_without_pairs_are_refused(tmp_path, pair):
    other = store_fake(tmp_path, RunSpec(SEARCHED, 0.3, 1))
    with pytest.raises(RunStoreError, match="no problem in common"):
        compare(pair[0], other)
    with pytest.raises(RunStoreError, match="no finished search"):
        compare(pair[0], [])
