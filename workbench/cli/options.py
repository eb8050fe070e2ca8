"""What several verbs share: options, KEY=VALUE texts, tables on the terminal."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FAILED = 1  # the exit status when something was run and failed
WORDS = {"true": True, "false": False, "null": None, "none": None}


def _remember(context: typer.Context, value: bool) -> bool:
    """Tell `main` which verb runs, and whether it shows tracebacks."""
    context.obj |= {"debug": value, "command": context.command_path}
    return value


Profile = Annotated[
    Literal["quick", "default", "full", "thesis"],
    Option(
        help="size of the study: quick (8 problems, 1 seed, 4 shares), default (16, 2, 8), "
        "full (128, 5, 10), thesis (the 1B + 8B pair on a GPU)"
    ),
]
Runs = Annotated[
    str | None,
    Option(metavar="DIR", help="folder of run folders (default: reports/runs of the project)"),
]
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="any other setting of SweepConfig (repeatable)"),
]
DryRun = Annotated[
    bool, Option("--dry-run", help="list runs, feasible shares and expected minutes; run nothing")
]
RetryFailed = Annotated[bool, Option("--retry-failed", help="repeat runs whose row says failed")]
Memory = Annotated[str | None, Option(metavar="SIZE", help="of both models together, e.g. 64MiB")]
Debug = Annotated[
    bool, Option("--debug", callback=_remember, help="show the traceback of an error")
]


def numbers(text: str | None, kind: type[int] | type[float]) -> tuple[Any, ...] | None:
    """The numbers of "a,b,c"; None of None."""
    try:
        return None if text is None else tuple(map(kind, filter(str.strip, text.split(","))))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers, e.g. 1,2.") from error


def key_values(texts: Iterable[str] | None, option: str) -> dict[str, Any]:
    """{"n": 8} of ["n=8"]: a value is a Python or JSON literal where it reads as one, else text."""
    pairs = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option} {text!r} is not NAME=VALUE, e.g. {option} n=16.")
        pairs[key.strip()] = _literal(value)
    return pairs


def _literal(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def terminal() -> Console:
    """Where commands print: as wide as the terminal, or 200 columns into a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=200, highlight=False)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, fold: bool = False) -> Table:
    """A plain table; all but the first column to the right.

    fold: texts too long for the last column go on in its next line, to the left.
    """
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        folds = fold and place == len(headings) - 1
        side: Literal["left", "right"] = "right" if place and not folds else "left"
        drawn.add_column(heading, justify=side, no_wrap=not folds, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn
