"""What can be picked of stored runs: a whole sweep, the cells of a batching study, or one run.

Runs that differ in share and seed alone belong together; what tells two such groups apart is in
their names. What it does not do: draw (explorer_figures.py), or run anything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pandas as pd

from workbench.config import SweepConfig, format_size
from workbench.errors import RunStoreError, nearest
from workbench.experiments.batch_plan import COUNTED, LIMITS, TIMED
from workbench.experiments.batch_study import BatchStudy, batch_grid
from workbench.experiments.plan import HOW_IT_IS_CARRIED_OUT, SENTINEL
from workbench.experiments.record import FINISHED
from workbench.experiments.store import load_table
from workbench.experiments.sweep import Sweep

CELLS = (TIMED, COUNTED)
SHOWN = [
    *("role", "llm", "llm_share", "seed", "n", "num_problems"),
    *("tokens_per_s", "accuracy", "status"),
]
_OF_A_CELL = {*LIMITS, "num_problems", "repeat"}
"""Settings in which the cells of one batching study differ."""


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """Runs to be looked at together. runs: rows of load_runs, sentinels and failed ones too."""

    name: str
    runs: pd.DataFrame

    @property
    def is_batches(self) -> bool:
        """Whether it is cells of the batching study, which ask requests and search nothing."""
        return bool(self.runs["role"].isin(CELLS).all())

    @property
    def folders(self) -> tuple[Path, ...]:
        """The run folders."""
        return tuple(Path(folder) for folder in self.runs["folder"])

    @property
    def shares(self) -> list[float]:
        """The LLM's shares that were measured."""
        done = self.runs[(self.runs["status"] == FINISHED) & (self.runs["role"] != SENTINEL)]
        return sorted(map(float, done["llm_share"].unique()))

    def sweep(self) -> Sweep:
        """As what the study's views read."""
        seeds = tuple(sorted({int(seed) for seed in self.runs["seed"]}))
        shares = tuple(self.shares) or (0.5,)
        return Sweep(SweepConfig(shares=shares, seeds=seeds), self.folders)

    def batches(self) -> BatchStudy:
        """As what the batching study's views read; the grid is that of the cells there are."""
        sweep = self.sweep()
        seqs, tokens = (tuple(sorted(map(int, self.runs[name].unique()))) for name in LIMITS[:2])
        timed = self.runs[self.runs["role"] == TIMED]
        repeats = max(1, int(timed["repeat"].nunique()))
        limits = replace(batch_grid(), max_num_seqs=seqs, max_num_batched_tokens=tokens)
        return BatchStudy(sweep.config, replace(limits, repeats=repeats), sweep)


def picks(runs: pd.DataFrame) -> dict[str, Pick]:
    """What can be picked of the rows of load_runs, by name: groups first, then single searches."""
    readable = runs[runs["status"] != "unreadable"] if len(runs) else runs
    if readable.empty:
        raise RunStoreError(
            "There is no stored run to explore; `workbench figures` makes some, and so does "
            "`workbench sweep`."
        )
    cells = readable["role"].isin(CELLS)
    groups = [*_groups(readable[~cells], set()), *_groups(readable[cells], _OF_A_CELL)]
    single = readable[~cells & (readable["status"] == FINISHED)]
    found = {name: Pick(name, rows) for name, rows in groups}
    for k in range(len(single)):
        row = single.iloc[[k]]
        name = str(row["run_id"].iloc[0])
        found[name] = Pick(name, row.assign(role="measure"))
    return found


def picked(found: dict[str, Pick], name: str | None) -> Pick:
    """The pick of this name, the first by default. RunStoreError for one that is not there."""
    if name is None:
        return next(iter(found.values()))
    if name not in found:
        known = list(found)
        raise RunStoreError(
            f"There is no pick {name!r}.{nearest(name, known)} First: {known[0]!r}."
        )
    return found[name]


def searched(pick: Pick, llm_share: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables `problems` and `nodes` of the pick's run nearest to a share, its first seed.

    RunStoreError where no run of it kept its nodes: replays and batching cells sample nothing.
    """
    done = pick.runs[pick.runs["status"] == FINISHED]
    order = done.assign(far=(done["llm_share"] - llm_share).abs()).sort_values(["far", "seed"])
    for folder in order["folder"]:
        nodes = load_table(folder, "nodes")
        if len(nodes):
            return load_table(folder, "problems"), nodes
    raise RunStoreError(
        f"{pick.name} has no run with sampled nodes; pick a measured search to see its trees."
    )


def runs_table(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs as a person picks from them, searches before cells, best known columns only."""
    columns = [name for name in SHOWN if name in runs]
    order = runs.assign(cell=runs["role"].isin(CELLS))
    order = order.sort_values(["cell", "role", "run_id"]).set_index("run_id")
    return order[columns]


def _groups(runs: pd.DataFrame, varying: set[str]) -> list[tuple[str, pd.DataFrame]]:
    """Runs that share every setting but `varying`, share and seed; named by what differs."""
    if runs.empty:
        return []
    own = {"llm_share", "seed", "repeat"} | varying
    known = [field.name for field in fields(SweepConfig) if field.name in runs]
    settings = [name for name in known if name not in HOW_IT_IS_CARRIED_OUT | own]
    keys = pd.DataFrame({name: runs[name].map(str) for name in [*settings, "machine"]})
    groups = [rows for _, rows in runs.groupby([keys[name] for name in keys], sort=False)]
    names = [_name(rows) for rows in groups]
    alike = pd.concat([r for r, name in zip(groups, names) if names.count(name) > 1] or [runs[:0]])
    telling = [str(name) for name in keys if alike[name].map(str).nunique() > 1]
    return [
        (_telling(name, rows, telling) if names.count(name) > 1 else name, rows)
        for name, rows in zip(names, groups)
    ]


def _name(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    kind = "batching cells" if first["role"] in CELLS else "sweep"
    shares = sorted(rows["llm_share"].unique())
    span = f"{shares[0]:g}" if len(shares) == 1 else f"{shares[0]:g} to {shares[-1]:g}"
    return (
        f"{kind} {first['llm']} + {first['prm']}, {format_size(int(first['total_memory']))}, "
        f"n={first['n']}, {first['num_problems']} problems, share {span}, {len(rows)} runs"
    )


def _telling(name: str, rows: pd.DataFrame, settings: list[str]) -> str:
    """The name with what tells it from others of the same."""
    first = rows.iloc[0]
    return ", ".join([name, *(f"{each}={first[each]}" for each in settings)])
