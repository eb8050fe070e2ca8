"""What the widgets share: a slider with a typed twin, buttons, escaped text, figures that follow.

Every control has a visible label, every button says beside it what it did, nothing needs a mouse
alone. A `Drawing` comes from a plain function, which notebooks and tests call without a widget.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go

from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.export import save_figure

LIVE = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD")
"""What the front ends that can show a widget set in a kernel's environment; papermill sets none."""
NOT_LIVE = (
    "The controls are shown in a live notebook (Jupyter, VS Code); the cells above show where they "
    "would start."
)
OF_USERS = {"uid", "visible", "selectedpoints", "dragmode", "hovermode", "selections"}
"""What a user sets in a figure, which a redraw leaves as it is; uid: plotly's own."""
MOST_REPLACED = 8
"""Replaced figures that stay open: one closed while the front end makes it is an error there."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """A figure, the rows it draws, what it shows in words, the parameters its controls set, tables
    that stand below the words, and where its runs were measured, as save_figure takes it.
    """

    figure: go.Figure
    rows: pd.DataFrame
    words: str
    parameters: Mapping[str, Any]
    tables: Sequence[pd.DataFrame] = ()
    measured: Mapping[str, Any] | None = None


def is_live() -> bool:
    """Whether a front end that shows widgets holds this kernel."""
    return any(name in os.environ for name in LIVE)


def papermill_command(notebook: str, parameters: Mapping[str, Any]) -> str:
    """The papermill command that runs `notebook` (a name in notebooks/) with these parameters.

    Values are given as YAML, which keeps texts, numbers, lists, true and null apart.
    """
    pairs = (f"{name}: {json.dumps(value)}" for name, value in parameters.items())
    settings = " ".join(f"-y {shlex.quote(pair)}" for pair in pairs)
    return f"papermill notebooks/{notebook}.ipynb {notebook}.run.ipynb {settings}".rstrip()


class HtmlText(ipywidgets.HTML):
    """Text on the page. All HTML of the widgets is made here, of escaped text."""

    text = ""

    def say(
        self, text: str, lead: str = "", tag: str = "div", tables: Sequence[pd.DataFrame] = ()
    ) -> None:
        """Show a text, its line breaks kept, after a bold lead; below it tables, side by side where
        there is room. tag: `pre` for equal widths.
        """
        self.text = f"{lead} {text}".lstrip()
        style = "white-space:pre-wrap;word-break:normal;line-height:1.4;margin:0 1em 0 0"
        bold = f"<b>{escape(lead)}</b> " if lead else ""
        how: dict[str, Any] = {"index": False, "float_format": "{:,.2f}".format, "escape": True}
        drawn = "".join(rows.to_html(**how) for rows in tables)
        look = "display:flex;flex-wrap:wrap;align-items:flex-start;gap:8px;"
        look += "font-size:12px;line-height:1.4;text-align:right"
        below = f'<div style="{look}">{drawn}</div>' if drawn else ""
        self.value = f'<{tag} style="{style}">{bold}{escape(text)}</{tag}>{below}'

    def say_error(self, error: Exception, note: str = "") -> None:
        """Show an error's kind and sentence, and a note in brackets after it."""
        self.say(f"{error} ({note})" if note else str(error), f"{type(error).__name__}:")


def as_markdown(text: str) -> str:
    """Markdown that shows this text as it is: no tag, emphasis, link or formula in it works."""
    return text.translate({ord(sign): f"&#{ord(sign)};" for sign in "&<>*_`$[]\\#|~"})


def labelled(name: str, *controls: ipywidgets.Widget) -> ipywidgets.HBox:
    """A row of controls behind a label, all labels equally wide."""
    layout = ipywidgets.Layout(flex="0 0 290px")
    return ipywidgets.HBox([ipywidgets.Label(name, layout=layout), *controls])


