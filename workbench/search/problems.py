"""Problems to search: the tiny family, MATH-500, or any JSON or JSONL file with answers.

A file's rows hold `problem` (or `question`) and `answer`, and may hold `level`, `subject` and an
id. Worked solutions are never kept: a problem carries its final answer alone, and a strategy is
given a copy without it. Tiny problems are chains of signed integers, `Compute 7-3+12+9-4.`, in five
levels, a level being a number of operations and so the length of a solution. They are drawn from
seeded generators, and one in eight (by the hash of its text) is held out: what is searched is held
out, what the corpus trains on never is.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, ProblemFileError, nearest

NAMES = ("tiny", "math500")
TINY_DEFAULT_LIMIT = 128
MATH500_HUB = ("HuggingFaceH4/MATH-500", "test.jsonl")
SUFFIXES = (".json", ".jsonl")
Row = dict[str, Any]

LEVEL_OPERATIONS = {1: (2, 3), 2: (3, 4), 3: (5, 7), 4: (8, 12), 5: (20, 24)}
"""Fewest and most operations of a level."""
LEVELS = tuple(LEVEL_OPERATIONS)

HELD_OUT_MODULUS = 8
LARGEST_TOTAL = 60
TWO_DIGIT_SHARE = 0.25

Terms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. id is unique in a search; answer None: nobody knows, nothing is checked."""

    id: str
    problem: str
    answer: str | None = None
    level: int | None = None
    subject: str | None = None

    def without_answer(self) -> Problem:
        """What a strategy may see."""
        return replace(self, answer=None)


def load_problems(
    source: str | Path, limit: int | None = None, levels: Sequence[int] | None = None, seed: int = 0
) -> list[Problem]:
    """Problems of "tiny", of "math500" (local cache, then the hub), or of a .json or .jsonl file.

    limit: at most so many, the levels taking turns, so any prefix is uniform (128 over five levels
    are 26, 26, 26, 25, 25); within a level the order is that of sha256 of seed and id. Without
    limit: the whole file in its order ("tiny", which has no end: 128).
    Raises ProblemFileError naming file, row and field; ConfigError for an unknown name or level.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; allowed: None (all) or at least 1.")
    if source == "tiny":
        return _tiny(TINY_DEFAULT_LIMIT if limit is None else limit, levels, seed)
    problems = read_problems(math500_file() if source == "math500" else _file(source))
    if levels is not None:
        _check_levels(levels, {p.level for p in problems if p.level is not None}, str(source))
        problems = [problem for problem in problems if problem.level in levels]
    return problems if limit is None else pick_uniformly(problems, limit, seed)


def pick_uniformly(problems: Sequence[Problem], limit: int, seed: int) -> list[Problem]:
    """`limit` problems, the levels taking turns; a level that runs out drops out of the turns."""
    by_level: dict[int, list[Problem]] = {}
    for problem in problems:
        by_level.setdefault(problem.level or 0, []).append(problem)
    queues = [
        sorted(by_level[level], key=lambda p: hashlib.sha256(f"{seed}/{p.id}".encode()).digest())
        for level in sorted(by_level)
    ]
    turns = [queue[turn] for turn in range(limit) for queue in queues if turn < len(queue)]
    return turns[:limit]


def math500_file() -> Path:
    """The MATH-500 file of the local Hugging Face cache, else fetched from the hub."""
    import huggingface_hub  # noqa: PLC0415 - slow to import, needed by this source alone

    repository, name = MATH500_HUB
    for cached_only in (True, False):
        try:
            found = huggingface_hub.hf_hub_download(
                repository, name, repo_type="dataset", local_files_only=cached_only
            )
            return Path(found)
        except Exception as error:  # offline, refused, not cached: one answer to the user
            reason = error
    raise ProblemFileError(
        f"MATH-500 is not in the local cache and {repository} cannot be fetched "
        f"({type(reason).__name__}). Give the path of a MATH-500 .json or .jsonl file instead, "
        "or use 'tiny', which needs no network."
    ) from reason


def read_problems(path: str | Path) -> list[Problem]:
    """Every problem of a .json (a list) or .jsonl file, in its order. Raises ProblemFileError."""
    path = Path(path)
    problems: list[Problem] = []
    rows_of: dict[str, int] = {}
    for number, row in _rows(path):
        problem = _problem(path, number, row)
        if problem.id in rows_of:
            raise _bad(path, number, f"has the same id or text as row {rows_of[problem.id]}")
        rows_of[problem.id] = number
        problems.append(problem)
    if not problems:
        raise ProblemFileError(
            f"{path} holds no problem; give one object with problem and answer a row."
        )
    return problems


def _tiny(limit: int, levels: Sequence[int] | None, seed: int) -> list[Problem]:
    if levels is not None:
        _check_levels(levels, set(LEVELS), "tiny")
    return tiny_problems(limit, levels, seed)


def _check_levels(levels: Sequence[int], known: set[int], source: str) -> None:
    missing = [level for level in levels if level not in known]
    if missing or not levels:
        raise ConfigError(
            f"levels are {list(levels)}; {source} has {sorted(known) or 'no levels'}."
        )


def _file(source: str | Path) -> Path:
    path = Path(source)
    if path.suffix in SUFFIXES and path.is_file():
        return path
    if path.suffix in SUFFIXES:
        raise ProblemFileError(
            f"There is no problem file {path}; give an existing .json or .jsonl file."
        )
    raise ConfigError(
        f"There are no problems {str(source)!r}; allowed: {', '.join(NAMES)}, "
        f"or the path of a .json or .jsonl file.{nearest(str(source), NAMES)}"
    )


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Each row with its number, from 1: the line of a .jsonl file, the place in a .json list."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        yield from (
            (number, _json(path, number, line))
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        )
        return
    found = _json(path, None, text)
    if not isinstance(found, list):
        raise ProblemFileError(
            f"{path} holds a {type(found).__name__}; a .json file holds a list of rows."
        )
    yield from enumerate(found, start=1)


def _json(path: Path, number: int | None, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        if number is None:
            raise ProblemFileError(f"{path} is no valid JSON: {error}") from error
        raise _bad(path, number, f"is no valid JSON: {error}") from error


def _bad(path: Path, number: int, what: str) -> ProblemFileError:
    return ProblemFileError(f"{path}, row {number} {what}. Correct or remove the row.")


def _problem(path: Path, number: int, row: Any) -> Problem:
    if not isinstance(row, dict):
        raise _bad(
            path, number, f"is a {type(row).__name__}, not an object with problem and answer"
        )
    text = _text(path, number, row, "problem", "question")
    answer = _text(path, number, row, "answer")
    if "####" in answer:  # GSM8K: the worked solution, then the answer
        answer = answer.rsplit("####", 1)[1].strip().replace(",", "")
        if not answer:
            raise _bad(path, number, "has no answer after '####' in field 'answer'")
    level = _level(path, number, row.get("level"))
    name = row.get("unique_id", row.get("id"))
    if name is None:
        name = f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    subject = row.get("subject", row.get("type"))
    return Problem(str(name), text, answer, level, None if subject is None else str(subject))


def _text(path: Path, number: int, row: Row, *fields: str) -> str:
    field = next((name for name in fields if name in row), None)
    if field is None:
        others = f" (it has {', '.join(map(str, row))})" if row else ""
        raise _bad(path, number, f"lacks field {' or '.join(map(repr, fields))}{others}")
    value = row[field]
    if isinstance(value, int | float) and not isinstance(value, bool) and field == "answer":
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise _bad(
            path, number, f"has {value!r} in field {field!r}, not a text with something in it"
        )
    return value.strip()


def _level(path: Path, number: int, value: Any) -> int | None:
    """A level is a number, a text such as "Level 3", or absent (as MATH's "Level ?" is)."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and (
        found := re.fullmatch(r"(?:level\s*)?(\d+|\?)", value.strip().lower())
    ):
        return None if found[1] == "?" else int(found[1])
    raise _bad(
        path, number, f"has {value!r} in field 'level', neither a whole number nor 'Level 3'"
    )


