"""A run's one row in the `runs` table: what was set, what was measured, on what, and how it ended.

A run that failed or could not be built is a row like any other, with its reason, so that no setting
disappears from a figure without a word. What it does not do: measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from workbench.experiments.machine import describe, git_state, machine_facts, versions
from workbench.experiments.plan import Identity, RunSpec

FINISHED, FAILED, INFEASIBLE = "finished", "failed", "infeasible"


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a carried-out run hands back: measured columns of its row, and its tables without
    `runs`.
    """

    measured: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)


def run_id(spec: RunSpec, identity: Identity) -> str:
    """The run's name in every table, and the name of its folder."""
    return f"{spec.name}-{spec.fingerprint(identity)}"


def run_tables(
    spec: RunSpec,
    identity: Identity,
    status: str,
    *,
    result: RunResult | None = None,
    error: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> dict[str, pd.DataFrame]:
    """All tables of a run, `runs` included, ready for the store; every row carries the run's id."""
    name = run_id(spec, identity)
    measured = dict(result.measured) if result else {}
    row = _heading(spec, identity, status, error) | dict(notes or {}) | provenance() | measured
    tables = {
        table: frame.assign(run_id=name)
        for table, frame in (result.tables if result else {}).items()
    }
    return {"runs": pd.DataFrame([row])} | {
        name: _run_id_first(frame) for name, frame in tables.items()
    }


def run_config(spec: RunSpec, identity: Identity) -> dict[str, Any]:
    """What config.json holds: enough to make the same run again and to check its name."""
    return {
        "name": spec.name,
        "fingerprint": spec.fingerprint(identity),
        "role": spec.role,
        "parameters": spec.parameters,
        "identity": identity.to_dict(),
    }


def provenance() -> dict[str, Any]:
    """Columns that say on what a run was measured: machine, versions, commit."""
    machine, git = machine_facts(), git_state()
    columns = {f"machine_{name}": value for name, value in machine.items()}
    return columns | {
        "machine": describe(machine),
        "versions": json.dumps(versions(), sort_keys=True),
        "git_commit": git["commit"],
        "git_dirty": git["dirty"],
    }


def _heading(spec: RunSpec, identity: Identity, status: str, error: str | None) -> dict[str, Any]:
    return {
        "run_id": run_id(spec, identity),
        "name": spec.name,
        "fingerprint": spec.fingerprint(identity),
        "status": status,
        "error": error,
        "role": spec.role,
        "profile": spec.config.profile,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "llm_bytes": spec.llm_bytes,
        "prm_bytes": spec.prm_bytes,
    } | _columns(spec.parameters)


def _columns(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as table cells: a tuple becomes its JSON text."""
    return {k: json.dumps(v) if isinstance(v, list | tuple) else v for k, v in parameters.items()}


def _run_id_first(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[["run_id", *[column for column in frame.columns if column != "run_id"]]]
