"""Turns: each search's own seconds, whatever the others do, and nothing left behind."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import workbench
from tests.experiments import policy_fakes
from workbench.errors import OutOfMemory, WorkbenchError
from workbench.experiments import run, turns
from workbench.experiments.ladder_plan import RUNGS, LadderPlan, ladder_runs
from workbench.experiments.policy_plan import PolicyPlan, policy_config, reference_runs
from workbench.experiments.policy_run import execute

PACKAGE = Path(workbench.__file__).parent
PLAN = PolicyPlan(2, 2, 1, (0.5,), (0.3,), ())


@pytest.fixture(scope="module")
def specs():
    return reference_runs(policy_config(policy_fakes.CONFIG, PLAN))


@pytest.mark.slow
def test_searches_that_take_turns_sample_what_they_sample_alone(specs, monkeypatch):
    """Turns far shorter than a search; each has worked, and no process is left."""
    monkeypatch.setattr(turns, "TURN_S", 0.02)
    started = []
    start = turns._start
    monkeypatch.setattr(turns, "_start", lambda *of: started.append(start(*of)) or started[-1])
    found = turns.take_turns(specs)
    alone = execute(specs[0]).measured
    assert [turn.result.measured["sampled_tokens"] for turn in found] == [
        alone["sampled_tokens"]
    ] * 2
    assert len(found[0].result.tables["nodes"]) > 0
    assert all(timed.seconds > 0.02 for timed in found)
    for timed in found:  # the other's turns are not in its tables
        assert 0 < timed.result.measured["wall_s"] < 1.3 * timed.seconds
    assert not any(worker.process.is_alive() for worker in started)


@pytest.mark.slow
def test_rungs_of_the_ladder_take_turns_too_the_dear_one_longer_ones(monkeypatch):
    """They own their memory, each engine its part; the tokens are those of a run alone."""
    monkeypatch.setattr(turns, "TURN_S", 0.02)
    config = policy_fakes.CONFIG
    plan = LadderPlan(2, 2, depth_limits=(), queue_problems=0, in_turns=True)
    specs = [spec for spec in ladder_runs(config, plan) if spec.rung in (RUNGS[1], RUNGS[-1])][:2]
    lengths, start = [], turns._start
    monkeypatch.setattr(turns, "_start", lambda *of: lengths.append(of[1]) or start(*of))
    found = turns.take_turns(specs, costs=[5.0, 1.0])
    assert lengths == [0.1, 0.02]
    for spec, timed in zip(specs, found, strict=True):
        nodes, alone = timed.result.tables["nodes"], run.execute(spec).tables["nodes"]
        assert nodes["token_ids"].map(tuple).tolist() == alone["token_ids"].map(tuple).tolist()
        assert 0 < timed.result.measured["wall_s"] < 1.3 * timed.seconds


@pytest.mark.slow
def test_a_search_that_cannot_be_says_why_and_the_others_go_on(specs):
    """Instead of a wait for ever, or of all being lost."""
    lacking, found = turns.take_turns([replace(specs[0], kv_bytes=1), specs[0]])
    assert isinstance(lacking, OutOfMemory)
    assert isinstance(found, turns.Timed)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["_start", "turn", "outcome"])
def test_a_process_that_dies_is_named_and_the_others_go_on(specs, monkeypatch, when):
    """Killed from outside, as by a machine without memory: at the start, stopped, at the end."""
    monkeypatch.setattr(turns, "TURN_S", 0.02)
    owner = turns if when == "_start" else turns._Worker
    usual = getattr(owner, when)

    def killing(given, *others):
        if when == "outcome" and given.spec is specs[0]:
            given.process.kill()
            given.process.join()
        found = usual(given, *others)
        worker = found if when == "_start" else given
        if worker.spec is specs[0]:
            worker.process.kill()
            worker.process.join()
        return found

    monkeypatch.setattr(owner, when, killing)
    lost, found = turns.take_turns(specs)
    assert isinstance(lost, WorkbenchError)
    assert "ended or hung" in str(lost)
    assert isinstance(found, turns.Timed)


def test_a_clock_that_comes_too_late_is_told(monkeypatch):
    """Guards against others' turns in the tables of a script that imports engines at its top."""
    monkeypatch.setitem(sys.modules, "workbench.engine.executor", turns)
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # given back, were it taken
    with pytest.raises(WorkbenchError, match=r"imports workbench\.engine.*before"):
        turns._take_clock(lambda: 0.0)
    assert time.perf_counter() > 0.0


def test_the_command_line_comes_before_every_clock():
    """A process that takes turns imports the main module first; of `workbench` that is the CLI."""
    given = "from workbench.cli import main; from workbench.experiments import turns"
    code = f"{given}; turns._take_clock(lambda: 0.0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [path for path in PACKAGE.rglob("*.py") if "= time.perf_counter," in path.read_text()]
    names = {f"workbench.{path.parent.name}.{path.stem}" for path in files}
    assert names == turns.TAKE_A_CLOCK
