"""SVG and PDF of a figure through a browser without a window (kaleido), byte-stable.

One browser serves all figures of a `with Browser() as browser:` block: 0.3 s a figure instead of 3
s. Where there is no browser nothing is raised: `browser.problem` says what to install, and what
needs none is written all the same.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

import plotly.graph_objects as go

START_S, DRAW_S = 60.0, 90.0
SCREEN_WIDTH_PX = 800
HOW_TO_GET_ONE = (
    "Install Chromium for SVG and PDF (Debian, Ubuntu: `apt-get install chromium`; elsewhere "
    "`plotly_get_chrome`, or set BROWSER_PATH to a Chrome or Chromium) and run "
    "`workbench figures --replot`."
)


class Browser:
    """A browser while the `with` block lasts. problem: None, or why no image can be drawn."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._kaleido: Any = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._kaleido = self._start()
        except Exception as problem:  # not installed, not startable, no kaleido: all mean no image
            reason = str(problem).strip().split("\n")[0] or type(problem).__name__
            self.problem = f"No browser for static images ({reason}). {HOW_TO_GET_ONE}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._kaleido is not None:
            self._wait(self._kaleido.__aexit__(None, None, None), START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    def svg(self, fig: go.Figure) -> bytes:
        """The figure as on a screen 800 px wide; equal figures give equal bytes."""
        options = {"format": "svg", "width": SCREEN_WIDTH_PX, "height": fig.layout.height or 450}
        return stable_svg(self._draw(fig, options))

    def pdf(self, fig: go.Figure) -> bytes:
        """The figure for paper, 150 mm wide; equal figures give equal bytes."""
        paper = print_version(fig)
        size = {"width": paper.layout.width, "height": paper.layout.height}
        return stable_pdf(self._draw(paper, {"format": "pdf", **size}))

    def _start(self) -> Any:
        import kaleido  # noqa: PLC0415  an optional extra

        server = kaleido.Kaleido(mathjax=False)  # no formulas are drawn, no network is asked
        self._wait(server.__aenter__(), START_S)
        return server

    def _draw(self, fig: go.Figure, options: dict[str, Any]) -> bytes:
        assert self.problem is None, self.problem
        return self._wait(self._kaleido.calc_fig(fig.to_plotly_json(), opts=options), DRAW_S)

    def _wait(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)


def stable(fig: go.Figure) -> go.Figure:
    """A copy whose traces have fixed names inside; plotly would draw them at random."""
    copy = go.Figure(fig)
    for place, trace in enumerate(copy.data):
        trace.uid = f"trace{place}"
    return copy


def print_version(fig: go.Figure) -> go.Figure:
    """A copy for paper, without title and face: the caption says what they do on a screen.

    `layout.meta["on_paper"]` is the layout to use; a figure without it keeps its own.
    """
    paper = go.Figure(fig)
    paper.layout.annotations = [a for a in fig.layout.annotations if a.name != "face"]
    layout = (fig.layout.meta or {}).get(
        "on_paper", {"width": 567, "height": fig.layout.height or 400}
    )
    return paper.update_layout(title=None, **layout)


def stable_svg(svg: bytes) -> bytes:
    """The same image without the six random hexadecimal digits in its ids."""
    found = re.search(rb'id="(?:top)?defs-([0-9a-f]{6})"', svg)
    return svg.replace(found[1], b"figure") if found else svg


def stable_pdf(pdf: bytes) -> bytes:
    """The same document dated to the year 2000; the length stays, so its table of offsets holds."""
    return re.sub(rb"\(D:\d{14}", b"(D:20000101000000", pdf)
