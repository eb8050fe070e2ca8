"""What a sweep would do, without doing it: its runs, which are stored, which cannot fit, how long.

Reads configs and stored rows only; loads no model. What it does not do: promise. Minutes come from
the runs this machine has finished, or from the profile's rough figure where it has finished none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from workbench.config import SweepConfig
from workbench.experiments.feasible import FeasibleShares, feasibility, feasible_shares
from workbench.experiments.identity import identify
from workbench.experiments.ladder_plan import DEPTH, LADDER, QUEUE
from workbench.experiments.machine import machine_facts
from workbench.experiments.paths import runs_folder
from workbench.experiments.plan import Identity, RunSpec, planned_runs
from workbench.experiments.profiles import SECONDS_PER_PROBLEM
from workbench.experiments.record import FINISHED, INFEASIBLE
from workbench.experiments.store import RunStore, load_runs, status_of

TO_RUN = "to run"


@dataclass(frozen=True, slots=True)
class Preview:
    """What is left to do. runs: one row a run, in order.

    Columns: name, role, llm_share, seed, status, llm_blocks, prm_blocks, lacks_bytes, expected_s (0
    where nothing is left to do).
    """

    runs: pd.DataFrame
    feasible: FeasibleShares
    measured_before: bool  # expected_s comes from this machine's own runs

    @property
    def minutes(self) -> float:
        """Expected minutes of what is left to do."""
        return float(self.runs["expected_s"].sum() / 60)

    @property
    def num_to_run(self) -> int:
        """Runs that are still to be done."""
        return int((self.runs["status"] == TO_RUN).sum())


def preview(
    config: SweepConfig, runs_dir: str | Path | None = None, *, retry_failed: bool = False
) -> Preview:
    """Look at a sweep before it runs; bad settings raise as they would then."""
    store = RunStore(Path(runs_dir) if runs_dir is not None else runs_folder())
    identity, seconds = identify(config), seconds_per_problem(config, store)
    each = seconds or SECONDS_PER_PROBLEM.get(config.profile, 1.5)
    rows = [_row(spec, store, identity, each, retry_failed) for spec in planned_runs(config)]
    ends = feasible_shares(
        config.llm,
        config.prm,
        config.total_memory,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        dtype=config.dtype,
        activations=None if config.activations_in_total else (0, 0),
    )
    return Preview(pd.DataFrame(rows), ends, seconds is not None)


def seconds_per_problem(config: SweepConfig, store: RunStore) -> float | None:
    """Wall seconds a problem took in finished runs of this pair and n on this kind of machine."""
    if not store.folders():
        return None
    runs = load_runs(store.root)
    runs = runs[runs["status"] == FINISHED]
    if runs.empty:
        return None
    if "wall_s" not in runs:  # cells of the batching study search nothing
        return None
    own = (runs["llm"] == config.llm) & (runs["prm"] == config.prm) & (runs["n"] == config.n)
    own &= ~runs["role"].isin(
        (LADDER, DEPTH, QUEUE)
    )  # rungs without a score cache are slow on purpose
    runs = runs[own & (runs["machine_cpu"] == machine_facts()["cpu"]) & runs["wall_s"].notna()]
    return float((runs["wall_s"] / runs["num_problems"]).median()) if len(runs) else None


def _row(
    spec: RunSpec, store: RunStore, identity: Identity, seconds: float, retry_failed: bool
) -> dict[str, object]:
    possible = feasibility(spec)
    folder = store.find(spec.fingerprint(identity))
    status = TO_RUN if folder is None else status_of(folder)
    again = status == "unreadable" or (status == "failed" and retry_failed)
    status = TO_RUN if again else status if possible.fits else INFEASIBLE
    return {
        "name": spec.name,
        "role": spec.role,
        "llm_share": spec.llm_share,
        "seed": spec.seed,
        "status": status,
        "llm_blocks": possible.llm.num_blocks(spec.llm_bytes),
        "prm_blocks": possible.prm.num_blocks(spec.prm_bytes),
        "lacks_bytes": possible.llm_lacks + possible.prm_lacks,
        "expected_s": seconds * spec.config.num_problems if status == TO_RUN else 0.0,
    }
