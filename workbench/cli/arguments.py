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
from workbench.search.prm_formats import FORMATS

PROFILES = ("quick", "default", "full", "thesis")
PROFILE_HELP = (
    "size of the study: quick (8 problems, 1 seed, 4 shares), default (16, 2, 8), full (128, 5, "
    "10), thesis (the 1B + 8B pair on a GPU)"
)
SET_HELP = (
    "any other setting of the sweep by its name in SweepConfig (repeatable), e.g. --set "
    "min_problem_batch=12"
)
DRY_RUN_HELP = "list runs, feasible shares and expected minutes; run nothing"
STATUSES = ("finished", "failed", "infeasible", "unreadable")
BENCHES = ("engine", "search", "identity", "memory", "kernels", "replay", "reenact")
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
    names = "notebooks (02 or 02_memory_split); with --replot figures; all if none"
    command.add_argument("names", nargs="*", metavar="NAME", help=names)
    _profile(command)
    _flag(command, "--replot", "redraw the profile's figures from their stored rows; runs nothing")
    _flag(command, "--retry-failed", "repeat runs whose row says failed")
    _flag(command, "--dry-run", DRY_RUN_HELP)
    refused = "set a parameter of the notebooks (repeatable); one that no notebook has is refused"
    _repeat(command, ("-p", "--parameter"), "NAME=VALUE", refused)
    place = "folder of the executed notebooks; reports/notebooks/PROFILE if not given"
    _value(command, "--out", "DIR", place)
    _runs_dir(command)


def _run(command: Parser) -> None:
    given = 'a problem as text ("Compute 7-3+12."); else one of --problems'
    command.add_argument("problem", nargs="?", metavar="PROBLEM", help=given)
    source = "tiny, math500, or a .json/.jsonl file (default: tiny)"
    _value(command, "--problems", "SOURCE", source)
    which = "which of --problems, counted from 0 (default: 0)"
    _value(command, "--index", "K", which, kind=_at_least(0))
    _value(command, "--level", "L", "only problems of this level (1 to 5)", kind=int)
    _value(command, "--llm", "MODEL", "generator: a name, hub id, folder or .gguf", "tiny-solver")
    _value(command, "--prm", "MODEL", "process reward model", "tiny-prm")
    _choice(command, "--prm-format", tuple(FORMATS), "how it is asked (default: as its name tells)")
    _value(command, "--total-memory", "SIZE", "memory of both models together", "64MiB")
    _value(command, "--llm-share", "S", "the LLM's share of it, in (0, 1)", 0.3)
    _choice(command, "--strategy", ("beam_search", "best_of_n"), "how to search", "beam_search")
    _value(command, "--n", "N", "beams (or samples) of a problem", 16)
    _value(command, "--beam-width", "W", "children of a survivor; N // W survive", 4)
    _value(command, "--max-depth", "D", "steps of a beam, at most", 40)
    _value(command, "--temperature", "T", "of sampling; 0 is greedy", 0.8)
    _value(command, "--seed", "K", "equal seeds give equal trees", 0)
    levels = "levels of the tree that are printed; 0: none"
    _value(command, "--tree-depth", "D", levels, 6, _at_least(0))
    _repeat(command, ("--set",), "KEY=VALUE", SET_HELP)


def _sweep(command: Parser) -> None:
    _profile(command)
    _value(command, "--config", "FILE", "JSON file of settings, laid over the profile")
    _repeat(command, ("--set",), "KEY=VALUE", SET_HELP)
    shares = "the LLM's shares of total memory, each in (0, 1)"
    _value(command, "--shares", "S,S,...", shares, kind=_numbers(float))
    _value(command, "--seeds", "K,K,...", "one run a share and seed", kind=_numbers(int))
    _value(command, "--num-problems", "N", "problems of a run", kind=int)
    _value(command, "--total-memory", "SIZE", "memory of both models together, e.g. 64MiB")
    _flag(command, "--retry-failed", "repeat runs whose row says failed")
    _flag(command, "--dry-run", DRY_RUN_HELP)
    _runs_dir(command)


def _runs(command: Parser) -> None:
    actions = command.add_subparsers(
        dest="action", metavar="ACTION", required=True, title="actions"
    )
    listing = _action(actions, "list", "one line a stored run")
    _choice(listing, "--status", STATUSES, "only these")
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
    what = f"what to measure: {', '.join(BENCHES)}"
    command.add_argument("name", choices=BENCHES, metavar="NAME", help=what)
    _value(command, "--json", "FILE", "write the record (machine, versions, commit, rows) here")
    sizes = ("quick", "default", "full")
    _choice(command, "--profile", sizes, "how many repeats or problems", "default")
    _value(command, "--model", "MODEL", "what is measured (default: tiny-solver)")
    _value(command, "--llm", "MODEL", "search, identity, reenact: generator (default: tiny-solver)")
    _value(command, "--prm", "MODEL", "search, identity, reenact: reward model (default: tiny-prm)")
    _value(command, "--seed", "K", "where the bench takes one (default: 0)", kind=int)
    seeds = "search, memory: how many, not the profile's number"
    _value(command, "--seeds", "N", seeds, kind=_at_least(1))
    problems = "search, identity, memory: problem file (default: math500) for models but the tiny"
    _value(command, "--problems", "PATH", problems)
    part = "memory: starts, beams, forks, arena or sharing alone; replaces its rows in --json FILE"
    _value(command, "--part", "PART", part)
    repeats = "engine, memory, kernels, replay: how many, not the profile's number"
    _value(command, "--repeats", "N", repeats, kind=_at_least(1))
    peers = "engine: installed (default), none, or names joined by commas; see make bench-peers"
    _value(command, "--peers", "NAMES", peers)
    device = "engine, reenact: cpu (default), or a GPU: cuda, cuda:1"
    _value(command, "--device", "NAME", device)