class NumberSlider(ipywidgets.HBox):
    """A labelled slider over given numbers, and a box to type in. What is typed and cannot be taken
    as it is becomes the nearest that can; `said`, beside it, says so.

    Observe `slider`, whose `value` is where both stand. unit: what is counted, after the box. step:
    of a slider on which every number between the ends can be typed; None: only `options` can be.
    """

    def __init__(
        self,
        name: str,
        options: Iterable[float],
        value: float,
        form: str = "{:g}",
        unit: str = "",
        step: float | None = None,
    ) -> None:
        self.options, self._form, self._unit = sorted(options), form, unit
        self._is_free = step is not None
        start, wide = self.nearest(value), ipywidgets.Layout(flex="1 1 240px", width="auto")
        look = {"description": "slide", "layout": wide}
        if self._is_free:
            ends = {"min": self.options[0], "max": self.options[-1], "step": step}
            read = form.strip("{:}")
            self.slider = ipywidgets.FloatSlider(start, readout_format=read, **ends, **look)
        else:
            texts = [(form.format(each), each) for each in self.options]
            self.slider = ipywidgets.SelectionSlider(options=texts, value=start, **look)
            step = min((b - a for a, b in pairwise(self.options)), default=1.0)
        self.typed = ipywidgets.FloatText(start, description="or type", step=step)
        self.typed.layout.width = "190px"
        self.said = HtmlText(layout=ipywidgets.Layout(display="none"))
        ipywidgets.dlink((self.slider, "value"), (self.typed, "value"), lambda _: self.value)
        self.typed.observe(self._typed, names="value")
        self.slider.observe(lambda _: self.say(""), names="value")
        row = [*labelled(name).children, self.slider, self.typed, ipywidgets.Label(unit), self.said]
        super().__init__(row, layout=ipywidgets.Layout(flex_flow="row wrap", width="100%"))

    @property
    def value(self) -> float:
        """Where both stand, without what the browser's arithmetic leaves of a step."""
        return round(float(self.slider.value), 12)

    def nearest(self, value: float) -> float:
        """What `value` becomes: itself, an end, or the nearest option."""
        if self._is_free:
            return float(min(max(value, self.options[0]), self.options[-1]))
        return min(self.options, key=lambda each: abs(each - value))

    def say(self, text: str) -> None:
        """A note below the slider, until it moves."""
        self.said.say(text)
        self.said.layout.display = "" if text else "none"

    def _typed(self, change: Any) -> None:
        given, taken = change["new"], self.nearest(change["new"])
        if given == self.value:
            return
        self.slider.value = taken
        self.typed.value = self.value  # whoever watches the slider may have moved it on
        if taken != given and taken == self.value:
            first, last, shown = map(self._form.format, (self.options[0], self.options[-1], taken))
            inside = self.options[0] <= given <= self.options[-1]
            why = "is none of the values there are" if inside else f"lies outside {first} to {last}"
            self.say(f"{given:,g} {why}; {shown} {self._unit}".rstrip() + " is taken, the nearest.")


def button(name: str, action: Callable[[], str]) -> ipywidgets.HBox:
    """A button and, beside it, what its action returned; named errors are said, not raised."""
    push = ipywidgets.Button(description=name, layout=ipywidgets.Layout(width="auto"))
    said = HtmlText()

    def act(_: Any) -> None:
        said.say("…")
        try:
            said.say(action())
        except (WorkbenchError, OSError) as error:
            said.say_error(error)

    push.on_click(act)
    return ipywidgets.HBox([push, said])


