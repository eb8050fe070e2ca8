"""The what-if widget: a recorded search under another split, memory, limit, policy or device.

    what_if()                                  in a notebook that can show widgets

While a slider moves, what lies between two replayed shares is interpolated, and marked so; once it
rests, the exact replay takes its place, and a few other shares are replayed for the line. Figures
and sentences are plain functions of a `View`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.config import format_size
from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.memory import FeasibleShares
from workbench.plots import theme
from workbench.plots.theme import MODELS, Style, area, finish, legend_note, say
from workbench.replay.cost import BOUND
from workbench.replay.devices import load_device
from workbench.replay.simulator import POLICIES
from workbench.widgets import parts, what_if_replay
from workbench.widgets.parts import Drawing, HtmlText, NumberSlider
from workbench.widgets.what_if_replay import (
    DRAWN,
    GIB,
    MIB,
    Position,
    RecordingInfo,
    Replay,
    replay_rows,
)

GRID, PINS = 7, 3  # shares replayed for the line; curves pinned at most
QUIET_S = 0.3  # a replay begins once the controls have rested so long
OFFERED = {  # what the slider is called, and the least and the greatest power of two on it
    "block_size": ("block size (tokens)", 0, 7),
    "max_num_seqs": ("sequences in a step (max_num_seqs)", 2, 9),
    "max_num_batched_tokens": ("tokens in a step (max_num_batched_tokens)", 6, 14),
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
EXACT = {"size": 8, "line": {"color": theme.BLACK, "width": 1}}
RING = {"symbol": "circle-open", "size": 17, "color": theme.BLACK, "line": {"width": 2.5}}
SHADES = ("#4D4D4D", "#8C8C8C", "#B8B8B8")  # of pinned curves, the latest first
DASHES = ("dot", "dashdot", "longdash")  # of these
TITLES = (
    "generated tokens/s",
    "prompt tokens<br>found cached (%)",
    "thrash events<br>per 1,000 look-ups",
)
Quantity = tuple[str, int, Style, float]  # column of a replay's row, panel from 1, looks, scale
QUANTITIES: tuple[Quantity, ...] = (
    ("tokens_per_s", 1, Style("both models", theme.BLACK, symbol="diamond"), 1.0),
    *((f"{model}_hit_rate", 2, style, 100.0) for model, style in MODELS.items()),
    *((f"{model}_thrash", 3, style, 1.0) for model, style in MODELS.items()),
)
COSTS = {
    "llm_seconds": ("LLM steps", MODELS["llm"].colour),
    "prm_seconds": ("PRM steps", MODELS["prm"].colour),
    "outside_s": ("outside steps", theme.GREY),
}


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """All that is drawn. rows: of replay_rows, the exact ones at the chosen settings.

    pins: views kept for comparison, by name, the latest first.
    """

    chosen: Replay
    rows: pd.DataFrame
    feasible: FeasibleShares
    provenance: str
    pins: Mapping[str, View]

    @property
    def costs(self) -> dict[str, Replay]:
        """The replays whose cost is drawn: now and at pinned places; what is none says so."""
        pinned = {
            name + " (interpolated)" * (not pin.chosen.is_exact): pin.chosen
            for name, pin in self.pins.items()
        }
        return {"now": self.chosen} | pinned


def make_view(
    info: RecordingInfo,
    chosen: Replay,
    replays: Sequence[Replay],
    pins: Mapping[str, View] | None = None,
) -> View:
    """The view of a chosen replay among those at the same settings and other shares."""
    position = chosen.position
    device, settings = load_device(position.device), info.header.settings
    is_fitted = device.is_fitted_to(info.header.llm.name, info.header.prm.name)
    bound = "" if is_fitted else f"; roofline alone: seconds are {BOUND}"
    policy = OWN_CACHES if position.policy is None else f"policy {position.policy}"
    outside = "" if info.name in DRAWN else ", activations outside it"
    provenance = (
        f"Replayed: {info}, {settings.min_problem_batch} in flight (recording {info.path.stem}); "
        f"total memory {format_size(position.total_memory)}{outside}; {policy}.\n"
        f"Blocks of {position.block_size} tokens, at most {position.max_num_seqs} sequences and "
        f"{position.max_num_batched_tokens:,} tokens a step; {device.name} "
        f"({device.source}{bound})."
    )
    return View(chosen, replay_rows(replays), info.feasible(position), provenance, pins or {})


# -- in words --


def in_words(chosen: Replay) -> str:
    """What the rings of the share figure stand on."""
    row, position = chosen.row, chosen.position
    device = load_device(position.device)
    bound = "" if row["is_fitted"] else "at most "  # a roofline's seconds are a bound from below
    total = format_size(position.total_memory)
    where = f"with {total} (the policy {position.policy} sets the split"
    if position.keeps_split:
        where = f"at an LLM share of {position.llm_share:.2f} of {total} "
        where += f"(kv_share {row['kv_share']:.2f}"
    return (
        f"{chosen.kind}: {where}; the device has "
        f"{format_size(device.memory_bytes)}): {bound}{row['tokens_per_s']:,.0f} generated "
        f"tokens/s; the LLM finds {row['llm_hit_rate']:.1%} "
        f"and the PRM {row['prm_hit_rate']:.1%} of prompt tokens cached; {row['llm_thrash']:.1f} "
        f"and {row['prm_thrash']:.1f} of 1,000 look-ups ask for a block that was evicted."
    )


def cost_in_words(chosen: Replay, price_per_hour: float | None = None) -> str:
    """What a problem costs, and how full the caches were."""
    seconds, price = chosen.row["seconds_per_problem"], ""
    least = "" if chosen.row["is_fitted"] else "at least "
    llm, prm, rest = (f"{chosen.row[part]:.3g}" for part in COSTS)
    if price_per_hour is not None:
        price = (
            f"; at {price_per_hour:g} an hour that is {least}{seconds / 3600 * price_per_hour:.3g}"
        )
    full = [
        f"the {MODELS[str(model)].label} at most {own['blocks_active'].max():,} of "
        f"{own['blocks_total'].max():,} blocks"
        for model, own in chosen.blocks.groupby("engine", sort=False)
    ]
    at = "" if chosen.is_exact else " at the nearest replay"
    return (
        f"{chosen.kind}: a problem takes {least}{seconds:.3g} s: {llm} in steps of the LLM, {prm} "
        f"in steps of the PRM, {rest} outside{price}. In use at once{at}: {', '.join(full)}."
    )


# -- figures --


def share_figure(view: View) -> go.Figure:
    """Throughput, hits and thrash over the share: replays, the line between them, the ring."""
    fig = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.06)
    chosen = replay_rows([view.chosen])
    for quantity in QUANTITIES:
        _, panel, style, _ = quantity
        traces = []
        for place, (name, pin) in reversed(list(enumerate(view.pins.items()))):
            line = {"color": style.soft or SHADES[place], "dash": DASHES[place], "width": 1.5}
            named = {"name": name, "showlegend": panel == 1, "legendrank": 2000}
            look = {"mode": "lines", "line": line, **named}
            traces.append(_points(pin.rows, quantity, f"pin{place}", **look))
        line = {"color": style.colour, "dash": style.dash, "width": 2}
        named = {"name": style.label, "showlegend": panel < 3}
        exact = {"color": style.colour, "symbol": style.symbol, **EXACT}
        traces += [
            _points(view.rows, quantity, "line", mode="lines", line=line, **named),
            _points(view.rows, quantity, "exact", marker=exact),
            _points(chosen, quantity, "ring", marker=RING),
        ]
        fig.add_traces(traces, rows=panel, cols=1)
        fig.update_yaxes(title_text=TITLES[panel - 1], rangemode="tozero", row=panel, col=1)
    white = {**EXACT, "symbol": "diamond", "color": "white"}
    for text, marker in (("the chosen share", {**RING, "size": 9}), ("exact replay", white)):
        legend_note(fig, "legend", text, marker, row=1, col=1)
    fig.update_yaxes(range=[0, 103], row=2, col=1)
    theme.share_axes(fig, view.rows, panels=3)
    title = "What if the memory were split there?"
    _finished(fig, title, SHARE_CAPTION, view, top=146, left=80, legend=58)
    # in grey: shares at which a model has no room for one request, and what it needs at least
    low, high = max(view.feasible.low, 0.0), min(view.feasible.high, 1.0)
    reach = [max(low - 0.07, 0.0), min(high + 0.07, 1.0)]
    fig.update_xaxes(range=reach)
    sides = (("llm", reach[0], low), ("prm", high, reach[1]))
    for model, start, end in sides if view.chosen.position.keeps_split else ():
        least = format_size(getattr(view.feasible, model).least)
        text = f"{MODELS[model].label} lacks room: it needs {least}"
        label = {"text": text, "textangle": -90, "font": {"size": 11, "color": "#444444"}}
        look = {"fillcolor": "#D9D9D9", "opacity": 0.6, "line_width": 0, "layer": "below"}
        spot = {"xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1}
        fig.add_shape(type="rect", label=label, **spot, **look)
    return fig


def _points(rows: pd.DataFrame, quantity: Quantity, key: str, **look: Any) -> go.Scatter:
    """A quantity over the share, called column/key in `meta`."""
    column, _, _, scale = quantity
    look = {"mode": "markers", "showlegend": False, "cliponaxis": False, **look}
    return go.Scatter(x=rows["llm_share"], y=rows[column] * scale, meta=f"{column}/{key}", **look)


def _finished(
    fig: go.Figure, title: str, caption: str, view: View, top: int, **room: int
) -> go.Figure:
    """With a mark above: whether what is drawn was replayed or interpolated."""
    finish(fig, title, caption, view.provenance, 480, top=top, **room)
    text, colour = "INTERPOLATED between replays", theme.VERMILION
    if view.chosen.is_exact:
        text, colour = f"EXACT REPLAY ({view.chosen.took_s:.1f} s)", theme.GREEN
    place = {"name": "mark", "xanchor": "right", "yshift": top - 30}
    say(fig, f"<b>{text}</b>", 1, 1, font={"color": colour, "size": 13}, **place)
    return fig


def blocks_figure(view: View) -> go.Figure:
    """Blocks of both models over a search, and what a problem costs, at the chosen place."""
    fig = make_subplots(rows=3, row_heights=[0.37, 0.37, 0.26], vertical_spacing=0.13)
    blocks = view.chosen.blocks
    for panel, (model, style) in enumerate(MODELS.items(), start=1):
        own = blocks[blocks["engine"] == model]
        for column, colour in (("blocks_active", style.colour), ("blocks_cached", style.soft)):
            label, meta = f"{style.label} {column.removeprefix('blocks_')}", f"{model}/{column}"
            stacked = area(own["start_s"], own[column], label, colour, model, meta=meta)
            fig.add_trace(stacked, row=panel, col=1)
        look = {"meta": f"{model}/total", "showlegend": model == "llm"}
        total = theme.capacity(own["start_s"], own["blocks_total"], "all there are", **look)
        fig.add_trace(total, row=panel, col=1)
        title = f"blocks of the {style.label}"
        fig.update_yaxes(title_text=title, rangemode="tozero", row=panel, col=1)
    for part, (label, colour) in COSTS.items():
        cost = go.Bar(
            x=[one.row[part] for one in view.costs.values()],
            y=[name.replace(", ", ",<br>", 1) for name in view.costs],
            orientation="h",
            name=label,
            meta=f"cost/{part}",
            marker={"color": colour, "line": {"color": "white", "width": 0.6}},
            width=0.7,
            showlegend=part == "outside_s",
            hovertemplate="%{x:.3s}s",
        )
        fig.add_trace(cost, row=3, col=1)
    fig.update_xaxes(tickformat="~s", ticksuffix="s")  # 2ms, 1.5s
    fig.update_xaxes(matches="x", title_text="simulated time since the start", row=2)
    fig.update_xaxes(title_text="time of one problem", row=3, col=1)
    fig.update_yaxes(autorange="reversed", automargin=True, tickfont_size=9, row=3, col=1)
    fig.update_layout(barmode="stack", legend={"traceorder": "normal", "entrywidth": 104})
    title = "Blocks over the search, and what a problem costs"
    return _finished(fig, title, BLOCKS_CAPTION, view, top=88, left=92)


def drawings(view: View, price_per_hour: float | None = None) -> dict[str, Drawing]:
    """Both figures with rows, words and parameters, by the names they are saved under."""
    tables = [view.rows.assign(curve="now"), replay_rows([view.chosen]).assign(curve="chosen")]
    tables += [pin.rows.assign(curve=name) for name, pin in view.pins.items()]
    bars = pd.DataFrame([{"bar": name, **one.row} for name, one in view.costs.items()])
    shares, blocks = pd.concat(tables), pd.concat([view.chosen.blocks, bars])
    given, cost = view.chosen.position.parameters, cost_in_words(view.chosen, price_per_hour)
    return {
        "what_if_share": Drawing(share_figure(view), shares, in_words(view.chosen), given),
        "what_if_blocks": Drawing(blocks_figure(view), blocks, cost, given),
    }


# -- the widget --


def what_if(
    position: Position | None = None,
    known: Sequence[Replay] = (),
    *,
    price_per_hour: float | None = None,
) -> Any:
    """The widget over the thesis's pair and the package's recordings, where one can be shown, else
    a sentence.

    position: where it starts, its recording added; None: the thesis's pair. known: replays to start
    from. price_per_hour: of the device, in any currency.
    """
    if not parts.is_live():
        return parts.NOT_LIVE
    infos = what_if_replay.find_recordings()
    position = position or infos[what_if_replay.THESIS].position()
    if position.recording not in infos:
        infos |= what_if_replay.find_recordings([position.recording])
    return WhatIfWidget(infos, position, known, price_per_hour).box


class NotReplayed(WorkbenchError):
    """A place that is not known yet: neither replayed, nor between two replays."""


class WhatIfWidget(parts.FigureView):
    """Controls and figures; `box` is shown. To be made where an event loop runs.

    known: all replays so far. task: replays what the controls stand on.
    """

    def __init__(
        self,
        infos: Mapping[str, RecordingInfo],
        start: Position,
        known: Sequence[Replay] = (),
        price_per_hour: float | None = None,
    ) -> None:
        self._infos, self._price = infos, price_per_hour
        self.known = {one.position: one for one in known}
        self.pins: dict[str, View] = {}
        self.task: asyncio.Task[None] | None = None
        self.status, self._controls = HtmlText(), ipywidgets.VBox()
        self._offer(start)
        unpin = parts.button("clear pins", self.unpin)
        price = {} if price_per_hour is None else {"price_per_hour": price_per_hour}
        rows = [self._controls, self.status]
        super().__init__("what_if", rows, lambda: drawings(self.view, self._price), price, [unpin])
        self.move()

    @property
    def position(self) -> Position:
        """Where the controls stand."""
        chosen: dict[str, Any] = {name: menu.value for name, menu in self.menus.items()}
        chosen |= {name: round(self.sliders[name].value) for name in what_if_replay.LIMITS}
        chosen["policy"] = None if chosen["policy"] == OWN_CACHES else chosen["policy"]
        memory = round(self.sliders["total_memory"].value * self._unit)
        share = self.sliders["llm_share"].value
        return Position(**chosen, total_memory=memory, llm_share=share)

    @property
    def view(self) -> View:
        """What is drawn there. Raises NotReplayed while nothing is known of it."""
        position = self.position
        same = [one for at, one in self.known.items() if at.at(position.llm_share) == position]
        chosen = self.known.get(position) or what_if_replay.interpolated(position, same)
        if chosen is None:
            raise NotReplayed("no replay of this place is there yet; the line above says why.")
        pins = {  # a pinned place may have been replayed since
            name: replace(pin, chosen=self.known.get(pin.chosen.position, pin.chosen))
            for name, pin in self.pins.items()
        }
        return make_view(self._infos[position.recording], chosen, same, pins)

    def _offer(self, at: Position) -> None:
        """Controls that offer what the position's recording has, and stand there."""
        info, given = self._infos[at.recording], asdict(at)
        offered = {
            "recording": [(f"{name}: {each}", name) for name, each in self._infos.items()],
            "device": list(dict.fromkeys([*what_if_replay.device_names(), at.device])),
            "policy": [OWN_CACHES, *POLICIES],
        }
        self.menus = {
            name: ipywidgets.Dropdown(options=options, value=given[name] or OWN_CACHES)
            for name, options in offered.items()
        }
        self.menus["recording"].layout = ipywidgets.Layout(flex="1 1 300px", width="auto")
        text = "LLM share of total memory (llm_share)"
        share = NumberSlider(text, (0.01, 0.99), at.llm_share, "{:.2f}", step=0.01)
        ends = info.memories(at)
        self._unit, unit, step = (GIB, "GiB", 0.1) if ends[-1] >= GIB else (MIB, "MiB", 1.0)
        sizes, size = [each / self._unit for each in ends], at.total_memory / self._unit
        memory = NumberSlider("total memory of both models", sizes, size, "{:,.1f}", unit, step)
        self.sliders = {"llm_share": share, "total_memory": memory}
        for name, (text, least, most) in OFFERED.items():
            options = {*(2**k for k in range(least, most + 1)), given[name]}
            self.sliders[name] = NumberSlider(text, options, given[name], "{:,.0f}")
        called = {"recording": self._other_recording, "device": self._other_device}
        for name, menu in self.menus.items():
            menu.observe(called.get(name, self.move), names="value")
        for slider in self.sliders.values():
            slider.slider.observe(self.move, names="value")
        menus = [parts.labelled(name, menu) for name, menu in self.menus.items()]
        self._controls.children = [menus[0], *self.sliders.values(), *menus[1:]]

    def move(self, _: Any = None) -> None:
        """The controls stand somewhere else: show what is known, replay what is not."""
        share, at = self.sliders["llm_share"], self.position
        free, was_free = at.keeps_split, not share.slider.disabled
        share.slider.disabled = share.typed.disabled = not free
        if not (free and was_free):  # a note on what was typed stays
            share.say("" if free else f"The policy {at.policy} sets the split by itself.")
        self.show()
        self.status.say("Waiting for the controls to rest …")
        if self.task is not None:
            self.task.cancel()
        self.task = asyncio.get_running_loop().create_task(self._replay(self.position))

    def show(self, _: Any = None) -> None:
        """Draw the place; its command is right also where it cannot be drawn yet."""
        super().show()
        given = {**self._parameters, **self.position.parameters}
        self.copy.value = parts.papermill_command("what_if", given)

    def pin(self) -> str:
        """Keep the present curve in the place of the oldest; returns what was done."""
        view = self.view
        at, info = view.chosen.position, self._infos[view.chosen.position.recording]
        policy = "" if at.policy is None else f", {at.policy}"
        share = max(f"{at.llm_share:.2f}", f"{at.llm_share:.6g}", key=len)
        name = (
            f"{info.path.stem}, {format_size(at.total_memory)} at {share}, {at.device}, "
            f"{at.block_size}/{at.max_num_seqs}/{at.max_num_batched_tokens}{policy}"
        )
        others = [(key, pin) for key, pin in self.pins.items() if key != name]
        self.pins = dict([(name, replace(view, pins={})), *others][:PINS])
        self.show()
        return f"Pinned: {name}."

    def unpin(self) -> str:
        """Let all pinned curves go; returns what was done."""
        self.pins = {}
        self.show()
        return "No curve is pinned."

    def _other_recording(self, change: Any) -> None:
        """Memory, share and limits are the recording's own; device and policy stay."""
        kept = {name: getattr(self.position, name) for name in ("device", "policy")}
        self._offer(self._infos[change["new"]].position(**kept))
        self.move()

    def _other_device(self, _: Any) -> None:
        """Memory is offered as far as the device has it; what it lacks is taken back, and said."""
        at, note = self.position, ""
        with suppress(ConfigError):  # a file that is no device: the replay says so
            device = load_device(at.device)
            if at.total_memory > device.memory_bytes:
                room, asked = map(format_size, (device.memory_bytes, at.total_memory))
                note = f"{device.name} has {room}, not {asked}: {room} is taken."
                at = replace(at, total_memory=device.memory_bytes)
        self._offer(at)
        self.sliders["total_memory"].say(note)
        self.move()

    async def _replay(self, position: Position) -> None:
        """What is not known yet: the position, then shares of its line, the nearest first."""
        info = self._infos[position.recording]
        grid = info.grid(position, GRID)
        grid.sort(key=lambda other: abs(other.llm_share - position.llm_share))
        lacking = [each for each in dict.fromkeys([position, *grid]) if each not in self.known]
        await asyncio.sleep(QUIET_S if lacking else 0)
        for each in lacking:
            self.status.say(f"Replaying an LLM share of {each.llm_share:.2f} …")
            try:
                self.known[each] = await what_if_replay.replay_elsewhere(info, each)
            except Exception as error:  # no caller awaits this task; the user is told
                self.status.say_error(error, f"at an LLM share of {each.llm_share:.2f}")
                return
            self.show()
        self.status.say("Exact.")