def format_terms(terms: Sequence[int]) -> str:
    """The signed sum as it is written: (7, -3, 12) is "7-3+12"."""
    return str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:])


def problem_text(terms: Sequence[int]) -> str:
    """The prompt of a chain; it holds the terms and nothing derived from them."""
    return f"Compute {format_terms(terms)}."


def is_held_out(text: str) -> bool:
    """Whether a problem is kept from training and from PRM labelling, by its text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def draw_terms(operations: int, rng: random.Random) -> Terms:
    """A chain with `operations` signs whose running totals stay in [0, LARGEST_TOTAL]."""
    total = _operand(rng)
    terms = [total]
    for _ in range(operations):
        operand = _operand(rng)
        adds = rng.random() < 0.5
        if total + operand > LARGEST_TOTAL:
            adds = False
        elif total - operand < 0:
            adds = True
        terms.append(operand if adds else -operand)
        total += terms[-1]
    return tuple(terms)


def _operand(rng: random.Random) -> int:
    return rng.randint(10, 29) if rng.random() < TWO_DIGIT_SHARE else rng.randint(1, 9)


def tiny_problem(level: int, rng: random.Random) -> Problem:
    """One held-out problem of a level. Raises ValueError for a level that does not exist."""
    if level not in LEVEL_OPERATIONS:
        raise ValueError(f"tiny problems have the levels {LEVELS}, not {level!r}")
    while True:
        terms = draw_terms(rng.randint(*LEVEL_OPERATIONS[level]), rng)
        text = problem_text(terms)
        if is_held_out(text):
            digest = hashlib.sha256(text.encode()).hexdigest()
            name = f"tiny-{level}-{digest[:12]}"
            return Problem(name, text, str(sum(terms)), level, "arithmetic")


def tiny_problems(limit: int, levels: Sequence[int] | None = None, seed: int = 0) -> list[Problem]:
    """`limit` different held-out problems, the levels taking turns so any prefix is uniform.

    With all five levels 128 problems are 26, 26, 26, 25 and 25. A longer list of the same seed
    and levels begins with the shorter one.
    """
    stream = stream_problems(LEVELS if levels is None else tuple(levels), seed)
    return [problem for problem, _ in zip(stream, range(limit), strict=False)]


def stream_problems(levels: Sequence[int], seed: int) -> Iterator[Problem]:
    """An endless run of different held-out problems; each level has its own generator."""
    generators = {level: random.Random(f"tiny-{seed}-{level}") for level in levels}
    seen: set[str] = set()
    while levels:
        for level in levels:
            problem = tiny_problem(level, generators[level])
            while problem.id in seen:
                problem = tiny_problem(level, generators[level])
            seen.add(problem.id)
            yield problem
