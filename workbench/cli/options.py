"""What several verbs share: how typer reads them, options, KEY=VALUE texts, tables."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer import Option

from workbench.errors import ConfigError, NotebookError, StepError, WorkbenchError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Verb = Callable[..., None]
FAILED, BAD_INPUT = 1, 2  # exit statuses: something was run and failed; nothing was
WORDS = {"true": "True", "false": "False", "null": "None", "none": "None"}  # as JSON has them

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
Debug = Annotated[bool, Option("--debug", help="show the traceback of an error")]


def command(verb: Verb) -> Verb:
    """The verb as typer reads it: with --debug, and errors of bad input in one block.

    A parameter whose type is a dataclass stands for that class's fields, each written as an option.
    """
    taken: dict[str, tuple[Any, Any]] = {"context": (typer.Context, inspect.Parameter.empty)}
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        if is_dataclass(kind := parameter.annotation):
            groups[name], hints = kind, get_type_hints(kind, include_extras=True)
            taken |= {f.name: (hints[f.name], f.default) for f in fields(kind)}
        else:
            taken[name] = kind, parameter.default
    taken["debug"] = Debug, False

    @wraps(verb)
    def called(context: typer.Context, debug: bool, **given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{f.name: given.pop(f.name) for f in fields(kind)})
        try:
            verb(**given)
        except WorkbenchError as problem:
            if debug:
                raise
            print(f"{context.command_path}: {problem}", file=sys.stderr)
            stopped = isinstance(problem, NotebookError | StepError)
            raise typer.Exit(FAILED if stopped else BAD_INPUT) from problem

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, annotation=kind, default=default)
        for name, (kind, default) in taken.items()
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {name: kind for name, (kind, _) in taken.items()}
    return called


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
        try:
            found = ast.literal_eval(WORDS.get(value.lower(), value))
        except (ValueError, SyntaxError):
            found = value
        pairs[key.strip()] = found
    return pairs


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
