"""A benchmark's record: rows with their peers and ceilings, and what they were measured with.

The format is fixed (CONTRACTS §8) and committed under reports/bench, so a field that does not apply
is null, names are unique, and a ratio above 1 always means ours is better. Contenders run
interleaved, so repeat k of one is paired with repeat k of the other: noise of the machine that
lasts longer than a repeat falls on both.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError
from workbench.experiments.provenance import git_state, machine_facts, versions

if TYPE_CHECKING:
    from workbench.engine.memory import MemoryProfile
    from workbench.experiments.statistics import Interval

FAILED = "failed"  # a run's status (experiments/runs.py, which needs pandas: records do not)
KEYS = ("bench", "machine", "versions", "git", "mode", "isa", "rows")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity. spread: half the range of the middle half of the repeats, or an
    interval.

    peer: who it is set against; ratio > 1: ours is better; ceiling: what the machine could do, in
    `unit`. A value that there cannot be is NaN, and `unit` says why ("infeasible: ...",
    "failed: ...").
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

    @property
    def failed(self) -> bool:
        """Whether it has no value because what was to be measured failed."""
        return not math.isfinite(self.value) and self.unit.startswith(FAILED)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it: what is not a finite number becomes null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def median_row(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    peer: str | None = None,
    peers: Sequence[float] | None = None,
    ceiling: float | None = None,
) -> Row:
    """The median of repeats, more being better where there is a peer or a ceiling.

    peers: the peer's repeats; ratio and spread are then of the paired ratios.
    """
    value = median(values)
    ratios = peers and [mine / other for mine, other in zip(values, peers, strict=True)]
    return Row(
        name,
        value,
        unit,
        peer=peer,
        peer_value=median(peers) if peers else None,
        ratio=median(ratios) if ratios else None,
        ceiling=ceiling,
        share_of_ceiling=None if ceiling is None else value / ceiling,
        repeats=len(values),
        spread=middle_half(ratios or values),
    )


def interval_row(name: str, found: Interval, unit: str, repeats: int) -> Row:
    """An estimate with its 95 % interval over problems."""
    return Row(name, found.estimate, unit, repeats=repeats, spread=(found.low, found.high))


def memory_rows(prefix: str, memory: MemoryProfile) -> Iterator[Row]:
    """An engine's memory by part, as its profiling pass measured it."""
    for part in ("weights", "activations", "other", "kv"):
        yield Row(f"{prefix}{part}", float(getattr(memory, part)), "bytes", repeats=1)


def middle_half(values: Sequence[float]) -> float | None:
    """Half the range of the middle half of the values."""
    if len(values) < 2:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def record(bench: str, rows: Iterable[Row], mode: dict[str, Any]) -> dict[str, Any]:
    """The whole record; mode says how it was run (profile, model, batch_invariant, ...).

    Raises ConfigError when two rows have one name.
    """
    listed = list(rows)
    names = [row.name for row in listed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"Bench {bench} has two rows named {', '.join(twice)}; names are unique.")
    try:
        from workbench.kernels.isa import ISA  # noqa: PLC0415 - numba is missing on bare machines

        isa = ISA.name
    except ImportError:
        isa = None
    told = (machine_facts(), versions(), git_state(), mode, isa)
    values = (bench, *told, [row.to_dict() for row in listed])
    return dict(zip(KEYS, values, strict=True))


def renewed(before: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """A record with the rows that were measured again in the place of those of their names.

    mode.again: of each of them the commit that it was measured with. ConfigError as require_alike.
    """
    require_alike(before, again)
    new = {row["name"]: row for row in again["rows"]}
    rows = [new.pop(row["name"], row) for row in before["rows"]] + list(new.values())
    commits = {row["name"]: again["git"]["commit"] for row in again["rows"]}
    mode = before["mode"] | {"again": before["mode"].get("again", {}) | commits}
    return before | {"mode": mode, "rows": rows}


def require_alike(before: dict[str, Any], again: dict[str, Any]) -> None:
    """ConfigError unless both are of one benchmark, machine, versions, mode and instruction set."""
    for key in ("bench", "machine", "versions", "mode", "isa"):
        one, other = (_without_passes(each[key]) for each in (before, again))
        if one != other:
            raise ConfigError(
                f"Rows can be measured again where the {key} is the same; the record has {one}, "
                f"this run {other}. Write another file."
            )


def _without_passes(facts: Any) -> Any:
    """As read back from a file, without what tells one pass from another."""
    if not isinstance(facts, dict):
        return facts
    passes = ("again", "part", "complete")
    return json.loads(json.dumps({k: fact for k, fact in facts.items() if k not in passes}))


def read_record(file: str | Path) -> dict[str, Any]:
    """What `write_record` wrote. ConfigError for anything else."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        known = isinstance(content, dict) and set(KEYS) <= set(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a record ({error}).") from error
    if not known:
        raise ConfigError(f"{file} is no record; it lacks one of {', '.join(KEYS)}.")
    return dict(content)


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
