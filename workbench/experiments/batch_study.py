"""The batching study: its cells, carried out or found, and the rows that its figures draw.

What it does not do: run a cell (batch_run.py) or choose them (batch_plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.config import SweepConfig
from workbench.errors import RunStoreError
from workbench.experiments.batch_plan import (
    CONTINUOUS,
    COUNTED,
    GRIDS,
    STATIC,
    TIMED,
    BatchGrid,
    accepted,
    batch_cells,
)
from workbench.experiments.face import face
from workbench.experiments.identity import identify
from workbench.experiments.paths import runs_folder
from workbench.experiments.plan import RunSpec
from workbench.experiments.profiles import SECONDS_PER_PROBLEM, overridden
from workbench.experiments.record import FINISHED, RunResult
from workbench.experiments.store import RunStore
from workbench.experiments.sweep import Execute, Sweep, is_stored, run_sweep
from workbench.experiments.views import Tables, interval_cells, problem_ratio, with_rooms

CELL_COLUMNS = ["model", "kind", "max_num_seqs", "max_num_batched_tokens", "status", "error"]
RATES = ["tokens_per_s", "steps_per_s", "padding", "waste", "most_running", "kv_blocks"]
RANGE = {"steps_per_s_low": ("steps_per_s", "min"), "steps_per_s_high": ("steps_per_s", "max")}
TOO_FEW_TOKENS = "more sequences than tokens in a step: not all could decode"
PROBLEMS_PER_CELL = {TIMED: 0.45, COUNTED: 0.06}
"""Roughly what a cell takes of the time of searching its problems; measured on the tiny pair."""
BUSY = {"llm": "llm_busy_part_s", "prm": "prm_busy_part_s"}


@dataclass(frozen=True, slots=True)
class BatchStudy:
    """The stored cells of one grid."""

    config: SweepConfig
    grid: BatchGrid
    sweep: Sweep

    @property
    def cells(self) -> pd.DataFrame:
        """One row a cell, infeasible and failed ones too."""
        return self.sweep.all_runs

    @property
    def runs(self) -> pd.DataFrame:
        """The timed cells that were carried out. RunStoreError when there is none."""
        cells = self.cells
        done = cells[(cells["status"] == FINISHED) & (cells["role"] == TIMED)]
        if done.empty:
            reasons = "; ".join(sorted(set(cells["error"].dropna().astype(str))))
            raise RunStoreError(f"No cell of the batching study finished: {reasons}.")
        return done.sort_values(CELL_COLUMNS[:4], ignore_index=True)


GRID_PARAMETERS = {
    "grid_seqs": "max_num_seqs",
    "grid_tokens": "max_num_batched_tokens",
    "compared_seqs": "compared",
    "block_sizes": "block_sizes",
    "batch_problems": "num_problems",
}
"""Parameters of the notebook and the fields of BatchGrid they set."""


def batch_grid(profile: str = "default", **overrides: Any) -> BatchGrid:
    """The profile's grid with the overrides that are not None; lists become tuples."""
    return replace(GRIDS[profile], **overridden(overrides))


def run_batches(
    config: SweepConfig,
    grid: BatchGrid,
    runs_dir: str | Path | None = None,
    *,
    execute: Execute | None = None,
) -> BatchStudy:
    """Carry out every cell that is not stored yet and answer all of them, as run_sweep does."""
    cells = batch_cells(config, grid)
    own = cells[0].config
    sweep = run_sweep(own, runs_dir, specs=cells, execute=execute or _execute_here())
    return BatchStudy(own, grid, sweep)


def left_to_do(config: SweepConfig, grid: BatchGrid, runs_dir: str | Path | None = None) -> str:
    """How many cells are not stored yet and roughly how long they take, in one sentence."""
    store = RunStore(Path(runs_dir) if runs_dir is not None else runs_folder())
    cells = batch_cells(config, grid)
    identity = identify(cells[0].config)
    todo = [cell for cell in cells if not is_stored(store, cell, identity)]
    problem_s = SECONDS_PER_PROBLEM[config.profile] * grid.num_problems
    minutes = sum(problem_s * PROBLEMS_PER_CELL[cell.role] for cell in todo) / 60
    return f"{len(todo)} of {len(cells)} batching cells to do, about {minutes:.0f} min (rough)."


def _execute_here() -> Execute:
    """Cells carried out in this process; the module that loads models comes with the first."""
    runs: list[Execute] = []

    def execute(spec: RunSpec) -> RunResult:
        if not runs:
            runs.append(import_module("workbench.experiments.batch_run").BatchRuns())
        return runs[0](spec)

    return execute


