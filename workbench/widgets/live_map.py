"""The block map as the cells of a heat map: pages in rows, a gap between any two blocks.

What it does not do: read an arena (live_blocks.py) or lay out a figure (live_figure.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.plots.theme import MODELS
from workbench.widgets.live_blocks import STATES, BlockMap

LABELS = {
    "llm_active": "LLM active",
    "llm_cached": "LLM cached",
    "prm_active": "PRM active",
    "prm_cached": "PRM cached",
    "free": "free",
}
COLOURS = {
    "free": "#ECECEC",
    "llm_active": MODELS["llm"].colour,
    "llm_cached": MODELS["llm"].soft,
    "prm_active": MODELS["prm"].colour,
    "prm_cached": MODELS["prm"].soft,
}
HOVER = (
    "page %{customdata}, state %{z} (0 free, 1 LLM active, 2 LLM cached, 3 PRM active, "
    "4 PRM cached)<extra></extra>"
)
BLOCK_GAP, PAGE_GAP = 0.22, 0.6  # widths in cells
WIDE = 4.0  # a map has about so many times as many pages in a row as rows


@dataclass(frozen=True, slots=True)
class MapGrid:
    """Where pages lie: `per_row` of them in each of `rows`, each of `units` cells."""

    pages: int
    units: int

    @property
    def per_row(self) -> int:
        """The divisor of the number of pages that makes the map about WIDE times as wide."""
        wanted = math.sqrt(WIDE * self.pages)
        fitting = [n for n in range(1, self.pages + 1) if self.pages % n == 0]
        best = min(fitting, key=lambda n: abs(math.log(n / wanted)))
        near = abs(math.log(best / wanted)) < math.log(2)
        return best if near else max(1, min(self.pages, round(wanted)))

    @property
    def rows(self) -> int:
        return -(-self.pages // self.per_row)

    def edges(self) -> NDArray[np.float64]:
        """Edges of the columns: a cell, a gap, a cell, ... of every page of a row."""
        widths = np.tile([1.0, BLOCK_GAP], self.units)
        widths[-1] = PAGE_GAP
        return np.concatenate([[0.0], np.cumsum(np.tile(widths, self.per_row))])

    def page_numbers(self) -> NDArray[np.int32]:
        """[rows, columns] whose page a cell is; of what is left over in the last row, the next."""
        pages = np.arange(self.rows * self.per_row, dtype=np.int32)
        return np.repeat(pages.reshape(self.rows, -1), 2 * self.units, axis=1)

    def heights(self, blocks: BlockMap) -> list[list[int | None]]:
        """[rows, columns] states; None between blocks and pages (JSON knows no NaN)."""
        shape = (self.rows * self.per_row, 2 * self.units)
        columns: NDArray[np.object_] = np.full(shape, None, dtype=object)
        filled = columns[: self.pages]
        filled[:, 0::2] = blocks.cells.astype(object)
        width = np.where(blocks.owner > 0, self.units // np.maximum(blocks.owner, 1), self.units)
        gap = np.arange(1, self.units)
        inside = gap % width[:, None] != 0
        bridges = filled[:, 1:-1:2]  # a view: between two cells of one block there is no gap
        bridges[inside] = blocks.cells[:, :-1].astype(object)[inside]
        return columns.reshape(self.rows, -1).tolist()


def map_trace(blocks: BlockMap) -> go.Heatmap:
    """The map as a trace; `heights` of later maps of the same arena may replace its z."""
    grid = MapGrid(*blocks.cells.shape)
    steps = [k / len(STATES) for k in range(len(STATES) + 1)]
    scale = [
        (at, COLOURS[state])
        for state, *ends in zip(STATES, steps, steps[1:], strict=False)
        for at in ends
    ]
    return go.Heatmap(
        z=grid.heights(blocks),
        x=grid.edges(),
        customdata=grid.page_numbers(),
        colorscale=scale,
        zmin=-0.5,
        zmax=len(STATES) - 0.5,
        ygap=2,
        showscale=False,
        hovertemplate=HOVER,
        meta="map",
    )
