"""A running search to look at and steer: start, pause, re-split and stop it by hand.

`live_figure` draws a snapshot: the block map, and below it throughput, phase and split in time. The
widget takes one every REPAINT_S seconds in the kernel's event loop, which stays free whatever the
search does (live_search.py).
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import ipywidgets
import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.theme import BLACK, GREY, MODELS, area, finish, legend_at, legend_note
from workbench.widgets.live_search import LiveSearch, Snapshot, timeline, window_s
from workbench.widgets.parts import Drawing, FigureView, HtmlText, NumberSlider, button

REPAINT_S = 0.25  # between two snapshots
LLM, PRM = MODELS["llm"], MODELS["prm"]
CAPTION = (
    "A search on both engines. Above, the arena: every rectangle is a block, as wide as its bytes; "
    "blocks of one page stand together. Below, over time with pauses left out: generated tokens/s "
    "(mean of the last {window_s:.3g} s), which model was stepping, cached blocks that each model "
    "evicted, and the split: what each model holds, the LLM's target, and what it holds or could "
    "have at once. Triangles and dotted lines are re-splits; the dotted grey line is the "
    "throughput that was pinned."
)
COLOURS = {  # by BLOCK_STATES, in its order
    "free": "#ECECEC",
    "llm_active": LLM.colour,
    "llm_cached": LLM.soft,
    "prm_active": PRM.colour,
    "prm_cached": PRM.soft,
}
FRACTIONS = ("busy", "target", "actual", "held")  # how such columns of a time line end
MOST_UNITS = 24  # cells of a page, where the models' blocks divide a page too differently
BLOCK_GAP, PAGE_GAP = 0.22, 0.6  # widths in cells
WIDE = 4.0  # a map has so many times as many pages in a row as rows


def in_words(snapshot: Snapshot) -> str:
    """What the figure shows, in a sentence."""
    counts = snapshot.block_counts
    words = (
        f"{snapshot.state} after {snapshot.seconds:.1f} s: {snapshot.answered} of "
        f"{snapshot.problems} problems answered, {snapshot.tokens:,} tokens generated "
        f"({snapshot.tokens_per_s:,.0f} tokens/s since the start), {snapshot.steps:,} steps. "
        f"The LLM should have {snapshot.target:.0%} of the pages and holds or could have "
        f"{snapshot.actual:.0%}. Blocks in use: {counts['llm_active']} of the LLM, "
        f"{counts['prm_active']} of the PRM; evicted {snapshot.evicted['llm']:,} and "
        f"{snapshot.evicted['prm']:,}."
    )
    if snapshot.phase:
        words += f" Last step: the {snapshot.phase.upper()}'s."
    return f"{words} {snapshot.problem}" if snapshot.problem else words


def figure_rows(snapshot: Snapshot) -> pd.DataFrame:
    """The rows a live figure draws over time: the time line, fractions as percentages."""
    rows = timeline(snapshot.steps_seen)
    rows[[name for name in rows.columns if str(name).endswith(FRACTIONS)]] *= 100
    return rows.assign(unheld=100 - rows["llm_held"] - rows["prm_held"])


def live_figure(
    snapshot: Snapshot,
    provenance: str = "",
    pinned: pd.DataFrame | None = None,
    rows: pd.DataFrame | None = None,
) -> go.Figure:
    """A snapshot drawn; its traces carry their names in `meta`. pinned: figure_rows of another;
    rows: of this, where they are known.
    """
    rows = figure_rows(snapshot) if rows is None else rows
    specs = [[{}], [{"secondary_y": True}], [{}], [{}], [{}]]
    heights = (0.33, 0.19, 0.09, 0.13, 0.26)
    shape = {"row_heights": heights, "vertical_spacing": 0.064, "specs": specs}
    fig = make_subplots(rows=5, shared_xaxes=True, **shape)
    fig.add_trace(_map(snapshot.blocks), row=1, col=1)
    for state, colour in COLOURS.items():
        label = state.replace("llm_", "LLM ").replace("prm_", "PRM ")
        mark = {"symbol": "square", "size": 11, "color": colour}
        legend_note(fig, "legend", label, mark, row=1, col=1)
    none = rows[:0] if pinned is None else pinned
    _line(fig, 2, none, "tokens_per_s", "", GREY, "dot", meta="pinned")
    _line(fig, 2, rows, "tokens_per_s", "", BLACK)
    for style, name in ((LLM, "llm_busy"), (PRM, "prm_busy")):
        busy = area(rows["time_s"], rows[name], style.label, style.colour, "busy")
        fig.add_trace(busy.update(meta=name, legend="legend2"), row=3, col=1)
        _line(fig, 4, rows, f"{name[:3]}_evicted", "", style.colour)
    for name, label, colour in (  # from below
        ("llm_held", "LLM holds", LLM.soft),
        ("unheld", "", "rgba(0,0,0,0)"),
        ("prm_held", "PRM holds", PRM.soft),
    ):
        look = {"meta": name, "legend": "legend3", "showlegend": bool(label)}
        look["hoverinfo"] = None if label else "skip"
        part = area(rows["time_s"], rows[name], label, colour, "held", **look)
        fig.add_trace(part, row=5, col=1)
    _line(fig, 5, rows, "llm_actual", "LLM holds or could have", LLM.colour)
    _line(fig, 5, rows, "llm_target", "LLM's target", BLACK, "dash")
    moves = snapshot.moves  # dotted lines from the axis to a triangle at the top
    words = [f"split to {move.share:.2f}: {move.outcome}" for move in moves]
    for row in (2, 3, 5):
        strokes = go.Scatter(
            x=[x for move in moves for x in (move.time_s, move.time_s, None)],
            y=[0.0, 1.0 if row == 2 else 100.0, None] * len(moves),
            text=[text for each in words for text in (each, each, "")],
            mode="lines+markers",
            line={"color": GREY, "dash": "dot", "width": 1.2},
            marker={"symbol": "triangle-down", "color": BLACK, "size": [0, 9, 0] * len(moves)},
            cliponaxis=False,
            showlegend=False,
            hovertemplate="%{text}<extra></extra>",
            meta=f"moves {row}",
        )
        fig.add_trace(strokes, row=row, col=1, secondary_y=row == 2 or None)
    hidden = {"visible": False, "fixedrange": True}
    bare = {"showticklabels": False, "ticks": "", "showline": False, "showgrid": False}
    percent = {"range": [0, 100], "tickvals": [0, 50, 100]}
    fig.update_xaxes(rangemode="tozero")
    fig.update_xaxes(**hidden, matches=None, row=1, col=1)
    fig.update_xaxes(title_text="time since the start, s (pauses left out)", row=5, col=1)
    fig.update_yaxes(title_text="pages", autorange="reversed", **bare, row=1, col=1)
    fig.update_yaxes(title_text="tokens/s", rangemode="tozero", row=2, col=1, secondary_y=False)
    fig.update_yaxes(**hidden, range=[0, 1], row=2, col=1, secondary_y=True)
    fig.update_yaxes(title_text="steps<br>(%)", **percent, row=3, col=1)
    fig.update_yaxes(title_text="blocks<br>evicted", rangemode="tozero", row=4, col=1)
    fig.update_yaxes(title_text="pages (%)", **percent, row=5, col=1)
    fig.update_yaxes(title_font_size=11, tickfont_size=10, nticks=4)
    for name, panel in (("legend2", fig.layout.yaxis4), ("legend3", fig.layout.yaxis6)):
        legend_at(fig, name, panel.domain[1])
        look = {"traceorder": "normal", "font": {"size": 11}}
        fig.update_layout({name: look, "uirevision": "live"})
    caption = CAPTION.format(window_s=window_s(snapshot.seconds))
    room = {"top": 56, "bottom": 44, "left": 70, "legend": 2}  # one laptop screen, controls too
    return finish(fig, "A search as it runs", caption, provenance, 375, **room)


def _map(pages: list[list[int]]) -> go.Heatmap:
    """Pages in rows, a gap between any two blocks and a wider one between pages.

    Columns are cells and gaps alternately; a block is as many cells wide as its bytes are, and has
    the gaps within. A gap between blocks is None (JSON knows no NaN), as is what a row lacks.
    """
    sizes = {len(blocks) or 1 for blocks in pages}
    units = math.lcm(*sizes) if math.lcm(*sizes) <= MOST_UNITS else max(sizes)
    per_row = min(len(pages), round(math.sqrt(WIDE * len(pages))))
    rows = -(-len(pages) // per_row)
    columns = np.full((rows * per_row, 2 * units), None, dtype=object)
    for page, blocks in enumerate(each or [0] for each in pages):
        ends = [2 * (units * k // len(blocks)) for k in range(len(blocks) + 1)]
        for state, start, end in zip(blocks, ends, ends[1:]):
            columns[page, start : end - 1] = state
    widths = np.tile([1.0, BLOCK_GAP], units)
    widths[-1] = PAGE_GAP
    numbers = np.arange(rows * per_row).reshape(rows, -1)
    edges = np.linspace(0, 1, len(COLOURS) + 1).repeat(2)[1:-1]  # each colour from one to the next
    colours = [colour for each in COLOURS.values() for colour in (each, each)]
    return go.Heatmap(
        z=columns.reshape(rows, -1).tolist(),
        x=np.concatenate([[0.0], np.cumsum(np.tile(widths, per_row))]),
        customdata=np.repeat(numbers, 2 * units, axis=1),
        colorscale=list(zip(edges.tolist(), colours)),
        zmin=-0.5,
        zmax=len(COLOURS) - 0.5,
        ygap=2,
        showscale=False,
        hovertemplate="page %{customdata}<extra></extra>",
        meta="map",
    )


def _line(
    fig: go.Figure, row: int, rows: pd.DataFrame, name: str, label: str, colour: str,
    dash: str = "solid", meta: str = "",
) -> None:  # fmt: skip
    look = {"color": colour, "dash": dash, "width": 2, "shape": "hv"}
    named = {"name": label, "meta": meta or name, "showlegend": bool(label), "legend": "legend3"}
    line = go.Scatter(x=rows["time_s"], y=rows[name], mode="lines", line=look, **named)
    fig.add_trace(line, row=row, col=1)


class LiveView(FigureView):
    """The controls and the figure of one LiveSearch. task: what watches it run.

    parameters: of notebooks/live_memory_split.ipynb, as this search was made with them; the split
    is the slider's.
    """

    def __init__(self, live: LiveSearch, provenance: str = "", **parameters: Any) -> None:
        self.live, self._provenance = live, provenance
        self._pinned_rows: pd.DataFrame | None = None
        self._awaited: float | None = None  # a share that is to be reached later
        self.task: asyncio.Task[None] | None = None
        self.answer, pair = HtmlText(), live.pair
        shares = [s / 100 for s in range(1, 100)]
        low, high = pair.share_limits
        fitting = [s for s in shares if low <= s <= high] or [low]  # of one page of room: none
        name = "LLM share of the arena's pages"
        self.share = NumberSlider(name, fitting, live.snapshot().target, "{:.2f}")
        if pair.arena.policy.keeps_split:
            self.share.slider.observe(lambda change: self.resplit(change["new"]), names="value")
        else:
            self.share.slider.disabled = self.share.typed.disabled = True
            self.answer.say(f"The policy {pair.spec.config.policy} sets the split by itself.")
        self.pause = ipywidgets.Button(description="pause")
        self.pause.on_click(self.toggle)
        row = [button("start", self.start), self.pause, button("stop", self.stop)]
        controls = [ipywidgets.HBox(row), self.share, self.answer]
        super().__init__("live_memory_split", controls, self._drawings, parameters)

    def start(self) -> str:
        """Start the search, and look at it until it ends; one that nothing looks at goes on."""
        is_watched = self.task is not None and not self.task.done()
        if is_watched or not self.live.is_alive:
            self.live.start()
        if not is_watched:
            self.task = asyncio.get_running_loop().create_task(self._watch())
        return ""

    def stop(self) -> str:
        """Stop the search; it ends within a step."""
        self.live.stop()
        self.show()
        return ""

    def toggle(self, _: Any = None) -> None:
        """Pause or resume."""
        (self.live.resume if self.live.is_paused else self.live.pause)()
        self.show()

    def pin(self) -> str:
        """Keep the throughput of this search in the figure; returns what was pinned."""
        snapshot = self.live.snapshot()
        self._pinned_rows, share = figure_rows(snapshot), snapshot.target
        self.show()
        return f"pinned: {snapshot.tokens_per_s:,.0f} tokens/s, LLM share {share:.2f} at the end"

    def resplit(self, share: float) -> None:
        """Ask for another split and say what became of it."""
        answer = self.live.resplit(share)
        reason = f": {answer.reason}" if answer.reason else ""
        reason += ", from the next step on" if self.live.state == "paused" else ""
        self._awaited = share if answer.outcome == "later" else None
        self.answer.say(f"{answer.outcome}{reason}.", f"LLM share {share:.2f}:")
        if not self.live.is_alive:  # else the task that watches does
            self.show()

    def show(self, _: Any = None) -> None:
        """Bring figure, words, command and the pause button up to now."""
        self.pause.description = "resume" if self.live.is_paused else "pause"
        arena = self.live.pair.arena
        if self._awaited is not None and arena.actual == arena.target:
            self.answer.say("reached.", f"LLM share {self._awaited:.2f}:")
            self._awaited = None
        super().show()

    async def _watch(self) -> None:
        try:
            while self.live.is_alive:
                self.show()
                await asyncio.sleep(REPAINT_S)
            self.show()
        except Exception as problem:  # no caller awaits this task
            self.answer.say_error(problem)
            raise

    def _drawings(self) -> dict[str, Drawing]:
        snapshot = self.live.snapshot()
        rows = figure_rows(snapshot)
        figure = live_figure(snapshot, self._provenance, self._pinned_rows, rows)
        given, words = {"kv_share": self.share.value}, in_words(snapshot)
        return {"live_memory_split": Drawing(figure, rows, words, given)}
