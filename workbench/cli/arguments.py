"""Every option of every command, with its meaning, unit and default; the standard library only.

Kept apart from the commands so that `--help` loads neither pandas nor torch. What it does not do:
check values that only a model, a file or a notebook can judge.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from typing import Any

from workbench import __version__

PROFILES = ("quick", "default", "full", "thesis")
PROFILE_HELP = (
    "size of the study: quick (8 problems, 1 seed, 4 shares), default (16, 2, 8), full (128, 5, "
    "10), thesis (the 1B + 8B pair on a GPU)"
)
SET_HELP = (
    "any other setting of the sweep by its name in SweepConfig (repeatable), e.g. --set "
    "min_problem_batch=12"
)
BENCHES = ("engine", "search", "identity")
Parser = argparse.ArgumentParser


class Formatter(argparse.HelpFormatter):
    """Wider than argparse's own; an option shows its default unless that is None or False."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, max_help_position=28, width=min(110, _terminal_width()), **settings)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default in (None, [], argparse.SUPPRESS) or action.default is False
        if silent or not action.option_strings:
            return text
        return f"{text} (default: %(default)s)"


def build_parser() -> Parser:
    """The parser of `workbench`; `command` is None when none was given."""
    parser = Parser(
        prog="workbench",
        description="Two models that search together, one memory: engine, experiments and figures.",
        epilog="workbench COMMAND --help explains a command. Exit status: 0 done, "
        "1 something failed, 2 bad input.",
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (summary, add) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=Formatter,
        )
        add(command)
        _debug(command)
    return parser


def _figures(command: Parser) -> None:
    command.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="notebooks (02 or 02_memory_split); with --replot figures; all if none",
    )
    _profile(command)
    command.add_argument(
        "--replot", action="store_true", help="redraw figures/ from their stored rows; runs nothing"
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="list runs, feasible shares and expected minutes; run nothing",
    )
    command.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a parameter of the notebooks (repeatable); one that no notebook has is refused",
    )
    command.add_argument(
        "--out",
        metavar="DIR",
        help="folder of the executed notebooks; reports/notebooks/PROFILE if not given",
    )
    _runs_dir(command)


def _run(command: Parser) -> None:
    command.add_argument(
        "problem", nargs="?", help='a problem as text ("Compute 7-3+12."); else one of --problems'
    )
    command.add_argument(
        "--problems", default="tiny", metavar="SOURCE", help="tiny, math500, or a .json/.jsonl file"
    )
    command.add_argument(
        "--index", type=int, default=0, metavar="K", help="which of --problems, counted from 0"
    )
    command.add_argument(
        "--level", type=int, metavar="L", help="only problems of this level (1 to 5)"
    )
    command.add_argument(
        "--llm",
        default="tiny-solver",
        metavar="MODEL",
        help="generator: short name, hub id or folder",
    )
    command.add_argument("--prm", default="tiny-prm", metavar="MODEL", help="process reward model")
    command.add_argument(
        "--total-memory", default="64MiB", metavar="SIZE", help="memory of both models together"
    )
    command.add_argument(
        "--llm-share", type=float, default=0.3, metavar="S", help="the LLM's share of it, in (0, 1)"
    )
    command.add_argument(
        "--strategy",
        choices=("beam_search", "best_of_n"),
        default="beam_search",
        help="how to search",
    )
    command.add_argument(
        "--n", type=int, default=16, metavar="N", help="beams (or samples) of a problem"
    )
    command.add_argument(
        "--beam-width",
        type=int,
        default=4,
        metavar="W",
        help="children of a survivor; n // beam-width survive",
    )
    command.add_argument(
        "--max-depth", type=int, default=40, metavar="D", help="steps of a beam, at most"
    )
    command.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="of sampling; 0 is greedy"
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="K", help="equal seeds give equal trees"
    )
    command.add_argument(
        "--tree-depth",
        type=int,
        default=6,
        metavar="D",
        help="levels of the tree that are printed; 0: none",
    )
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=SET_HELP)


def _sweep(command: Parser) -> None:
    _profile(command)
    command.add_argument(
        "--config", metavar="FILE", help="JSON file of settings, laid over the profile"
    )
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=SET_HELP)
    command.add_argument(
        "--shares",
        type=_numbers(float),
        metavar="S,S,...",
        help="the LLM's shares of total memory, in (0, 1)",
    )
    command.add_argument(
        "--seeds", type=_numbers(int), metavar="K,K,...", help="one run a share and seed"
    )
    command.add_argument("--num-problems", type=int, metavar="N", help="problems of a run")
    command.add_argument(
        "--total-memory", metavar="SIZE", help="memory of both models together, e.g. 64MiB"
    )
    command.add_argument(
        "--retry-failed", action="store_true", help="repeat runs whose row says failed"
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="list runs, feasible shares and expected minutes; run nothing",
    )
    _runs_dir(command)


