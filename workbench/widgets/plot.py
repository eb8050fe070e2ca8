"""A plotly FigureWidget that reaches the browser whole.

plotly's own opens its channel to the browser empty and sends data and layout after it. The browser
is then still loading plotly.js, several MB, and a busy one loses what comes meanwhile: the figure
stays empty. This one opens its channel when everything is in it.
"""

from __future__ import annotations

import plotly.graph_objects as go


class PlotWidget(go.FigureWidget):
    """A FigureWidget of a figure; it is used as one."""

    def __init__(self, fig: go.Figure) -> None:
        self._is_whole = False
        super().__init__(fig)
        self._is_whole = True
        self.open()

    def open(self) -> None:
        """Tell the browser of this widget, once there is something to tell."""
        if self._is_whole:
            super().open()
