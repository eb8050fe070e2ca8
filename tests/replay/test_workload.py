"""Searches to be replayed: made of lengths, of published completions, and those in the package."""

import json
from pathlib import Path

import pytest

from workbench.bench.search import PLANS, make_recording
from workbench.errors import ConfigError, RecordingError
from workbench.experiments.plans import VOTE_ONLY
from workbench.replay import workload
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.simulator import replay
from workbench.replay.workload import load_recording, thesis_search
from workbench.search.recording import read_recording, write_recording
from workbench.search.result import node_id
from workbench.search.variants import STRATEGIES

LARGEST_BYTES = 3_000_000  # of all recordings in the package
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def search():
    return thesis_search(num_problems=5, n=16)


def test_the_problems_are_those_of_the_study() -> None:
    """128 problems by the study's rule, with MATH-500's levels."""
    named = (DATA / "math500_128_seed0.txt").read_text().split()
    assert [row.id for row in workload.math500_lengths(128)] == named
    levels = dict(r.split(",") for r in (DATA / "math500_levels.csv").read_text().split()[1:])
    assert {row.id: str(row.level) for row in workload.math500_lengths()} == levels
    with pytest.raises(ConfigError, match="1 to 500"):
        workload.math500_lengths(501)


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


@pytest.mark.parametrize("strategy", workload.DRAWN_STRATEGIES[1:])
def test_every_strategy_replays_to_the_tree_that_was_made(strategy) -> None:
    """The same steps stand at the same places in all trees; whole samples are cut where asked."""
    made = thesis_search(num_problems=3, n=8, strategy=strategy)
    nodes = replay(Answers(made), PRESETS["a100-80"]).trace.nodes
    sizes = {(p.problem.id, node_id(s.path)): len(s.tokens) for p in made.problems for s in p.steps}
    asked = nodes.set_index(["problem_id", "node_id"])["step_tokens"]
    assert asked.to_dict() == sizes
    if strategy == "best_of_n":
        ends = thesis_search(1, 4, strategy=strategy, assumptions=workload.Assumptions(endless=1.0))
        (problem,) = ends.problems
        assert {(len(s.tokens), s.finish_reason) for s in problem.steps} == {(2048, "length")}
    else:
        beams = {s.path: s.tokens for s in thesis_search(num_problems=3, n=8).problems[0].steps}
        own = {s.path: s.tokens for s in made.problems[0].steps}
        assert all(own[path] == beams[path] for path in own.keys() & beams.keys())


def test_requests_fit_both_models(search) -> None:
    """No sequence passes max_model_len; every beam ends or reaches the depth."""
    for problem in search.problems:
        held = {(): len(problem.prompt)}
        for step in problem.steps:
            held[step.path] = held[step.path[:-1]] + len(step.tokens)
        judged = {(): 0}
        for solution in problem.solutions:
            judged[solution.steps] = judged[solution.steps[:-1]] + len(solution.tokens)
        assert max(held.values()) < workload.MAX_MODEL_LEN
        assert max(judged.values()) < workload.MAX_MODEL_LEN
        last = max(problem.steps, key=lambda step: len(step.path))
        assert last.finish_reason == "eos" or len(last.path) == 40


def test_assumptions_do_what_they_say() -> None:
    """Longer solutions take more steps; twins repeat a sibling; solutions that never end go on."""

    def depth(**given: float) -> float:
        found = thesis_search(num_problems=10, n=4, assumptions=workload.Assumptions(**given))
        return sum(max(len(s.path) for s in p.steps) for p in found.problems) / 10

    usual = depth()
    assert depth(length_ratio=4.0) > usual > depth(length_ratio=0.5)
    assert depth(endless=1.0) == 40
    assert depth(step_tokens=80.0) < usual
    twins = thesis_search(num_problems=5, n=4, assumptions=workload.Assumptions(twins=1.0))
    assert all(len({s.tokens for s in p.steps if len(s.path) == 1}) == 1 for p in twins.problems)
    endless = workload.Assumptions(step_tokens=800.0, endless=1.0)
    found = Answers(thesis_search(num_problems=4, n=4, assumptions=endless))
    requests = replay(found, PRESETS["a100-40"]).trace.requests
    assert requests.eval("prompt_tokens + output_tokens").max() < workload.MAX_MODEL_LEN
    with pytest.raises(ConfigError, match=r"twins is 1.5; allowed: in .0, 1"):
        workload.Assumptions(twins=1.5)
    with pytest.raises(ConfigError, match="step_tokens"):
        workload.Assumptions(step_tokens=0.0)