def _calibrate(command: Parser) -> None:
    command.epilog = "Searches the embedded pair; leave the machine to it meanwhile."
    _value(command, "--out", "FILE", "the .json file to be written", "device.json")
    _value(command, "--num-problems", "N", "problems of a search", 4, _at_least(1))
    _value(command, "--repeats", "N", "searches of a setting; the fastest stands", 3, _at_least(1))
    _value(command, "--seed", "K", "of the searches", 0)


def _record(command: Parser) -> None:
    command.epilog = "Names and what each holds: replay/data/README.md in the package."
    command.add_argument("name", metavar="NAME", help="a recording of the package, e.g. tiny-128")
    _value(command, "--out", "FILE", "the file to be written; NAME.parquet if not given")
    _value(command, "--problems", "PATH", "file of MATH-500 (default: the hub's) for smollm2-*")


def _train(command: Parser) -> None:
    _value(command, "--out", "DIR", "folder the model folders are written to", "trained")
    _value(command, "--minutes", "M", "training time of all models together, minutes", 60.0)
    _value(command, "--seed", "K", "of data and initial weights", 0)
    models = "tiny-solver or tiny-prm: only this one (repeatable); both if not given"
    _repeat(command, ("--model",), "MODEL", models, ("tiny-solver", "tiny-prm"))
    _flag(command, "--card", "train nothing: measure the pair in use, print its model card's table")
    fresh = "--card: fresh problems, uniform over levels"
    _value(command, "--num-problems", "N", fresh, 128, _at_least(1))


def _doctor(command: Parser) -> None:
    command.epilog = "Looks and changes nothing. Exit status 1 when a thing every run needs lacks."


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "figures": (
        "regenerate the study: run what is missing, draw every figure, write the report",
        _figures,
    ),
    "run": ("search one problem; print the answer, the tree and the throughput", _run),
    "sweep": ("measure the memory split over its shares; finished runs are not repeated", _sweep),
    "runs": ("list, show, compare, export and import stored runs", _runs),
    "bench": ("measure speed, search quality or sameness, and write a record", _bench),
    "calibrate": ("measure this machine and write a device preset for replays", _calibrate),
    "record": ("make one of the package's recorded searches anew", _record),
    "train-tiny": ("train the embedded models anew", _train),
    "doctor": ("say what this machine has, what will be used, and what is missing", _doctor),
}


def _action(actions: Any, name: str, summary: str) -> Parser:
    description = summary.replace("%%", "%")
    parser: Parser = actions.add_parser(
        name, help=summary, description=description, formatter_class=Formatter
    )
    _runs_dir(parser)
    _debug(parser)
    return parser


def _value(
    command: Parser, name: str, metavar: str, text: str, default: Any = None, kind: Any = None
) -> None:
    """An option with a value; its type is that of the default unless `kind` says otherwise."""
    parse = kind or (type(default) if default is not None else str)
    command.add_argument(name, metavar=metavar, help=text, default=default, type=parse)


def _choice(
    command: Parser, name: str, allowed: tuple[str, ...], text: str, default: str | None = None
) -> None:
    command.add_argument(name, choices=allowed, help=text, default=default)


def _flag(command: Parser, name: str, text: str) -> None:
    command.add_argument(name, action="store_true", help=text)


def _repeat(
    command: Parser,
    names: tuple[str, ...],
    metavar: str,
    text: str,
    allowed: tuple[str, ...] | None = None,
) -> None:
    """An option that may be given several times; a list of texts, empty by default."""
    settings: dict[str, Any] = {"metavar": metavar, "help": text, "choices": allowed}
    command.add_argument(*names, action="append", default=[], **settings)


def _profile(command: Parser) -> None:
    _choice(command, "--profile", PROFILES, PROFILE_HELP, "default")


def _runs_dir(command: Parser) -> None:
    text = "folder of run folders; reports/runs of the project if not given"
    command.add_argument("--runs", dest="runs_dir", metavar="DIR", help=text)


def _debug(command: Parser) -> None:
    _flag(command, "--debug", "show the traceback of an error")


def _numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """A parser of "a,b,c"; its name is what argparse calls a value it refuses."""

    def numbers(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(",") if part.strip())

    return numbers


def _at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` on; its name is what argparse calls a bad one."""

    def whole_number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too small; allowed: {least} or more")
        return int(text)

    return whole_number


def _terminal_width() -> int:
    return shutil.get_terminal_size((100, 24)).columns
