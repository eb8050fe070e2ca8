"""Estimates against full replays: exact while a cache holds the order, near it below."""

import numpy as np
import pytest

from workbench.errors import ConfigError
from workbench.replay.basis import make_basis
from workbench.replay.cost import MeteredCost, ModelWork, StepCost, StepWork, Terms
from workbench.replay.devices import Device
from workbench.replay.estimate import Limits, estimate, seconds_of
from workbench.replay.simulator import Costs, replay

DEVICE = Device("fast", 5e10, 1e10, 1 << 30, "made up")
TERMS = Terms(roofline=1.0, step=1e-3, token=3e-5, sequence=1e-4, key=1e-9, logit=1e-6)


@pytest.fixture(scope="module")
def basis(measured):
    return make_basis(measured.answers)


@pytest.fixture(scope="module")
def costs(measured):
    recording = measured.recording
    models = (recording.llm, recording.prm)
    return Costs(*(StepCost(ModelWork.of(m), DEVICE, TERMS) for m in models), 1e-4)


def estimated(basis, costs, llm, prm, seqs=16, tokens=256):
    return estimate(basis, costs, Limits(llm, seqs, tokens), Limits(prm, seqs, tokens))


def test_with_room_for_all_an_estimate_is_the_replay(measured, basis, costs):
    """Nothing is bent: seconds, busy seconds, hits and blocks are those of a full replay."""
    llm = int(basis.llm.curve["num_blocks"][-1])
    prm = int(basis.prm.curve["num_blocks"][-1])
    done = replay(measured.answers, costs, llm={"num_blocks": llm}, prm={"num_blocks": prm})
    found = estimated(basis, costs, llm, prm)
    assert found.wall_s == pytest.approx(done.throughput.wall_s)
    assert found.tokens_per_s == pytest.approx(done.throughput.tokens_per_s)
    assert found.llm.fits and found.prm.fits
    for name, model in (("llm", found.llm), ("prm", found.prm)):
        steps = done.trace.steps[done.trace.steps["engine"] == name]
        assert model.busy_s == pytest.approx(steps["duration_s"].sum())
        assert model.hit_rate == pytest.approx(
            steps["hit_tokens"].sum() / steps["query_tokens"].sum()
        )
        blocks = found.blocks()
        own = blocks[blocks["engine"] == name]
        assert own["blocks_active"].tolist() == steps["blocks_active"].tolist()
        assert own["blocks_cached"].tolist() == steps["blocks_cached"].tolist()


def test_smaller_caches_cost_more_and_come_near_the_replay(measured, basis, costs):
    """Where the cache holds the order the estimate is within 5 %, below it within 35 %."""
    rates = []
    for llm, prm, allowed in ((80, 100, 0.05), (60, 60, 0.1), (40, 34, 0.35)):
        found = estimated(basis, costs, llm, prm)
        done = replay(measured.answers, costs, llm={"num_blocks": llm}, prm={"num_blocks": prm})
        assert found.tokens_per_s == pytest.approx(done.throughput.tokens_per_s, rel=allowed)
        assert (found.blocks()["blocks_active"] <= found.blocks()["blocks_total"]).all()
        rates.append(found.tokens_per_s)
    assert rates == sorted(rates, reverse=True)
    assert not found.llm.fits


def test_limits_cut_steps(basis, costs):
    """Fewer sequences or tokens a step never make a search faster."""
    usual = estimated(basis, costs, 500, 500).wall_s
    assert estimated(basis, costs, 500, 500, seqs=2).wall_s > usual
    assert estimated(basis, costs, 500, 500, tokens=32).wall_s > usual
    assert estimated(basis, costs, 500, 500, seqs=512, tokens=4096).wall_s == usual


def test_many_steps_cost_what_each_costs(basis, costs):
    """The array formula is StepCost.seconds, step by step."""
    together = seconds_of(costs.prm, basis.prm.work)
    alone = [costs.prm(StepWork(*one)) for one in zip(*basis.prm.work)]
    assert np.allclose(together, alone)


def test_a_cost_that_is_no_formula_is_refused(basis, costs):
    """A callable cannot be asked about many steps at once; the message says what to give."""
    with pytest.raises(ConfigError, match=r"Costs\.on"):
        estimated(basis, Costs(MeteredCost(), MeteredCost()), 100, 100)