def _runs(command: Parser) -> None:
    actions = command.add_subparsers(
        dest="action", metavar="ACTION", required=True, title="actions"
    )
    listing = _action(actions, "list", "one line a stored run")
    listing.add_argument(
        "--status", choices=("finished", "failed", "infeasible", "unreadable"), help="only these"
    )
    show = _action(actions, "show", "everything about one run")
    show.add_argument("run", help="run folder, its name, or the beginning of its fingerprint")
    compare = _action(actions, "compare", "what differs between two runs, with 95 %% intervals")
    compare.add_argument("a", help="run folder, name or fingerprint; or a folder of runs")
    compare.add_argument("b", help="the other; differences are b - a")
    export = _action(actions, "export", "write runs into one archive")
    export.add_argument("archive", help="file to write: .tar, .tar.gz, .tgz or .zip")
    export.add_argument("run", nargs="*", help="runs to take; all if none is named")
    importing = _action(actions, "import", "check an archive and store its runs")
    importing.add_argument("archive", help="file that `workbench runs export` wrote")


def _bench(command: Parser) -> None:
    command.add_argument(
        "name", choices=BENCHES, metavar="NAME", help=f"what to measure: {', '.join(BENCHES)}"
    )
    command.add_argument(
        "--json", metavar="FILE", help="write the record (machine, versions, commit, rows) here"
    )
    command.add_argument(
        "--profile",
        choices=("quick", "default", "full"),
        default="default",
        help="how many repeats or problems",
    )
    command.add_argument(
        "--model", metavar="MODEL", help="model of bench engine (default: tiny-solver)"
    )
    command.add_argument(
        "--llm",
        metavar="MODEL",
        help="generator of bench search and identity (default: tiny-solver)",
    )
    command.add_argument(
        "--prm",
        metavar="MODEL",
        help="reward model of bench search and identity (default: tiny-prm)",
    )
    command.add_argument(
        "--seed",
        type=int,
        metavar="K",
        help="of prompts or search, where the bench takes one (default: 0)",
    )


def _train(command: Parser) -> None:
    command.add_argument(
        "--out", default="trained", metavar="DIR", help="folder the model folders are written to"
    )
    command.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="M",
        help="training time of all models together, minutes",
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="K", help="of data and initial weights"
    )
    command.add_argument(
        "--model",
        action="append",
        choices=("tiny-solver", "tiny-prm"),
        help="only this one (repeatable); both if not given",
    )


def _doctor(command: Parser) -> None:
    command.epilog = (
        "Looks and changes nothing. Exit status 1 when something is missing that every run needs."
    )


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "figures": (
        "regenerate the study: run what is missing, draw every figure, write the report",
        _figures,
    ),
    "run": ("search one problem; print the answer, the tree and the throughput", _run),
    "sweep": ("measure the memory split over its shares; finished runs are not repeated", _sweep),
    "runs": ("list, show, compare, export and import stored runs", _runs),
    "bench": ("measure speed, search quality or sameness, and write a record", _bench),
    "train-tiny": ("train the embedded models anew", _train),
    "doctor": ("say what this machine has, what will be used, and what is missing", _doctor),
}


def _action(actions: Any, name: str, summary: str) -> Parser:
    parser: Parser = actions.add_parser(
        name,
        help=summary,
        description=summary.replace("%%", "%"),
        formatter_class=Formatter,
    )
    _runs_dir(parser)
    _debug(parser)
    return parser


def _profile(command: Parser) -> None:
    command.add_argument("--profile", choices=PROFILES, default="default", help=PROFILE_HELP)


def _runs_dir(command: Parser) -> None:
    command.add_argument(
        "--runs",
        dest="runs_dir",
        metavar="DIR",
        help="folder of run folders; reports/runs of the project if not given",
    )


def _debug(command: Parser) -> None:
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """A parser of "a,b,c"; its name is what argparse calls a value it refuses."""

    def numbers(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(",") if part.strip())

    return numbers


def _terminal_width() -> int:
    return shutil.get_terminal_size((100, 24)).columns
