"""`workbench runs`: list, show, compare, export and import what is stored. Loads no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from workbench.cli.settings import table, terminal
from workbench.errors import RunStoreError, nearest
from workbench.experiments.archive import export_runs, import_runs
from workbench.experiments.compare import compare
from workbench.experiments.paths import runs_folder
from workbench.experiments.store import RunStore, load_runs, read_run

LISTED = (
    "run_id",
    "status",
    "llm_share",
    "seed",
    "num_problems",
    "tokens_per_s",
    "accuracy",
    "written_at",
)


def run(given: argparse.Namespace) -> int:
    """Carry out one action on the store."""
    root = Path(given.runs_dir) if given.runs_dir else runs_folder()
    return ACTIONS[given.action](given, RunStore(root), terminal())


def listing(given: argparse.Namespace, store: RunStore, console: Console) -> int:
    """One line a run."""
    runs = load_runs(store.folders())
    if given.status:
        runs = runs[runs["status"] == given.status]
    if runs.empty:
        console.print("No runs are stored here yet; `workbench sweep --profile quick` makes some.")
        return 0
    columns = [name for name in LISTED if name in runs]
    console.print(table(columns, ([_cell(v) for v in row] for row in runs[columns].to_numpy())))
    return 0


def show(given: argparse.Namespace, store: RunStore, console: Console) -> int:
    """Every column of one run's row."""
    row = read_run(find(given.run, store))
    cells = [(name, _cell(row[name])) for name in row]
    console.print(table(("column", "value"), cells, fold=True))
    return 0


def comparison(given: argparse.Namespace, store: RunStore, console: Console) -> int:
    """Settings that differ, paired differences, whether the tokens are the same."""
    found = compare(find(given.a, store), find(given.b, store))
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow")
    for frame in (found.parameters, found.differences):
        if len(frame):
            console.print(
                table(list(map(str, frame)), ([_cell(v) for v in row] for row in frame.to_numpy()))
            )
            console.print()
    same = "identical" if found.identical else f"different; first: {found.first_difference}"
    console.print(f"tokens and scores: {same}")
    return 0


def export(given: argparse.Namespace, store: RunStore, console: Console) -> int:
    """Write runs into an archive."""
    chosen = [find(name, store) for name in given.run] or store.folders()
    names = export_runs(chosen, given.archive)
    console.print(f"{len(names)} runs written to {given.archive}")
    return 0


def importing(given: argparse.Namespace, store: RunStore, console: Console) -> int:
    """Store the runs of an archive."""
    done = import_runs(given.archive, store.root)
    console.print(f"{len(done.stored)} runs stored, {len(done.already_there)} were there already")
    return 0


def find(name: str, store: RunStore) -> Path:
    """A run by its folder, its name, or the beginning of its name or fingerprint."""
    if Path(name).is_dir():
        return Path(name)
    folders = store.folders()
    found = [f for f in folders if f.name == name] or [
        f for f in folders if f.name.startswith(name) or f.name.rsplit("-", 1)[1].startswith(name)
    ]
    if len(found) != 1:
        hint = nearest(name, [f.name for f in folders])
        many = (
            f" {len(found)} runs begin so: {', '.join(f.name for f in found)}." if found else hint
        )
        raise RunStoreError(f"No single run is called {name!r}.{many} See `workbench runs list`.")
    return found[0]


def _cell(value: Any) -> str:
    if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


ACTIONS = {
    "list": listing,
    "show": show,
    "compare": comparison,
    "export": export,
    "import": importing,
}
