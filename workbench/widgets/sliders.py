"""Sliders through measured figures: a share of the memory (02, 06), or a share and a step (03).

Every place is a measured run, none is interpolated. Rings or a stroke mark the place in the figure,
a sentence reads it. Without a front end the sentence alone is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.experiments.rows import block_rows
from workbench.experiments.runs import RunTables
from workbench.plots import prm_blocks, thrashing
from workbench.plots.theme import BLACK, MODELS, Style, finish, series
from workbench.widgets.parts import NOT_LIVE, Drawing, FigureView, NumberSlider, is_live

SHARE = "LLM share of total memory"
PANELS = {
    "generated tokens/s": ("tokens_per_s",),
    "blocks in use (%)": ("llm_occupancy", "prm_occupancy"),
    "prefix hits (%)": ("llm_hit_rate", "prm_hit_rate"),
}


def nearest_row(readings: pd.DataFrame, share: float) -> pd.Series:
    """The row measured at the share nearest to this one."""
    return readings.iloc[int((readings["llm_share"] - share).abs().argmin())]


def split_readings(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row a share, means over seeds: tokens_per_s, and both models' occupancy and hit_rate.

    occupancy: the peak of active blocks over the blocks there are; rates are fractions. runs,
    steps: tables of one sweep.
    """
    steps = steps.assign(used=steps["blocks_active"] / steps["blocks_total"])
    peaks = steps.groupby(["run_id", "engine"])["used"].max().unstack("engine")
    occupancy = peaks.add_suffix("_occupancy").reset_index()
    names = [name for panel in PANELS.values() for name in panel]
    return runs.merge(occupancy, on="run_id").groupby("llm_share", as_index=False)[names].mean()


def split_drawing(readings: pd.DataFrame, share: float, provenance: str = "") -> Drawing:
    """Throughput, occupancy and hit rates over the share, ringed at the one nearest to `share`."""
    row = nearest_row(readings, share)
    fig = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.06)
    for panel, (title, names) in enumerate(PANELS.items(), start=1):
        for name in names:
            scale = 1 if name == "tokens_per_s" else 100
            style = MODELS.get(name[:3], Style("both", BLACK, symbol="diamond"))
            rows = readings.assign(value=scale * readings[name])
            shown = "hit_rate" not in name
            series(fig, rows, "llm_share", style, "%{y:.4g}", panel, 1, showlegend=shown)
            fig.add_trace(_ring(name, row["llm_share"], scale * row[name]), row=panel, col=1)
        fig.update_yaxes(title_text=title, rangemode="tozero", row=panel, col=1)
    fig.update_xaxes(title_text=SHARE, row=3, col=1)
    caption = "Measured shares; the ringed point is the one the slider stands on."
    finish(fig, "Move the memory between the models", caption, provenance, 420)
    words = (
        f"At a share of {row['llm_share']:.2f}: {row['tokens_per_s']:,.0f} tokens/s; at most "
        f"{row['llm_occupancy']:.0%} of the LLM's and {row['prm_occupancy']:.0%} of the PRM's "
        f"blocks in use at once; {row['llm_hit_rate']:.1%} and {row['prm_hit_rate']:.1%} of their "
        "prompt tokens found cached."
    )
    return Drawing(fig, readings, words, {"slider_share": float(row["llm_share"])})


def thrash_readings(rows: pd.DataFrame, lost: pd.DataFrame) -> pd.DataFrame:
    """One row a share: events_per_1000 and blocks of each model, again_s, wall_s.

    rows: of plots.thrashing; lost: of plots.lost_time. again_s: seconds a search spends on what was
    evicted.
    """
    wide = rows.pivot_table(index="llm_share", columns=["engine", "metric"], values="value")
    wide.columns = ["_".join(pair) for pair in wide.columns.to_list()]
    again = lost["seconds"].where(lost["part"] == "recomputed_evicted", 0.0)
    by_share = lost.assign(again_s=again).groupby("llm_share")
    return wide.join(by_share.agg({"again_s": "sum", "wall_s": "first"})).reset_index()