class FigureView:
    """Figures below their controls, each under its words; pin, save, and the command for the same.

    `box` is shown. draw: drawings by name for the controls as they stand, always equally many;
    `show`, which controls call with every move, puts them on the screen. parameters: of the
    notebook, beside those that the controls set. tools: further buttons. measured: as save_figure
    takes it, of drawings that tell none of their own.
    """

    def __init__(
        self,
        notebook: str,
        controls: Sequence[ipywidgets.Widget],
        draw: Callable[[], Mapping[str, Drawing]],
        parameters: Mapping[str, Any],
        tools: Sequence[ipywidgets.Widget] = (),
        measured: Mapping[str, Any] | None = None,
    ) -> None:
        self._notebook, self._draw, self._parameters = notebook, draw, parameters
        self._measured = measured
        self._replaced: list[go.FigureWidget] = []
        self.words, self.pinned = HtmlText(), HtmlText()
        wide = {"layout": {"width": "100%"}, "style": {"description_width": "initial"}}
        self.copy = ipywidgets.Text(description="copy as papermill command", **wide)
        self._texts, self._places = [self.words], ipywidgets.VBox()
        self._folder = ipywidgets.Text(f"build/figures/{notebook}", description="folder")
        save = ipywidgets.HBox([self._folder, *button("save as figure", self.save).children])
        pin = button("pin for comparison", self.pin)
        rows = [*controls, self.words, self.pinned, self._places, pin, *tools, save, self.copy]
        self.box = ipywidgets.VBox(rows)
        self.show()

    @classmethod
    def shown(cls, *given: Any, **parameters: Any) -> Any:
        """The widget of a view made so; a sentence, and no view, where none can be shown."""
        return cls(*given, **parameters).box if is_live() else NOT_LIVE

    @property
    def figures(self) -> list[go.FigureWidget]:
        """The figures on the screen."""
        return [each for each in self._places.children if isinstance(each, go.FigureWidget)]

    def show(self, _: Any = None) -> None:
        """Draw what the controls stand on; what cannot be drawn is said above the last figures."""
        try:
            drawings = list(self._draw().values())
        except WorkbenchError as error:
            note = "Drawn below is the last place that could be." if self.figures else ""
            self.words.say_error(error, note)
            self.copy.value = ""
            return
        parameters = {**self._parameters, **drawings[0].parameters}
        self.copy.value = papermill_command(self._notebook, parameters)
        self._texts += [HtmlText() for _ in drawings[len(self._texts) :]]
        shown = self.figures or [None] * len(drawings)
        children: list[ipywidgets.Widget] = []
        for text, figure, drawing in zip(self._texts, shown, drawings, strict=True):
            text.say(drawing.words, tables=drawing.tables)
            if figure is None or not redraw(figure, drawing.figure):
                self._replaced += [] if figure is None else [figure]
                figure = go.FigureWidget(drawing.figure)
                self.attach(figure)
            children += [text, figure]
        self._places.children = children[1:]  # the first words stand above
        while len(self._replaced) > MOST_REPLACED:
            self._replaced.pop(0).close()

    def attach(self, figure: go.FigureWidget) -> None:
        """Called with each new figure before it is shown; a view of clicks listens to them here."""

    def pin(self) -> str:
        """Keep the sentence shown now beside those that follow; returns what was done."""
        if not self.copy.value:
            raise ConfigError("Nothing is drawn of this place, so there is nothing to pin.")
        self.pinned.say(self.words.text, "Pinned:")
        return "pinned"

    def save(self) -> str:
        """Save the figures, by their names, into the folder typed; returns where they are."""
        where = self._folder.value.strip()
        if not where:
            raise ConfigError("No folder is given; type the folder that the figures go to.")
        saved = []
        for name, one in self._draw().items():
            made_with = {**self._parameters, **one.parameters}
            measured = one.measured or self._measured
            drawn = one.figure, one.rows, name, where, made_with
            saved.append(save_figure(*drawn, measured=measured))
        names = ", ".join(f"{each.name} ({' '.join(each.endings)})" for each in saved)
        problems = {each.problem for each in saved if each.problem}
        return " ".join([f"Saved in {saved[0].folder.resolve()}: {names}.", *problems])


def redraw(shown: go.FigureWidget, drawn: go.Figure) -> bool:
    """Make a FigureWidget what another figure is; only what differs goes to the browser.

    False, and nothing is done, where traces, axes, legends, or whether there are shapes differ.
    """
    parts = ("xaxis", "yaxis", "legend", "shapes", "annotations")
    first, second = (
        [trace.type for trace in fig.data]
        + sorted(name for name in fig.layout.to_plotly_json() if name.startswith(parts))
        for fig in (shown, drawn)
    )
    if first != second:
        return False
    with shown.batch_update():
        for old, new in zip((*shown.data, shown.layout), (*drawn.data, drawn.layout), strict=True):
            given, had = new.to_plotly_json(), old.to_plotly_json().keys()
            gone = dict.fromkeys(had - given.keys() - OF_USERS)
            for name, value in (given | gone).items():
                if name not in ("type", "template"):  # plotly passes over what is equal
                    old[name] = value
    return True
