"""Run folders travel: what comes in is checked, nothing is overwritten, nothing lands outside."""

import io
import json
import tarfile
import zipfile

import pandas as pd
import pytest

from tests.experiments.fakes import store_fake
from workbench.errors import RunStoreError
from workbench.experiments.archive import export_runs, import_runs
from workbench.experiments.plan import RunSpec
from workbench.experiments.profiles import sweep_config
from workbench.experiments.store import load_runs

CONFIGURATION = sweep_config("quick", num_problems=2)


@pytest.fixture
def two_runs(tmp_path):
    return [store_fake(tmp_path / "here", RunSpec(CONFIGURATION, 0.3, seed)) for seed in (0, 1)]


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".zip"])
def test_runs_arrive_as_they_left_and_a_second_time_change_nothing(tmp_path, two_runs, ending):
    archive, there = tmp_path / f"runs{ending}", tmp_path / "there"
    assert export_runs(tmp_path / "here", archive) == [folder.name for folder in two_runs]
    assert import_runs(archive, there).stored == tuple(folder.name for folder in two_runs)
    columns = ["run_id", "status", "tokens_per_s", "machine"]
    left, arrived = (load_runs(root)[columns] for root in (tmp_path / "here", there))
    pd.testing.assert_frame_equal(left, arrived)
    again = import_runs(archive, there)
    assert (again.stored, len(again.already_there)) == ((), 2)
    assert sorted(p.name for p in there.iterdir()) == sorted(f.name for f in two_runs)


def test_a_different_run_of_the_same_name_is_never_overwritten(tmp_path, two_runs):
    export_runs(two_runs, tmp_path / "runs.zip")
    there = tmp_path / "there"
    other = store_fake(there, RunSpec(CONFIGURATION, 0.3, 0))
    frame = pd.read_parquet(two_runs[0] / "problems.parquet")
    frame.assign(tokens=0).to_parquet(other / "problems.parquet")
    before = (other / "problems.parquet").read_bytes()
    with pytest.raises(RunStoreError, match="Nothing was imported"):
        import_runs(tmp_path / "runs.zip", there)
    assert (other / "problems.parquet").read_bytes() == before
    assert [p.name for p in there.iterdir()] == [other.name]


def test_a_run_that_is_not_what_its_name_says_is_refused(tmp_path, two_runs):
    config = json.loads((two_runs[0] / "config.json").read_text())
    config["parameters"]["temperature"] = 0.1
    (two_runs[0] / "config.json").write_text(json.dumps(config))
    export_runs(two_runs[0], tmp_path / "runs.tar")
    with pytest.raises(RunStoreError, match="not what it says"):
        import_runs(tmp_path / "runs.tar", tmp_path / "there")
    assert load_runs(tmp_path / "there").empty


@pytest.mark.parametrize("name", ["../evil/config.json", "/config.json", "a/b/config.json"])
def test_members_outside_a_run_folder_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as out:
        out.writestr(name, "{}")
    with tarfile.open(tmp_path / "evil.tar", "w") as out:
        out.addfile(tarfile.TarInfo(name), io.BytesIO())
    for archive in ("evil.zip", "evil.tar"):
        with pytest.raises(RunStoreError, match="allowed"):
            import_runs(tmp_path / archive, tmp_path / "there")
    assert not (tmp_path / "evil").exists()


def test_a_link_in_an_archive_is_refused(tmp_path):
    link = tarfile.TarInfo("run/config.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    with tarfile.open(tmp_path / "evil.tar", "w") as out:
        out.addfile(link)
    with pytest.raises(RunStoreError, match="no plain file"):
        import_runs(tmp_path / "evil.tar", tmp_path / "there")


def test_a_truncated_archive_and_wrong_names_are_named(tmp_path, two_runs):
    archive = tmp_path / "runs.tar.gz"
    export_runs(two_runs, archive)
    with pytest.raises(RunStoreError, match="exists already"):
        export_runs(two_runs, archive)
    archive.write_bytes(archive.read_bytes()[:-400])
    with pytest.raises(RunStoreError, match="damaged"):
        import_runs(archive, tmp_path / "there")
    with pytest.raises(RunStoreError, match="must end in"):
        export_runs(two_runs, tmp_path / "runs.rar")
    with pytest.raises(RunStoreError, match="no archive"):
        import_runs(tmp_path / "nothing.zip", tmp_path / "there")
    with pytest.raises(RunStoreError, match="no runs to export"):
        export_runs([], tmp_path / "none.zip")
