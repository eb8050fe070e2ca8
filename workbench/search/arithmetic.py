"""The tiny problem family: chains of signed integers, `Compute 7-3+12+9-4.`, in five levels.

A level is a number of operations, so it is also the length of a worked solution. Problems are
drawn from seeded generators alone, and one in eight (by the hash of its text) is held out: what
this module hands to a search is held out, what the corpus trains on never is. No torch, and no
dependency beyond the standard library; worked solutions live in training.corpus.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LEVEL_OPERATIONS = {1: (2, 3), 2: (3, 4), 3: (5, 7), 4: (8, 12), 5: (20, 24)}
"""Fewest and most operations of a level."""
LEVELS = tuple(LEVEL_OPERATIONS)

HELD_OUT_MODULUS = 8
LARGEST_TOTAL = 60
TWO_DIGIT_SHARE = 0.25

Terms = tuple[int, ...]


class TinyProblem(NamedTuple):
    """One problem with its exact answer; `id` names the text, so equal problems share it."""

    id: str
    problem: str
    answer: str
    level: int


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


def tiny_problem(level: int, rng: random.Random) -> TinyProblem:
    """One held-out problem of a level. Raises ValueError for a level that does not exist."""
    if level not in LEVEL_OPERATIONS:
        raise ValueError(f"tiny problems have the levels {LEVELS}, not {level!r}")
    while True:
        terms = draw_terms(rng.randint(*LEVEL_OPERATIONS[level]), rng)
        text = problem_text(terms)
        if is_held_out(text):
            digest = hashlib.sha256(text.encode()).hexdigest()
            return TinyProblem(f"tiny-{level}-{digest[:12]}", text, str(sum(terms)), level)


def tiny_problems(
    limit: int, levels: Sequence[int] | None = None, seed: int = 0
) -> list[TinyProblem]:
    """`limit` different held-out problems, the levels taking turns so any prefix is uniform.

    With all five levels 128 problems are 26, 26, 26, 25 and 25. A longer list of the same seed
    and levels begins with the shorter one.
    """
    stream = stream_problems(LEVELS if levels is None else tuple(levels), seed)
    return [problem for problem, _ in zip(stream, range(limit), strict=False)]


def stream_problems(levels: Sequence[int], seed: int) -> Iterator[TinyProblem]:
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
