"""Blocks of the PRM at one scheduling step of one measured share: a cursor through notebook 03.

Every place is a measured step. The numbers come from `reading`, a plain function; the widget has
a share slider, a step slider, a typed twin of each, and a sentence. What it does not do: run
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.errors import ConfigError
from workbench.experiments.rows import block_rows
from workbench.experiments.statistics import Tables
from workbench.plots import prm_blocks
from workbench.plots.theme import BLACK
from workbench.widgets.plot import PlotWidget
from workbench.widgets.split import NOT_LIVE, is_live

CURSOR = "cursor"


def share_steps(sweep: Tables, shares: Sequence[float] | None = None) -> dict[float, pd.DataFrame]:
    """Rows of prm_blocks for each share that was measured, all with the same axes."""
    found = sorted(float(share) for share in sweep.runs["llm_share"].unique())
    wanted = found if shares is None else list(shares)
    return {share: block_rows(sweep, share, beside=tuple(wanted)) for share in wanted}


def reading(rows: pd.DataFrame, step: int) -> dict[str, int]:
    """Blocks at a step (the nearest there is), and those taken and evicted up to it."""
    if rows.empty:
        raise ConfigError("There are no steps; give the rows of one share (share_steps).")
    place = int(np.clip(step, 0, len(rows) - 1))
    row, before = rows.iloc[place], rows.iloc[: place + 1]
    active, cached = int(row["blocks_active"]), int(row["blocks_cached"])
    return {
        "step": place,
        "active": active,
        "cached": cached,
        "free": int(row["blocks_total"]) - active - cached,
        "total": int(row["blocks_total"]),
        "allocated": int(before["allocated"].sum()),
        "evicted": int(before["evicted"].sum()),
    }


def in_words(rows: pd.DataFrame, share: float, step: int) -> str:
    """One sentence that says what the cursor stands on."""
    at = reading(rows, step)
    return (
        f"At an LLM share of {share:.2f}, step {at['step']:,} of {len(rows) - 1:,}: of the PRM's "
        f"{at['total']:,} blocks {at['active']:,} are active, {at['cached']:,} cached and "
        f"{at['free']:,} free; so far {at['allocated']:,} were taken and {at['evicted']:,} evicted."
    )


def occupancy_figure(rows: pd.DataFrame, step: int, face: str = "") -> go.Figure:
    """prm_blocks with the cursor at a step."""
    fig = prm_blocks(rows, face)
    fig.add_shape(name=CURSOR, type="line", xref="x", yref="paper", y0=0, y1=1, line_color=BLACK)
    fig.update_shapes({"x0": 0, "x1": 0, "line": {"width": 1.5}}, selector={"name": CURSOR})
    return move_cursor(fig, rows, step)


def move_cursor(fig: Any, rows: pd.DataFrame, step: int) -> Any:
    """Put the cursor of an occupancy_figure on the middle of a step; answers the figure."""
    middle = reading(rows, step)["step"] + 0.5
    fig.update_shapes({"x0": middle, "x1": middle}, selector={"name": CURSOR})
    return fig


def other_share(fig: Any, rows: pd.DataFrame, step: int, face: str = "") -> Any:
    """Draw another share's steps into an occupancy_figure; answers the figure."""
    drawn = occupancy_figure(rows, step, face)
    for old, new in zip(fig.data, drawn.data, strict=True):
        old.update(x=new.x, y=new.y, name=new.name, customdata=new.customdata)
    fig.layout.title.text = drawn.layout.title.text
    return move_cursor(fig, rows, step)


def occupancy_slider(sweep: Tables, start: float, face: str = "", **parameters: Any) -> Any:
    """The sliders in a live notebook, elsewhere a sentence.

    parameters: of notebooks/03_block_occupancy.ipynb; `upper_share` is where the slider stands.
    """
    return build_occupancy(share_steps(sweep), start, face, parameters) if is_live() else NOT_LIVE


def build_occupancy(
    tables: dict[float, pd.DataFrame],
    start: float,
    face: str = "",
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The widget itself, wherever it is. tables: of share_steps."""
    from workbench.widgets import parts  # noqa: PLC0415  an optional extra
    from workbench.widgets.footing import Footing  # noqa: PLC0415

    share = parts.Dial("LLM share of total memory", list(tables), start, "{:.2f}")
    places = range(max(len(rows) for rows in tables.values()))
    step = parts.Dial("PRM scheduling step", places, len(tables[share.value]) // 2, "{:,.0f}")
    fig = PlotWidget(occupancy_figure(tables[share.value], round(step.value), face))
    footing = Footing(
        "03_block_occupancy",
        "occupancy_slider",
        parameters,
        lambda: (
            occupancy_figure(tables[share.value], round(step.value), face),
            tables[share.value],
        ),
    )

    def say() -> None:
        words = in_words(tables[share.value], share.value, round(step.value))
        footing.say(words, upper_share=share.value)

    def to_share(_: float) -> None:
        with fig.batch_update():
            other_share(fig, tables[share.value], round(step.value), face)
        say()

    def to_step(_: float) -> None:
        with fig.batch_update():
            move_cursor(fig, tables[share.value], round(step.value))
        say()

    share.observe(to_share)
    step.observe(to_step)
    say()
    return parts.column([share.box, step.box, footing.words, fig, footing.tools])
