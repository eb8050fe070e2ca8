"""What `run_search` is given, refused by name before anything runs.

What it does not do: judge prompts (runner.py), which need a tokenizer, or sampling parameters
(core.py), which judge themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from workbench.errors import ConfigError
from workbench.search.prm import PRM
from workbench.search.problems import Problem


def as_problems(given: Problem | Iterable[Problem]) -> list[Problem]:
    """One problem or several as a list; ConfigError for anything else, and for ids that repeat."""
    if isinstance(given, Problem):
        given = [given]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(
            f"problems is {given!r:.200}; give Problems: load_problems({str(given)!r:.40}), or "
            "[Problem('mine', 'Compute 1+1.')]."
        )
    problems = list(given)
    if not problems:
        raise ConfigError(
            "run_search got no problem; give at least one, e.g. load_problems('tiny', 4)."
        )
    seen: set[str] = set()
    for place, problem in enumerate(problems):
        _require_problem(place, problem)
        if problem.id in seen:
            raise ConfigError(
                f"run_search got two problems with id {problem.id!r}; ids must differ, because "
                "the seed of every node is made from its problem's id."
            )
        seen.add(problem.id)
    return problems


def _require_problem(place: int, problem: Any) -> None:
    if not isinstance(problem, Problem):
        raise ConfigError(
            f"Problem {place} is {problem!r:.200}; give a Problem, e.g. "
            "Problem('mine', 'Compute 1+1.', answer='2')."
        )
    if not isinstance(problem.problem, str) or not problem.problem.strip():
        raise ConfigError(
            f"Problem {problem.id!r} has the text {problem.problem!r}; give one with something "
            "in it."
        )


def require_models(llm: Any, prm: Any) -> None:
    """ConfigError unless there are two engines, the second as a PRM."""
    if not isinstance(prm, PRM):
        raise ConfigError(f"prm is {prm!r:.200}; give PRM(engine).")
    for name, engine in (("llm", llm), ("the PRM's engine", prm.engine)):
        if not hasattr(engine, "add_score"):
            raise ConfigError(f"{name} is {engine!r:.200}; give an Engine.")
    if llm is prm.engine:
        raise ConfigError(
            "llm and prm are one engine; give each its own, since a search reads their steps apart."
        )


def require_strategy(strategy: Any) -> None:
    """ConfigError for what has no search to offer."""
    if isinstance(strategy, type) or not hasattr(strategy, "search"):
        raise ConfigError(
            f"strategy is {strategy!r:.200}; give one with its sizes, e.g. BeamSearch(n=16)."
        )


def require_whole(least: int, **given: Any) -> None:
    """ConfigError, by name, for a value that is no whole number of at least `least`."""
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}; allowed: whole numbers >= {least}.")
