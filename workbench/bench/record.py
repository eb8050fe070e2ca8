"""A benchmark's record: rows with their peers and ceilings, and what they were measured with.

The format is fixed (CONTRACTS §8) and committed under reports/bench, so a field that does not apply
is null, names are unique, and a ratio above 1 always means ours is better. What it does not do:
measure.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError
from workbench.experiments.machine import git_state, machine_facts, versions

KEYS = ("bench", "machine", "versions", "git", "mode", "rows")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity. spread: half the range of the middle half of the repeats, or an
    interval.

    peer: who it is set against; ratio > 1: ours is better; ceiling: what the machine could do, in
    `unit`.
    """

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    ceiling: float | None = None
    share_of_ceiling: float | None = None
    repeats: int | None = None
    spread: float | tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it: what is not a finite number becomes null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def record(bench: str, rows: Iterable[Row], mode: dict[str, Any]) -> dict[str, Any]:
    """The whole record; mode says how it was run (profile, model, batch_invariant, ...).

    Raises ConfigError when two rows have one name.
    """
    listed = list(rows)
    names = [row.name for row in listed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"Bench {bench} has two rows named {', '.join(twice)}; names are unique.")
    values = (bench, machine_facts(), versions(), git_state(), mode, [r.to_dict() for r in listed])
    return dict(zip(KEYS, values, strict=True))


def write_record(content: dict[str, Any], file: str | Path) -> Path:
    """Write a record as JSON, atomically."""
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, target)
    return target


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") else value
