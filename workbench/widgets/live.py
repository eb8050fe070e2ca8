"""A running search to look at and take hold of: start, pause, re-split and stop it with the mouse.

A thin view: every REPAINT_S seconds the kernel's event loop asks the LiveSearch for a snapshot and
brings the figure up to it, so the kernel answers whatever the search does. What it does not do:
search (live_search.py) or draw (live_figure.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.errors import WorkbenchError
from workbench.widgets.live_figure import figure_rows, live_figure, pin, show
from workbench.widgets.live_search import LiveSearch, Snapshot
from workbench.widgets.plot import PlotWidget
from workbench.widgets.split import is_live

REPAINT_S = 0.25  # between two snapshots
NOT_LIVE = (
    "The slider is shown in a live notebook (Jupyter, VS Code); what it does by hand, the cells "
    "above do by themselves."
)
ENDED = ("stopped", "finished", "failed")


def live_widget(live: LiveSearch, face: str = "", **parameters: Any) -> Any:
    """The widget; where none is shown, a sentence.

    parameters: of notebooks/live_memory_split.ipynb, as this search was made with them; the split
    is the slider's.
    """
    return LiveView(live, face, parameters).box if is_live() else NOT_LIVE


def in_words(snapshot: Snapshot) -> str:
    """What the figure shows, in a sentence."""
    share = snapshot.target["llm"]
    counts = snapshot.blocks.counts
    words = (
        f"<b>{snapshot.state}</b> after {snapshot.seconds:.1f} s: {snapshot.answered} of "
        f"{snapshot.problems} problems answered, {snapshot.tokens:,} tokens generated "
        f"({snapshot.tokens_per_s:,.0f} tokens/s since the start), {snapshot.steps:,} steps. "
        f"The LLM should have {share:.0%} of the pages and holds or could have "
        f"{snapshot.actual['llm']:.0%}. Blocks in use: {counts['llm_active']} of the LLM, "
        f"{counts['prm_active']} of the PRM."
    )
    if snapshot.phase:
        words += f" Last step: the {snapshot.phase.upper()}'s."
    return f"{words} {snapshot.problem}" if snapshot.problem else words


class LiveView:
    """The controls and the figure of one LiveSearch; `box` is shown."""

    def __init__(self, live: LiveSearch, face: str, parameters: dict[str, Any]) -> None:
        import ipywidgets  # noqa: PLC0415  an optional extra

        from workbench.widgets import parts  # noqa: PLC0415

        self.live, self._face, self._parameters = live, face, parameters
        self._task: asyncio.Task[None] | None = None
        self._said = ""
        snapshot = live.snapshot()
        self.figure = PlotWidget(live_figure(snapshot, face))
        self.words, self.answer = parts.sentence(in_words(snapshot)), parts.sentence()
        self.dial = self._dial(parts, snapshot)
        self.copy = parts.CopyText(text=self._command())
        self._pause = self._button(ipywidgets, "pause", self._toggle)
        start, stop = (self._button(ipywidgets, *each) for each in self._ends())
        pins = parts.button("pin for comparison", self.pin)
        save = parts.save_box(self._drawings, "build/figures/live")
        controls = ipywidgets.HBox([start, self._pause, stop, pins])
        shown = [controls, self.dial.box, self.answer, self.words, self.figure, self.copy, save]
        self.box = ipywidgets.VBox(shown)

    def _dial(self, parts: Any, snapshot: Snapshot) -> Any:
        pair = self.live.pair
        low, high = pair.lowest_share, pair.highest_share
        shares = [float(x) for x in np.arange(0.01, 1, 0.01).round(2) if low <= x <= high]
        name = "LLM share of the arena's pages"
        dial = parts.Dial(name, shares, snapshot.target["llm"], "{:.2f}")
        if pair.keeps_split:
            dial.observe(self.resplit)
        else:
            dial.slider.disabled = dial.typed.disabled = True
            self.answer.value = f"The policy {pair.policy} sets the split by itself."
        return dial

    @staticmethod
    def _button(ipywidgets: Any, text: str, action: Callable[[], None]) -> Any:
        push = ipywidgets.Button(description=text)
        push.on_click(lambda _: action())
        return push

    def _ends(self) -> tuple[tuple[str, Callable[[], None]], ...]:
        return ("start", self._begin), ("stop", self.stop)

    # -- what a person does --

    def _begin(self) -> None:
        try:
            self.start()
        except WorkbenchError as problem:
            self.answer.value = f"<b>{type(problem).__name__}</b>: {problem}"

    def start(self) -> None:
        """Start the search, and look at it until it ends."""
        if not self.live.is_alive:
            self.live.start()
            self._look()

    def stop(self) -> None:
        """Stop the search; it ends within a step."""
        self.live.stop()
        self.repaint()

    def pin(self) -> str:
        """Keep the throughput of this search in the figure; answers what was pinned."""
        snapshot = self.live.snapshot()
        pin(self.figure, snapshot)
        share = snapshot.target["llm"]
        return f"pinned: {snapshot.tokens_per_s:,.0f} tokens/s, LLM share {share:.2f} at the end"

    def _toggle(self) -> None:
        if self.live.is_paused:
            self.live.resume()
        else:
            self.live.pause()
        self.repaint()

    def resplit(self, share: float) -> None:
        """Ask for another split and say what became of it."""
        answer = self.live.resplit(share)
        reason = f": {answer.reason}" if answer.reason else ""
        reason += ", from the next step on" if self.live.state == "paused" else ""
        self.answer.value = f"LLM share {share:.2f}: <b>{answer.outcome}</b>{reason}."
        self.copy.text = self._command()
        if not self.live.is_alive:
            self.repaint()

    # -- what it shows --

    def repaint(self) -> Snapshot:
        """Bring figure and words up to now."""
        snapshot = self.live.snapshot()
        self.words.value = in_words(snapshot)
        self._pause.description = "resume" if self.live.is_paused else "pause"
        with self.figure.batch_update():
            show(self.figure, snapshot)
        return snapshot

    def _look(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        try:
            while self.repaint().state not in ENDED:
                await asyncio.sleep(REPAINT_S)
        except Exception as problem:  # nobody awaits this task
            self.answer.value = f"<b>{type(problem).__name__}</b>: {problem}"
            raise

    def _command(self) -> str:
        from workbench.widgets.commands import papermill_command  # noqa: PLC0415

        given = {**self._parameters, "kv_share": self.dial.value}
        return papermill_command("live_memory_split", given)

    def _drawings(self) -> dict[str, Any]:
        snapshot = self.live.snapshot()
        fig = live_figure(snapshot, self._face)
        given = {**self._parameters, "kv_share": self.dial.value}
        return {"live_memory_split": (fig, figure_rows(snapshot), given)}
