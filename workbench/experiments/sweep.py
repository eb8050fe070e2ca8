"""The sweep: carry out what is not stored yet, one run folder each, and see all of it as tables.

Whoever needs a sweep calls `run_sweep`; finished runs are found by fingerprint and not repeated, so
the first notebook pays and the others read. Interrupted at any moment it resumes. A run that fails
becomes a row and the rest go on. Importing this loads no torch: the code that runs models is
imported when the first run starts.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from workbench.config import SweepConfig
from workbench.errors import OutOfMemory, RunStoreError
from workbench.experiments.feasible import Feasibility, feasibility
from workbench.experiments.identity import identify
from workbench.experiments.paths import runs_folder
from workbench.experiments.plan import MEASURE, REPLAY, Identity, RunSpec, planned_runs, warmup_run
from workbench.experiments.record import (
    FAILED,
    FINISHED,
    INFEASIBLE,
    RunResult,
    run_config,
    run_tables,
)
from workbench.experiments.store import RunStore, load_runs, load_table, status_of

Execute = Callable[[RunSpec], RunResult]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The stored runs of one sweep, as tables. `missing` names the runs that are not stored."""

    config: SweepConfig
    folders: tuple[Path, ...]
    missing: tuple[str, ...] = ()

    @property
    def all_runs(self) -> pd.DataFrame:
        """One row a run: measured, sentinel, failed and infeasible ones."""
        return load_runs(self.folders)

    @property
    def runs(self) -> pd.DataFrame:
        """The finished measured or replayed runs, by share and seed."""
        every = self.all_runs
        if every.empty:
            return every
        wanted = every[(every["status"] == FINISHED) & every["role"].isin([MEASURE, REPLAY])]
        runs = load_runs(list(wanted["folder"]))  # anew: beside failed runs, counts are floats
        return runs.sort_values(["llm_share", "seed"], ignore_index=True) if len(runs) else runs

    def table(
        self, name: str, llm_share: float | None = None, seed: int | None = None
    ) -> pd.DataFrame:
        """Rows of one trace table of the finished measured runs, with llm_share and run_seed as
        columns.
        """
        runs = self.runs
        for column, value in (("llm_share", llm_share), ("seed", seed)):
            if value is not None and len(runs):
                runs = runs[(runs[column] - value).abs() < 1e-9]
        if runs.empty:
            raise RunStoreError(
                f"The sweep has no finished run at llm_share={llm_share}, seed={seed}; "
                f"it has shares {sorted(self.config.shares)} and seeds {sorted(self.config.seeds)}."
            )
        keys = runs[["run_id", "llm_share", "seed"]].rename(columns={"seed": "run_seed"})
        return load_table(list(runs["folder"]), name).merge(keys, on="run_id", how="left")

    def __repr__(self) -> str:
        counts = f"{len(self.folders)} runs stored, {len(self.missing)} missing"
        return f"Sweep({self.config.profile}: {counts})"


def run_sweep(
    config: SweepConfig,
    runs_dir: str | Path | None = None,
    *,
    compute: bool = True,
    retry_failed: bool = False,
    progress: bool = True,
    execute: Execute | None = None,
    specs: Sequence[RunSpec] | None = None,
    identity: Identity | None = None,
) -> Sweep:
    """Carry out every run of the sweep that is not stored yet and answer all of them.

    specs: other runs than the configuration's own, such as the cells of the batching study.
    compute=False only looks (figures redrawn from stored rows); retry_failed repeats runs whose row
    says failed. execute carries out one run; None is this process (workbench.experiments.run).
    identity: what runs of another kind depend on; None: both models' files and the problems' texts.
    Raises ConfigError, ModelError and ProblemFileError before the first run; whatever one run
    raises becomes its row.
    """
    store = RunStore(Path(runs_dir) if runs_dir is not None else runs_folder())
    identity = identify(config) if identity is None else identity
    specs = planned_runs(config) if specs is None else specs
    if compute:
        store.clear_leftovers()
        todo = [spec for spec in specs if not is_stored(store, spec, identity, retry_failed)]
        _carry_out(todo, store, identity, config, execute or _execute_here, progress, retry_failed)
    found = {spec.name: store.find(spec.fingerprint(identity)) for spec in specs}
    stored = tuple(folder for folder in found.values() if folder is not None)
    return Sweep(config, stored, tuple(name for name, folder in found.items() if folder is None))


def is_stored(
    store: RunStore, spec: RunSpec, identity: Identity, retry_failed: bool = False
) -> bool:
    """Whether this run needs no repetition: finished, infeasible, or failed and not retried."""
    folder = store.find(spec.fingerprint(identity))
    if folder is None:
        return False
    status = status_of(folder)
    return status in (FINISHED, INFEASIBLE) or (status == FAILED and not retry_failed)


def _carry_out(
    todo: list[RunSpec],
    store: RunStore,
    identity: Identity,
    config: SweepConfig,
    execute: Execute,
    progress: bool,
    retry_failed: bool,
) -> None:
    possible = {spec.name: feasibility(spec) for spec in todo}
    if any(each.fits for each in possible.values()):
        _warm_up(warmup_run(config), execute)
    for spec in _bar(todo, progress):
        if not is_stored(
            store, spec, identity, retry_failed
        ):  # another process may have been faster
            tables = _attempt(spec, identity, possible[spec.name], execute)
            store.write(spec.name, run_config(spec, identity), tables)


def _attempt(
    spec: RunSpec, identity: Identity, possible: Feasibility, execute: Execute
) -> dict[str, pd.DataFrame]:
    """The run's tables, whatever becomes of it."""
    if not possible.fits:
        return run_tables(spec, identity, INFEASIBLE, error=str(possible), notes=possible.columns)
    try:
        result = execute(spec)
    except OutOfMemory as problem:
        return run_tables(spec, identity, INFEASIBLE, error=str(problem), notes=possible.columns)
    except Exception as problem:  # a sweep outlives whatever one of its runs raises
        error = f"{type(problem).__name__}: {problem}"
        notes = dict(possible.columns) | {"traceback": traceback.format_exc()}
        return run_tables(spec, identity, FAILED, error=error, notes=notes)
    return run_tables(spec, identity, FINISHED, result=result, notes=possible.columns)


def _warm_up(spec: RunSpec | None, execute: Execute) -> None:
    """One run thrown away. What it raises is left to the measured runs, which keep it as a row."""
    if spec is None or not feasibility(spec).fits:
        return
    try:
        execute(spec)
    except Exception:
        return


def _bar(todo: list[RunSpec], progress: bool) -> Iterable[RunSpec]:
    bar = tqdm(todo, desc="runs", unit="run", disable=not progress or not todo)
    for spec in bar:
        bar.set_postfix_str(spec.name)
        yield spec


def _execute_here(spec: RunSpec) -> RunResult:
    return import_module("workbench.experiments.run").execute(spec)
