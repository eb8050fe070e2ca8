"""Pages that blocks of different models fit into: their size, and where each layer of a block lies.

A slab per layer of the deepest model; page p is the same stripe of bytes in every slab, and one
page holds blocks of one model only. A shallower model lays several of its layers side by side in
a stripe, so that its layers live in fewer slabs and several groups of blocks share a page:

    slab 0:  | page 0 | page 1 | page 2 | ...       stripe: | layer 0: lanes | layer 1: lanes | ...
    slab 1:  | page 0 | page 1 | page 2 | ...       group:  as many slabs as a block's layers need
    address of a block in a layer = layer_base[layer] + offsets[block], in the model's elements

What it does not do: say who holds a page (arena.py), or own bytes (storage.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError

ALIGNMENT = 64  # bytes; a stripe is a multiple, so that vector loads of any page are aligned alike
MOST_WASTE = 0.05  # of a page; a page that wastes more is taken only if none wastes less
MOST_CELLS = 128  # blocks side by side in one stripe, looked at when a page is chosen


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What the arena must know of one model. Invariant: all numbers positive, cells of elements.

    cell_bytes: one block in one layer. floor_blocks: of one request of the longest length.
    block_cost: the work of computing its tokens again, in a unit that the arena's models share.
    """

    name: str
    layers: int
    cell_bytes: int
    element_bytes: int = 4
    floor_blocks: int = 1
    block_cost: float = 1.0

    def __post_init__(self) -> None:
        sizes = (self.layers, self.cell_bytes, self.element_bytes, self.floor_blocks)
        if min(sizes) < 1 or self.cell_bytes % self.element_bytes or self.block_cost <= 0:
            raise ConfigError(
                f"{self}: layers, bytes, blocks and block_cost must be positive, and cell_bytes a "
                "multiple of element_bytes."
            )

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self.layers * self.cell_bytes


@dataclass(frozen=True, slots=True)
class PageShape:
    """How a page is cut: `slabs` stripes of `stripe` bytes, a multiple of 64."""

    slabs: int
    stripe: int

    def __post_init__(self) -> None:
        if min(self.slabs, self.stripe) < 1 or self.stripe % ALIGNMENT:
            raise ConfigError(
                f"{self}; allowed: at least one slab, and a stripe of a multiple of {ALIGNMENT} "
                "bytes."
            )

    @property
    def page_bytes(self) -> int:
        """In all slabs together."""
        return self.slabs * self.stripe


@dataclass(frozen=True, slots=True)
class Packing:
    """How one model's blocks lie in a page: `groups` of `lanes` blocks side by side.

    layers_per_stripe: layers of a block that share a slab. 0 blocks: the page is too small.
    """

    shape: BlockShape
    page: PageShape
    layers_per_stripe: int

    @property
    def slabs_per_block(self) -> int:
        """Slabs that the layers of a block are spread over."""
        return -(-self.shape.layers // self.layers_per_stripe)

    @property
    def groups(self) -> int:
        """Runs of slabs, each of which holds whole blocks."""
        return self.page.slabs // self.slabs_per_block

    @property
    def lanes(self) -> int:
        """Blocks whose cells of one layer lie side by side in a stripe."""
        return self.page.stripe // (self.layers_per_stripe * self.shape.cell_bytes)

    @property
    def blocks(self) -> int:
        """Blocks of this model in one page."""
        return self.groups * self.lanes

    def page_of(self, block: int) -> int:
        """Where a block id of this model lies."""
        return block // self.blocks

    @property
    def waste(self) -> int:
        """Bytes of a page that this model cannot use."""
        return self.page.page_bytes - self.blocks * self.shape.block_bytes

    def layer_base(self, num_pages: int) -> NDArray[np.int64]:
        """[layers] elements from the arena's first byte."""
        slab, section = np.divmod(
            np.arange(self.shape.layers, dtype=np.int64), self.layers_per_stripe
        )
        at = slab * (num_pages * self.page.stripe) + section * (self.lanes * self.shape.cell_bytes)
        return self._elements(at)

    def offsets(self, num_pages: int) -> NDArray[np.int64]:
        """[pages * blocks] elements; block b is the b % blocks-th of page b // blocks."""
        page, slot = np.divmod(np.arange(num_pages * self.blocks, dtype=np.int64), self.blocks)
        group, lane = np.divmod(slot, self.lanes)
        at = group * (self.slabs_per_block * num_pages * self.page.stripe)
        return self._elements(at + page * self.page.stripe + lane * self.shape.cell_bytes)

    def _elements(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        return at // self.shape.element_bytes


def pack(shape: BlockShape, page: PageShape) -> Packing:
    """Most blocks a page; of equal ways the one with fewest layers side by side (locality)."""
    most = max(1, min(shape.layers, page.stripe // shape.cell_bytes))
    ways = (Packing(shape, page, count) for count in range(1, most + 1))
    return max(ways, key=lambda way: (way.blocks, -way.layers_per_stripe))


def choose_page(shapes: Iterable[BlockShape]) -> PageShape:
    """The smallest page of which no model wastes more than 5 %, else the one that wastes least."""
    models = list(shapes)
    slabs = max(shape.layers for shape in models)
    unit = math.lcm(ALIGNMENT, *(shape.element_bytes for shape in models))
    stripes = {
        -(-count * shape.cell_bytes // unit) * unit
        for shape in models
        for count in range(1, MOST_CELLS + 1)
    }
    best, best_waste = PageShape(slabs, max(stripes)), math.inf
    for stripe in sorted(stripes):
        page = PageShape(slabs, stripe)
        waste = max(pack(shape, page).waste for shape in models) / page.page_bytes
        if waste <= MOST_WASTE:
            return page
        if waste < best_waste:
            best, best_waste = page, waste
    return best
