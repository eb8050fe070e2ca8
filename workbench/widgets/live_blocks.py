"""The memory as a map: every block of every page, whose it is and whether it is in use.

    page of the LLM:  | active | cached | active | free |      four blocks of one page's bytes
    page of the PRM:  | active                          |      one block of as many bytes
    page of nobody:   | free                            |

A page is one rectangle, so a block's area is its bytes. What it does not do: draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.kvcache.arena import KVArena, LeasedPool

FREE = 0
STATES = ("free", "llm_active", "llm_cached", "prm_active", "prm_cached")
"""What a cell shows, by its number."""
MOST_UNITS = 24  # cells of a page, where the models' blocks divide a page too differently


@dataclass(frozen=True, slots=True)
class BlockMap:
    """cells: [pages, units] of STATES; owner: [pages] blocks of a page, 0 where nobody has it.

    A block is units / owner cells wide.
    """

    cells: NDArray[np.int8]
    owner: NDArray[np.int16]
    counts: dict[str, int]  # blocks by state; free: those in held pages, and pages of nobody


def block_map(arena: KVArena) -> BlockMap:
    """The arena's blocks now; its first model is the LLM, the second the PRM. Holds its lock."""
    units = page_units([pool.per_page for pool in arena.pools])
    cells = np.zeros((arena.num_pages, units), dtype=np.int8)
    owner = np.zeros(arena.num_pages, dtype=np.int16)
    counts = dict.fromkeys(STATES, 0)
    with arena.lock:
        counts["free"] = arena.num_free
        for role, pool in enumerate(arena.pools):
            _paint(pool, 2 * role + 1, cells, owner, counts)
    return BlockMap(cells, owner, counts)


def page_units(per_page: list[int]) -> int:
    """Cells of a page, so that a block of each model is a whole number of them, where that fits."""
    units = int(np.lcm.reduce(per_page))
    return units if units <= MOST_UNITS else max(per_page)


def _paint(
    pool: LeasedPool,
    active: int,
    cells: NDArray[np.int8],
    owner: NDArray[np.int16],
    counts: dict[str, int],
) -> None:
    per, units = pool.per_page, cells.shape[1]
    edges = [units * k // per for k in range(per + 1)]
    for page in pool.pages:
        owner[page] = per
        for k, block in enumerate(pool.blocks[page * per : (page + 1) * per]):
            state = active if block.ref_count else active + 1 if block.digest else FREE
            cells[page, edges[k] : edges[k + 1]] = state
            counts[STATES[state]] += 1
