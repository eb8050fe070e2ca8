"""Published completions as a recording: what was kept is there, what was pruned is modelled."""

import json

import pytest

from workbench.errors import RecordingError
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.simulator import replay
from workbench.replay.workload import from_completions

COMMON = "## Step 1: Add.\nWe add 1 and 1.\n\n"
ROW = {
    "problem": "What is $1+1$?",
    "solution": "It is 2.",
    "answer": "2",
    "subject": "Prealgebra",
    "level": 1,
    "unique_id": "test/made/1.json",
    "completions": [
        COMMON + "So the answer is 2.",
        "We guess.\n\nTherefore it is two.\n\nThe final answer is $\\boxed{2}$.",
        "We guess.\n\nIt is 3.",
        COMMON + "So the answer is 2.",
    ],
    "scores": [[0.9, 0.95], [0.4, 0.8, 0.85], [0.4, 0.3], [0.9, 0.95]],
    "pred": "2",
    "completion_tokens": [-1, -1, -1, -1],
}


def tokenize(text: str) -> list[int]:
    """A token a byte."""
    return list(text.encode())


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Through a file in the set's form, a row a line."""
    path = tmp_path_factory.mktemp("set") / "train.jsonl"
    other = {**ROW, "unique_id": "test/made/2.json", "level": 2}
    path.write_text("\n".join(json.dumps(row) for row in (ROW, other)), encoding="utf-8")
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return from_completions(rows, tokenize, beam_width=2, max_depth=6)


def test_the_final_beams_are_in_the_tree(recording) -> None:
    """Every completion is a path that ends, equal ones twice; tokens and scores are the set's."""
    problem = recording.problems[0]
    texts = {step.path: step.text for step in problem.steps}
    whole = {
        "".join(texts[step.path[: k + 1]] for k in range(len(step.path))): step
        for step in problem.steps
        if step.finish_reason == "eos"
    }
    assert set(ROW["completions"]) <= set(whole)
    ends = [step.text for step in problem.steps if step.finish_reason == "eos"]
    assert ends.count("So the answer is 2.") == 2
    assert max(len(step.path) for step in problem.steps) == 3, "as deep as the longest final beam"
    scores = {solution.steps: solution.score for solution in problem.solutions}
    assert scores[COMMON, "So the answer is 2."] == pytest.approx(0.95, abs=1e-4)
    step = whole[ROW["completions"][0]]
    assert bytes(step.tokens).decode() == step.text


def test_pruned_siblings_are_modelled_and_lose(recording) -> None:
    """Each score of a step that nobody published lies below all that were."""
    for problem in recording.problems:
        modelled = [s.score for s in problem.solutions if s.steps[-1].startswith("modelled")]
        assert modelled
        assert max(modelled) < 0.3


def test_it_replays(recording) -> None:
    """The recording replays to all its nodes."""
    nodes = replay(Answers(recording), PRESETS["a100-80"]).trace.nodes
    assert len(nodes) == sum(len(problem.steps) for problem in recording.problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "no 'scores'"),
        ({"scores": [[0.1]]}, "4 completions and 1 lists"),
        ({"completions": ["a", "b", " ", "c"]}, "Completion 2 is empty"),
    ],
)
def test_other_files_are_refused(change, message) -> None:
    """A missing column, lists that do not match, an empty text: named with their row."""
    row = {name: value for name, value in (ROW | change).items() if value is not None}
    with pytest.raises(RecordingError, match=message):
        from_completions([row], tokenize)


def test_rows_of_several_n_are_refused() -> None:
    """Rows with different numbers of beams are no one search; none at all is none."""
    short = ROW | {"completions": ROW["completions"][:2], "scores": ROW["scores"][:2]}
    with pytest.raises(RecordingError, match="2, 4 completions"):
        from_completions([ROW, short], tokenize)
    with pytest.raises(RecordingError, match="no completions"):
        from_completions([], tokenize)
