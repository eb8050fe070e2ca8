"""Searches to be replayed: made of lengths, and those in the package."""

from pathlib import Path

import pytest

from workbench.bench.search import PLANS, make_recording
from workbench.errors import ConfigError, RecordingError
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.simulator import replay
from workbench.replay.workload import (
    FOLDER,
    MAX_MODEL_LEN,
    Assumptions,
    load_recording,
    math500_lengths,
    recording_names,
    recording_path,
    thesis_search,
)
from workbench.search.recording import read_recording, write_recording
from workbench.search.result import node_id

LARGEST_BYTES = 3_000_000  # of all recordings in the package
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def search():
    return thesis_search(num_problems=5, n=16)


def test_the_problems_are_those_of_the_study() -> None:
    """128 problems by the study's rule, with MATH-500's levels."""
    named = (DATA / "math500_128_seed0.txt").read_text().split()
    assert [row.id for row in math500_lengths(128)] == named
    levels = dict(r.split(",") for r in (DATA / "math500_levels.csv").read_text().split()[1:])
    assert {row.id: str(row.level) for row in math500_lengths()} == levels
    with pytest.raises(ConfigError, match="1 to 500"):
        math500_lengths(501)


def test_a_seed_names_a_search(search) -> None:
    """Equal seeds give equal searches, other seeds others, of the same problems."""
    assert thesis_search(num_problems=5, n=16) == search
    other = thesis_search(num_problems=5, n=16, seed=1)
    assert [p.prompt for p in other.problems] == [p.prompt for p in search.problems]
    assert [p.steps for p in other.problems] != [p.steps for p in search.problems]


def test_it_is_a_recording_like_any_other(search, tmp_path) -> None:
    """Written and read it is the same; replayed it gives the tree and the tokens it holds."""
    assert read_recording(write_recording(search, tmp_path / "s.parquet")) == search
    replayed = replay(Answers(search), PRESETS["a100-80"])
    nodes = replayed.trace.nodes
    steps = [(p.problem.id, s) for p in search.problems for s in p.steps]
    assert len(nodes) == len(steps)
    assert nodes["step_tokens"].sum() == sum(len(step.tokens) for _, step in steps)
    kept = {(row.problem_id, row.node_id): row.score for row in nodes.itertuples()}
    scores = {(p.problem.id, s.steps): s.score for p in search.problems for s in p.solutions}
    texts = {(p.problem.id, s.path): s.text for p in search.problems for s in p.steps}
    for problem, step in steps:
        own = tuple(texts[problem, step.path[: k + 1]] for k in range(len(step.path)))
        assert kept[problem, node_id(step.path)] == scores[problem, own]


def test_requests_fit_both_models(search) -> None:
    """No sequence passes max_model_len; every beam ends or reaches the depth."""
    for problem in search.problems:
        held = {(): len(problem.prompt)}
        for step in problem.steps:
            held[step.path] = held[step.path[:-1]] + len(step.tokens)
        judged = {(): 0}
        for solution in problem.solutions:
            judged[solution.steps] = judged[solution.steps[:-1]] + len(solution.tokens)
        assert max(held.values()) < MAX_MODEL_LEN
        assert max(judged.values()) < MAX_MODEL_LEN
        last = max(problem.steps, key=lambda step: len(step.path))
        assert last.finish_reason == "eos" or len(last.path) == 40


def test_assumptions_do_what_they_say() -> None:
    """Longer solutions take more steps; twins repeat a sibling; solutions that never end go on."""

    def depth(**given: float) -> float:
        found = thesis_search(num_problems=10, n=4, assumptions=Assumptions(**given))
        return sum(max(len(s.path) for s in p.steps) for p in found.problems) / 10

    usual = depth()
    assert depth(length_ratio=4.0) > usual > depth(length_ratio=0.5)
    assert depth(endless=1.0) == 40
    assert depth(step_tokens=80.0) < usual
    twins = thesis_search(num_problems=5, n=4, assumptions=Assumptions(twins=1.0))
    assert all(len({s.tokens for s in p.steps if len(s.path) == 1}) == 1 for p in twins.problems)
    with pytest.raises(ConfigError, match=r"twins is 1.5; allowed: in .0, 1"):
        Assumptions(twins=1.5)
    with pytest.raises(ConfigError, match="step_tokens"):
        Assumptions(step_tokens=0.0)


def test_every_recording_is_planned_and_described() -> None:
    """What is there can be made again by name, the card names it, and all is small; problems, n and
    beam width are the plan's; models told their shapes, so that any device can be asked.
    """
    names = recording_names()
    assert len(names) >= 7
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in card for name in names)
    assert sum(recording_path(name).stat().st_size for name in names) < LARGEST_BYTES
    for name in names:
        found, plan = load_recording(name), PLANS[name]
        assert len(found.problems) == plan.problems
        assert found.settings.strategy_settings["n"] == plan.n
        assert found.settings.strategy_settings["beam_width"] == plan.beam_width
        assert all(problem.steps and problem.solutions for problem in found.problems)
        assert all(engine.spec and engine.weight_bytes for engine in (found.llm, found.prm))
        if name in ("tiny-16-n4", "smollm2-n4"):  # replays to its own tree
            nodes = replay(found, PRESETS["h100"]).trace.nodes
            steps = [step for problem in found.problems for step in problem.steps]
            assert len(nodes) == len(steps)
            assert nodes["step_tokens"].sum() == sum(len(step.tokens) for step in steps)


def test_unknown_names_are_told_what_there_is(tmp_path) -> None:
    """A name that nobody recorded is refused, with those there are and the nearest."""
    with pytest.raises(RecordingError, match=r"'tiny-16-n5'.*Did you mean 'tiny-16-n4'"):
        load_recording("tiny-16-n5")
    with pytest.raises(RecordingError, match="known: tiny-128"):
        make_recording("tiny", tmp_path / "a.parquet")
