"""How repeats become the row of a record: medians, paired ratios, and their spread.

Contenders run interleaved, so repeat k of one is paired with repeat k of the other: noise of the
machine that lasts longer than a repeat falls on both. What it does not do: measure, or write files
(record.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median, quantiles

from workbench.bench.record import Row
from workbench.engine.memory import MemoryProfile
from workbench.experiments.statistics import Interval


def rate_row(
    name: str,
    ours: Sequence[float],
    peers: Sequence[float],
    unit: str,
    peer: str,
    ceiling: float | None = None,
) -> Row:
    """Our rate (more is better) beside the peer's; ratio and spread are of the paired ratios."""
    ratios = [mine / other for mine, other in zip(ours, peers, strict=True)]
    value = median(ours)
    return Row(
        name,
        value,
        unit,
        peer=peer,
        peer_value=median(peers),
        ratio=median(ratios),
        ceiling=ceiling,
        share_of_ceiling=None if ceiling is None else value / ceiling,
        repeats=len(ratios),
        spread=middle_half(ratios),
    )


def plain_row(name: str, values: Sequence[float], unit: str) -> Row:
    """The median of a quantity that has no peer."""
    return Row(name, median(values), unit, repeats=len(values), spread=middle_half(values))


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
