"""What can be picked of stored runs: a whole sweep, the cells of a batching study, or one run.

Runs that differ in share and seed alone belong together; what tells two such groups apart is in
their names. What it does not do: draw (explorer_figures.py), or run anything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from workbench.config import SweepConfig, format_size
from workbench.errors import RunStoreError, nearest
from workbench.experiments.runs import FINISHED, load_runs, load_table
from workbench.experiments.settings import (
    COUNTED,
    HOW_IT_IS_CARRIED_OUT,
    LIMITS,
    MEASURE,
    REPLAY,
    SENTINEL,
    TIMED,
)

CELLS = (TIMED, COUNTED)
KINDS = {
    MEASURE: "sweep",
    SENTINEL: "sweep",
    REPLAY: "replayed sweep",
    **dict.fromkeys(CELLS, "batching cells"),
}
"""What a group of runs of a role is called."""
SHOWN = [
    *("role", "llm", "llm_share", "seed", "n", "num_problems"),
    *("tokens_per_s", "accuracy", "status"),
]
_OF_A_CELL = {*LIMITS, "num_problems", "repeat"}
"""Settings in which the cells of one batching study differ."""


@dataclass(frozen=True, slots=True, eq=False)
class PickedRuns:
    """Searches of any role, as the study's views read them; all_runs: failed ones too."""

    all_runs: pd.DataFrame

    @property
    def runs(self) -> pd.DataFrame:
        """By share and seed; sentinels only where there is nothing else."""
        done = self.all_runs[self.all_runs["status"] == FINISHED]
        first = done[done["role"] != SENTINEL]
        runs = load_runs(list((first if len(first) else done)["folder"]))
        return runs.sort_values(["llm_share", "seed"], ignore_index=True) if len(runs) else runs

    def table(
        self, name: str, llm_share: float | None = None, seed: int | None = None
    ) -> pd.DataFrame:
        """Rows of one trace table, with llm_share and run_seed, as Sweep.table."""
        runs = self.runs
        for column, value in (("llm_share", llm_share), ("seed", seed)):
            if value is not None and len(runs):
                runs = runs[(runs[column] - value).abs() < 1e-9]
        if runs.empty:
            raise RunStoreError(f"No finished run is picked at llm_share={llm_share}.")
        keys = runs[["run_id", "llm_share", "seed"]].rename(columns={"seed": "run_seed"})
        return load_table(list(runs["folder"]), name).merge(keys, on="run_id", how="left")


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
        done = self.runs[self.runs["status"] == FINISHED]
        return sorted(map(float, done["llm_share"].unique()))

    def searches(self) -> PickedRuns:
        """As what the study's views read."""
        return PickedRuns(self.runs)


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
    single = single.iloc[(single["role"] != MEASURE).to_numpy().argsort(kind="stable")]
    found = {name: Pick(name, rows) for name, rows in groups}
    for k in range(len(single)):
        row = single.iloc[[k]]
        name = str(row["run_id"].iloc[0])
        found[name] = Pick(name, row)
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
    keys["role"] = runs["role"].replace({SENTINEL: MEASURE} | dict.fromkeys(CELLS, TIMED))
    parts = [rows for _, rows in runs.groupby([keys[name] for name in keys], sort=False)]
    groups = sorted(parts, key=lambda rows: MEASURE not in set(rows["role"]))
    names = [_name(rows) for rows in groups]
    alike = pd.concat([r for r, name in zip(groups, names) if names.count(name) > 1] or [runs[:0]])
    telling = [str(name) for name in keys if alike[name].map(str).nunique() > 1]
    return [
        (_telling(name, rows, telling) if names.count(name) > 1 else name, rows)
        for name, rows in zip(names, groups)
    ]


def _name(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    role = str(first["role"])
    kind = KINDS.get(role, f"{role} runs")
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
