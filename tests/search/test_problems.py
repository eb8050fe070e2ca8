"""Problems: what is read, what is chosen, and how a bad row is named."""

import csv
import hashlib
import json
import random
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path
from unittest.mock import Mock

import pytest

from workbench.errors import ConfigError, ProblemFileError
from workbench.search import problems
from workbench.search.problems import LEVELS, Problem, load_problems, pick_uniformly

DATA = Path(__file__).parents[1] / "data"


def write(tmp_path, *rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def test_tiny_is_uniform_over_levels():
    """128 problems over five levels are 26, 26, 26, 25 and 25."""
    found = load_problems("tiny", limit=128)
    assert Counter(p.level for p in found) == {1: 26, 2: 26, 3: 26, 4: 25, 5: 25}
    assert load_problems("tiny", limit=5) == found[:5] != load_problems("tiny", limit=5, seed=3)
    assert {p.level for p in load_problems("tiny", limit=6, levels=[2, 4])} == {2, 4}


def test_math500_rows_are_read_without_their_solutions():
    """The worked solution would be an answer leaking in; only the final answer is kept."""
    found = problems.read_problems(DATA / "math500_sample.json")
    rows = json.loads((DATA / "math500_sample.json").read_text())
    assert [p.answer for p in found] == [row["answer"] for row in rows]
    assert [p.id for p in found] == [row["unique_id"] for row in rows]
    assert {p.level for p in found} == {1, 2, 3, 4, 5}
    assert all(p.subject for p in found)
    told = [(row["solution"], p.problem + p.answer + p.subject) for p, row in zip(found, rows)]
    assert not any(solution in text for solution, text in told)


def test_the_committed_128_of_math500():
    """The rule is fixed: these ids for ever, whatever order the file has."""
    with (DATA / "math500_levels.csv").open() as file:
        rows = [Problem(r["unique_id"], "?", None, int(r["level"])) for r in csv.DictReader(file)]
    chosen = (DATA / "math500_128_seed0.txt").read_text().split()
    assert [p.id for p in pick_uniformly(rows[::-1], 128, 0)] == chosen
    levels = Counter(p.level for p in pick_uniformly(rows, 128, 0))
    assert levels == {1: 26, 2: 26, 3: 26, 4: 25, 5: 25}
    assert [p.id for p in pick_uniformly(rows, 128, 1)] != chosen


def test_a_level_that_runs_out_leaves_its_turns_to_the_others():
    """`limit` is at most; nothing is repeated to fill it."""
    rows = [Problem(str(k), "?", None, 1 if k < 2 else 2) for k in range(8)]
    assert Counter(p.level for p in pick_uniformly(rows, 6, 0)) == {1: 2, 2: 4}
    assert len(pick_uniformly(rows, 99, 0)) == 8


def test_gsm8k_answers_are_the_number_after_the_marks():
    """question/answer rows; an empty line and a line separator inside a text are no rows."""
    found = problems.read_problems(DATA / "gsm8k_like.jsonl")
    assert [p.answer for p in found] == ["1040", "4"]
    assert "####" not in repr(found)
    assert len({p.id for p in found}) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{not json", "row 2 is no valid JSON"),
        ("[1, 2]", "row 2 is a list"),
        ({"answer": "4"}, "lacks field 'problem' or 'question'"),
        ({"problem": "", "answer": "4"}, "'' in field 'problem'"),
        ({"problem": "a", "answer": None}, "None in field 'answer'"),
        ({"problem": "b"}, "lacks field 'answer'"),
        ({"problem": "a", "answer": "work ####  "}, "no answer after '####'"),
        ({"problem": "a", "answer": "4", "level": "hard"}, "'hard' in field 'level'"),
        ({"problem": "How?", "answer": "4"}, "same id or text as row 1"),
    ],
)
def test_every_kind_of_bad_row_is_named(tmp_path, row, said):
    """File, row number and field: enough to correct it."""
    path = write(tmp_path, {"problem": "How?", "answer": 3}, row)
    with pytest.raises(ProblemFileError) as error:
        load_problems(path)
    assert said in str(error.value)
    assert f"{path}, row 2" in str(error.value)


