"""Sweeps with a fake run: nothing is repeated, nothing lost, whatever fails becomes a row."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.experiments.fakes import fake_result
from workbench.errors import ConfigError, ModelError, OutOfMemory, RunStoreError
from workbench.experiments.plan import planned_runs
from workbench.experiments.preview import preview
from workbench.experiments.profiles import sweep_config
from workbench.experiments.store import TEMPORARY
from workbench.experiments.sweep import run_sweep

CONFIG = sweep_config("quick", num_problems=3, warmup_problems=0)
ROOT = Path(__file__).parents[2]


class Counting:
    """Carries out fake runs and remembers which."""

    def __init__(self, fail=()):
        self.done, self.fail = [], dict(fail)

    def __call__(self, spec):
        self.done.append(spec.name)
        if spec.llm_share in self.fail:
            raise self.fail[spec.llm_share]
        return fake_result(spec)


def sweep(tmp_path, execute, config=CONFIG, **options):
    return run_sweep(config, tmp_path, execute=execute, progress=False, **options)


def test_every_run_once_and_never_again(tmp_path):
    execute = Counting()
    first = sweep(tmp_path, execute)
    assert sorted(execute.done) == sorted(spec.name for spec in planned_runs(CONFIG))
    assert list(first.runs["llm_share"]) == [0.08, 0.2, 0.3, 0.5]
    assert first.missing == ()
    again = Counting()
    assert sweep(tmp_path, again).folders == first.folders
    assert again.done == []
    assert "4 runs stored, 0 missing" in repr(first)


def test_a_larger_sweep_finds_the_runs_of_a_smaller_one(tmp_path):
    sweep(tmp_path, Counting())
    more = Counting()
    wide = sweep_config(
        "default", num_problems=3, warmup_problems=0, seeds=(0, 1), sentinel_every=0
    )
    found = sweep(tmp_path, more, wide)
    assert len(more.done) == 16 - 4
    assert len(found.runs) == 16


def test_one_warm_up_is_run_and_thrown_away(tmp_path):
    execute = Counting()
    config = sweep_config("quick", num_problems=3, warmup_problems=1)
    found = sweep(tmp_path, execute, config)
    assert execute.done[0].startswith("warmup")
    assert len(execute.done) == len(found.all_runs) + 1
    assert not found.all_runs["role"].eq("warmup").any()
    again = Counting()
    sweep(tmp_path, again, config)
    assert again.done == []  # nothing to do, nothing to warm up for


def test_a_failing_run_is_kept_as_a_row_and_retried_only_when_asked(tmp_path):
    broken = Counting({0.3: RuntimeError("the forward broke")})
    found = sweep(tmp_path, broken)
    assert len(broken.done) == 4
    row = found.all_runs.set_index("llm_share").loc[0.3]
    assert row["status"] == "failed"
    assert row["error"] == "RuntimeError: the forward broke"
    assert "Traceback" in row["traceback"]
    assert row["machine_cores"] > 0
    assert list(found.runs["llm_share"]) == [0.08, 0.2, 0.5]
    patient, retrying = Counting(), Counting()
    sweep(tmp_path, patient)
    assert patient.done == []
    assert len(sweep(tmp_path, retrying, retry_failed=True).runs) == 4
    assert retrying.done == ["split-0.300-seed0"]


def test_an_infeasible_share_is_a_row_with_the_bytes_that_lack(tmp_path):
    config = sweep_config("quick", num_problems=3, warmup_problems=0, shares=(0.02, 0.3, 0.8))
    execute = Counting()
    rows = sweep(tmp_path, execute, config).all_runs.set_index("llm_share")
    assert execute.done == ["split-0.300-seed0"]
    assert list(rows["status"].loc[[0.02, 0.3, 0.8]]) == ["infeasible", "finished", "infeasible"]
    assert rows.loc[0.02, "llm_lacks_bytes"] > 0
    assert rows.loc[0.02, "prm_lacks_bytes"] == 0
    assert rows.loc[0.8, "prm_lacks_bytes"] > 0
    assert "the LLM (tiny-solver) lacks" in rows.loc[0.02, "error"]


def test_a_budget_the_engine_refuses_is_infeasible_too(tmp_path):
    execute = Counting({0.08: OutOfMemory("2 blocks lack")})
    rows = sweep(tmp_path, execute).all_runs.set_index("llm_share")
    assert rows.loc[0.08, "status"] == "infeasible"
    assert rows.loc[0.08, "error"] == "2 blocks lack"


def test_looking_computes_nothing_and_says_what_is_missing(tmp_path):
    assert len(sweep(tmp_path, Counting(), compute=False).missing) == 4
    sweep(tmp_path, Counting({0.5: KeyError("x")}))
    found = sweep(tmp_path, Counting(), compute=False)
    assert found.missing == ()
    assert len(found.runs) == 3


def test_tables_carry_share_and_seed_and_can_be_narrowed(tmp_path):
    config = sweep_config("quick", num_problems=3, warmup_problems=0, seeds=(0, 1))
    found = sweep(tmp_path, Counting(), config)
    steps = found.table("steps")
    assert set(steps["llm_share"]) == {0.08, 0.2, 0.3, 0.5}
    assert set(steps["run_seed"]) == {0, 1}
    assert len(found.table("steps", llm_share=0.3, seed=1)) == len(steps) / 8
    assert found.table("nodes")["run_id"].nunique() == 8
    with pytest.raises(RunStoreError, match=r"no finished run at llm_share=0\.31"):
        found.table("steps", llm_share=0.31)


def test_bad_settings_stop_before_the_first_run(tmp_path):
    execute = Counting()
    with pytest.raises(ModelError, match="Did you mean 'tiny-solver'"):
        sweep(tmp_path, execute, sweep_config("quick", llm="tiny-solvr"))
    with pytest.raises(ConfigError, match="shares"):
        sweep_config("quick", shares=(0.3, 1.2))
    with pytest.raises(ConfigError, match="each share once"):
        sweep_config("quick", shares=(0.3, 0.3))
    assert execute.done == []
    assert not any(tmp_path.iterdir())


def test_an_interrupt_keeps_what_was_finished(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, Counting({0.5: KeyboardInterrupt()}))
    assert "failed" not in set(sweep(tmp_path, Counting(), compute=False).all_runs["status"])
    rest = Counting()
    assert len(sweep(tmp_path, rest).runs) == 4
    assert "split-0.500-seed0" in rest.done


KILLED = """
import sys, time
from pathlib import Path
from tests.experiments.fakes import fake_result
from workbench.experiments import store
from workbench.experiments.profiles import sweep_config
from workbench.experiments.sweep import run_sweep

