"""Stored runs to look through: pick one or two from a table and see any figure of the study.

A thin view over explorer_figures.explore, a plain function. What it does not do: run anything.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.experiments.runs import load_runs
from workbench.widgets.commands import papermill_command
from workbench.widgets.explorer_figures import AT_ONE_SHARE, Explored, explore, figures_of
from workbench.widgets.explorer_runs import Pick, picks, runs_table
from workbench.widgets.plot import PlotWidget
from workbench.widgets.split import is_live

NOT_LIVE = "Runs can be picked in a live notebook (Jupyter, VS Code); the cells above pick some."
NOBODY = "none"
KEPT = 8
"""Figures that live on: one closed while the front end still makes it is an error there."""


def explorer_widget(runs_dir: str | Path, **parameters: Any) -> Any:
    """The widget over the runs of a folder; where none is shown, a sentence.

    parameters: of notebooks/10_explore.ipynb beside those that are picked here.
    """
    return ExplorerView(runs_dir, parameters).box if is_live() else NOT_LIVE


class ExplorerView:
    """Table, menus and figure; `box` is shown, `explored` is what it shows."""

    def __init__(self, runs_dir: str | Path, parameters: dict[str, Any]) -> None:
        import ipywidgets  # noqa: PLC0415  an optional extra

        from workbench.widgets import parts  # noqa: PLC0415

        runs = load_runs(runs_dir)
        self.picks = picks(runs)
        self._changing, self._drawn = False, list[Any]()
        self._parameters = {**parameters, "runs_dir": str(runs_dir)}
        names = list(self.picks)
        self.first = parts.Choice("A", names, names[0])
        self.second = parts.Choice("B, laid over A", [NOBODY, *names], NOBODY)
        self.name = parts.Choice("figure", figures_of(self._a), figures_of(self._a)[0])
        self.share = parts.Dial("LLM share, where one is drawn", self._shares(), 0.3, "{:.2f}")
        self.words, self.copy = parts.sentence(), parts.CopyText()
        self.place, self.explored = ipywidgets.VBox(), Explored(go.Figure(), runs[:0], "")
        table = parts.sentence(runs_table(runs).to_html(float_format="{:,.2f}".format))
        table.layout = ipywidgets.Layout(max_height="220px", overflow="auto")
        pins = parts.button("pin for comparison", self.pin)
        save = parts.save_box(self._drawings, "build/figures/explorer")
        menus = [self.first.box, self.second.box, pins, self.name.box, self.share.box]
        shown = [table, *menus, self.words, self.place, self.copy, save]
        self.box = ipywidgets.VBox(shown)
        for choice in (self.first, self.second):
            choice.menu.layout.width = "560px"
            choice.observe(lambda _: self._picked())
        self.name.observe(lambda _: self.show())
        self.share.observe(lambda _: self.show())
        self.show()

    @property
    def _a(self) -> Pick:
        return self.picks[self.first.value]

    @property
    def _b(self) -> Pick | None:
        return self.picks.get(self.second.value)

    def show(self) -> None:
        """Draw what is picked; what cannot be drawn is said."""
        if self._changing:
            return
        self.copy.text = papermill_command("10_explore", self._given())
        try:
            share = self.share.value
            self.explored = explore(self.name.value, self._a, self._b, share)
        except WorkbenchError as problem:
            self.words.value = f"<b>{type(problem).__name__}</b>: {escape(str(problem))}"
            self.place.children = []
            return
        self.words.value = escape(self.explored.words)
        figure = PlotWidget(self.explored.figure)
        self.place.children = [figure]
        self._drawn.append(figure)
        if len(self._drawn) > KEPT:
            self._drawn.pop(0).close()

    def pin(self) -> str:
        """What is A now is laid over whatever is picked as A next; answers what was pinned."""
        self.second.value = self.first.value
        return f"pinned as B: {escape(self.first.value)}"

    def _picked(self) -> None:
        """Another pick: figures and shares are those that both have."""
        before = self.name.value
        self._changing = True
        self.name.offer(figures_of(self._a, self._b) or [before])
        self.share.offer(self._shares())
        self._changing = False
        self.show()

    def _shares(self) -> list[float]:
        """Measured by either; one, where nothing was."""
        found = {share for pick in (self._a, self._b) if pick is not None for share in pick.shares}
        return sorted(found) or [0.5]

    def _given(self) -> dict[str, Any]:
        chosen = {"pick_a": self.first.value, "figure": self.name.value}
        second = {} if self._b is None else {"pick_b": self.second.value}
        share = {"llm_share": self.share.value} if self.name.value in AT_ONE_SHARE else {}
        return {**self._parameters, **chosen, **second, **share}

    def _drawings(self) -> dict[str, Any]:
        shown = self.explored
        return {f"explored_{self.name.value}": (shown.figure, shown.rows, self._given())}
