"""The what-if widget: a recorded search under another split, memory, limit, policy or device.

    what_if()                                  in a notebook that can show widgets

While a slider moves, what lies between two replayed shares is interpolated, and marked so; once it
rests, the exact replay takes its place, and a few other shares are replayed for the line. Figures
and sentences are plain functions of a `View`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.config import format_size
from workbench.errors import ConfigError
from workbench.experiments.memory import FeasibleShares
from workbench.plots.theme import (
    BLACK,
    GREEN,
    GREY,
    MODELS,
    UPPER_AXIS_PX,
    VERMILION,
    Frame,
    finish,
    legend_at,
    legend_note,
    share_axes,
)
from workbench.replay.devices import load_device
from workbench.replay.simulator import POLICIES
from workbench.widgets.parts import (
    CopyText,
    Drawing,
    NumberSlider,
    button,
    error_in_html,
    is_live,
    labelled,
    papermill_command,
    redraw,
    save_box,
)
from workbench.widgets.what_if_replay import (
    DEFAULT_RECORDING,
    LIMITS,
    MIB,
    Position,
    RecordingInfo,
    Replay,
    device_names,
    find_recordings,
    interpolated,
    replay_elsewhere,
    replay_rows,
)

NOT_LIVE = (
    "The controls are shown in a live notebook (Jupyter, VS Code); the figures above are where "
    "they would start."
)
GRID, PINS = 7, 3  # shares replayed for the line; curves pinned at most
QUIET_S = 0.3  # a replay begins once the controls have rested so long
UNKNOWN = f'<b style="color: {GREY}">NOT YET KNOWN (drawn is the last one)</b>'
OFFERED = {
    "block_size": ("block size (tokens)", (1, 2, 4, 8, 16, 32, 64, 128)),
    "max_num_seqs": ("sequences in a step (max_num_seqs)", tuple(2**k for k in range(2, 10))),
    "max_num_batched_tokens": (
        "tokens in a step (max_num_batched_tokens)",
        tuple(2**k for k in range(6, 15)),
    ),
}
OWN_CACHES = "each model its own cache"
SHARE_CAPTION = (
    "A recorded search at other shares of the memory: generated tokens per second, prompt tokens "
    "found cached at first admission, and thrash events, over the LLM's share. Markers with a "
    "black edge are exact replays, lines interpolate between them; the ring is the chosen share."
)
BLOCKS_CAPTION = (
    "Blocks of each model's KV cache over the simulated time of the search, active and cached "
    "stacked, what is missing to the dashed line is free, as at its own steps and held until its "
    "next one; below, wall time of one problem, divided among the models' steps and the rest, at "
    "the chosen place and at pinned ones."
)
SHADES = ("#4D4D4D", "#8C8C8C", "#B8B8B8")  # of pinned curves, the latest first
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SHARE_FRAME = Frame(panels=480, top=84 + UPPER_AXIS_PX, left=80)
_BLOCKS_FRAME = Frame(panels=480, top=88, left=92)


class Quantity(NamedTuple):
    """One line of the share figure: a column of a replay's row, its panel from 1, its looks."""

    column: str
    panel: int
    label: str
    colour: str
    dash: str
    symbol: str
    scale: float = 1.0


QUANTITIES = (
    Quantity("tokens_per_s", 1, "both models", BLACK, "solid", "diamond"),
    *(
        Quantity(f"{model}_{column}", panel, s.label, s.colour, s.dash, s.symbol, scale)
        for column, panel, scale in (("hit_rate", 2, 100.0), ("thrash", 3, 1.0))
        for model, s in MODELS.items()
    ),
)
TITLES = (
    "generated tokens/s",
    "prompt tokens<br>found cached (%)",
    "thrash events<br>per 1,000 look-ups",
)


class Pin(NamedTuple):
    """A curve kept for comparison: what it is called, its rows, and its chosen replay."""

    name: str
    rows: pd.DataFrame
    chosen: Replay


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """All that is drawn. rows: of replay_rows, the exact ones at the chosen settings."""

    chosen: Replay
    rows: pd.DataFrame
    feasible: FeasibleShares
    provenance: str = ""
    pins: Sequence[Pin] = ()

    @property
    def bars(self) -> list[tuple[str, Replay]]:
        """What a problem costs, now and at pinned places."""
        return [("now", self.chosen), *((pin.name, pin.chosen) for pin in self.pins)]


