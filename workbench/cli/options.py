"""What several verbs share: how typer reads them, options, KEY=VALUE texts, tables."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from inspect import Parameter
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_origin

import typer
from typer import Option

from workbench.config import BACKENDS, Range, declared_fields
from workbench.errors import (
    BrokenLaw,
    ConfigError,
    NotebookError,
    StepError,
    WorkbenchError,
    WorkerError,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Verb = Callable[..., None]
FAILED, BAD_INPUT = 1, 2  # exit statuses: something was run and failed; nothing was
WORDS = {"true": "True", "false": "False", "null": "None", "none": "None"}  # as JSON has them

Profile = Annotated[
    Literal["quick", "default", "full", "thesis"],
    Option(
        help="size of the study: quick (12 problems, 1 seed, 4 shares), default (32, 1, 7), "
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
Stale = Annotated[
    Literal["ok"] | None,
    Option("--stale", help="ok: take stored runs of other code where there are none of this"),
]
On = Annotated[
    str,
    Option(
        "--backend",
        envvar="WORKBENCH_BACKEND",
        help="where runs are carried out (ray, slurm: on a cluster): " + ", ".join(BACKENDS),
    ),
]
Workers = Annotated[
    int | None,
    Option(min=1, envvar="WORKBENCH_WORKERS", help="workers at once (default: as many as fit)"),
]
Debug = Annotated[bool, Option("--debug", help="show the traceback of an error")]


def option(name: str, kind: Any, text: str, default: Any = None, **how: Any) -> Parameter:
    """An option as a parameter that typer reads."""
    declared = Annotated[kind, Option(help=text, **how)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=declared)


def options_of(
    settings: type, helps: Mapping[str, str], *, defaults: bool = True
) -> list[Parameter]:
    """Fields of a settings class as options, each of the field's type, choices, least and default.

    helps: the help text of each field that becomes one. defaults: False: what is not given is None.
    """
    declared = {name: (kind, allowed) for name, kind, _, allowed in declared_fields(settings)}
    default = {field.name: field.default if defaults else None for field in fields(settings)}
    found = []
    for name, text in helps.items():
        kind, allowed = declared[name]
        how: dict[str, Any] = {}
        if get_origin(kind) is tuple:
            kind, how = str, {"metavar": "N,N,...", "parser": numbers}
        elif kind == int | str:
            kind, how = str, {"metavar": "SIZE"}
        elif isinstance(allowed, Range):
            how = {"min": allowed.low}
        elif allowed:
            kind, how = str, {"metavar": "NAME"}  # `check` names the nearest
            text += f": {', '.join(allowed)}"
        found.append(option(name, kind, text, default[name], **how))
    return found


def command(verb: Verb, resumable: bool = False) -> Verb:
    """The verb as typer reads it: with --debug, and errors of bad input in one block; a resumable
    one with --at.

    A parameter annotated with a list of options takes those that have a value, by name.
    """
    taken = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    groups: dict[str, list[str]] = {}
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        (listed,) = getattr(parameter.annotation, "__metadata__", (None,))
        if isinstance(listed, list):
            groups[name] = [each.name for each in listed]
            taken += listed
        else:
            taken.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
    if resumable:
        text = "go on with the code of that commit, in a git worktree"
        taken.append(option("at", str, text, metavar="COMMIT"))
    taken.append(Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

    @wraps(verb)
    def called(context: typer.Context, debug: bool, at: str | None = None, **given: Any) -> None:
        for group, names in groups.items():
            given[group] = {n: own for n in names if (own := given.pop(n)) is not None}
        try:
            if at:
                resume_at(at, context.obj, given["runs"])
            verb(**given)
        except WorkbenchError as problem:
            if debug:
                raise
            print(f"{context.command_path}: {problem}", file=sys.stderr)
            stopped = isinstance(problem, NotebookError | StepError | WorkerError | BrokenLaw)
            raise typer.Exit(FAILED if stopped else BAD_INPUT) from problem
        except ModuleNotFoundError as problem:
            if debug or (problem.name or "workbench").startswith("workbench"):
                raise
            print(f"{context.command_path} needs {problem.name}: pip install -e '.[all]'.",
                  file=sys.stderr)  # fmt: skip
            raise typer.Exit(BAD_INPUT) from problem

    called.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in taken}
    return called


def resume_at(commit: str, given: list[str], runs: str | None) -> NoReturn:
    """Put the command `given`, of the code at a commit, in this process's place; runs stay where
    they are.

    Notebooks are those of the commit too, and what is written beside runs is in its worktree.
    """
    from workbench.experiments.provenance import runs_folder, worktree_of

    place = worktree_of(commit)
    words = [w for before, w in pairwise(["", *given]) if before != "--at" and w[:4] != "--at"]
    words += [] if runs or "--replot" in given else ["--runs", str(runs_folder())]
    paths = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    here = os.environ | {"PYTHONPATH": paths, "WORKBENCH_HOME": str(place)}
    call = "import sys; from workbench.cli import main; sys.exit(main())"
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-c", call, *words], here)


def literal(text: str) -> Any:
    """The value of a text: a Python or JSON literal where it reads as one, else the text."""
    try:
        return ast.literal_eval(WORDS.get(text.lower(), text))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def numbers(text: str) -> tuple[Any, ...]:
    """The numbers of "a,b,c"."""
    found = tuple(map(literal, filter(str.strip, text.split(","))))
    if not all(isinstance(each, int | float) for each in found):
        raise typer.BadParameter(f"{text!r} is no list of numbers, e.g. 1,2.")
    return found


def key_values(texts: Iterable[str] | None, option: str) -> dict[str, Any]:
    """{"n": 8} of ["n=8"]."""
    pairs = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option} {text!r} is not NAME=VALUE, e.g. {option} n=16.")
        pairs[key.strip()] = literal(value)
    return pairs


def terminal() -> Console:
    """Where commands print: as wide as the terminal, or 200 columns into a file or a pipe."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def table(headings: Iterable[str], rows: Iterable[Iterable[Any]], *, texts: bool = False) -> Table:
    """A plain table; all but the first column are numbers, to the right, or texts that fold."""
    import pandas as pd
    from rich.table import Table
    from rich.text import Text

    from workbench.experiments.provenance import number

    def cell(value: Any) -> str:
        if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
            return "-"
        if isinstance(value, float):
            return number(value)
        return str(value)

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    later: dict[str, Any] = {"overflow": "fold"} if texts else {"justify": "right", "no_wrap": True}
    for heading in headings:
        drawn.add_column(heading, **later if drawn.columns else {"no_wrap": True})
    for row in rows:
        drawn.add_row(*(Text(cell(value)) for value in row))  # no markup: what runs say is text
    return drawn