def test_every_recording_is_planned_and_described() -> None:
    """Made again by name, named by the card, small, as planned, with the models' shapes."""
    names = workload.recording_names()
    assert set(names) == set(PLANS)
    card = (workload.FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in card for name in names)
    sizes = (workload.recording_path(name).stat().st_size for name in names)
    assert sum(sizes) < LARGEST_BYTES
    for name in names:
        found, (llm, num_problems, sizes) = load_recording(name), PLANS[name]
        plan = {"n": 16, "beam_width": 4, "strategy": "beam_search"} | sizes
        assert (found.llm.name, len(found.problems)) == (llm, num_problems)
        kind, settings = STRATEGIES[plan["strategy"]], found.settings.strategy_settings
        assert (found.settings.strategy, settings["n"]) == (kind.__name__, plan["n"])
        assert settings.get("beam_width", plan["beam_width"]) == plan["beam_width"]
        is_scored = plan["strategy"] not in VOTE_ONLY
        assert all(p.steps and bool(p.solutions) == is_scored for p in found.problems)
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
    with pytest.raises(ConfigError, match=r"strategy 'dora'.*rebase"):
        thesis_search(2, strategy="dora")
    with pytest.raises(RecordingError, match="known: tiny-128"):
        make_recording("tiny", tmp_path / "a.parquet")


COMMON = "## Step 1: Add.\nWe add 1 and 1.\n\n"
ROW = {"problem": "What is $1+1$?", "solution": "It is 2.", "answer": "2", "level": 1}
ROW |= {
    "subject": "Prealgebra",
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
def recording():
    """Of rows as they are read from the set's file."""
    rows = json.loads(json.dumps([ROW, {**ROW, "unique_id": "test/made/2.json", "level": 2}]))
    return workload.from_completions(rows, tokenize, beam_width=2, max_depth=6)


def test_the_final_beams_are_in_the_tree(recording) -> None:
    """Every completion is a path that ends, equal ones twice; tokens and scores are the set's."""
    told = [(p.problem.answer, p.problem.level) for p in recording.problems]
    assert told == [("2", 1), ("2", 2)]
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
    """Each score of a step that nobody published lies below all that were; all is replayed."""
    for problem in recording.problems:
        modelled = [s.score for s in problem.solutions if s.steps[-1].startswith("modelled")]
        assert modelled
        assert max(modelled) < 0.3
    nodes = replay(Answers(recording), PRESETS["a100-80"]).trace.nodes
    assert len(nodes) == sum(len(problem.steps) for problem in recording.problems)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{k: v for k, v in ROW.items() if k != "scores"}], "Row 0 has no 'scores'"),
        ([ROW | {"scores": [[0.1]]}], "4 completions and 1 lists"),
        ([ROW | {"completions": ["a", "b", " ", "c"]}], "Completion 2 is empty"),
        ([ROW, ROW | {"completions": ["a"], "scores": [[0.1]]}], "1, 4 completions"),
        ([], "no completions"),
        ([ROW | {"level": "Level 3"}], "Row 0: level is 'Level 3'"),
        ([ROW | {"problem": None}], "Row 0: problem is None"),
        ([ROW | {"completions": None}], "completions and scores are None"),
        ([ROW | {"scores": [[None]] * 4}], r"Row 0: scores 0 are \[None\]"),
        ([ROW | {"unique_id": "a"}, ROW | {"unique_id": "a"}], "Row 1 has the unique_id 'a'"),
    ],
)
def test_other_rows_are_refused(rows, message) -> None:
    """A missing column, lists that do not match, an empty text, several n, nothing at all."""
    with pytest.raises(RecordingError, match=message):
        workload.from_completions(rows, tokenize)
