"""What the widgets share: a slider with a typed twin, buttons, text to copy, a figure that follows.

Every control has a visible label, every button says beside it what it did, nothing needs a mouse
alone. A `Drawing` comes from a plain function, which notebooks and tests call without a widget.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anywidget
import ipywidgets
import pandas as pd
import plotly.graph_objects as go
import traitlets

from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.export import save_figure

LIVE = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD")
"""What the front ends that can show a widget set in a kernel's environment; papermill sets none."""
LABEL_WIDTH = "320px"
KEPT_FIGURES = 8
"""Replaced ones that live on: one closed while the front end still makes it is an error there."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """A figure, the rows it draws, what it shows in words, and the parameters that make it."""

    figure: go.Figure
    rows: pd.DataFrame
    words: str
    parameters: Mapping[str, Any]


def is_live() -> bool:
    """Whether a front end that shows widgets holds this kernel."""
    return any(name in os.environ for name in LIVE)


def papermill_command(notebook: str, parameters: Mapping[str, Any]) -> str:
    """The papermill command that runs `notebook` (a name in notebooks/) with these parameters.

    Values are given as YAML, which keeps texts, numbers, lists, true and null apart.
    """
    pairs = (f"{name}: {json.dumps(value)}" for name, value in parameters.items())
    settings = " ".join(f"-y {shlex.quote(pair)}" for pair in pairs)
    out = f"{notebook}.run.ipynb"
    return f"papermill notebooks/{notebook}.ipynb {out} {settings}".rstrip()


def labelled(name: str, *controls: ipywidgets.Widget) -> ipywidgets.HBox:
    """A row of controls behind a label, all labels equally wide."""
    layout = ipywidgets.Layout(width=LABEL_WIDTH)
    return ipywidgets.HBox([ipywidgets.Label(name, layout=layout), *controls])


class NumberSlider(ipywidgets.HBox):
    """A labelled SelectionSlider over given numbers, and a box to type in that takes the nearest.

    Observe `slider`, whose `value` is where both stand.
    """

    def __init__(
        self, name: str, options: Sequence[float], value: float, form: str = "{:g}"
    ) -> None:
        self.options = sorted(options)
        start, gaps = self.nearest(value), [b - a for a, b in zip(self.options, self.options[1:])]
        self.slider = ipywidgets.SelectionSlider(
            options=[(form.format(option), option) for option in self.options],
            value=start,
            description="slide",
        )
        self.typed = ipywidgets.BoundedFloatText(
            value=start,
            min=self.options[0],
            max=self.options[-1],
            step=min(gaps, default=1.0),
            description="or type",
            layout=ipywidgets.Layout(width="190px"),
        )
        self.slider.observe(self._slid, names="value")
        self.typed.observe(self._typed, names="value")
        super().__init__([*labelled(name).children, self.slider, self.typed])

    @property
    def value(self) -> float:
        """Where the slider stands."""
        return float(self.slider.value)

    def nearest(self, wanted: float) -> float:
        """The option nearest to a number."""
        return min(self.options, key=lambda option: abs(option - wanted))

    def _slid(self, change: Any) -> None:
        self.typed.value = change["new"]

    def _typed(self, change: Any) -> None:
        self.slider.value = self.nearest(change["new"])
        self.typed.value = self.slider.value


class CopyText(anywidget.AnyWidget):
    """A line of text to be copied, and the button that does it; the text can be marked by hand."""

    _esm = """
    function render({ model, el }) {
      const button = document.createElement("button");
      const shown = document.createElement("input");
      const said = document.createElement("span");
      button.className = "jupyter-button";
      button.textContent = model.get("name");
      shown.readOnly = true;
      shown.size = 100;
      shown.setAttribute("aria-label", model.get("name"));
      said.setAttribute("role", "status");
      Object.assign(el.style, { display: "flex", width: "100%", gap: "8px" });
      Object.assign(shown.style, { flex: "1", fontFamily: "monospace" });
      button.style.padding = "0 10px";
      const update = () => { shown.value = model.get("text"); said.textContent = ""; };
      button.onclick = async () => {
        shown.select();
        try { await navigator.clipboard.writeText(shown.value); }
        catch (refused) { document.execCommand("copy"); }
        said.textContent = "copied";
      };
      model.on("change:text", update);
      update();
      el.append(button, shown, said);
    }
    export default { render };
    """
    text = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode("copy as papermill command").tag(sync=True)


def button(text: str, action: Callable[[], str]) -> ipywidgets.HBox:
    """A button and, beside it, what its action returned; named errors are said, not raised."""
    push = ipywidgets.Button(description=text, layout=ipywidgets.Layout(width="auto"))
    said = ipywidgets.HTML()

    def act(_: Any) -> None:
        said.value = "…"
        try:
            said.value = action()
        except (WorkbenchError, OSError) as error:
            said.value = error_in_html(error)

    push.on_click(act)
    return ipywidgets.HBox([push, said])


def error_in_html(error: Exception) -> str:
    """An error's kind and sentence."""
    return f"<b>{type(error).__name__}</b>: {error}"


