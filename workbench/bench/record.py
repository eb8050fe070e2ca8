"""A benchmark's record: rows with their peers and ceilings, and what they were measured with.

README's tables are made of those under reports/: a field that does not apply is null, names are
unique, and a ratio above 1 always means ours is better. Contenders run interleaved, so repeat k of
one is paired with repeat k of the other: noise that lasts longer than a repeat falls on both (a
GPU's kernels run one after the other, each a graph of its own).
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import numpy as np
import torch

from workbench.bench import code_of
from workbench.engine.memory import MemoryProfile
from workbench.errors import ConfigError
from workbench.experiments.provenance import machine_facts, versions
from workbench.trace import write_atomically

Work = Callable[[], object]
T = TypeVar("T")
Timer = Callable[[Work, int], list[float]]  # seconds of so many repeats


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity. spread: half the range of the middle half of the repeats, or two
    bounds.

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
        return not math.isfinite(self.value) and self.unit.startswith("failed")


def median_row(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    peer: str | None = None,
    peers: Sequence[float] = (),
    ceiling: float | None = None,
    less: bool = False,
    extremes: bool = False,
) -> Row:
    """The median of repeats, more being better where there is a ceiling.

    peers: the peer's repeats; ratio and spread are then of the paired ratios, NaN where a peer's
    repeat came to nothing. less: is better, of ours and the peer's. extremes: the spread is the
    least and the most, else half the range of the middle half.
    """
    value, paired = float(np.median(values)), list(values)
    found: dict[str, Any] = {"peer": peer, "ceiling": ceiling, "repeats": len(values)}
    if peers:
        sides = (peers, values) if less else (values, peers)
        paired = [a / b if b else math.nan for a, b in zip(*sides, strict=True)]
        found |= {"peer_value": float(np.median(peers)), "ratio": float(np.median(paired))}
    if ceiling is not None:
        found["share_of_ceiling"] = value / ceiling
    if len(paired) > 1 and np.isfinite(paired).all():
        low, high = np.percentile(paired, (0, 100) if extremes else (25, 75)).tolist()
        found["spread"] = (low, high) if extremes else (high - low) / 2
    return Row(name, value, unit, **found)


def compared_rows(
    name: str,
    values: Sequence[float],
    unit: str,
    peers: Mapping[str, Sequence[float]],
    ceiling: float | None = None,
    labels: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Our repeats against the first peer's; against those of each other in a row `name@PEER`.

    labels: what a row calls a peer, if not by its name. A peer without repeats is named alone.
    """
    for place, (peer, repeats) in enumerate(peers.items()):
        row, label = f"{name}@{peer}" if place else name, (labels or {}).get(peer, peer)
        yield median_row(row, values, unit, peer=label, peers=repeats, ceiling=ceiling)
    if not peers:
        yield median_row(name, values, unit, ceiling=ceiling)


def memory_rows(prefix: str, memory: MemoryProfile) -> Iterator[Row]:
    """An engine's memory by part, as its profiling pass measured it."""
    for part in ("weights", "activations", "other", "kv"):
        yield Row(f"{prefix}{part}", float(getattr(memory, part)), "bytes", repeats=1)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The two slopes of a roofline, and what torch's products reach of the first.

    Measured in the same run as what is held against it, never looked up in a table of processors.
    """

    flops_per_s: float
    bytes_per_s: float
    gemm_flops_per_s: float

    def seconds(self, flops: float, read_bytes: float) -> float:
        """The least that work can take."""
        return max(flops / self.flops_per_s, read_bytes / self.bytes_per_s)

    def best(self, other: Ceiling) -> Ceiling:
        """Of two measurements the faster: a shared machine is never faster than it is."""
        return Ceiling(*map(max, astuple(self), astuple(other)))

    def rows(self) -> Iterator[Row]:
        """As a record has it."""
        if self.flops_per_s != self.gemm_flops_per_s:
            yield Row("fma_flops_per_s", self.flops_per_s, "FLOP/s")
        yield Row("gemm_flops_per_s", self.gemm_flops_per_s, "FLOP/s")
        yield Row("read_bytes_per_s", self.bytes_per_s, "B/s")


def wall_seconds(work: Work, repeats: int) -> list[float]:
    """Of each repeat, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def in_turn(contenders: Iterable[T], repeat: int) -> list[T]:
    """In a repeat's order, which alternates: none is measured first each time."""
    return list(contenders)[:: -1 if repeat % 2 else 1]


def rates_in_turn(works: Sequence[Work], amount: float, repeats: int) -> list[list[float]]:
    """Rates of each piece of work, `amount` by seconds, after a repeat that is not counted."""
    rates: list[list[float]] = [[] for _ in works]
    for repeat in range(-1, repeats):
        for work, found in in_turn(zip(works, rates, strict=True), repeat):
            start = time.perf_counter()
            work()
            found.append(amount / (time.perf_counter() - start))
    return [found[1:] for found in rates]


@contextmanager
def meanwhile(work: Work, pause: Callable[[], float]) -> Iterator[None]:
    """Another thread does the work at once, and again after every pause (seconds), to the end."""
    ended = Event()

    def repeat() -> None:
        work()
        while not ended.wait(pause()):
            work()

    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure_ceiling(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    timer: Timer = wall_seconds,
    repeats: int = 5,
    side: int = 1536,
    read_bytes: int = 256 << 20,
) -> Ceiling:
    """Operations: the best of torch's product of square matrices. Reading: the best of summing up
    so many bytes (256 MiB: more than a cache keeps) and of copying half of them, each moved twice.
    """
    left = torch.randn(side, side, device=device).to(dtype)
    product = torch.empty_like(left)
    product_s = min(timer(lambda: torch.mm(left, left, out=product), repeats))
    data = torch.ones(read_bytes // 4, device=device)
    half, total = len(data) // 2, torch.empty((), device=device)
    read_s = timer(lambda: torch.sum(data, dim=0, out=total), repeats)
    read_s += timer(lambda: data[:half].copy_(data[half : 2 * half]), repeats)
    flops_per_s = 2 * side**3 / product_s
    return Ceiling(flops_per_s, data.nbytes / min(read_s), flops_per_s)


def record(bench: str, rows: Iterable[Row], mode: dict[str, Any]) -> dict[str, Any]:
    """The whole record; mode says how it was run (profile, model, batch_invariant, ...).

    Raises ConfigError when two rows have one name.
    """
    listed = list(rows)
    twice = [name for name, count in Counter(row.name for row in listed).items() if count > 1]
    if twice:
        raise ConfigError(f"Bench {bench} has two rows named {', '.join(twice)}; names are unique.")
    try:
        from workbench.kernels.isa import ISA  # noqa: PLC0415 - numba is missing on bare machines

        isa = ISA.name
    except ImportError:
        isa = None
    return {
        "bench": bench,
        "machine": machine_facts(),
        "versions": versions(),
        **code_of(bench),
        "mode": mode,
        "isa": isa,
        "rows": [{key: _plain(value) for key, value in asdict(row).items()} for row in listed],
    }


def write_record(content: dict[str, Any], file: str | Path) -> Path:
    """Write a record as JSON, atomically."""
    return write_atomically(json.dumps(content, indent=2) + "\n", file)


def _plain(value: Any) -> Any:
    """As JSON holds it: what is not a finite number becomes null."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") else value
