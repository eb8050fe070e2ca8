"""SVG and PDF of a figure through a browser without a window (kaleido), byte-stable.

One browser serves all figures of a `with Browser() as browser:` block: 0.3 s a figure instead of 3
s, and it starts while the first is being prepared. Where there is no browser nothing is raised:
`browser.problem` says what to install, and what needs none is written all the same.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
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
    """A browser while the `with` block lasts; it starts beside what is done before an image."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._starting: Future[Any] | None = None
        self._kaleido: Any = None
        self._problem: str | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.problem is None:
            self._wait(self._kaleido.__aexit__(None, None, None), START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    @property
    def problem(self) -> str | None:
        """None, or why no image can be drawn. Waits until the browser has started."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            try:
                self._kaleido = starting.result(START_S)
            except Exception as problem:  # not installed, not startable, no kaleido: no image
                reason = str(problem).strip().split("\n")[0] or type(problem).__name__
                self._problem = f"No browser for static images ({reason}). {HOW_TO_GET_ONE}"
        return self._problem

    def images(self, fig: go.Figure) -> tuple[bytes, bytes]:
        """SVG as on a screen 800 px wide and PDF for paper, 150 mm wide, drawn at the same time.

        Equal figures give equal bytes.
        """
        assert self.problem is None, self.problem
        paper = print_version(fig)
        screen = {"width": SCREEN_WIDTH_PX, "height": fig.layout.height or 450}
        size = {"width": paper.layout.width, "height": paper.layout.height}
        svg, pdf = self._wait(
            self._both((fig, {"format": "svg", **screen}), (paper, {"format": "pdf", **size})),
            DRAW_S,
        )
        return stable_svg(svg), stable_pdf(pdf)

    async def _start(self) -> Any:
        import kaleido  # noqa: PLC0415  an optional extra

        # no formulas are drawn, no network is asked; one page for SVG, one for PDF
        server = kaleido.Kaleido(n=2, mathjax=False)
        await server.__aenter__()
        return server

    async def _both(self, *wanted: tuple[go.Figure, dict[str, Any]]) -> list[bytes]:
        calls = (self._kaleido.calc_fig(f.to_plotly_json(), opts=opts) for f, opts in wanted)
        return await asyncio.gather(*calls)

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