def batch_rows(study: BatchStudy, model: str) -> pd.DataFrame:
    """Rows of plots.batch_limits: one a cell of one model, also those that cannot be.

    Columns: those of CELL_COLUMNS, and of RATES the median over repetitions, with the range of
    steps_per_s; error says why a cell has no rate.
    """
    cells = study.cells
    own = cells[(cells["model"] == model) & (cells["role"] == TIMED)]
    refused = [
        {"model": model, "kind": CONTINUOUS, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        | {"status": "infeasible", "error": TOO_FEW_TOKENS}
        for seqs in study.grid.max_num_seqs
        for tokens in study.grid.max_num_batched_tokens
        if not accepted(seqs, tokens)
    ]
    together = pd.concat([own, pd.DataFrame(refused)], ignore_index=True)
    rows = together.reindex(columns=[*CELL_COLUMNS, *RATES]).astype(dict.fromkeys(RATES, float))
    medians = {name: (name, "median") for name in RATES}
    told = {name: (name, "first") for name in CELL_COLUMNS[4:]}
    return rows.groupby(CELL_COLUMNS[:4], as_index=False).agg(**told, **medians, **RANGE)


def balance_rows(sweep: Tables, study: BatchStudy) -> pd.DataFrame:
    """Rows of plots.balance: steps a second of both models over the split, and wasted blocks.

    Columns: metric (steps_per_busy_s | waste), model, value, low, high; of the first llm_share and
    the tokens both caches hold, of the second kind, block_size and max_num_seqs.
    """
    return pd.concat([busy_rows(sweep), waste_rows(study)], ignore_index=True)


def busy_rows(sweep: Tables) -> pd.DataFrame:
    """Reasoning steps of the searches over the seconds each model was busy with them, by share."""
    parts = [
        {"llm_share": share, "metric": "steps_per_busy_s", "model": model}
        | interval_cells(problem_ratio(rows, "steps", seconds))
        for share, rows in _steps_and_seconds(sweep).groupby("llm_share")
        for model, seconds in BUSY.items()
    ]
    return with_rooms(parts, sweep)


def _steps_and_seconds(sweep: Tables) -> pd.DataFrame:
    """One row a run and problem: nodes sampled, and its parts of both models' busy seconds."""
    keys = ["run_id", "problem_id"]
    steps = sweep.table("nodes").groupby(keys).size().rename("steps").reset_index()
    rows = sweep.table("problems")[[*keys, "llm_share", "wall_part_s"]].merge(steps, on=keys)
    rows = rows.merge(sweep.runs[["run_id", "wall_s", "llm_busy_s", "prm_busy_s"]], on="run_id")
    part = rows["wall_part_s"] / rows["wall_s"]
    parts = {column: part * rows[f"{model}_busy_s"] for model, column in BUSY.items()}
    return rows.assign(**parts)


def waste_rows(study: BatchStudy) -> pd.DataFrame:
    """Share of the active blocks' room that held nothing, by model, block size and max_num_seqs."""
    cells = study.cells
    done = cells[cells["status"] == FINISHED]
    wanted = done[(done["role"] == COUNTED) | (done["kind"] == STATIC)]
    columns = ["model", "kind", "block_size", "max_num_seqs"]
    rows = wanted[[*columns, "waste"]].drop_duplicates(columns).rename(columns={"waste": "value"})
    return rows.assign(metric="waste").sort_values(columns, ignore_index=True)


def limits_face(study: BatchStudy) -> str:
    """What stands on the figures of batch limits: what was measured, and how it was asked."""
    requests, grid = study.runs.groupby("model")["requests"].max(), study.grid
    asked = " and ".join(f"{requests[m]:,.0f} of the {m.upper()}" for m in requests.index)
    times = "once" if grid.repeats == 1 else f"{grid.repeats} times"
    part = f", without a prefix cache 1 in {grid.compared_every}" if grid.compared_every > 1 else ""
    return (
        f"Each model alone, with its memory at an LLM share of {grid.llm_share:g}; requests of one "
        f"search ({asked}{part}), queued at once, each cell {times}.\n{face(study.runs)}"
    )


def balance_face(searches: str, study: BatchStudy) -> str:
    """What stands on the balance figure: the face of its searches, the recorded one below."""
    problems = f"{study.grid.num_problems} problem{'' if study.grid.num_problems == 1 else 's'}"
    return (
        f"{searches}\nWaste: requests of one search of {problems} at an LLM share of "
        f"{study.grid.llm_share:g}."
    )
