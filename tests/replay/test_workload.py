"""Searches grown from lengths and assumptions: who they are of, that they replay, what repeats."""

import random
from collections import Counter
from pathlib import Path

import pytest

from workbench.errors import ConfigError
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.growth import arrival_rounds
from workbench.replay.lengths import math500_lengths
from workbench.replay.recordings import load_recording
from workbench.replay.simulator import replay
from workbench.replay.what_if import what_if
from workbench.replay.workload import (
    MAX_MODEL_LEN,
    Assumptions,
    drawn_tokens,
    thesis_search,
)
from workbench.search.recording import read_recording, write_recording
from workbench.search.result import node_id

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def search():
    return thesis_search(num_problems=5, n=16)


def test_the_problems_are_those_of_the_study() -> None:
    """128 problems by the study's rule, their levels MATH-500's: 26, 26, 26, 25, 25."""
    chosen = math500_lengths(128)
    named = (DATA / "math500_128_seed0.txt").read_text().split()
    assert [row.id for row in chosen] == named
    assert sorted(Counter(row.level for row in chosen).values()) == [25, 25, 26, 26, 26]
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
    """No sequence of either model passes max_model_len; every beam ends or reaches the depth."""
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


def test_a_split_changes_evictions_and_not_the_tree(search) -> None:
    """At thesis scale a small cache evicts, a large one does not, and both sample the same."""
    answers = Answers(search)
    few = {"num_blocks": 260}
    tight = what_if(answers, device="a100-80", llm=few, prm=few)
    roomy = what_if(answers, device="a100-80", total_memory="70GiB", llm_share=0.3)
    evicted = [r.trace.steps["evicted"].sum() for r in (tight, roomy)]
    assert evicted[0] > 0
    assert evicted[1] == 0
    assert tight.tree.equals(roomy.tree)
    assert tight.throughput.wall_s > roomy.throughput.wall_s


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
    with pytest.raises(ConfigError, match=r"twins is 1.5; allowed: 0 to 1"):
        Assumptions(twins=1.5)
    with pytest.raises(ConfigError, match="step_tokens"):
        Assumptions(step_tokens=0.0)


def test_rounds_follow_the_queue() -> None:
    """The rounds computed from iterations are those in which a measured search asked."""
    measured = load_recording("tiny-16-n4")
    iterations = [max(len(step.path) for step in p.steps) for p in measured.problems]
    first = arrival_rounds(iterations, measured.settings.min_problem_batch)
    assert first == [min(step.round for step in p.steps) for p in measured.problems]
    for start, problem in zip(first, measured.problems, strict=True):
        assert all(step.round == start + 2 * (len(step.path) - 1) for step in problem.steps)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 50])
def test_drawn_tokens_are_as_many_as_asked(count) -> None:
    """However few, and drawn alike by equal generators."""
    tokens = drawn_tokens(random.Random(7), count)
    assert len(tokens) == count
    assert tokens == drawn_tokens(random.Random(7), count)