def make_view(
    info: RecordingInfo, chosen: Replay, replays: Sequence[Replay], pins: Sequence[Pin] = ()
) -> View:
    """The view of a chosen replay among those at the same settings and other shares."""
    position = chosen.position
    device, settings = load_device(position.device), info.header.settings
    fitted = {info.header.llm.name, info.header.prm.name} & set(device.terms)
    bound = "" if fitted else "; roofline alone, so seconds are a bound from below"
    policy = "each model its own cache" if position.policy is None else f"policy {position.policy}"
    provenance = (
        f"Replayed: {info}, {settings.min_problem_batch} in flight (recording {info.path.stem}); "
        f"total memory {format_size(position.total_memory)}, activations outside it; {policy}.\n"
        f"Blocks of {position.block_size} tokens, at most {position.max_num_seqs} sequences and "
        f"{position.max_num_batched_tokens:,} tokens a step; {device.name} "
        f"({device.source}{bound})."
    )
    return View(chosen, replay_rows(replays), info.feasible(position), provenance, pins)


# -- in words --


def mark(chosen: Replay) -> tuple[str, str]:
    """What stands above a figure, and its colour."""
    if chosen.is_exact:
        return f"EXACT REPLAY ({chosen.took_s:.1f} s)", GREEN
    return "INTERPOLATED between replays", VERMILION


def in_words(chosen: Replay) -> str:
    """What the rings of the share figure stand on."""
    row, position = chosen.row, chosen.position
    return (
        f"{'Exact replay' if chosen.is_exact else 'Interpolated'}: at an LLM share of "
        f"{position.llm_share:.2f} of {format_size(position.total_memory)} (kv_share "
        f"{row['kv_share']:.2f}): {row['tokens_per_s']:,.0f} generated tokens/s; the LLM finds "
        f"{row['llm_hit_rate']:.1%} and the PRM {row['prm_hit_rate']:.1%} of prompt tokens cached; "
        f"{row['llm_thrash']:.1f} and {row['prm_thrash']:.1f} of 1,000 look-ups ask for a block "
        "that was evicted."
    )


def cost_in_words(chosen: Replay, price_per_hour: float | None = None) -> str:
    """What a problem costs, and how full the caches were."""
    row, (unit, name) = chosen.row, unit_of(chosen.row["seconds_per_problem"])
    llm, prm, rest = (f"{row[part] / unit:.3g}" for part in COSTS)
    price = ""
    if price_per_hour is not None:
        cost = row["seconds_per_problem"] / 3600 * price_per_hour
        price = f"; at {price_per_hour:g} an hour that is {cost:.3g}"
    full = [
        f"the {MODELS[str(model)].label} at most {own['blocks_active'].max():,} of "
        f"{own['blocks_total'].max():,} blocks"
        for model, own in chosen.blocks.groupby("engine", sort=False)
    ]
    at = "" if chosen.is_exact else f" at the nearest replay ({chosen.blocks_share:.2f})"
    return (
        f"{'Exact replay' if chosen.is_exact else 'Interpolated'}: a problem takes "
        f"{row['seconds_per_problem'] / unit:.3g} {name}: {llm} in steps of the LLM, {prm} in "
        f"steps of the PRM, {rest} outside{price}. In use at once{at}: {', '.join(full)}."
    )


def unit_of(seconds: float) -> tuple[float, str]:
    """The largest unit of which `seconds` is at least one: seconds in it, and its name."""
    return next((unit for unit in UNITS if seconds >= unit[0]), UNITS[-1])


# -- figures --


