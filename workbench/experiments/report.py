"""reports/: executed notebooks as pages that need no network, and an index with claims.

Figures stay alive (hover, zoom) through one plotly.js beside the pages; every figure carries its
sentence of text. What it does not do: run notebooks or judge claims.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.experiments.claims import Claim
from workbench.experiments.export import share_plotly_js, write_together

FIGURE = "application/vnd.plotly.v1+json"
NO_NETWORK = dict.fromkeys(("require_js_url", "mathjax_url", "jquery_url", "mermaid_js_url"), "")
CAPTIONS = "figcaption { font-size: .85em; color: #333; }"
STYLE = """
body { font-family: Arial, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } tr { border-bottom: 1px solid #ddd; }
th, td { text-align: left; padding: .3em .8em; vertical-align: top; }
.verdict { font-weight: bold; white-space: nowrap; }
.holds { color: #006b4e; } .fails { color: #a33f00; }
"""


def write_report(
    executed: Sequence[Path], claims: Sequence[Claim], face: str, reports: Path, figures: Path
) -> Path:
    """Pages beside the executed notebooks and `reports`/index.html; answers the index.

    figures: the folder that the claims' figures were written to.
    """
    pages = [write_page(notebook) for notebook in executed]
    content = index_page(pages, claims, face, reports, figures)
    write_together(reports, {"index.html": content.encode()})
    return reports / "index.html"


def write_page(notebook: Path) -> Path:
    """The executed notebook as a page beside it, its figures drawn by the folder's plotly.js."""
    import nbconvert  # noqa: PLC0415  an optional extra
    import nbformat  # noqa: PLC0415

    script = share_plotly_js(notebook.parent).name
    content = nbformat.read(notebook, as_version=4)
    for number, output in enumerate(_figure_outputs(content)):
        output["data"] = {"text/html": drawing(output["data"][FIGURE], f"figure-{number}")}
    exporter = nbconvert.HTMLExporter(embed_images=True, **NO_NETWORK)
    body, _ = exporter.from_notebook_node(content)
    body = re.sub(r'<script src="">\s*</script>', "", body)
    head = f'<head>\n<script src="{script}"></script>\n<style>{CAPTIONS}</style>'
    page = body.replace("<head>", head, 1)
    write_together(notebook.parent, {f"{notebook.stem}.html": page.encode()})
    return notebook.with_suffix(".html")


def _figure_outputs(notebook: Any) -> list[Any]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output for output in outputs if FIGURE in output.get("data", {})]


def drawing(figure: dict[str, Any], name: str) -> str:
    """The HTML of one figure, its caption below; plotly.js comes from the page."""
    import plotly.graph_objects as go  # noqa: PLC0415  an optional extra

    fig = go.Figure({key: figure[key] for key in ("data", "layout")}, skip_invalid=True)
    caption = html.escape((fig.layout.meta or {}).get("caption", ""))
    config = {"displaylogo": False, "responsive": True}
    inner = fig.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    return f'<figure aria-label="{caption}">{inner}<figcaption>{caption}</figcaption></figure>'


def index_page(
    pages: Sequence[Path], claims: Sequence[Claim], face: str, reports: Path, figures: Path
) -> str:
    """The first page: the claims with their verdicts, then the notebooks."""
    links = "\n".join(
        f'<li><a href="{_link(page, reports)}">{page.stem}</a></li>' for page in pages
    )
    measured = "<br>".join(html.escape(line) for line in face.splitlines())
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>The memory study</title><style>{STYLE}</style></head>
<body>
<h1>How should two models that search together share one memory?</h1>
<p>{measured}</p>
<h2>Claims</h2>
{claims_html(claims, _link(figures, reports))}
<h2>Notebooks</h2>
<ul>
{links}
</ul>
<p>Written {written}.</p>
</body>
</html>
"""


def claims_html(claims: Sequence[Claim], figures: str) -> str:
    """The claims as a table. figures: where their figures lie, seen from the page."""
    head = "".join(
        f"<th scope='col'>{t}</th>" for t in ("", "claim", "verdict", "number", "figure", "rung")
    )
    rows = "\n".join(_claim_row(claim, figures) for claim in claims)
    return f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"


def _claim_row(claim: Claim, figures: str) -> str:
    cells = [html.escape(text) for text in (claim.text, claim.number, claim.rung)]
    figure = f'<a href="{figures}/{claim.figure}.html">{claim.figure}</a>'
    kind = claim.verdict.split()[0]
    return (
        f"<tr><th scope='row'>{claim.key}</th><td>{cells[0]}</td>"
        f"<td class='verdict {kind}'>{claim.verdict}</td>"
        f"<td>{cells[1]}</td><td>{figure}</td><td>{cells[2]}</td></tr>"
    )


def _link(page: Path, reports: Path) -> str:
    return html.escape(Path(os.path.relpath(page, reports)).as_posix())
