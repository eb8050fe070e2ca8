"""A plotly FigureWidget that reaches the browser whole, and stays what Python says it is.

plotly's own opens its channel to the browser empty and sends data and layout after it. The browser
is then still loading plotly.js, several MB, for which anywidget 0.11 gives it two seconds; one that
is too busy loses what comes meanwhile, and the figure stays empty. This one opens its channel when
everything is in it, and once the browser says that it has drawn, sends again what may have changed
since. What it does not do: mend a browser that took longer, where a figure stays as it was first.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

DRAWN = "_js2py_traceDeltas"  # the browser's first message: what it filled in while drawing
OF_TRACES = ("x", "y", "name", "showlegend", "customdata", "text", "visible")
OF_LAYOUT = ("title", "annotations", "shapes")


class PlotWidget(go.FigureWidget):
    """A FigureWidget of a figure; it is used as one."""

    def __init__(self, fig: go.Figure) -> None:
        self._is_whole = self._has_caught_up = False
        super().__init__(fig)
        self._is_whole = True
        self.open()
        self.observe(self._catch_up, names=DRAWN)

    def open(self) -> None:
        """Tell the browser of this widget, once there is something to tell."""
        if self._is_whole:
            super().open()

    def _catch_up(self, _: Any) -> None:
        if self._has_caught_up:
            return
        self._has_caught_up = True
        whole = self.to_dict()
        for place, trace in enumerate(whole["data"]):
            changed = {name: [trace[name]] for name in OF_TRACES if name in trace}
            self._send_restyle_msg(changed, trace_indexes=[place])
        layout = whole["layout"]
        self._send_relayout_msg({name: layout[name] for name in OF_LAYOUT if name in layout})
