"""From measured runs to the terms of a device: which step took how long, and why.

The trace says how long each step lasted, a replay of the same run what it computed; row by row they
are the same steps, or the fit is refused. Several runs are fitted together. What it does not do:
measure (bench/, cli/).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import NamedTuple

from workbench.errors import ConfigError, RecordingError
from workbench.replay.answers import Answers
from workbench.replay.cost import MeteredCost, fit
from workbench.replay.devices import Device
from workbench.replay.simulator import Changes, Costs, Replayed, events, replay
from workbench.replay.work import ModelWork, StepWork
from workbench.search.recording import Recording
from workbench.trace import Trace


class MeasuredRun(NamedTuple):
    """A trace of a recorded search, and how its settings differed from the recording's."""

    answers: Answers
    trace: Trace
    llm: Changes = {}
    prm: Changes = {}


def calibrated(device: Device, runs: Iterable[MeasuredRun]) -> Device:
    """The device with terms for the runs' models. RecordingError for a trace of another search."""
    works: dict[str, list[StepWork]] = {"llm": [], "prm": []}
    seconds: dict[str, list[float]] = {"llm": [], "prm": []}
    outside, requests = 0.0, 0
    recording: Recording | None = None
    for run in runs:
        recording = run.answers.recording
        meters = {"llm": MeteredCost(), "prm": MeteredCost()}
        costs = Costs(meters["llm"], meters["prm"])
        _require_same(run, replay(run.answers, costs, llm=run.llm, prm=run.prm))
        steps = run.trace.steps
        for name, meter in meters.items():
            works[name] += meter.works
            seconds[name] += steps.loc[steps["engine"] == name, "duration_s"].tolist()
        outside += float(run.trace.spans["duration_s"].sum())
        requests += len(run.trace.requests)
    if recording is None:
        raise ConfigError("A device is calibrated with no run; give one or more.")
    terms = {
        engine.name: asdict(fit(ModelWork.of(engine), device, works[name], seconds[name]))
        for name, engine in (("llm", recording.llm), ("prm", recording.prm))
    }
    return replace(device, terms=terms | {"request": {"seconds": outside / max(requests, 1)}})


def _require_same(run: MeasuredRun, replayed: Replayed) -> None:
    if not events(replayed.trace.steps).equals(events(run.trace.steps)):
        raise RecordingError(
            f"The trace has {len(run.trace.steps)} steps and the replay of the recording "
            f"{len(replayed.trace.steps)}, or they differ in what they did: give the trace of the "
            "same search with the same settings."
        )
