"""What the widgets are put together from: labelled sliders with a typed twin, choices, buttons.

Every control has a visible label, every button says what it did in words beside it, nothing needs a
mouse alone. Needs the notebooks extra, so import it where a widget is built, not at a module's top.
What it does not do: draw, or know what is explored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anywidget
import ipywidgets
import pandas as pd
import plotly.graph_objects as go
import traitlets

from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.export import save_figure

LABEL_WIDTH = "320px"
WIDE = ipywidgets.Layout(width="auto")
Change = dict[str, Any]
Observer = Callable[[float], None]
Drawing = tuple[go.Figure, pd.DataFrame, Mapping[str, Any]]
"""A figure, the rows it draws, and the parameters they are made with: what save_figure takes."""


def label(text: str) -> ipywidgets.Label:
    """The name of a control, unit included, as wide as all the others."""
    return ipywidgets.Label(text, layout=ipywidgets.Layout(width=LABEL_WIDTH))


def sentence(text: str = "") -> ipywidgets.HTML:
    """Text beside a figure; unlike a Label it is never cut off."""
    return ipywidgets.HTML(text)


class Dial:
    """A slider over given numbers, its label, and a box to type in that takes the nearest one.

    `box` is shown; `value` may be set; observers are called with each new value, once.
    """

    def __init__(
        self, name: str, options: Sequence[float], value: float, form: str = "{:g}"
    ) -> None:
        self._form, self._observers, self._silent = form, list[Observer](), False
        self.options = sorted(options)
        start = self.nearest(value)
        self.slider = ipywidgets.SelectionSlider(
            options=self._texts(), value=start, description="slide", readout=True
        )
        self.typed = ipywidgets.BoundedFloatText(
            value=start,
            min=self.options[0],
            max=self.options[-1],
            step=self._step(),
            description="or type",
            layout=ipywidgets.Layout(width="190px"),
        )
        self.slider.observe(self._moved, names="value")
        self.typed.observe(self._moved, names="value")
        self.box = ipywidgets.HBox([label(name), self.slider, self.typed])

    @property
    def value(self) -> float:
        """Where the slider stands."""
        return float(self.slider.value)

    @value.setter
    def value(self, wanted: float) -> None:
        self.slider.value = self.nearest(wanted)

    def nearest(self, wanted: float) -> float:
        """The option nearest to a number."""
        return min(self.options, key=lambda option: abs(option - wanted))

    def observe(self, observer: Observer) -> None:
        """Call this with every new value."""
        self._observers.append(observer)

    def offer(self, options: Sequence[float]) -> None:
        """Other numbers to choose from; the slider goes to the nearest of them."""
        if sorted(options) == self.options:
            return
        before = self.value
        self.options = sorted(options)
        start = self.nearest(before)
        self._silent = True
        self.slider.options = self._texts()
        self.slider.value = start
        self.typed.min = min(self.options[0], self.typed.value)
        self.typed.max = max(self.options[-1], self.typed.value)
        self.typed.value = start
        self.typed.min, self.typed.max = self.options[0], self.options[-1]
        self._silent = False
        if start != before:
            self._tell(start)

    def _moved(self, change: Change) -> None:
        if self._silent:
            return
        value = self.nearest(change["new"])
        if self.slider.value == value == self.typed.value:
            self._tell(value)
            return
        twin = self.typed if change["owner"] is self.slider else self.slider
        twin.value = value  # comes back here, and then both agree
        change["owner"].value = value

    def _tell(self, value: float) -> None:
        for observer in self._observers:
            observer(value)

    def _step(self) -> float:
        gaps = [b - a for a, b in zip(self.options, self.options[1:])]
        return min(gaps, default=1.0)

    def _texts(self) -> list[tuple[str, float]]:
        return [(self._form.format(option), option) for option in self.options]


class Choice:
    """One of several names, with its label. `box` is shown."""

    def __init__(self, name: str, options: Sequence[Any], value: Any) -> None:
        self._observers, self._silent = list[Callable[[Any], None]](), False
        self.menu = ipywidgets.Dropdown(options=list(options), value=value)
        self.menu.observe(self._chosen, names="value")
        self.box = ipywidgets.HBox([label(name), self.menu])

    @property
    def value(self) -> Any:
        """What is chosen."""
        return self.menu.value

    @value.setter
    def value(self, wanted: Any) -> None:
        self.menu.value = wanted

    def observe(self, observer: Callable[[Any], None]) -> None:
        """Call this with every new choice."""
        self._observers.append(observer)

    def offer(self, options: Sequence[Any]) -> None:
        """Other names to choose from; what was chosen stays where it still is one."""
        if list(self.menu.options) == list(options):
            return
        before = self.value
        kept = before if before in options else options[0]
        self._silent = True
        self.menu.options = list(options)
        self.menu.value = kept
        self._silent = False
        if kept != before:
            self._chosen({"new": kept})

    def _chosen(self, change: Change) -> None:
        if not self._silent:
            for observer in self._observers:
                observer(change["new"])


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
      shown.setAttribute("aria-label", model.get("name"));
      said.setAttribute("role", "status");
      el.style.display = "flex";
      el.style.width = "100%";
      el.style.gap = "8px";
      shown.style.flex = "1";
      shown.style.fontFamily = "monospace";
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
    """A button and, beside it, what its action answered; named errors are said, not raised."""
    push = ipywidgets.Button(description=text, layout=WIDE)
    said = sentence()

    def act(_: Any) -> None:
        said.value = "…"
        said.value = outcome_in_words(action)

    push.on_click(act)
    return ipywidgets.HBox([push, said])


def outcome_in_words(action: Callable[[], str]) -> str:
    """What an action answered, or what was wrong with what it was given."""
    try:
        return action()
    except (WorkbenchError, OSError) as error:
        return f"<b>{type(error).__name__}</b>: {error}"


def save_box(draw: Callable[[], Mapping[str, Drawing]], folder: str) -> ipywidgets.HBox:
    """*save as figure* into a folder that is typed beside it; says where the files are.

    draw: the figures as they stand, by the name each is saved under.
    """
    place = ipywidgets.Text(value=folder, description="folder")
    saver = button("save as figure", lambda: save_figures(draw(), place.value))
    return ipywidgets.HBox([place, *saver.children])


def save_figures(drawings: Mapping[str, Drawing], folder: str) -> str:
    """Save figures in a folder; answers where they are, in words. ConfigError without a name."""
    if not folder.strip():
        raise ConfigError("No folder is given; type the folder that the figures go to.")
    saved = [
        save_figure(fig, rows, name, folder.strip(), parameters)
        for name, (fig, rows, parameters) in drawings.items()
    ]
    problems = {each.problem for each in saved if each.problem}
    where = saved[0].folder.resolve()
    names = ", ".join(f"{each.name} ({' '.join(each.endings)})" for each in saved)
    return " ".join([f"Saved in {where}: {names}.", *problems])


def column(children: Sequence[Any]) -> ipywidgets.VBox:
    """Widgets below each other."""
    return ipywidgets.VBox(list(children))
