"""The PRM benchmark: ProcessBench's measures on known scores, its files, and the embedded PRM."""

import json

import pytest

from tests.search.conftest import FakeEngine
from workbench.bench import prm as bench
from workbench.cli import main
from workbench.errors import ProblemFileError
from workbench.search.prm import PRM, Critiques
from workbench.training.corpus import is_right

ROWS = (
    {"id": "a", "problem": "Compute 1+1.", "steps": ["good", "bad", "good"], "label": 1},
    {"id": "b", "problem": "Compute 1+1.", "steps": ["good", "good"], "label": 1},
    {"id": "c", "problem": "Compute 2+2.", "steps": ["bad", "good"], "label": 0},
    {"id": "d", "problem": "Compute 2+2.", "steps": ["good", "good"], "label": -1},
    {"id": "e", "problem": "Compute 3+3.", "steps": ["good", "bad"], "label": -1},
)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["rlhflow", "thinkprm"])
def test_the_measures_are_those_of_the_paper(tmp_path, kind) -> None:
    """Of three erroneous solutions two are named, of two correct ones one: F1 is 4/7."""
    engine = FakeEngine(lambda text, seed: f"It is {'bad' * ('bad' in text)}</think>")
    engine.judge = lambda ids: (0.0, 9.0 if "bad" in engine.tokenizer.decode(ids) else -9.0)
    judge = PRM(engine, kind, Critiques(2, 40) if kind == "thinkprm" else None)
    solutions = bench.read_solutions(write(tmp_path / "a.jsonl", ROWS))
    rows = {row.name: row for row in bench.rows_of(judge, solutions)}
    assert (rows["erroneous"].value, rows["correct"].value) == (3, 2)
    assert rows["accuracy_erroneous"].value == pytest.approx(2 / 3)
    assert rows["accuracy_correct"].value == 0.5
    assert rows["f1"].value == pytest.approx(4 / 7)
    low, high = rows["accuracy_correct"].spread
    assert low < 0.5 < high
    steps = sum(len(row["steps"]) for row in ROWS)
    wanted = len(ROWS) if kind == "rlhflow" else 4 * steps  # two critiques, two verdicts a step
    assert len(engine.asked) == wanted


def test_labels_of_the_tiny_family_are_what_its_texts_say() -> None:
    """The first wrong step is the first whose text leaves another value; some have none."""
    solutions = bench.tiny_solutions(60, seed=1)
    for each in solutions:
        right = [is_right(step, int(each.problem.answer)) for step in each.steps]
        assert each.first_error == (right.index(False) if False in right else None)
    erroneous = sum(each.first_error is not None for each in solutions)
    assert 15 < erroneous < 60
    assert bench.tiny_solutions(60, seed=1) == solutions != bench.tiny_solutions(60, seed=2)


def test_the_command_judges_the_embedded_prm(tmp_path, monkeypatch) -> None:
    """Its F1 is far above naming a step by chance; the record says what was asked."""
    monkeypatch.setattr(bench, "PROFILES", {"quick": 40})
    file = tmp_path / "prm.json"
    assert main(["bench", "prm", "--profile", "quick", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = {row["name"]: row["value"] for row in found["rows"]}
    assert rows["f1"] > 0.5 and rows["erroneous"] + rows["correct"] == 40
    assert rows["f1_best_threshold"] >= rows["f1"]
    assert (found["bench"], found["mode"]["prm"]) == ("prm", "tiny-prm")


WRONG = [{"label": wrong} for wrong in (3, True, None)] + [{"problem": " "}]
WRONG += [{"steps": []}, {"steps": [1]}]


@pytest.mark.parametrize("row", WRONG)
def test_rows_that_are_none_are_named(tmp_path, row) -> None:
    """The file and the row; a file of no row, and none at all."""
    path = write(tmp_path / "a.jsonl", [ROWS[0], ROWS[1] | row])
    with pytest.raises(ProblemFileError, match=r"a\.jsonl, row 2: .*label \(-1, or the index"):
        bench.read_solutions(path)
    with pytest.raises(ProblemFileError, match="holds no solution"):
        bench.read_solutions(write(tmp_path / "b.jsonl", []))
    with pytest.raises(ProblemFileError, match="cannot be read"):
        bench.read_solutions(tmp_path / "none.jsonl")