folder, log = Path(sys.argv[1]), Path(sys.argv[2])
started = []

def execute(spec):
    with log.open("a") as out:
        out.write(spec.name + "\\n")
    started.append(spec.name)
    return fake_result(spec)

write = store.write_table

def slow_write(table, file):  # the third run is caught with half its tables written
    write(table, file)
    if len(started) == 3 and file.stem == "nodes":
        log.with_suffix(".ready").touch()
        time.sleep(120)

if len(sys.argv) == 3:
    store.write_table = slow_write
config = sweep_config("quick", num_problems=3, warmup_problems=0)
run_sweep(config, folder, execute=execute, progress=False)
"""


def test_a_sweep_killed_while_writing_resumes_without_repeating_or_losing(tmp_path):
    folder, log = tmp_path / "runs", tmp_path / "log"
    command = [sys.executable, "-c", KILLED, str(folder), str(log)]
    victim = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + 60
    while not log.with_suffix(".ready").exists():
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.02)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    leftovers = [p for p in folder.iterdir() if p.name.startswith(TEMPORARY)]
    assert len(leftovers) == 1
    before = {p: (p / "runs.parquet").read_bytes() for p in folder.iterdir() if p.name[0] != "."}
    assert len(before) == 2
    subprocess.run([*command, "resume"], cwd=ROOT, check=True, timeout=60)
    started = log.read_text().split()
    assert len(started) == 5  # three before, the interrupted one and the last after
    assert started.count(started[2]) == 2
    assert len(set(started)) == 4
    assert all((p / "runs.parquet").read_bytes() == content for p, content in before.items())
    assert len(run_sweep(CONFIG, folder, compute=False).runs) == 4
    assert [p for p in folder.iterdir() if p.name.startswith(".")] == []


def test_a_preview_lists_runs_ends_and_minutes_and_runs_nothing(tmp_path):
    config = sweep_config("quick", num_problems=3, warmup_problems=0, shares=(0.02, 0.3, 0.5))
    seen = preview(config, tmp_path)
    assert set(seen.runs["status"]) == {"to run", "infeasible"}
    assert seen.num_to_run == 2
    assert seen.minutes > 0
    assert not seen.measured_before
    assert 0.05 < seen.feasible.low < 0.1 < 0.5 < seen.feasible.high < 0.7
    sweep(tmp_path, Counting(), config)
    after = preview(config, tmp_path)
    assert (after.num_to_run, after.minutes) == (0, 0)
    assert after.measured_before
