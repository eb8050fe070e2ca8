"""How long MATH-500's problems and solutions are, in tokens of Llama 3: a table in the package.

data/README.md says how it was counted. What it does not do: hold any text.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from workbench.errors import ConfigError
from workbench.search.problems import Problem, pick_uniformly

MATH500 = Path(__file__).parent / "data" / "math500_lengths.csv"


class Lengths(NamedTuple):
    """One problem. Tokens of its text, and of the reference solution."""

    id: str
    level: int
    problem_tokens: int
    solution_tokens: int


def math500_lengths(limit: int | None = None, seed: int = 0) -> list[Lengths]:
    """Every problem, or those that load_problems("math500", limit, seed=seed) chooses."""
    with MATH500.open(encoding="utf-8", newline="") as file:
        rows = [Lengths(r[0], *map(int, r[1:])) for r in list(csv.reader(file))[1:]]
    if limit is None:
        return rows
    if not 1 <= limit <= len(rows):
        raise ConfigError(f"limit is {limit}; allowed: 1 to {len(rows)}, or None.")
    known = {row.id: row for row in rows}
    problems = [Problem(row.id, row.id, None, row.level) for row in rows]
    return [known[problem.id] for problem in pick_uniformly(problems, limit, seed)]
