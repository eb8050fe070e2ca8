"""`workbench run`: one search, with its answer, its tree and its speed on the terminal."""

from __future__ import annotations

import argparse

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from workbench.cli.settings import key_values, terminal
from workbench.config import SweepConfig, format_size, parse_size
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, OutOfMemory
from workbench.experiments.feasible import feasible_shares
from workbench.experiments.plan import RunSpec
from workbench.experiments.run import build_engine, search
from workbench.search.problems import Problem, load_problems
from workbench.search.result import SearchResult
from workbench.search.search import as_problems

OPTIONS = ("llm", "prm", "total_memory", "strategy", "n", "beam_width", "max_depth", "temperature")
SOURCE = "tiny"


def run(given: argparse.Namespace) -> int:
    """Search one problem and print what came of it."""
    problem = chosen_problem(given)
    spec = run_spec(given)
    llm, prm = engines(spec)
    result = search([problem], llm, prm, spec.search, spec.seed, given.prm_format)
    show(result, problem, given.tree_depth, terminal())
    return 0


def run_spec(given: argparse.Namespace) -> RunSpec:
    """The run that the options mean."""
    if not 0 < given.llm_share < 1:
        raise ConfigError(f"--llm-share is {given.llm_share:g}; allowed: a share in (0, 1).")
    settings = {name: getattr(given, name) for name in OPTIONS} | key_values(given.set, "--set")
    return RunSpec(SweepConfig.from_dict(settings), given.llm_share, given.seed)


def engines(spec: RunSpec) -> tuple[Engine, Engine]:
    """LLM and PRM with their parts of the memory; OutOfMemory names the shares that fit."""
    try:
        return build_engine(spec.engine("llm")), build_engine(spec.engine("prm"))
    except OutOfMemory as error:
        total = format_size(parse_size(spec.config.total_memory))
        raise OutOfMemory(
            f"llm_share {spec.llm_share:g} of {total} is infeasible. {error}{_ends(spec.config)}"
        ) from error


def _ends(config: SweepConfig) -> str:
    """The shares that fit; nothing where the total pays for activations, which are measured."""
    if config.activations_in_total:
        return ""
    pair, total = (config.llm, config.prm), config.total_memory
    sizes = {name: getattr(config, name) for name in ("block_size", "max_model_len", "dtype")}
    return f" {feasible_shares(*pair, total, **sizes)}."


def chosen_problem(given: argparse.Namespace) -> Problem:
    """The problem given as text, or the one picked from a source; never a bit of both."""
    picked = [n for n in ("problems", "index", "level") if getattr(given, n) is not None]
    if given.problem is not None:
        if picked:
            raise ConfigError(
                f"run got the problem {given.problem!r} and --{picked[0]}, which picks another; "
                "give one of them."
            )
        return as_problems(Problem("given", given.problem))[0]
    source, index = given.problems or SOURCE, given.index or 0
    levels = None if given.level is None else (given.level,)
    found = load_problems(source, limit=index + 1, levels=levels)
    if index >= len(found):
        raise ConfigError(f"--index is {index}; {source} has problems 0 to {len(found) - 1}.")
    return found[index]


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
