"""`workbench run`: one search, with its answer, its tree and its speed on the terminal."""

from __future__ import annotations

import argparse

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from workbench.cli.settings import key_values, terminal
from workbench.config import SweepConfig
from workbench.errors import ConfigError
from workbench.experiments.plan import RunSpec
from workbench.experiments.run import build_engine, search
from workbench.search.problems import Problem, load_problems
from workbench.search.result import SearchResult

OPTIONS = ("llm", "prm", "total_memory", "strategy", "n", "beam_width", "max_depth", "temperature")


def run(given: argparse.Namespace) -> int:
    """Search one problem and print what came of it."""
    problem = chosen_problem(given)
    settings = {name: getattr(given, name) for name in OPTIONS} | key_values(given.set, "--set")
    spec = RunSpec(SweepConfig.from_dict(settings), given.llm_share, given.seed)
    llm, prm = (build_engine(spec.engine(role)) for role in ("llm", "prm"))
    result = search([problem], llm, prm, spec.search, spec.seed, given.prm_format)
    show(result, problem, given.tree_depth, terminal())
    return 0


def chosen_problem(given: argparse.Namespace) -> Problem:
    """The problem given as text, or the one picked from a source."""
    if given.problem is not None:
        return Problem("given", given.problem)
    levels = None if given.level is None else (given.level,)
    found = load_problems(given.problems, limit=given.index + 1, levels=levels)
    if not 0 <= given.index < len(found):
        raise ConfigError(
            f"--index is {given.index}; {given.problems} has problems 0 to {len(found) - 1}."
        )
    return found[given.index]


def show(result: SearchResult, problem: Problem, depth: int, console: Console) -> None:
    """Problem, tree, answer and speed."""
    console.print(f"[bold]problem[/]  {escape(problem.problem)}")
    if depth:
        console.print(tree_of(result.tree, depth))
    row = result.problems.iloc[0]
    console.print(f"[bold]answer[/]   {escape(row['predicted'] or '(none)')}{_verdict(row)}")
    best = result.candidates.iloc[0]
    steps = [step.strip() for step in best["text"].split("\n\n") if step.strip()]
    console.print(f"[bold]best[/]     {escape(' / '.join(steps))}")
    console.print(
        f"[bold]speed[/]    {result.throughput}; {len(result.tree)} nodes, {row['tokens']} tokens, "
        f"{row['iterations']} iterations"
    )


def tree_of(nodes: pd.DataFrame, depth: int) -> Tree:
    """The nodes down to `depth`: kept ones bold, each with its score and the text of its step."""
    drawn = Tree("tree  (score, step; bold: kept)")
    branches = {"": drawn}
    for node in nodes[nodes["depth"] <= depth].sort_values(["depth", "node_id"]).to_dict("records"):
        text = escape(" ".join(node["text"].split()))
        style = "bold" if node["kept"] else "dim"
        label = f"[{style}]{node['score']:.3f}  {text}[/]"
        branches[node["node_id"]] = branches[node["parent_id"]].add(label)
    return drawn


def _verdict(row: pd.Series) -> str:
    if pd.isna(row["correct"]):
        return ""
    return "  (right)" if row["correct"] else f"  (wrong; it is {row['answer']})"
