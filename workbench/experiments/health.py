"""Whether the runs of a sweep may be set side by side: one machine, one code, no drift.

The sentinel is one setting repeated through the sweep; what it changes by is the machine's doing.
What it does not do: correct anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from workbench.experiments.machine import git_state
from workbench.experiments.record import FINISHED

MACHINE_COLUMNS = ("machine", "versions")
DRIFT_WORTH_A_WORD = 0.1
SENTINEL_COLUMNS = ["run_id", "written_at", "tokens_per_s", "relative"]


def sentinel_drift(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the sentinel's setting in the order they ran.

    Columns run_id, written_at, tokens_per_s, relative: throughput over the median of them all, so 1
    is no drift. The measured run of the same setting counts. Empty where there is no sentinel.
    """
    if runs.empty or not (runs["role"] == "sentinel").any():
        return pd.DataFrame(columns=SENTINEL_COLUMNS)
    setting = runs.loc[runs["role"] == "sentinel", ["llm_share", "seed"]].iloc[0]
    same = (runs[["llm_share", "seed"]] == setting).all(axis=1) & (runs["status"] == FINISHED)
    found = runs[same].sort_values("written_at", ignore_index=True)
    return found.assign(relative=found["tokens_per_s"] / found["tokens_per_s"].median())[
        SENTINEL_COLUMNS
    ]


def unfinished(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that no figure draws: failed, infeasible or unreadable ones, each with its error."""
    return runs[runs["status"] != FINISHED] if len(runs) else runs


def remarks(runs: pd.DataFrame) -> Iterator[str]:
    """What a reader of these runs must know: mixed machines or versions, other code, drift."""
    done = runs[runs["status"] == FINISHED] if len(runs) else runs
    if done.empty:
        return
    for column in MACHINE_COLUMNS:
        values = sorted(set(map(str, done[column])))
        if len(values) > 1:
            yield f"The runs differ in {column}: {' / '.join(values)}; seconds do not compare."
    here = git_state()["commit"]
    others = sorted({str(c)[:12] for c in done["git_commit"].dropna() if c != here})
    if here and others:
        yield (
            f"Stored runs were made at commit {', '.join(others)}, this is {here[:12]}; where code "
            "that matters to them has changed, measure again into another folder (--runs DIR)."
        )
    drift = sentinel_drift(runs)
    if len(drift) and (drift["relative"] - 1).abs().max() > DRIFT_WORTH_A_WORD:
        low, high = drift["relative"].min() - 1, drift["relative"].max() - 1
        yield (
            f"The sentinel drifted by {low:+.0%} to {high:+.0%} over {len(drift)} repetitions: "
            "the machine was not equally free all the time."
        )
