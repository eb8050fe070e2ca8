"""A slider over the measured shares: a marker moves through throughput, occupancy and hit rates.

Every position is a measured run, none is interpolated. The numbers come from `reading`, a plain
function; the slider has a visible label and a typed twin, and says in words what the marker shows.
What it does not do: run anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import BLACK, MODELS, Frame, finish, legend_at
from workbench.widgets.plot import PlotWidget

COLUMNS = {
    "tokens_per_s": "tokens/s",
    "llm_occupancy": "LLM blocks in use",
    "prm_occupancy": "PRM blocks in use",
    "llm_hit_rate": "LLM hit rate",
    "prm_hit_rate": "PRM hit rate",
}
PANELS = (("tokens_per_s",), ("llm_occupancy", "prm_occupancy"), ("llm_hit_rate", "prm_hit_rate"))
TITLES = ("generated tokens/s", "blocks in use (%)", "prefix hits (%)")
LIVE = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD")
"""What the front ends that can show a widget set in a kernel's environment; papermill sets none."""
NOT_LIVE = (
    "The slider is shown in a live notebook (Jupyter, VS Code); the table above holds its numbers."
)
_FRAME = Frame(panels=420)


def split_readings(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row a share, means over seeds: llm_share and COLUMNS; rates as fractions.

    occupancy: the peak of active blocks over the blocks there are. runs, steps: tables of one
    sweep.
    """
    steps = steps.assign(used=steps["blocks_active"] / steps["blocks_total"])
    peaks = steps.groupby(["run_id", "engine"])["used"].max().unstack("engine")
    occupancy = peaks.add_suffix("_occupancy").reset_index()
    columns = ["run_id", "llm_share", "tokens_per_s", "llm_hit_rate", "prm_hit_rate"]
    joined = runs[columns].merge(occupancy, on="run_id").drop(columns="run_id")
    return joined.groupby("llm_share", as_index=False)[list(COLUMNS)].mean()


def nearest_share(readings: pd.DataFrame, wanted: float) -> float:
    """The measured share nearest to `wanted`."""
    shares = readings["llm_share"]
    return float(shares.iloc[(shares - wanted).abs().argmin()])


def reading(readings: pd.DataFrame, share: float) -> pd.Series:
    """The row measured at `share` (the nearest one there is)."""
    distance = (readings["llm_share"] - share).abs()
    return readings.iloc[int(distance.argmin())]


def in_words(readings: pd.DataFrame, share: float) -> str:
    """One sentence that says what the marker shows."""
    row = reading(readings, share)
    return (
        f"At a share of {nearest_share(readings, share):.2f}: {row['tokens_per_s']:,.0f} tokens/s; "
        f"at most {row['llm_occupancy']:.0%} of the LLM's and {row['prm_occupancy']:.0%} of the "
        f"PRM's blocks in use at once; {row['llm_hit_rate']:.1%} and {row['prm_hit_rate']:.1%} "
        "of their prompt tokens found cached."
    )


def split_figure(readings: pd.DataFrame, share: float, face: str = "") -> go.Figure:
    """Three panels over the share with the marker at `share`: the last traces, one a line drawn."""
    fig = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.06)
    for panel, names in enumerate(PANELS, start=1):
        for name in names:
            fig.add_trace(_line(readings, name), row=panel, col=1)
        fig.update_yaxes(title_text=TITLES[panel - 1], rangemode="tozero", row=panel, col=1)
    for panel, names in enumerate(PANELS, start=1):
        for name in names:
            fig.add_trace(_marker(readings, name, share), row=panel, col=1)
    fig.update_xaxes(title_text="LLM share of total memory", row=3, col=1)
    legend_at(fig, "legend", _FRAME.above(4))
    caption = "Measured shares; the ringed point is the one the slider stands on."
    return finish(fig, "Move the memory between the models", caption, face, _FRAME)


def move_marker(fig: Any, readings: pd.DataFrame, share: float) -> None:
    """Move the rings of `fig` (a Figure or FigureWidget of split_figure) to `share`."""
    rings = [trace for trace in fig.data if trace.meta == "marker"]
    for name, ring in zip(_names(), rings, strict=True):
        ring.update(x=[nearest_share(readings, share)], y=[_value(readings, name, share)])


def split_slider(
    readings: pd.DataFrame, face: str = "", share: float = 0.3, **parameters: Any
) -> Any:
    """Slider, typed twin, a sentence and the figure; where no widget is shown, what they would say.

    share: where it starts. parameters: of notebooks/02_memory_split.ipynb.
    """
    if not is_live():
        return f"{in_words(readings, share)} {NOT_LIVE}"
    return build_slider(readings, face, share, parameters)


def is_live() -> bool:
    """Whether a front end that shows widgets holds this kernel."""
    return any(name in os.environ for name in LIVE)


def build_slider(
    readings: pd.DataFrame,
    face: str = "",
    share: float = 0.3,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The widget itself: an ipywidgets.VBox, wherever it is."""
    from workbench.widgets import parts  # noqa: PLC0415  an optional extra
    from workbench.widgets.footing import Footing  # noqa: PLC0415

    shares = [float(each) for each in readings["llm_share"]]
    dial = parts.Dial("LLM share of total memory", shares, share, "{:.2f}")
    fig = PlotWidget(split_figure(readings, dial.value, face))
    footing = Footing(
        "02_memory_split",
        "split_slider",
        parameters,
        lambda: (split_figure(readings, dial.value, face), readings),
    )

    def show(value: float) -> None:
        with fig.batch_update():
            move_marker(fig, readings, value)
        footing.say(in_words(readings, value), slider_share=value)

    dial.observe(show)
    show(dial.value)
    return parts.column([dial.box, footing.words, fig, footing.tools])


def _names() -> list[str]:
    return [name for names in PANELS for name in names]


def _value(readings: pd.DataFrame, name: str, share: float) -> float:
    value = float(reading(readings, share)[name])
    return value if name == "tokens_per_s" else 100 * value


def _line(readings: pd.DataFrame, name: str) -> go.Scatter:
    style = MODELS.get(name[:3])
    colour, dash = (style.colour, style.dash) if style else (BLACK, "solid")
    return go.Scatter(
        x=readings["llm_share"],
        y=[_value(readings, name, share) for share in readings["llm_share"]],
        name=style.label if style else "both",
        mode="lines+markers",
        line={"color": colour, "dash": dash},
        marker={"symbol": style.symbol if style else "diamond", "color": colour},
        showlegend="hit_rate" not in name,
    )


def _marker(readings: pd.DataFrame, name: str, share: float) -> go.Scatter:
    ring = {"symbol": "circle-open", "size": 18, "color": BLACK, "line": {"width": 2.5}}
    return go.Scatter(
        x=[nearest_share(readings, share)],
        y=[_value(readings, name, share)],
        mode="markers",
        marker=ring,
        meta="marker",
        showlegend=False,
        hoverinfo="skip",
    )
