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
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Integral
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, ProblemFileError, nearest

NAMES = ("tiny", "math500")
TINY_DEFAULT_LIMIT = 128
MATH500_HUB = ("HuggingFaceH4/MATH-500", "test.jsonl")
SUFFIXES = (".json", ".jsonl")

LEVEL_OPERATIONS = {1: (2, 3), 2: (3, 4), 3: (5, 7), 4: (8, 12), 5: (20, 24)}
"""Fewest and most operations of a level of the tiny family."""
LEVELS = tuple(LEVEL_OPERATIONS)
HELD_OUT_MODULUS = 8
LARGEST_TOTAL = 60
TWO_DIGIT_SHARE = 0.25
Terms = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. id is unique in a search; answer None: unknown, so that nothing is checked."""

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
    if limit is not None and not (isinstance(limit, Integral) and int(limit) >= 1):
        raise ConfigError(f"limit is {limit!r}; allowed: None (all) or at least 1.")
    if levels is not None and not isinstance(levels, Sequence | Set):
        raise ConfigError(f"levels is {levels!r}; allowed: None (all) or a list.")
    if source == "tiny":
        _check_levels(levels, LEVELS, "tiny")
        return tiny_problems(TINY_DEFAULT_LIMIT if limit is None else limit, levels, seed)
    path = math500_file() if source == "math500" else Path(source)
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"There are no problems {str(source)!r}; allowed: {', '.join(NAMES)}, "
            f"or the path of a .json or .jsonl file.{nearest(source, NAMES)}"
        )
    problems = read_problems(path)
    if levels is not None:
        _check_levels(levels, {p.level for p in problems if p.level is not None}, str(source))
        problems = [problem for problem in problems if problem.level in levels]
    return problems if limit is None else pick_uniformly(problems, limit, seed)


def _check_levels(levels: Sequence[int] | None, known: Iterable[int], source: str) -> None:
    if levels is not None and (not levels or not set(levels) <= set(known)):
        raise ConfigError(
            f"levels are {list(levels)}; {source} has {sorted(known) or 'no levels'}."
        )


def pick_uniformly(problems: Sequence[Any], limit: int, seed: int) -> list[Any]:
    """`limit` problems, or what else has an id and a level, the levels taking turns; a level that
    runs out drops out of the turns.
    """
    by_level: dict[int, list[Any]] = {}
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
        except Exception as error:  # offline, refused, not cached: one error for the user
            reason = error
    raise ProblemFileError(
        f"MATH-500 is not in the local cache and {repository} cannot be fetched "
        f"({type(reason).__name__}). Give the path of a MATH-500 .json or .jsonl file instead, "
        "or use 'tiny', which needs no network."
    ) from reason


# -- files --


def read_problems(path: str | Path) -> list[Problem]:
    """Every problem of a .json (a list) or .jsonl file, in its order. Raises ProblemFileError."""
    path = Path(path)
    if not path.is_file():
        raise ProblemFileError(
            f"There is no problem file {path}; give an existing .json or .jsonl file."
        )
    is_lines = path.suffix == ".jsonl"
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = text.split("\n") if is_lines else parsed(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemFileError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ProblemFileError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise ProblemFileError(
            f"{path} holds a {type(rows).__name__}; a .json file holds a list of rows."
        )
    problems: list[Problem] = []
    rows_of: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        if is_lines and not row.strip():
            continue
        try:
            problem = _problem(path.stem, parsed(row) if is_lines else row)
            if problem.id in rows_of:
                raise ValueError(f"has the same id or text as row {rows_of[problem.id]}")
        except ValueError as error:
            damaged = isinstance(error, json.JSONDecodeError)
            what = f"is no valid JSON: {error}" if damaged else error
            raise ProblemFileError(
                f"{path}, row {number} {what}. Correct or remove the row."
            ) from error
        rows_of[problem.id] = number
        problems.append(problem)
    if not problems:
        raise ProblemFileError(
            f"{path} holds no problem; give one object with problem and answer a row."
        )
    return problems


def parsed(text: str) -> Any:
    """JSON whose numbers are as they are written: 0.00001 is no 1e-05. ValueError for NaN."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"has {constant}, which is no number")

    return json.loads(text, parse_float=Decimal, parse_constant=refuse)


def _problem(stem: str, row: Any) -> Problem:
    """The problem of a row; stem: of the file's name, for the id of one that has none."""
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object with problem and answer")
    text, answer = _text(row, "problem", "question"), _text(row, "answer")
    if "####" in answer:  # GSM8K: the worked solution, then the answer
        answer = answer.rsplit("####", 1)[1].strip().replace(",", "")
        if not answer:
            raise ValueError("has no answer after '####' in field 'answer'")
    name = _first(row, "unique_id", "id")
    if name is None:
        name = f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    subject, level = _first(row, "subject", "type"), row.get("level")
    if isinstance(level, str):  # "Level 3"; MATH has a "Level ?"
        found = re.fullmatch(r"(?:level\s*)?(\d+|\?)", level.strip().lower())
        level = level if found is None else None if found[1] == "?" else int(found[1])
    if level is not None and (not isinstance(level, int) or isinstance(level, bool)):
        raise ValueError(f"has {level!r} in field 'level', neither a whole number nor 'Level 3'")
    return Problem(str(name), text, answer, level, None if subject is None else str(subject))


def _first(row: dict[str, Any], *fields: str) -> Any:
    """The first of the fields that holds something."""
    return next((row[name] for name in fields if row.get(name) is not None), None)


def _text(row: dict[str, Any], *fields: str) -> str:
    field = next((name for name in fields if name in row), None)
    if field is None:
        others = f" (it has {', '.join(map(str, row))})" if row else ""
        raise ValueError(f"lacks field {' or '.join(map(repr, fields))}{others}")
    value = row[field]
    if isinstance(value, int | Decimal) and not isinstance(value, bool) and field == "answer":
        return format(value, "f") if isinstance(value, Decimal) else str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"has {value!r} in field {field!r}, not a text with something in it")
    return value.strip()


# -- the tiny family --


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


def tiny_problems(limit: int, levels: Sequence[int] | None = None, seed: int = 0) -> list[Problem]:
    """`limit` different held-out problems, the levels taking turns so any prefix is uniform.

    Each level has a generator of its own, so a longer list of the same seed and levels begins with
    the shorter one.
    """
    levels = LEVELS if levels is None else tuple(levels)
    generators = {level: random.Random(f"tiny-{seed}-{level}") for level in levels}
    found: dict[str, Problem] = {}
    while len(found) < limit:
        level = levels[len(found) % len(levels)]
        rng = generators[level]
        terms = draw_terms(rng.randint(*LEVEL_OPERATIONS[level]), rng)
        text = problem_text(terms)
        if is_held_out(text):
            name = f"tiny-{level}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
            found.setdefault(text, Problem(name, text, str(sum(terms)), level, "arithmetic"))
    return list(found.values())
