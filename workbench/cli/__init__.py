"""The command `workbench`: one subcommand a job, each in a module of its own.

Parsing needs the standard library alone, so help is there at once; a command's module, and whatever
it loads, is imported when that command runs. Bad input is one clean block on standard error and
exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from workbench.cli.arguments import build_parser
from workbench.errors import NotebookError, StepError, WorkbenchError

MODULES = {
    "figures": "workbench.cli.figures",
    "run": "workbench.cli.search",
    "sweep": "workbench.cli.sweep",
    "runs": "workbench.cli.runs",
    "bench": "workbench.cli.bench",
    "calibrate": "workbench.cli.calibrate",
    "record": "workbench.cli.record",
    "train-tiny": "workbench.cli.train",
    "doctor": "workbench.cli.doctor",
}
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run the command, answer its exit status."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    try:
        return _run(given)
    except WorkbenchError as problem:
        if given.debug:
            raise
        print(f"workbench {given.command}: {problem}", file=sys.stderr)
        return FAILED if isinstance(problem, NotebookError | StepError) else BAD_INPUT
    except KeyboardInterrupt:
        print("\nInterrupted. Finished runs are kept; the same command resumes.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(given: argparse.Namespace) -> int:
    module = import_module(MODULES[given.command])
    return int(module.run() if given.command == "doctor" else module.run(given))