def test_numbers_and_level_texts_are_understood(tmp_path):
    """MATH writes "Level 3"; hand-written files write numbers."""
    rows = [{"problem": "a", "answer": 3, "level": "Level 3"}, {"problem": "b", "answer": "x"}]
    path = write(tmp_path, *rows)
    assert [(p.answer, p.level) for p in load_problems(path)] == [("3", 3), ("x", None)]
    assert [p.level for p in load_problems(path, levels=[3])] == [3]
    with pytest.raises(ConfigError, match=r"levels are \[7\]; .* has \[3\]"):
        load_problems(path, levels=[7])
    with pytest.raises(ConfigError, match="levels is 3; allowed: None"):
        load_problems(path, levels=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit is '5'; allowed: None"):
        load_problems(path, limit="5")  # type: ignore[arg-type]


def test_unknown_sources_and_empty_and_odd_files_are_refused(tmp_path):
    """With the nearest known one; and no silent zero problems."""
    with pytest.raises(ConfigError, match="Did you mean 'math500'"):
        load_problems("math50")
    with pytest.raises(ProblemFileError, match=r"no problem file nowhere.jsonl"):
        load_problems("nowhere.jsonl")
    with pytest.raises(ProblemFileError, match="holds no problem"):
        load_problems(write(tmp_path, ""))
    with pytest.raises(ProblemFileError, match="holds a dict"):
        load_problems(write(tmp_path, {"problem": "a", "answer": "b"}, name="rows.json"))
    with pytest.raises(ConfigError, match="limit is 0"):
        load_problems("tiny", limit=0)


def test_math500_offline_says_what_to_do(monkeypatch):
    """No cache and no network: a path is the way out."""
    import huggingface_hub

    refuse = Mock(side_effect=OSError("offline"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(ProblemFileError, match=r"Give the path of a MATH-500"):
        load_problems("math500", limit=3)
    tried = [call.kwargs["local_files_only"] for call in refuse.call_args_list]
    assert tried == [True, False]  # the cache first, then the hub
    found = str(DATA / "math500_sample.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: found)
    assert {p.level for p in load_problems("math500", limit=5)} == {1, 2, 3, 4, 5}


def test_numbers_and_names_are_as_the_file_writes_them(tmp_path):
    """Guards an answer of 0.00001 from being 1e-05, which no model boxes; and an id from null."""
    path, given = tmp_path / "rows.jsonl", ["0.00001", "1234567890123456789.5", "-3", "1e3"]
    rows = [f'{{"unique_id": null, "id": {k}, "problem": "p{k}", "answer": {answer}}}'
            for k, answer in enumerate(given)]  # fmt: skip
    path.write_text("\n".join(rows))
    found = problems.read_problems(path)
    assert [p.answer for p in found] == [*given[:3], "1000"]
    assert [p.id for p in found] == ["0", "1", "2", "3"]
    path.write_text('{"problem": "p", "answer": NaN}')
    with pytest.raises(ProblemFileError, match="row 1 has NaN, which is no number"):
        problems.read_problems(path)


# -- the tiny family --


def test_no_problem_is_there_twice():
    """Two levels share a length; a bootstrap takes problems for independent."""
    assert len({p.problem for p in problems.tiny_problems(1000, seed=1)}) == 1000


@pytest.mark.parametrize("level", LEVELS)
def test_problems_are_held_out_of_their_level_and_their_answers_right(level: int):
    """A level is its number of operations; the prompt holds the terms and nothing else."""
    counts, (fewest, most) = set(), problems.LEVEL_OPERATIONS[level]
    for problem in problems.tiny_problems(60, levels=[level], seed=1):
        digest = hashlib.sha256(problem.problem.encode()).hexdigest()
        assert int(digest, 16) % 8 == 0 and problems.is_held_out(problem.problem)
        chain = re.fullmatch(r"Compute ([0-9+-]+)\.", problem.problem)[1]
        assert str(sum(map(int, re.findall(r"[+-]?\d+", chain)))) == problem.answer
        assert problem.level == level
        counts.add(len(re.findall(r"[+-]", chain)))
    assert counts == set(range(fewest, most + 1))


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_has_ten_thousand_held_out_problems_of_small_totals(level: int):
    """Of the shortest ones there are least; of the others a tenth of it is looked at."""
    rng, held_out, draws = random.Random(level), set(), 0
    while len(held_out) < (10_000 if level == LEVELS[0] else 1_000):
        terms = problems.draw_terms(rng.randint(*problems.LEVEL_OPERATIONS[level]), rng)
        assert min(accumulate(terms)) >= 0 and max(accumulate(terms)) <= problems.LARGEST_TOTAL
        text = problems.problem_text(terms)
        held_out |= {text} if problems.is_held_out(text) else set()
        draws += 1
        assert draws < 200_000