def thrash_drawing(
    rows: pd.DataFrame, readings: pd.DataFrame, share: float, provenance: str = ""
) -> Drawing:
    """The thrashing figure, ringed at the measured share nearest to `share`."""
    row, fig = nearest_row(readings, share), thrashing(rows, provenance)
    for panel, metric in enumerate(("events_per_1000", "blocks"), start=1):
        for name in (f"{model}_{metric}" for model in MODELS):
            fig.add_trace(_ring(name, row["llm_share"], row[name]), row=panel, col=1)
    words = (
        f"At a share of {row['llm_share']:.2f}: of 1,000 look-ups "
        f"{row['llm_events_per_1000']:.1f} of the LLM's and {row['prm_events_per_1000']:.1f} of "
        f"the PRM's ask for a block that was evicted; {row['llm_blocks']:,.0f} and "
        f"{row['prm_blocks']:,.0f} blocks a search are lost so. Computing them again takes "
        f"{row['again_s']:.2f} of {row['wall_s']:.2f} s ({row['again_s'] / row['wall_s']:.1%})."
    )
    return Drawing(fig, readings, words, {"slider_share": float(row["llm_share"])})


def share_slider(
    notebook: str,
    name: str,
    readings: pd.DataFrame,
    draw: Callable[[float], Drawing],
    share: float | None = None,
    measured: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Any:
    """Slider over the measured shares, sentence and figure, saved by this name.

    draw: at a share; share: where it starts, None the largest; measured: as save_figure takes it;
    parameters: of the notebook.
    """
    slider = NumberSlider(SHARE, readings["llm_share"], 1.0 if share is None else share, "{:.2f}")

    def now() -> dict[str, Drawing]:
        return {name: draw(slider.value)}

    if not is_live():
        return f"{now()[name].words} {NOT_LIVE}"
    return _shown(notebook, [slider], now, parameters, measured=measured)


def occupancy_drawing(rows: pd.DataFrame, share: float, step: int, provenance: str = "") -> Drawing:
    """The PRM's blocks over the steps of a share, with a stroke at one step (the nearest there is).

    rows: of block_rows.
    """
    place = int(np.clip(step, 0, len(rows) - 1))
    before = rows.iloc[: place + 1]
    total, active, cached = before[["blocks_total", "blocks_active", "blocks_cached"]].iloc[-1]
    fig, ends = prm_blocks(rows, provenance), {"x0": place + 0.5, "x1": place + 0.5}
    look = {"xref": "x", "yref": "paper", "line": {"color": BLACK, "width": 1.5}}
    fig.add_shape(type="line", name="cursor", y0=0, y1=1, **ends, **look)
    words = (
        f"At an LLM share of {share:.2f}, step {place:,} of {len(rows) - 1:,}: of the PRM's "
        f"{total:,} blocks {active:,} are active, {cached:,} cached and "
        f"{total - active - cached:,} free; so far {int(before['allocated'].sum()):,} were taken "
        f"and {int(before['evicted'].sum()):,} evicted."
    )
    return Drawing(fig, rows, words, {"upper_share": share})


def occupancy_slider(
    sweep: RunTables,
    start: float,
    provenance: str = "",
    measured: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Any:
    """Sliders over share and step, sentence and figure. measured: as save_figure takes it;
    parameters: of 03_block_occupancy.
    """
    if not is_live():
        return NOT_LIVE
    shares = tuple(sorted(map(float, sweep.runs["llm_share"].unique())))
    tables = {round(at, 12): block_rows(sweep, at, beside=shares) for at in shares}
    places = range(max(len(rows) for rows in tables.values()))
    share = NumberSlider(SHARE, shares, start, "{:.2f}")
    step = NumberSlider("PRM scheduling step", places, len(tables[share.value]) // 2, "{:,.0f}")

    def now() -> dict[str, Drawing]:
        at = share.value
        last = len(tables[at]) - 1
        if step.value > last:  # a longer share's
            step.slider.value = last
            step.say(f"At a share of {at:.2f} the last step is {last:,}.")
        place = round(step.value)
        return {"occupancy_slider": occupancy_drawing(tables[at], at, place, provenance)}

    return _shown("03_block_occupancy", [share, step], now, parameters, measured=measured)


def _shown(notebook: str, sliders: Sequence[NumberSlider], *given: Any, **more: Any) -> Any:
    """The widget over sliders whose moves draw anew. given, more: as FigureView takes them."""
    view = FigureView(notebook, sliders, *given, **more)
    for slider in sliders:
        slider.slider.observe(view.show, names="value")
    return view.box


def _ring(name: str, x: float, y: float) -> go.Scatter:
    marker = {"symbol": "circle-open", "size": 18, "color": BLACK, "line": {"width": 2.5}}
    look = {"mode": "markers", "showlegend": False, "cliponaxis": False, "hoverinfo": "skip"}
    return go.Scatter(x=[x], y=[y], marker=marker, meta=f"ring {name}", **look)
