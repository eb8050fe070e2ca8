"""Figures to files: NAME.svg .pdf .html .tex, .parquet (the rows drawn), .json (their origin).

A figure's files appear together, each by an atomic rename, and equal figures give equal bytes, so
that version control shows what changed. Stored rows can be drawn again without a run. What it does
not do: draw.
"""

from __future__ import annotations

import html
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from workbench.errors import RunStoreError, nearest
from workbench.experiments.machine import git_state, machine_facts, versions
from workbench.experiments.static import Browser, stable

PLOTLY_JS = "plotly.min.js"
RECORD_KEYS = ("parameters", "versions", "git", "machine")
PAGE_STYLE = """
body { font-family: Arial, sans-serif; max-width: 1000px; margin: 1em auto; padding: 0 1em; }
figure { margin: 0; } figcaption { font-size: .85em; color: #333; padding: 0 1em; }
"""
Draw = Callable[[pd.DataFrame, str], go.Figure]


@dataclass(frozen=True, slots=True)
class SavedFigure:
    """The files of one figure. problem: None, or why some (SVG, PDF, TeX) were not written."""

    name: str
    folder: Path
    endings: tuple[str, ...]
    problem: str | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files written, one an ending."""
        return tuple(self.folder / f"{self.name}{ending}" for ending in self.endings)

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
    browser: Browser | None = None,
) -> SavedFigure:
    """Write the figure, the rows it draws and where they come from.

    measured: versions, git and machine of the runs drawn (default: this process's own). browser:
    one that is open already, for many figures. Without a browser HTML, Parquet and JSON are written
    and `problem` says what lacks.
    """
    if browser is None:
        with Browser() as own:
            return save_figure(fig, rows, name, folder, parameters, measured=measured, browser=own)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    fixed = stable(fig)
    share_plotly_js(place)
    contents = {
        ".parquet": rows.to_parquet(index=False, compression="zstd"),
        ".json": record_text(fig, parameters, measured).encode(),
        ".html": page(fixed, name).encode(),
    }
    if browser.problem is None:
        svg, pdf = browser.images(fixed)
        contents |= {".svg": svg, ".pdf": pdf, ".tex": tex(fig, name).encode()}
    write_together(place, {f"{name}{ending}": content for ending, content in contents.items()})
    stale = [
        f"{name}{e}"
        for e in (".svg", ".pdf")
        if e not in contents and (place / f"{name}{e}").exists()
    ]
    note = f" Older than these rows: {', '.join(stale)}." if stale else ""
    return SavedFigure(name, place, tuple(contents), browser.problem and browser.problem + note)


def replot(
    folder: str | Path, figures: Mapping[str, Draw], names: list[str] | None = None
) -> list[SavedFigure]:
    """Draw stored figures again from their rows; `figures` says how (workbench.plots.FIGURES).

    names: some of them; by default all that have rows in `folder`. Raises RunStoreError for a
    figure that is unknown or was never drawn.
    """
    place = Path(folder)
    wanted = names or [name for name in figures if (place / f"{name}.parquet").is_file()]
    for name in wanted:
        _require(name, place, figures)
    with Browser() as browser:
        drawn = {name: _drawn_again(place, name, figures[name]) for name in wanted}
        return [_replot(place, name, *drawn[name], browser) for name in wanted]


def _require(name: str, folder: Path, figures: Mapping[str, Draw]) -> None:
    if name not in figures:
        hint = nearest(name, list(figures))
        raise RunStoreError(f"There is no figure {name!r}.{hint} Figures: {', '.join(figures)}.")
    if not (folder / f"{name}.parquet").is_file() or not (folder / f"{name}.json").is_file():
        raise RunStoreError(
            f"Figure {name!r} has no stored rows in {folder.name}/; run `workbench figures` first."
        )


def _drawn_again(
    folder: Path, name: str, draw: Draw
) -> tuple[go.Figure, pd.DataFrame, dict[str, Any]]:
    """The figure, its stored rows and its record."""
    record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    rows = pd.read_parquet(folder / f"{name}.parquet")
    return draw(rows, record["parameters"].get("face", "")), rows, record


def _replot(
    folder: Path,
    name: str,
    fig: go.Figure,
    rows: pd.DataFrame,
    record: dict[str, Any],
    browser: Browser,
) -> SavedFigure:
    parameters = record["parameters"]
    return save_figure(fig, rows, name, folder, parameters, measured=record, browser=browser)


def record_text(
    fig: go.Figure, parameters: Mapping[str, Any], measured: Mapping[str, Any] | None
) -> str:
    """The JSON beside a figure: parameters (with the face drawn), versions, git, machine."""
    facts = dict(
        measured or {"versions": versions(), "git": git_state(), "machine": machine_facts()}
    )
    facts["parameters"] = {**parameters, "face": (fig.layout.meta or {}).get("face", "")}
    record = {key: facts[key] for key in RECORD_KEYS}
    return json.dumps(record, indent=2, sort_keys=True, default=str, ensure_ascii=False) + "\n"


def page(fig: go.Figure, name: str) -> str:
    """A page with the figure and a sentence of text; plotly.js lies in the same folder."""
    config = {"displaylogo": False, "responsive": True}
    drawing = fig.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    caption = html.escape(caption_of(fig))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{html.escape(name)}</title>
<script src="{PLOTLY_JS}"></script>
<style>{PAGE_STYLE}</style>
</head>
<body>
<figure aria-label="{caption}">
{drawing}
<figcaption>{caption}</figcaption>
</figure>
</body>
</html>
"""


def caption_of(fig: go.Figure) -> str:
    """The one sentence a plot function says about its figure; empty where it says none."""
    return str((fig.layout.meta or {}).get("caption", ""))


def tex(fig: go.Figure, name: str) -> str:
    """A LaTeX figure that needs graphicx alone; its caption takes in title and face."""
    face = (fig.layout.meta or {}).get("face", "").replace("\n", " ")
    caption = tex_escaped(f"{caption_of(fig)} {face}".strip())
    return (
        "\\begin{figure}\n  \\centering\n"
        f"  \\includegraphics[width=150mm]{{{name}.pdf}}\n"
        f"  \\caption{{{caption}}}\n  \\label{{fig:{name}}}\n\\end{{figure}}\n"
    )


def tex_escaped(text: str) -> str:
    """`text` with TeX's special characters made harmless."""
    special = {c: f"\\{c}" for c in "&%$#_{}"}
    special |= {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
    special |= {
        "<": "\\ensuremath{<}",
        ">": "\\ensuremath{>}",
        "×": "\\ensuremath{\\times}",
        "·": "\\ensuremath{\\cdot}",
    }
    return "".join(special.get(character, character) for character in text)


def share_plotly_js(folder: Path) -> Path:
    """One plotly.js for all pages of a folder, of the version that wrote them."""
    script = folder / PLOTLY_JS
    content = get_plotlyjs().encode()
    if not script.is_file() or script.stat().st_size != len(content):
        write_together(folder, {PLOTLY_JS: content})
    return script


def write_together(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files aside first, then rename each: none is ever half written."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
        for name, content in contents.items():
            (Path(aside) / name).write_bytes(content)
        for name in contents:
            os.replace(Path(aside) / name, folder / name)
