"""Miss-ratio curves: one order of cache calls, every cache size asked for, exactly.

Each size is run through the manager's rules (one_size.py), so that each point equals a run of those
calls through KVCacheManager. Stack distances would give all sizes in one pass, but are exact only
while no block is filled whose content another size still holds: such a duplicate is private there
and the new holder here, and from then on the sizes differ in what is least recent. What it does not
do: change the order, as a scheduler at a smaller size would; sizes that cannot follow it are
marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.host import usable_cores
from workbench.replay.calls import (
    ALLOCATE,
    EXTEND,
    FREE,
    STATS,
    Allocate,
    CacheCalls,
    Call,
    Contents,
    Extend,
)


def miss_ratio(calls: CacheCalls, sizes: Sequence[int]) -> pd.DataFrame:
    """One row a size: num_blocks, fits, peak_active, hit_ratio, and every field of CacheStats.

    fits: whether every call succeeds at this size; where not, the scheduler would change the order,
    and the row's other figures are of no order that happens. peak_active: most blocks in use, or
    asked for at once. hit_ratio: of first admissions.
    """
    from workbench.replay.one_size import run_at_size  # noqa: PLC0415  numba, where it is needed

    if not len(sizes) or min(sizes) < 1:
        raise ConfigError(f"Cache sizes are {list(sizes)!r:.200}; give one or more, each >= 1.")
    flat = _Flat.of(calls)

    def run(size: int) -> tuple[NDArray[np.int64], int]:
        return run_at_size(int(size), calls.block_size, *flat, max(calls.num_contents, 1))

    first = run(sizes[0])  # alone, since it may have to be compiled
    with ThreadPoolExecutor(usable_cores()) as threads:
        found = [first, *threads.map(run, sizes[1:])]
    stats = np.array([counts for counts, _ in found], np.int64)
    peaks = np.array([peak for _, peak in found], np.int64)
    columns = dict(zip(STATS, stats.T, strict=True))
    return pd.DataFrame(
        {
            "num_blocks": np.array(sizes, np.int64),
            "fits": peaks <= np.array(sizes, np.int64),
            "peak_active": peaks,
            "hit_ratio": columns["hit_tokens"] / np.maximum(columns["query_tokens"], 1),
        }
        | columns
    )


class _Flat(NamedTuple):
    """Calls as run_at_size takes them."""

    calls: NDArray[np.int64]  # [n, 8]
    starts: NDArray[np.int64]
    contents: Contents

    @classmethod
    def of(cls, calls: CacheCalls) -> _Flat:
        """Sequences are numbered anew: an id that comes back is another one."""
        parts: list[list[Contents]] = []  # of each sequence
        number: dict[int, int] = {}
        known: list[int] = []
        rows = []
        for call in calls.calls:
            if isinstance(call, Allocate):
                number[call.sequence] = len(parts)
                parts.append([])
                known.append(0)
            place = number[call.sequence]
            if isinstance(call, Allocate | Extend):
                parts[place].append(call.contents)
                known[place] += len(call.contents)
            rows.append(_row(call, place, known[place]))
        lengths = np.array(known, np.int64)
        contents = [part for own in parts for part in own]
        return cls(
            np.array(rows, np.int64).reshape(-1, 8),
            np.cumsum(lengths) - lengths,
            np.concatenate(contents) if contents else np.zeros(0, np.int32),
        )


def _row(call: Call, place: int, known: int) -> tuple[int, ...]:
    if isinstance(call, Allocate):
        asked = call.tokens, call.room, call.coverable, int(call.readmission)
        return (ALLOCATE, place, known, *asked, -1)
    if isinstance(call, Extend):
        return (EXTEND, place, known, call.tokens, 0, 0, 0, -1)
    return (FREE, place, known, 0, 0, 0, 0, -1 if call.computed is None else call.computed)
