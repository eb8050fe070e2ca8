"""A plotly FigureWidget that reaches the browser whole, and stays what Python says it is.

plotly's own opens its channel to the browser empty and sends data and layout after it, and the
browser is then still loading plotly.js: 5 MB, again for every figure. anywidget 0.11 gives that two
seconds, after which a figure is drawn but deaf for ever. This one opens its channel when everything
is in it, loads plotly.js once a page and in its own time, and keeps later changes until the browser
says that it has drawn. Of what plotly filled in it hears once. What it does not do: draw.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import plotly
import plotly.graph_objects as go
import traitlets

LOAD_ONCE = """
const name = "plotly VERSION of workbench";
const load = (model) => {
    if (!window[name]) {
        const file = new Blob([model.get("_plotly_js")], {type: "text/javascript"});
        window[name] = import(URL.createObjectURL(file));
        window[name].catch(() => { delete window[name]; });  // the next figure tries again
    }
    return window[name];
};
export default () => {
    let figure;
    return {
        initialize({model}) { load(model); },  // nobody waits for it here
        async render({model, el}) {
            const plotly = await load(model);
            if (!figure) {
                figure = plotly.default();
                figure.initialize({model});
            }
            return figure.render({model, el});
        },
    };
};
""".replace("VERSION", plotly.__version__)
DRAWN = "_js2py_traceDeltas"  # the browser's first message: what it filled in while drawing
AT_ONCE = {
    "transition": {"duration": 0},
    "frame": {"duration": 0, "redraw": False},
    "mode": "afterall",  # in other modes a move that comes early ends the one before in an error
}
REPORT = re.compile(r"(_send(?:TraceDeltas|LayoutDelta))\((\w+)\)\{")


def without_reports(script: str) -> str:
    """plotly's script, which tells Python what it filled in; here once, not at every change.

    Nobody reads it after that, and to gather it takes as long as to draw. So `on_edits_completed`
    is not for these figures.
    """
    return REPORT.sub(r"\1(\2){if(this.told\1)return;this.told\1=!0;", script)


class PlotWidget(go.FigureWidget):
    """A FigureWidget of a figure; it is used as one."""

    _plotly_js = traitlets.Unicode(without_reports(str(go.FigureWidget._esm))).tag(sync=True)
    _esm = LOAD_ONCE

    def __init__(self, fig: go.Figure) -> None:
        self._is_whole = self._is_drawn = False
        self._kept_of_traces: dict[tuple[int, ...], dict[str, Any]] = {}
        self._kept_of_layout: dict[str, Any] = {}
        super().__init__(fig)
        self._is_whole = True
        self.open()
        self.observe(self._catch_up, names=DRAWN)

    def open(self) -> None:
        """Tell the browser of this widget, once there is something to tell."""
        if self._is_whole:
            super().open()

    @contextmanager
    def batch_move(self) -> Iterator[None]:
        """batch_update of points alone: a third of the work for the browser.

        It is an animation in no time, for which plotly leaves axes, legend and annotations alone.
        It waits for its turn among other moves, and an update may overtake it: so what is moved is
        changed by moves alone, whatever else changes.
        """
        self._in_batch_mode = True
        try:
            yield
        finally:
            self._in_batch_mode = False
            assert not self._batch_layout_edits, "the layout is not moved"
            if self._batch_trace_edits:
                self._perform_batch_animate(AT_ONCE)

    def _catch_up(self, _: Any) -> None:
        if self._is_drawn:
            return
        self._is_drawn = True
        for places, changed in self._kept_of_traces.items():
            self._send_restyle_msg(changed, trace_indexes=list(places))
        if self._kept_of_layout:
            self._send_relayout_msg(self._kept_of_layout)
        self._kept_of_traces, self._kept_of_layout = {}, {}

    def _keep(self, changed: Mapping[str, Any], trace_indexes: int | Sequence[int] | None) -> None:
        """Of several changes of one thing the last."""
        places = tuple(self._normalize_trace_indexes(trace_indexes))
        before = self._kept_of_traces.pop(places, {})
        self._kept_of_traces[places] = {**before, **changed}

    # What plotly sends; the names are its own.

    def _send_restyle_msg(
        self, restyle_data: Any, trace_indexes: Any = None, source_view_id: Any = None
    ) -> None:
        if self._is_drawn:
            super()._send_restyle_msg(restyle_data, trace_indexes, source_view_id)
        else:
            self._keep(restyle_data, trace_indexes)

    def _send_relayout_msg(self, layout_data: Any, source_view_id: Any = None) -> None:
        if self._is_drawn:
            super()._send_relayout_msg(layout_data, source_view_id)
        else:
            self._kept_of_layout |= layout_data

    def _send_update_msg(
        self,
        restyle_data: Any,
        relayout_data: Any,
        trace_indexes: Any = None,
        source_view_id: Any = None,
    ) -> None:
        if self._is_drawn:
            super()._send_update_msg(restyle_data, relayout_data, trace_indexes, source_view_id)
        else:
            self._keep(restyle_data, trace_indexes)
            self._kept_of_layout |= relayout_data

    def _send_animate_msg(
        self, styles_data: Any, relayout_data: Any, trace_indexes: Any, animation_opts: Any
    ) -> None:
        if self._is_drawn:
            super()._send_animate_msg(styles_data, relayout_data, trace_indexes, animation_opts)
            return
        for changed, place in zip(styles_data, trace_indexes, strict=True):
            self._keep({name: [value] for name, value in changed.items()}, place)
        self._kept_of_layout |= relayout_data