def share_figure(view: View) -> go.Figure:
    """Throughput, hits and thrash over the share: replays, the line between them, the ring."""
    fig = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.06)
    chosen = replay_rows([view.chosen])
    pins = [*view.pins, *[Pin("", chosen[:0], view.chosen)] * PINS][:PINS]
    ring: dict[str, Any] = {
        "symbol": "circle-open",
        "size": 17,
        "color": BLACK,
        "line": {"width": 2.5},
    }
    for quantity in QUANTITIES:
        panel, edge = quantity.panel, {"color": BLACK, "width": 1}
        soft = [MODELS[quantity.column[:3]].soft] * PINS if panel > 1 else SHADES
        traces = [
            _spots(pin.rows, quantity, f"pin{place}").update(
                line={"color": soft[place], "dash": quantity.dash, "width": 1.5},
                name=pin.name,
                showlegend=bool(pin.name) and panel == 1,
                legendrank=2000,
            )
            for place, pin in reversed(list(enumerate(pins)))
        ]
        line = {"color": quantity.colour, "dash": quantity.dash, "width": 2}
        own = _spots(view.rows, quantity, "line")
        traces.append(own.update(line=line, name=quantity.label, showlegend=panel < 3))
        exact = {"symbol": quantity.symbol, "color": quantity.colour, "size": 8, "line": edge}
        for key, rows, marker in (("exact", view.rows, exact), ("ring", chosen, ring)):
            traces.append(_spots(rows, quantity, key).update(mode="markers", marker=marker))
        fig.add_traces(traces, rows=panel, cols=1)
        fig.update_yaxes(title_text=TITLES[panel - 1], rangemode="tozero", row=panel, col=1)
    white = {"symbol": "diamond", "color": "white", "line": {"color": BLACK, "width": 1.5}}
    for text, marker in (("the chosen share", {**ring, "size": 9}), ("exact replay", white)):
        fig.add_trace(legend_note("legend", text, marker), row=1, col=1)
    fig.update_yaxes(range=[0, 103], row=2, col=1)
    legend_at(fig, "legend", _SHARE_FRAME.above(UPPER_AXIS_PX - 4))
    share_axes(fig, view.rows if len(view.rows) else chosen, panels=3)
    finish(
        fig, "What if the memory were split there?", SHARE_CAPTION, view.provenance, _SHARE_FRAME
    )
    _grey_ends(fig, view.feasible)
    return _marked(fig, view.chosen, _SHARE_FRAME)


def _spots(rows: pd.DataFrame, quantity: Quantity, key: str) -> go.Scatter:
    """A quantity over the share, called column/key in `meta`."""
    return go.Scatter(
        x=rows["llm_share"] if len(rows) else (),
        y=rows[quantity.column] * quantity.scale if len(rows) else (),
        mode="lines",
        meta=f"{quantity.column}/{key}",
        showlegend=False,
        cliponaxis=False,
    )


def _grey_ends(fig: go.Figure, found: FeasibleShares) -> None:
    """Shares at which a model has no room for one request, and what it lacks there."""
    low, high = max(found.low, 0.0), min(found.high, 1.0)
    reach = (max(low - 0.07, 0.0), min(high + 0.07, 1.0))
    fig.update_xaxes(range=list(reach))
    for start, end, lacks, model in (
        (reach[0], low, found.at(reach[0]).lacks("llm"), "LLM"),
        (high, reach[1], found.at(reach[1]).lacks("prm"), "PRM"),
    ):
        fig.add_shape(
            type="rect",
            xref="x",
            yref="paper",
            x0=start,
            x1=end,
            y0=0,
            y1=1,
            fillcolor="#D9D9D9",
            opacity=0.6,
            line_width=0,
            layer="below",
        )
        fig.add_annotation(
            x=(start + end) / 2,
            y=0.5,
            yref="paper",
            text=f"{model} lacks {format_size(lacks)}",
            textangle=-90,
            showarrow=False,
            font={"size": 11, "color": "#444444"},
        )


def _marked(fig: go.Figure, chosen: Replay, frame: Frame) -> go.Figure:
    text, colour = mark(chosen)
    return fig.add_annotation(
        name="mark",
        text=f"<b>{text}</b>",
        xref="paper",
        yref="paper",
        x=1,
        y=1,
        xanchor="right",
        yanchor="bottom",
        yshift=frame.top - 30,
        font={"color": colour, "size": 13},
        showarrow=False,
    )


