"""Which single rows of a step begin with the same blocks: siblings of a search, mostly.

Told from the tables of blocks alone, by whoever attends; no request or prefix is known here.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from workbench.kernels.addresses import integers
from workbench.kernels.bundles import MOST_REGISTERS, TILE, registers_for
from workbench.kernels.lanes import WIDTH

LEAST_SHARED = 2 * TILE  # positions that are worth attending to together
_inlined = njit(error_model="numpy", inline="always")


@_inlined
def _in_common(tables: int, width: int, one: int, other: int, block_size: int, most: int) -> int:
    """Positions below `most`, in whole tiles, whose blocks two sequences share from the start."""
    a, b = integers(tables + one * width * 8, width), integers(tables + other * width * 8, width)
    blocks = 0
    while (blocks + 1) * block_size <= most and a[blocks] == b[blocks]:
        blocks += 1
    return blocks * block_size // TILE * TILE


@_inlined
def _pays(rows: int, group: int, rows_alone: bool) -> bool:
    """Whether rows together take fewer multiplications than each alone.

    rows_alone: each would go to `cpu_decode`, which wastes no lane but every second odd head.
    """
    if rows < 2 or not rows_alone:
        return rows > 1
    return registers_for(rows * group) * WIDTH <= rows * (group + group % 2)


@_inlined
def find_siblings(
    bounds: Any,
    positions: Any,
    sequence: Any,
    tables: int,
    width: int,
    block_size: int,
    group: int,
    rows_alone: bool,
    shared: Any,
) -> int:
    """Joins runs of rows (ForwardContext.pieces) into groups; answers how many.

    bounds [pieces + 1] becomes the groups' bounds; shared [pieces]: positions that all rows of a
    group, each of its own sequence, begin with in common, 0 where rows go alone. A row joins those
    before it unless that would halve what they share.
    """
    groups, most_rows = 0, MOST_REGISTERS * WIDTH // group
    for piece in range(len(bounds) - 1):
        begin, end = bounds[piece], bounds[piece + 1]
        if groups and end - begin == 1 and shared[groups - 1] >= 0:
            first, so_far = bounds[groups - 1], shared[groups - 1]
            most = min(positions[first], positions[begin])
            common = _in_common(tables, width, sequence[first], sequence[begin], block_size, most)
            wanted = max(LEAST_SHARED, so_far // 2)
            if common >= wanted and begin - first < most_rows:
                shared[groups - 1] = min(common, so_far) if so_far else common
                bounds[groups] = end
                continue
        shared[groups] = 0 if end - begin == 1 else -1
        groups += 1
        bounds[groups] = end
    for number in range(groups):
        rows = bounds[number + 1] - bounds[number]
        if shared[number] < 0 or not _pays(rows, group, rows_alone):
            shared[number] = 0
    return groups
