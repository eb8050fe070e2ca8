"""Calibration: a device's terms from measured runs, and what is no run of the recording."""

import pytest

from workbench.errors import ConfigError, RecordingError
from workbench.replay.calibration import MeasuredRun, calibrated
from workbench.replay.devices import Device
from workbench.replay.simulator import replay
from workbench.trace import Trace

MACHINE = Device("here", 1e11, 1e10, 2**30, "a test")


def test_the_run_it_was_fitted_to_is_explained(measured) -> None:
    """Replayed with the fitted terms, the run takes as long as it was measured to."""
    device = calibrated(MACHINE, [MeasuredRun(measured.answers, measured.trace)])
    replayed = replay(measured.answers, device)
    steps, spans = measured.trace.steps, measured.trace.spans
    wall = steps["duration_s"].sum() + spans["duration_s"].sum()
    assert replayed.throughput.wall_s == pytest.approx(wall, rel=0.01)
    assert all(value >= 0 for terms in device.terms.values() for value in terms.values())


def test_known_terms_come_back_from_a_replayed_trace(measured) -> None:
    """A trace made with known terms, of two runs, gives a device for other settings."""
    terms = {"tiny-solver": {"step": 1e-3, "token": 1e-5}, "tiny-prm": {"roofline": 2.0}}
    made = Device("made", 1e11, 1e10, 2**30, "a test", terms | {"request": {"seconds": 1e-4}})
    roomy = {"num_blocks": 300}
    runs = [
        MeasuredRun(measured.answers, replay(measured.answers, made).trace),
        MeasuredRun(measured.answers, replay(measured.answers, made, llm=roomy).trace, roomy),
    ]
    found = calibrated(MACHINE, runs)
    other = {"prm": {"num_blocks": 200}, "llm": {"max_num_seqs": 5}, "min_problem_batch": 3}
    walls = [replay(measured.answers, d, **other).throughput.wall_s for d in (found, made)]
    assert walls[0] == pytest.approx(walls[1], rel=5e-3)


def test_traces_of_other_runs_are_refused(measured) -> None:
    """Steps that differ in number or in what they did fit no recording; no run fits nothing."""
    trace = measured.trace
    short = Trace(trace.steps.iloc[:-1], trace.requests, trace.nodes, trace.spans)
    with pytest.raises(RecordingError, match="give the trace of the same search"):
        calibrated(MACHINE, [MeasuredRun(measured.answers, short)])
    with pytest.raises(RecordingError, match="the same settings"):
        calibrated(MACHINE, [MeasuredRun(measured.answers, trace, {"num_blocks": 100})])
    with pytest.raises(ConfigError, match="no run"):
        calibrated(MACHINE, [])
