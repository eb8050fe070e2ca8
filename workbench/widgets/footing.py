"""What goes with the sliders of a measured figure: its sentence, pinned ones, save, copy.

Needs the notebooks extra, so import it where a widget is built. What it does not do: draw, or know
what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench.widgets import parts
from workbench.widgets.commands import papermill_command

FOLDER = "build/figures/sliders"
Draw = Callable[[], tuple[go.Figure, pd.DataFrame]]


class Footing:
    """`words` stand above the figure, `tools` below it; `say` is called with every move.

    notebook: its name, figure: what it is saved under. parameters: of the notebook, what is None
    being its own; the sliders' are added by `say`. draw: the figure as it stands, and its rows.
    """

    def __init__(
        self, notebook: str, figure: str, parameters: Mapping[str, Any], draw: Draw
    ) -> None:
        self._notebook, self._figure, self._draw = notebook, figure, draw
        self._parameters = {k: v for k, v in parameters.items() if v is not None}
        self._chosen: dict[str, Any] = {}
        self._said, self._pinned = parts.sentence(), parts.sentence()
        self._copy = parts.CopyText()
        self.words = parts.column([self._said, self._pinned])
        pin = parts.button("pin for comparison", self.pin)
        self.tools = parts.column([pin, parts.save_box(self.drawings, FOLDER), self._copy])

    def say(self, words: str, **chosen: Any) -> None:
        """A move: its sentence, and the parameters that the sliders stand for."""
        self._said.value, self._chosen = words, chosen
        self._copy.text = papermill_command(self._notebook, self._parameters | chosen)

    def pin(self) -> str:
        """Keep the sentence below those said next; answers what was done."""
        self._pinned.value = f"Pinned: {self._said.value}"
        return "pinned"

    def drawings(self) -> dict[str, parts.Drawing]:
        """What *save as figure* saves."""
        return {self._figure: (*self._draw(), self._parameters | self._chosen)}
