"""Turns: each search's own seconds, whatever the others do, and nothing left behind."""

from dataclasses import replace

import pytest

from tests.experiments import policy_fakes
from workbench.bench import turns
from workbench.errors import WorkbenchError
from workbench.experiments.policy_plan import PolicyPlan, policy_config, reference_runs
from workbench.experiments.policy_run import execute

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
    monkeypatch.setattr(turns, "_start", lambda spec: started.append(start(spec)) or started[-1])
    found = turns.take_turns(specs)
    alone = execute(specs[0]).measured
    assert [timed.tokens for timed in found] == [alone["sampled_tokens"]] * 2
    assert all(timed.seconds > 0.02 for timed in found)
    assert not any(worker.process.is_alive() for worker in started)


@pytest.mark.slow
def test_a_search_that_dies_is_named(specs):
    """Instead of a wait for ever."""
    with pytest.raises(WorkbenchError, match="ended or hung"):
        turns.take_turns([replace(specs[0], kv_bytes=1)])