COSTS = {
    "llm_seconds": ("LLM steps", MODELS["llm"].colour),
    "prm_seconds": ("PRM steps", MODELS["prm"].colour),
    "outside_s": ("outside steps", GREY),
}


def blocks_figure(view: View) -> go.Figure:
    """Blocks of both models over a search, and what a problem costs, at the chosen place."""
    fig = make_subplots(rows=3, row_heights=[0.37, 0.37, 0.26], vertical_spacing=0.13)
    blocks = view.chosen.blocks
    factor, unit = unit_of(float(blocks["start_s"].max()))
    for panel, (model, style) in enumerate(MODELS.items(), start=1):
        own = blocks[blocks["engine"] == model]
        times = own["start_s"] / factor
        for column, colour in (("blocks_active", style.colour), ("blocks_cached", style.soft)):
            name = f"{style.label} {column.removeprefix('blocks_')}"
            area = go.Scatter(
                x=times,
                y=own[column],
                name=name,
                meta=f"{model}/{column}",
                stackgroup=model,
                mode="lines",
                fillcolor=colour,
                line={"width": 0, "color": colour, "shape": "hv"},
                hovertemplate="%{y:,.0f} blocks<extra>" + name + "</extra>",
            )
            fig.add_trace(area, row=panel, col=1)
        dashed = {"color": BLACK, "dash": "dash", "width": 1.5}
        total = go.Scatter(x=times, y=own["blocks_total"], mode="lines", line=dashed)
        total.update(meta=f"{model}/total", name="all there are", showlegend=model == "llm")
        fig.add_trace(total, row=panel, col=1)
        title = f"blocks of the {style.label}"
        fig.update_yaxes(title_text=title, rangemode="tozero", row=panel, col=1)
    each, cost_unit = unit_of(max(bar.row["seconds_per_problem"] for _, bar in view.bars))
    for part, (label, colour) in COSTS.items():
        cost = go.Bar(
            x=[bar.row[part] / each for _, bar in view.bars],
            y=[name.replace(": ", ":<br>") for name, _ in view.bars],
            orientation="h",
            name=label,
            meta=f"cost/{part}",
            marker={"color": colour, "line": {"color": "white", "width": 0.6}},
            width=0.7,
            showlegend=part == "outside_s",
            hovertemplate="%{x:.3g}<extra>" + label + "</extra>",
        )
        fig.add_trace(cost, row=3, col=1)
    fig.update_xaxes(matches="x", title_text=f"simulated time since the start ({unit})", row=2)
    fig.update_xaxes(title_text=f"time of one problem ({cost_unit})", row=3, col=1)
    fig.update_yaxes(autorange="reversed", automargin=True, tickfont_size=9, row=3, col=1)
    legend_at(fig, "legend", 1.01)
    fig.update_layout(barmode="stack", legend={"traceorder": "normal", "entrywidth": 104})
    title = "Blocks over the search, and what a problem costs"
    finish(fig, title, BLOCKS_CAPTION, view.provenance, _BLOCKS_FRAME)
    return _marked(fig, view.chosen, _BLOCKS_FRAME)


def drawings(view: View, price_per_hour: float | None = None) -> dict[str, Drawing]:
    """Both figures with rows, words and parameters, by the names they are saved under."""
    tables = [view.rows.assign(curve="now"), replay_rows([view.chosen]).assign(curve="chosen")]
    tables += [pin.rows.assign(curve=pin.name) for pin in view.pins]
    bars = pd.DataFrame([{"bar": name, **bar.row} for name, bar in view.bars])
    rows = (pd.concat(tables), pd.concat([view.chosen.blocks, bars]))
    figures = (share_figure(view), blocks_figure(view))
    words = (in_words(view.chosen), cost_in_words(view.chosen, price_per_hour))
    names, given = ("what_if_share", "what_if_blocks"), view.chosen.position.parameters
    return {
        name: Drawing(figure, table, text, given)
        for name, figure, table, text in zip(names, figures, rows, words)
    }


# -- the widget --


