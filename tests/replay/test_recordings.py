"""The recordings in the package: named, readable, replayable, and what their card says."""

import pytest

from workbench.bench.recordings import PLANS, make_recording
from workbench.errors import RecordingError
from workbench.replay.devices import PRESETS
from workbench.replay.recordings import FOLDER, load_recording, recording_names, recording_path
from workbench.replay.simulator import replay

LARGEST = 3_000_000  # bytes of all together


def test_every_recording_is_planned_and_described() -> None:
    """What is there can be made again by name, the card names it, and all is small."""
    names = recording_names()
    assert len(names) >= 7
    assert set(names) <= set(PLANS)
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in card for name in names)
    assert sum(recording_path(name).stat().st_size for name in names) < LARGEST


@pytest.mark.parametrize("name", recording_names())
def test_a_recording_is_what_its_plan_says(name: str) -> None:
    """Problems, n and beam width; models that told their shapes, so any device can be asked."""
    found, plan = load_recording(name), PLANS[name]
    assert len(found.problems) == plan.problems
    assert found.settings.strategy_settings["n"] == plan.n
    assert found.settings.strategy_settings["beam_width"] == plan.beam_width
    assert all(problem.steps and problem.solutions for problem in found.problems)
    assert all(engine.spec and engine.weight_bytes for engine in (found.llm, found.prm))


@pytest.mark.parametrize("name", ["tiny-16-n4", "smollm2-n4"])
def test_a_recording_replays_to_its_own_tree(name: str) -> None:
    """Every recorded node is sampled again, each with its own tokens."""
    found = load_recording(name)
    nodes = replay(found, PRESETS["h100"]).trace.nodes
    assert len(nodes) == sum(len(problem.steps) for problem in found.problems)
    assert nodes["step_tokens"].sum() == sum(
        len(step.tokens) for problem in found.problems for step in problem.steps
    )


def test_unknown_names_are_told_what_there_is(tmp_path) -> None:
    """A name that nobody recorded is refused, with those there are and the nearest."""
    with pytest.raises(RecordingError, match=r"'tiny-16-n5'.*Did you mean 'tiny-16-n4'"):
        load_recording("tiny-16-n5")
    with pytest.raises(RecordingError, match="known: tiny-128"):
        make_recording("tiny", tmp_path / "a.parquet")
