"""The command `workbench`: its verbs, and how each ends.

A verb imports what it needs when it runs, so help is there at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from workbench import __version__
from workbench.cli import study, tools
from workbench.cli.options import Verb, command

INTERRUPTED = 130
RESUMABLE = {"figures", "sweep"}  # verbs whose finished runs are kept

app = typer.Typer(
    rich_markup_mode=None,  # importing rich takes longer than everything else of a help page
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110},
    epilog="Exit status: 0 done, 1 something failed, 2 bad input.",
)
VERBS: tuple[Verb, ...] = (study.figures, tools.run, study.sweep, tools.advise, tools.serve,
    tools.bench, tools.calibrate, tools.record, tools.train_tiny, tools.doctor)  # fmt: skip
for verb in VERBS:
    app.command()(command(verb, verb.__name__ in RESUMABLE))
STORED: dict[str, Verb] = {"list": study.list_runs, "show": study.show, "compare": study.compare,
                           "export": study.export, "import": study.import_runs}  # fmt: skip
stored = typer.Typer(rich_markup_mode=None)
for name, verb in STORED.items():
    stored.command(name)(command(verb))
app.add_typer(stored, name="runs", help="List, show, compare, export, import stored runs.")


@app.callback(invoke_without_command=True)
def _workbench(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="show it and exit")] = False,
) -> None:
    """Two models that search together, one memory: engine, experiments and figures."""
    if show_version:
        print(f"workbench {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        app(given, prog_name="workbench", obj=given)
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # the reader left, as `head` does
            return 0
        if left.code == INTERRUPTED:
            kept = " Finished runs are kept; the same command resumes."
            text = f"Interrupted.{kept if RESUMABLE.intersection(given[:1]) else ''}"
            print(f"\n{text}", file=sys.stderr)
        return int(left.code or 0)
    return 0
