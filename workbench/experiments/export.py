"""Figures to files: NAME.svg .pdf .html .tex, .parquet (the rows drawn), .json (their origin).

A figure's files appear together, each by an atomic rename, and equal figures give equal bytes, so
that version control shows what changed. Stored rows can be drawn again without a run.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import html
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import plotly
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from workbench.config import require_known
from workbench.errors import ConfigError, RunStoreError
from workbench.experiments.provenance import (
    committed_figures,
    git_state,
    machine_facts,
    versions,
)

PRINT_WIDTH_MM, PX_PER_MM = 150.0, 96 / 25.4
PLOTLY_JS = "plotly.min.js"
Draw = Callable[[pd.DataFrame, str], go.Figure]
DRAW_LATER = "WORKBENCH_DRAW_LATER"
"""Environment variable: a folder, if it is there, where figures wait for their images."""


@dataclass(frozen=True, slots=True)
class SavedFigure:
    """The files of one figure. problem: None, or why some (SVG, PDF, TeX) were not written."""

    name: str
    folder: Path
    endings: tuple[str, ...]
    problem: str | None = None

    def __repr__(self) -> str:
        written = f"{self.name}: {' '.join(self.endings)} in {self.folder.name}/"
        return written if self.problem is None else f"{written}\n{self.problem}"


def save_figure(
    fig: go.Figure,
    rows: pd.DataFrame,
    name: str,
    folder: str | Path,
    parameters: Mapping[str, Any],
    *,
    measured: Mapping[str, Any] | None = None,
    width_mm: float = PRINT_WIDTH_MM,
) -> SavedFigure:
    """Write the figure, the rows it draws and where they come from.

    measured: versions, git and machine of the runs drawn (default: this process's own). width_mm:
    of the PDF, whose letters stay 9 pt; ConfigError if no page's. Images of an equal figure that
    are there stay. Without a browser HTML, Parquet and JSON are written; `problem` says why.
    """
    fixed, place = go.Figure(fig), Path(folder)
    for number, trace in enumerate(fixed.data):
        trace.uid = f"trace{number}"  # plotly would draw names inside at random
    paper = print_version(fixed, width_mm)
    share_plotly_js(place)
    device = str(parameters.get("device"))  # the what-if widget's is a preset's name
    machine = partial(machine_facts, device if device.startswith("cuda") else "cpu")
    here: dict[str, Any] = {"versions": versions, "git": git_state, "machine": machine}
    record = {key: measured[key] if measured else found() for key, found in here.items()}
    record["parameters"] = {**parameters, "provenance": _said(fig, "provenance")}
    contents = {
        ".parquet": rows.to_parquet(index=False, compression="zstd"),
        ".html": document(name, drawing(fixed, name)).encode(),
    }
    # to draw one takes longer than a notebook of stored runs: an equal figure keeps its images
    asked = f"{fixed.to_json()}{paper.layout.width}{plotly.__version__}".encode()
    images, problem = _kept_images(place / name, asked), None
    if images is None and os.path.isdir(waiting := os.environ.get(DRAW_LATER, "")):
        asks = [str(place.absolute()), name, width_mm, fixed.to_json()]
        file = f"{_digest(asks[0].encode())}-{name}.json"  # of one saved twice the later stays
        (Path(waiting) / file).write_text(json.dumps(asks))
    elif images is None and (problem := (browser := open_browser()).problem) is None:
        try:
            images = browser.images(fixed, paper)
        except Exception:
            open_browser.cache_clear()  # the next figure gets another one
            raise
    if images is not None:
        contents |= {".svg": images[0], ".pdf": images[1], ".tex": tex(fig, name).encode()}
        record["images"] = _digest(asked, *images)
    text = json.dumps(record, indent=2, sort_keys=True, default=str, ensure_ascii=False)
    contents[".json"] = f"{text}\n".encode()
    write_together(place, {f"{name}{ending}": content for ending, content in contents.items()})
    older = [file for file in (f"{name}.svg", f"{name}.pdf") if (place / file).exists()]
    if problem and older:
        problem += f" Older than these rows: {', '.join(older)}."
    return SavedFigure(name, place, tuple(contents), problem)


def draw_waiting(waiting: Path) -> list[SavedFigure]:
    """Images of the figures that were saved meanwhile, all by one browser, as they were saved."""
    saved = []
    for file in sorted(waiting.iterdir()):
        place, name, width_mm, drawn = json.loads(file.read_text())
        rows, record = read_figure(name, Path(place))
        how: dict[str, Any] = {"measured": record, "width_mm": width_mm}
        fig = go.Figure(json.loads(drawn))
        saved.append(save_figure(fig, rows, name, place, record["parameters"], **how))
    return saved


def _kept_images(stem: Path, asked: bytes) -> tuple[bytes, bytes] | None:
    """SVG and PDF beside the record that says they are of this very figure."""
    with suppress(OSError, ValueError):
        files = (stem.with_name(f"{stem.name}.{end}") for end in ("svg", "pdf", "json"))
        svg, pdf, record = (file.read_bytes() for file in files)
        if json.loads(record).get("images") == _digest(asked, svg, pdf):
            return svg, pdf
    return None


def read_figure(name: str, folder: Path | None = None) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Rows and record of a figure in a folder (default: the project's as committed, whatever is
    drawn over it meanwhile); else RunStoreError.
    """
    if folder is None:
        with committed_figures() as kept:
            return read_figure(name, kept)
    rows, record = (folder / f"{name}{ending}" for ending in (".parquet", ".json"))
    if not (rows.is_file() and record.is_file()):
        raise RunStoreError(
            f"Figure {name!r} has no stored rows in {folder.name}/; run `workbench figures` first. "
            "(`git checkout figures` brings the committed ones back.)"
        )
    return pd.read_parquet(rows), json.loads(record.read_text(encoding="utf-8"))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def replot(
    folder: str | Path,
    figures: Mapping[str, Draw],
    names: list[str] | None = None,
    *,
    to: str | Path | None = None,
    width_mm: float = PRINT_WIDTH_MM,
    change: Callable[[go.Figure], Any] | None = None,
) -> list[SavedFigure]:
    """Draw stored figures again from their rows; `figures` says how (workbench.plots.FIGURES).

    names: default all that have rows in `folder`. to: another folder for the new files. change:
    called with each figure before it is saved, to give it other labels. ConfigError for one
    unknown, RunStoreError for one never drawn.
    """
    place, saved = Path(folder), []
    require_known(names or (), list(figures), "The study", "figure")
    wanted = names or [name for name in figures if (place / f"{name}.parquet").is_file()]
    if not wanted:
        raise RunStoreError(f"No figure has stored rows in {place}; run `workbench figures` first.")
    for name, (rows, record) in {name: read_figure(name, place) for name in wanted}.items():
        told = record["parameters"]
        fig = figures[name](rows, told["provenance"])
        if change is not None:
            change(fig)
        how: dict[str, Any] = {"measured": record, "width_mm": width_mm}
        saved.append(save_figure(fig, rows, name, to or place, told, **how))
    return saved


def _said(fig: go.Figure, what: str) -> str:
    """The `caption` or `provenance` a plot function gave its figure; empty where it gave none."""
    return str((fig.layout.meta or {}).get(what, ""))


def document(title: str, body: str) -> str:
    """An HTML page that loads the plotly.js beside it."""
    return filled("figure.html", title=title, script=PLOTLY_JS, body=body) + "\n"


def filled(template: str, **quoted: Any) -> str:
    """One of the templates beside this module with what it quotes; StrictUndefined for less."""
    text = Path(__file__).with_name(template).read_text("utf-8")
    return jinja2.Template(text, undefined=jinja2.StrictUndefined).render(**quoted)


def drawing(fig: go.Figure, name: str) -> str:
    """The HTML of one figure, its caption below; plotly.js comes from the page."""
    config = {"displaylogo": False, "responsive": True}
    inner = fig.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    text = html.escape(_said(fig, "caption"))
    return f'<figure aria-label="{text}">\n{inner}\n<figcaption>{text}</figcaption>\n</figure>'


def tex(fig: go.Figure, name: str) -> str:
    """A LaTeX figure that needs graphicx alone, at its print size, centred also where the text is
    narrower. The list of figures has its title. What was measured is left out unless the document
    says where `\\provenance` is to stand: README.md says how.
    """
    title = " ".join(re.sub(r"<[^>]*>", " ", fig.layout.title.text or name).split())
    caption, measured = (
        tex_escaped(_said(fig, what).replace("\n", " ")) for what in ("caption", "provenance")
    )
    below = f"\\footnotesize {caption}\\provenance{{{measured}}}"
    return (
        "\\providecommand{\\provenance}[1]{}\n"
        "\\begin{figure}\n  \\centering\n"
        f"  \\makebox[\\linewidth]{{\\includegraphics{{{name}.pdf}}}}\n"
        f"  \\caption[{{{tex_escaped(title)}}}]{{{below}}}\n"
        f"  \\label{{fig:{name}}}\n\\end{{figure}}\n"
    )


def tex_escaped(text: str) -> str:
    """`text` with TeX's special characters made harmless."""
    special = {c: f"\\{c}" for c in "&%$#_{}"}
    special |= {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
    maths = {"<": "<", ">": ">", "×": "\\times", "·": "\\cdot", "±": "\\pm", "−": "-"}
    maths |= {"≤": "\\leq", "≥": "\\geq", "→": "\\to", "≈": "\\approx", "µ": "\\mu", "μ": "\\mu"}
    special |= {character: f"\\ensuremath{{{name}}}" for character, name in maths.items()}
    return "".join(special.get(character, character) for character in text)


def share_plotly_js(folder: Path) -> str:
    """One plotly.js for all pages of a folder, of the version that wrote them; its name."""
    script, content = folder / PLOTLY_JS, get_plotlyjs().encode()
    if not script.is_file() or script.stat().st_size != len(content):
        write_together(folder, {PLOTLY_JS: content})
    return PLOTLY_JS


def write_together(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files aside first, then rename each: none is ever half written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
        for name, content in contents.items():
            (Path(aside) / name).write_bytes(content)
        for name in contents:
            (Path(aside) / name).replace(folder / name)


# -- SVG and PDF through a browser without a window (kaleido), byte-stable --

START_S, DRAW_S = 60.0, 90.0
SCREEN_WIDTH_PX = 800
HOW_TO_GET_ONE = (
    "Install Chromium for SVG and PDF (Debian, Ubuntu: `apt-get install chromium`; elsewhere "
    "`plotly_get_chrome`, or set BROWSER_PATH to a Chrome or Chromium) and run "
    "`workbench figures --replot`."
)


class Browser:
    """A browser, and the thread that talks to it; `close` ends both. problem: why not, or None."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.problem: str | None = None
        try:
            self._kaleido = self._wait(self._start(), START_S)
        except Exception as problem:  # not installed, not startable, no kaleido: no image
            reason = str(problem).strip().split("\n")[0] or type(problem).__name__
            self.problem = f"No browser for static images ({reason}). {HOW_TO_GET_ONE}"

    def close(self) -> None:
        if self.problem is None:
            self._wait(self._kaleido.__aexit__(None, None, None), START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    def images(self, fig: go.Figure, paper: go.Figure) -> tuple[bytes, bytes]:
        """SVG as on a screen, and PDF of its version for paper; equal figures give equal bytes."""
        assert self.problem is None, self.problem
        screen = {"format": "svg", "width": SCREEN_WIDTH_PX, "height": fig.layout.height or 450}
        size = {"format": "pdf", "width": paper.layout.width, "height": paper.layout.height}

        async def both() -> list[bytes]:
            wanted = ((fig, screen), (paper, size))
            calls = (self._kaleido.calc_fig(f.to_plotly_json(), opts=opts) for f, opts in wanted)
            return await asyncio.gather(*calls)

        svg, pdf = self._wait(both(), DRAW_S)
        # six random hexadecimal digits in ids, and the date, go; lengths stay, so offsets hold
        digits = re.search(rb'id="(?:top)?defs-([0-9a-f]{6})"', svg)
        svg = svg.replace(digits[1], b"figure") if digits else svg
        return svg, re.sub(rb"\(D:\d{14}", b"(D:20000101000000", pdf)

    async def _start(self) -> Any:
        import kaleido  # noqa: PLC0415  an optional extra

        # no formulas are drawn, no network is asked; one page for SVG, one for PDF
        return await kaleido.Kaleido(n=2, mathjax=False).__aenter__()

    def _wait(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)


@cache
def open_browser() -> Browser:
    """The process's own: to start one takes ten times as long as to draw a figure."""
    browser = Browser()
    atexit.register(browser.close)
    return browser


def print_version(fig: go.Figure, width_mm: float = PRINT_WIDTH_MM) -> go.Figure:
    """A copy for paper, with `layout.meta["on_paper"]`; its caption says title and provenance.

    ConfigError for a width that is no page's.
    """
    if not (isinstance(width_mm, int | float) and 60 <= width_mm <= 400):
        raise ConfigError(f"width_mm is {width_mm!r}; allowed: 60 to 400, what a page has.")
    paper = go.Figure(fig)
    paper.layout.annotations = [a for a in fig.layout.annotations if a.name != "provenance"]
    usual = {"height": fig.layout.height or 400}
    look = {**(fig.layout.meta or {}).get("on_paper", usual), "width": round(width_mm * PX_PER_MM)}
    return paper.update_layout(title=None, **look)