def what_if(
    recordings: Sequence[str | PathLike[str]] | None = None,
    position: Position | None = None,
    known: Sequence[Replay] = (),
    *,
    price_per_hour: float | None = None,
    folder: str = "build/figures/what_if",
) -> Any:
    """The widget where one can be shown, else a sentence.

    recordings: names or files, all of the package's by default; the position's is added where it is
    none of them. position: where it starts. known: replays to start from. price_per_hour: of the
    device, in any currency; none is assumed. folder: where figures are saved unless told otherwise.
    """
    if not is_live():
        return NOT_LIVE
    infos = find_recordings(recordings)
    if position is None:
        position = (infos.get(DEFAULT_RECORDING) or next(iter(infos.values()))).position()
    if position.recording not in infos:
        infos |= find_recordings([position.recording])
    return WhatIfWidget(infos, position, known, price_per_hour, folder).box


class WhatIfWidget:
    """Controls and figures; `box` is shown. To be made where an event loop runs.

    known: all replays so far. task: replays what the controls stand on. replayer: of one position,
    in another process by default.
    """

    def __init__(
        self,
        infos: Mapping[str, RecordingInfo],
        start: Position,
        known: Sequence[Replay] = (),
        price_per_hour: float | None = None,
        folder: str = "build/figures/what_if",
        replayer: Callable[[RecordingInfo, Position], Awaitable[Replay]] = replay_elsewhere,
    ) -> None:
        self._infos, self._price, self._replayer = infos, price_per_hour, replayer
        self.known = {one.position: one for one in known}
        self.pins: tuple[Pin, ...] = ()
        self.view: View | None = None
        self.task: asyncio.Task[None] | None = None
        self.status, self.words, self.cost = (ipywidgets.HTML() for _ in range(3))
        self.command = CopyText()
        self._controls, self._figures = ipywidgets.VBox(), ipywidgets.VBox()
        tools = [
            button("pin for comparison", self.pin),
            button("clear pins", self.unpin),
            save_box(self._drawings, folder),
            self.command,
        ]
        self.box = ipywidgets.VBox([self._controls, self.status, self._figures, *tools])
        self.show_controls(start)

    @property
    def figures(self) -> tuple[go.FigureWidget, ...]:
        """The share and the blocks figure on the screen; none before the first replay."""
        return tuple(self._figures.children[1::2])

    @property
    def position(self) -> Position:
        """Where the controls stand."""
        numbers = {name: slider.value for name, slider in self.sliders.items()}
        limits: dict[str, Any] = {name: round(numbers[name]) for name in LIMITS}
        chosen = {name: menu.value for name, menu in self.menus.items()}
        chosen["policy"] = None if chosen["policy"] == OWN_CACHES else chosen["policy"]
        memory = round(numbers["total_memory"] * MIB)
        return Position(**chosen, **limits, total_memory=memory, llm_share=numbers["llm_share"])

    def show_controls(self, at: Position) -> None:
        """Controls that offer what the position's recording has, and stand there."""
        info, given = self._infos[at.recording], asdict(at)
        offered = {
            "recording": [(f"{name}: {each}", name) for name, each in self._infos.items()],
            "device": list(dict.fromkeys([*device_names(), at.device])),
            "policy": [OWN_CACHES, *POLICIES],
        }
        self.menus = {
            name: ipywidgets.Dropdown(options=options, value=given[name] or OWN_CACHES)
            for name, options in offered.items()
        }
        self.menus["recording"].layout.width = "560px"
        memories = [size / MIB for size in info.memories(at)]
        sliders = {
            "llm_share": (
                "LLM share of total memory (llm_share)",
                [k / 100 for k in range(1, 100)],
            ),
            "total_memory": ("total memory (MiB)", memories),
            **{name: (text, {*usual, given[name]}) for name, (text, usual) in OFFERED.items()},
        }
        given["total_memory"] /= MIB
        self.sliders = {
            name: NumberSlider(
                text, list(options), given[name], "{:.2f}" if name == "llm_share" else "{:,.0f}"
            )
            for name, (text, options) in sliders.items()
        }
        for name, menu in self.menus.items():
            menu.observe(self._other_recording if name == "recording" else self.move, names="value")
        for slider in self.sliders.values():
            slider.slider.observe(self.move, names="value")
        menus = [labelled(name, menu) for name, menu in self.menus.items()]
        self._controls.children = [menus[0], *self.sliders.values(), *menus[1:]]
        self.move()

    def move(self, _: Any = None) -> None:
        """The controls stand somewhere else: show what is known, replay what is not."""
        position = self.position
        self.command.text = papermill_command("what_if", position.parameters)
        self._draw(position)
        if self.task is not None:
            self.task.cancel()
        self.task = asyncio.get_running_loop().create_task(self._replay(position))

    def pin(self) -> str:
        """Keep the present curve in the place of the oldest; returns what was done."""
        if self.view is None or self.view.chosen.position != self.position:
            return "Nothing is pinned: wait until this place is known."
        chosen = self.view.chosen
        at = chosen.position
        info = self._infos[at.recording]
        width = "" if info.beam_width is None else f", width {info.beam_width}"
        name = (
            f"{info.path.stem}, n {info.n}{width}: {format_size(at.total_memory)} at "
            f"{at.llm_share:.2f}, {at.device}, "
            f"{at.block_size}/{at.max_num_seqs}/{at.max_num_batched_tokens}"
        ) + ("" if at.policy is None else f", {at.policy}")
        others = [pin for pin in self.pins if pin.name != name]
        self.pins = (Pin(name, self.view.rows, chosen), *others)[:PINS]
        self._draw(self.position)
        return f"Pinned: {name}."

    def unpin(self) -> str:
        """Let all pinned curves go; returns what was done."""
        self.pins = ()
        self._draw(self.position)
        return "No curve is pinned."

    def _other_recording(self, change: Any) -> None:
        """Memory, share and limits are the recording's own; device and policy stay."""
        kept = {name: getattr(self.position, name) for name in ("device", "policy")}
        self.show_controls(self._infos[change["new"]].position(**kept))

    async def _replay(self, position: Position) -> None:
        """What is not known yet: the position, then shares of its line, the nearest first."""
        info = self._infos[position.recording]
        grid = info.grid(position, GRID)
        grid.sort(key=lambda other: abs(other.llm_share - position.llm_share))
        lacking = [each for each in dict.fromkeys([position, *grid]) if each not in self.known]
        await asyncio.sleep(QUIET_S if lacking else 0)
        for each in lacking:
            self.status.value = f"Replaying an LLM share of {each.llm_share:.2f} …"
            try:
                self.known[each] = await self._replayer(info, each)
            except Exception as error:  # no caller awaits this task; the user is told
                where = f"No exact replay at an LLM share of {each.llm_share:.2f}"
                self.status.value = f"{where}: {error_in_html(error)}"
                return
            self._draw(position)
        self.status.value = "Exact."

    def _draw(self, position: Position) -> None:
        """Put what is known of a position on the screen, or say that nothing is."""
        same = [one for at, one in self.known.items() if at.at(position.llm_share) == position]
        chosen = self.known.get(position) or interpolated(position, same)
        if chosen is None:
            self.words.value = self.cost.value = UNKNOWN
            if self.view is None:
                return
            self.view = replace(self.view, pins=self.pins)
        else:
            self.view = make_view(self._infos[position.recording], chosen, same, self.pins)
            text, colour = mark(chosen)
            found = f'<b style="color: {colour}">{text}</b> '
            self.words.value = found + in_words(chosen)
            self.cost.value = found + cost_in_words(chosen, self._price)
        figures = share_figure(self.view), blocks_figure(self.view)
        if self.figures:
            for shown, drawn in zip(self.figures, figures, strict=True):
                redraw(shown, drawn)
        else:
            share, blocks = map(go.FigureWidget, figures)
            self._figures.children = [self.words, share, self.cost, blocks]

    def _drawings(self) -> dict[str, Drawing]:
        if self.view is None:
            raise ConfigError("There is nothing to save yet; wait for the first replay.")
        return drawings(self.view, self._price)
