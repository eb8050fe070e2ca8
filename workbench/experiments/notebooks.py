"""Notebooks run from top to bottom by papermill, and as pages.

A notebook that fails is an error that names it and where it stopped; what it had written is kept as
NAME.failed.ipynb, never under the name of a finished one. A page needs no network: one plotly.js
stands beside all of a folder.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from workbench.config import require_known
from workbench.errors import ConfigError, NotebookError
from workbench.experiments.export import (
    DRAW_LATER,
    draw_waiting,
    drawing,
    share_plotly_js,
    write_together,
)
from workbench.experiments.provenance import project_root

INJECTED = "# Parameters"  # the first line of the cell papermill inserts
BATCH = {
    "PLOTLY_RENDERER": "plotly_mimetype",  # a figure is its data; the report draws it
    "TQDM_MININTERVAL": "5",
    "SPYDER_TEXT_PROGRESS": "1",  # tqdm.auto's own sign for "no widgets": progress as text
}


def notebook_files(names: Sequence[str] | None = None, folder: Path | None = None) -> list[Path]:
    """The notebooks called `names` ("02_memory_split" or "02"), all of them by default, in order.

    ConfigError for a name there is no notebook of.
    """
    place = folder or project_root() / "notebooks"
    known = sorted(place.glob("[!.]*.ipynb"))  # those with a number come first
    if not known:
        raise ConfigError(f"There are no notebooks in {place}; run from a checkout of the project.")
    if names is None:
        return known
    by_name = {file.stem.split("_")[0]: file for file in reversed(known)}
    by_name |= {file.stem: file for file in known}
    wanted = [each.removesuffix(".ipynb") for each in names]
    unknown = [name for name in wanted if name not in by_name]
    require_known(unknown, [file.stem for file in known], place.name, "notebook")
    return [by_name[name] for name in wanted]


def _assigned(source: str) -> dict[str, Any]:
    """The names that a cell assigns, with the literals that they are set to."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    pairs = ((target, node.value) for node in nodes for target in node.targets)
    return {each.id: ast.literal_eval(to) for each, to in pairs if isinstance(each, ast.Name)}


def check_parameters(cells: Sequence[str] | None = None) -> None:
    """Refuse an unknown parameter from within a notebook, in one of its first cells.

    papermill puts its own cell right after the parameters cell and accepts any name there.
    cells: the sources run so far; by default those of the running notebook.
    """
    if cells is None:
        from IPython import get_ipython  # noqa: PLC0415  an optional extra

        shell = get_ipython()
        cells = () if shell is None else shell.user_ns["In"]
    for before, injected in pairwise(cells):
        if injected.startswith(INJECTED):
            require_known(
                _assigned(injected), list(_assigned(before)), "This notebook", "parameter"
            )


def parameters_of(files: Iterable[Path], given: Iterable[str]) -> dict[Path, dict[str, Any]]:
    """What the cell tagged `parameters` of each notebook assigns, by name; ConfigError for a given
    one that none of them has.
    """
    import nbformat  # noqa: PLC0415  an optional extra

    known = dict[Path, dict[str, Any]]()
    for file in files:
        cells = nbformat.read(file, as_version=4).cells
        tagged = [c.source for c in cells if "parameters" in c.metadata.get("tags", ())]
        known[file] = _assigned(tagged[0]) if tagged else {}
    names = list(dict.fromkeys(name for each in known.values() for name in each))
    require_known(given, names, " and ".join(file.stem for file in known), "parameter")
    return known