def save_box(draw: Callable[[], Mapping[str, Drawing]], folder: str) -> ipywidgets.HBox:
    """*save as figure* into a folder that is typed beside it; says where the files are.

    draw: the figures as they stand, by the name each is saved under.
    """
    place = ipywidgets.Text(value=folder, description="folder")

    def save() -> str:
        where = place.value.strip()
        if not where:
            raise ConfigError("No folder is given; type the folder that the figures go to.")
        saved = [
            save_figure(each.figure, each.rows, name, where, each.parameters)
            for name, each in draw().items()
        ]
        names = ", ".join(f"{each.name} ({' '.join(each.endings)})" for each in saved)
        problems = {each.problem for each in saved if each.problem}
        return " ".join([f"Saved in {saved[0].folder.resolve()}: {names}.", *problems])

    return ipywidgets.HBox([place, *button("save as figure", save).children])


class FigureView:
    """A figure below its controls: its words, pin, save, and the command for the same figure.

    `box` is shown. draw: the drawing for the controls as they stand; `show`, which controls call
    with every move, puts it on the screen.
    """

    def __init__(
        self,
        notebook: str,
        name: str,
        controls: Sequence[ipywidgets.Widget],
        draw: Callable[[], Drawing],
    ) -> None:
        self._notebook, self._draw = notebook, draw
        self._drawn: list[go.FigureWidget] = []
        self.words, self.pinned = ipywidgets.HTML(), ipywidgets.HTML()
        self.copy, self._place = CopyText(), ipywidgets.VBox()
        pin = button("pin for comparison", self.pin)
        save = save_box(lambda: {name: self._draw()}, f"build/figures/{name}")
        self.box = ipywidgets.VBox(
            [*controls, self.words, self.pinned, self._place, pin, save, self.copy]
        )
        self.show()

    def show(self, _: Any = None) -> None:
        """Draw what the controls stand on; what cannot be drawn is said."""
        try:
            drawing = self._draw()
        except WorkbenchError as error:
            self.words.value, self._place.children = error_in_html(error), []
            return
        self.words.value = drawing.words
        self.copy.text = papermill_command(self._notebook, drawing.parameters)
        if self._place.children and is_alike(self._drawn[-1], drawing.figure):
            redraw(self._drawn[-1], drawing.figure)
            return
        figure = go.FigureWidget(drawing.figure)
        self.attach(figure)
        self._drawn.append(figure)
        self._place.children = [figure]
        if len(self._drawn) > KEPT_FIGURES:
            self._drawn.pop(0).close()

    def attach(self, figure: go.FigureWidget) -> None:
        """Called with each new figure before it is shown; a view of clicks listens to them here."""

    def pin(self) -> str:
        """Keep the sentence shown now beside those that follow; returns what was done."""
        self.pinned.value = f"Pinned: {self.words.value}"
        return "pinned"


def is_alike(shown: go.Figure, drawn: go.Figure) -> bool:
    """Whether two figures have the same traces, axes and legends: one can become the other."""
    first, second = (
        (
            [trace.type for trace in fig.data],
            {n for n in fig.layout.to_plotly_json() if n.startswith(("xaxis", "yaxis", "legend"))},
        )
        for fig in (shown, drawn)
    )
    return first == second


def redraw(shown: go.FigureWidget, drawn: go.Figure) -> None:
    """Make a FigureWidget what another, alike figure is; only what differs goes to the browser."""
    with shown.batch_update():
        for old, new in zip(shown.data, drawn.data, strict=True):
            _assign(old, new)
        _assign(shown.layout, drawn.layout)


def _assign(old: Any, new: Any) -> None:
    """Every property that the new one has; plotly passes over what is equal."""
    for name, value in new.to_plotly_json().items():
        if name not in ("type", "template"):
            old[name] = value
