"""What the commands share: KEY=VALUE texts, the sweep that is meant, tables on the terminal."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console, JustifyMethod
from rich.table import Table

from workbench.config import SweepConfig, format_size
from workbench.errors import ConfigError
from workbench.experiments.health import unfinished
from workbench.experiments.preview import Preview, preview
from workbench.experiments.profiles import sweep_config
from workbench.experiments.record import FAILED

OPTIONS = ("shares", "seeds", "num_problems", "total_memory")


def key_values(texts: Iterable[str], option: str) -> dict[str, Any]:
    """{"n": 8} of ["n=8"]: a value is a Python or JSON literal where it reads as one, else text."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option} {text!r} is not NAME=VALUE, e.g. {option} n=16.")
        pairs[key.strip()] = literal(value)
    return pairs


def literal(text: str) -> Any:
    """The value a text means: 8, 0.3, true, None, [1, 2], or the text itself."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def sweep_of(given: argparse.Namespace) -> SweepConfig:
    """The sweep a command line means: profile, then --config, then options, then --set."""
    settings = _from_file(given.config) if given.config else {}
    profile = settings.pop("profile", given.profile)
    named = {name: getattr(given, name) for name in OPTIONS if getattr(given, name) is not None}
    return sweep_config(profile, **(settings | named | key_values(given.set, "--set")))


def print_preview(config: SweepConfig, runs_dir: str | None, retry_failed: bool = False) -> Preview:
    """The dry run on the terminal; answers what was shown."""
    found, console = preview(config, runs_dir, retry_failed=retry_failed), terminal()
    rows = [_preview_row(row) for row in found.runs.to_dict("records")]
    headings = ("run", "llm_share", "seed", "LLM blocks", "PRM blocks", "status", "minutes")
    console.print(table(headings, rows))
    console.print(f"{found.feasible}.")
    console.print(expectation(found))
    return found


def _preview_row(row: Mapping[Any, Any]) -> list[str]:
    lacks = row["lacks_bytes"]
    return [
        row["name"],
        f"{row['llm_share']:g}",
        str(row["seed"]),
        f"{row['llm_blocks']:,}",
        f"{row['prm_blocks']:,}",
        f"lacks {format_size(lacks)}" if lacks else row["status"],
        f"{row['expected_s'] / 60:.1f}",
    ]


def print_unfinished(runs: pd.DataFrame, console: Console) -> bool:
    """A line for each run that failed, does not fit or cannot be read; whether any failed."""
    bad = unfinished(runs).to_dict("records")
    for row in bad:
        reason = "no reason was kept" if pd.isna(row["error"]) else row["error"]
        console.print(f"{row['status']}: {row['run_id']}: {reason}", style="yellow", markup=False)
    return any(row["status"] == FAILED for row in bad)


def expectation(found: Preview) -> str:
    """How many runs are left and how long they take, in one sentence."""
    source = "from this machine's runs" if found.measured_before else "rough: none finished here"
    time = f"{found.minutes:.0f} min" if found.minutes < 120 else f"{found.minutes / 60:.0f} hours"
    return f"{found.num_to_run} of {len(found.runs)} runs to do, about {time} ({source})."


def terminal() -> Console:
    """Where commands print: as wide as the terminal, or 200 columns into a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=200, highlight=False)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, fold: bool = False) -> Table:
    """A plain table; all but the first column to the right.

    fold: texts too long for the last column go on in its next line, to the left.
    """
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        folds = fold and place == len(headings) - 1
        side: JustifyMethod = "right" if place and not folds else "left"
        drawn.add_column(heading, justify=side, no_wrap=not folds, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _from_file(file: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{file} cannot be read as JSON settings: {problem}.") from problem
    if not isinstance(content, dict):
        raise ConfigError(f'{file} holds no object of settings, e.g. {{"n": 16}}.')
    return content