def run_notebooks(
    names: Sequence[str] | None = None,
    profile: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    out_dir: str | Path | None = None,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Path]:
    """Execute notebooks in order; returns the executed files. Raises NotebookError.

    out_dir: default reports/notebooks/PROFILE. parameters: each goes to every notebook that has it,
    as the profile does; one that none has is a ConfigError before the first starts. environment:
    variables of the notebooks' processes. Images of their figures are drawn after the last.
    """
    files = notebook_files(names, folder)
    known = parameters_of(files, parameters or ())
    given = dict(parameters or {}) | ({"profile": profile} if profile else {})
    place = Path(out_dir or project_root() / "reports" / "notebooks" / (profile or "default"))
    if place.resolve() in {file.parent.resolve() for file in files}:
        raise ConfigError(f"{place} holds the notebooks themselves; give another folder.")
    place.mkdir(parents=True, exist_ok=True)
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as waiting:
        later = {DRAW_LATER: waiting}  # a browser for each kernel would take four seconds to start
        # for the kernels started within
        os.environ.update(BATCH | before | later | dict(environment or {}))
        try:
            return [
                _run(file, {k: v for k, v in given.items() if k in known[file]}, place)
                for file in files
            ]
        finally:
            os.environ.clear()
            os.environ.update(before)
            for said in {figure.problem for figure in draw_waiting(Path(waiting))} - {None}:
                sys.stderr.write(f"{said}\n")


def _run(notebook: Path, parameters: dict[str, Any], place: Path) -> Path:
    import papermill  # noqa: PLC0415  an optional extra

    done, failed = place / notebook.name, place / f"{notebook.stem}.failed.ipynb"
    partial = place / f".{notebook.stem}.partial.ipynb"
    for old in (done, failed):
        old.unlink(missing_ok=True)
    how = {"progress_bar": False, "stderr_file": sys.stderr, "cwd": project_root()}
    how["extra_arguments"] = ["--IPKernelApp.log_level=CRITICAL"]
    try:
        papermill.execute_notebook(notebook, partial, parameters, **how)
    except BaseException as problem:
        if partial.exists():
            partial.replace(failed)
        if not isinstance(problem, Exception):  # an interrupt stays what it is
            raise
        kind = getattr(problem, "ename", type(problem).__name__)
        what = re.sub(r"\x1b\[[0-9;]*m", "", str(getattr(problem, "evalue", problem))).strip()
        cell = getattr(problem, "exec_count", None)
        where = f" in cell In [{cell}]" if cell else ""
        raise NotebookError(
            f"Notebook {notebook.name} failed{where}: {kind}: {what} See {failed}."
        ) from problem
    return partial.replace(done)


# -- pages --

FIGURE = "application/vnd.plotly.v1+json"


def write_page(notebook: Path) -> Path:
    """An executed notebook as a page beside it, its figures drawn by the folder's plotly.js and
    without its progress bars; returns the page.
    """
    import nbconvert  # noqa: PLC0415  an optional extra
    import nbformat  # noqa: PLC0415

    script = share_plotly_js(notebook.parent)
    content = nbformat.read(notebook, as_version=4)
    for cell in content.cells:
        if "outputs" in cell:
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    outputs = [output for cell in content.cells for output in cell.get("outputs", ())]
    figures = [output for output in outputs if FIGURE in output.get("data", {})]
    for number, output in enumerate(figures):
        data = output["data"][FIGURE]
        fig = go.Figure({key: data[key] for key in ("data", "layout")}, skip_invalid=True)
        output["data"] = {"text/html": drawing(fig, f"figure-{number}")}
    no_network = ("require_js_url", "mathjax_url", "jquery_url", "mermaid_js_url")
    exporter = nbconvert.HTMLExporter(embed_images=True, **dict.fromkeys(no_network, ""))
    headings = (re.match(r"# (.+)", cell.source) for cell in content.cells)
    title = next((found[1] for found in headings if found), notebook.stem)
    body = exporter.from_notebook_node(content, {"metadata": {"name": title}})[0]
    body = re.sub(r'<script src="">\s*</script>', "", body)
    style = "figcaption { font-size: .85em; color: #333; }"
    head = f'<head>\n<script src="{script}"></script>\n<style>{style}</style>'
    page = body.replace("<head>", head, 1)
    write_together(notebook.parent, {f"{notebook.stem}.html": page.encode()})
    return notebook.with_suffix(".html")
