"""The notebook runner: refuses before it runs, names what failed, never shows a half as a whole."""

import json
import os
import re
import subprocess
import sys

import nbformat
import plotly.io as pio
import pytest

from tests.plots import synthetic
from workbench.errors import ConfigError, NotebookError
from workbench.experiments import notebooks
from workbench.experiments.export import SavedFigure
from workbench.experiments.notebooks import check_parameters, run_notebooks
from workbench.plots import prefix_hits

CHECK = "from workbench.experiments.notebooks import check_parameters\ncheck_parameters()"


def notebook(folder, name, *cells):
    """A notebook with a parameters cell and `cells`."""
    content = nbformat.v4.new_notebook()
    first = nbformat.v4.new_code_cell("profile = 'default'\nshares = [0.3]")
    first.metadata["tags"] = ["parameters"]
    content.cells = [first, *map(nbformat.v4.new_code_cell, cells)]
    content.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "py"}
    folder.mkdir(exist_ok=True)
    nbformat.write(content, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def run(tmp_path, names, parameters=None, **more):
    return run_notebooks(names, None, parameters, tmp_path / "out", folder=tmp_path / "nb", **more)


def test_an_unknown_parameter_or_notebook_is_refused_before_anything_runs(tmp_path):
    """And the nearest is named."""
    notebook(tmp_path / "nb", "02_memory_split", "raise SystemExit")
    with pytest.raises(ConfigError, match=r"no parameter .share.\..* .shares.\?"):
        run(tmp_path, ["02"], {"share": [0.2]})
    with pytest.raises(ConfigError, match="Did you mean '02_memory_split'"):
        run(tmp_path, ["02_memory_spilt"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="no notebooks"):
        notebooks.notebook_files(None, tmp_path / "nowhere")


def test_the_notebooks_themselves_are_not_written_over(tmp_path):
    file = notebook(tmp_path / "nb", "01_a", "print(1)")
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="holds the notebooks themselves"):
        run_notebooks(None, None, None, tmp_path / "nb", folder=tmp_path / "nb")
    assert file.read_bytes() == before


def test_parameters_reach_a_notebook_progress_is_text_an_old_failure_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("PLOTLY_RENDERER", "browser")
    monkeypatch.delenv("TQDM_MININTERVAL", raising=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "01_a.failed.ipynb").write_text("of an earlier run")
    names = "PLOTLY_RENDERER", "TQDM_MININTERVAL", "WORKBENCH_BACKEND"
    shown = f"import os\nprint(*map(os.environ.get, {names}))"
    cells = "print(shares)", "from tqdm.auto import tqdm\nprint(tqdm)", shown
    notebook(tmp_path / "nb", "01_a", CHECK, *cells)
    given = {"environment": {"WORKBENCH_BACKEND": "ray"}}
    (done,) = run(tmp_path, ["01_a"], {"shares": [0.1, 0.2]}, **given)
    outputs = [o for c in nbformat.read(done, 4).cells for o in c.get("outputs", ())]
    texts = [output.text for output in outputs if "text" in output]
    assert texts[0].strip() == "[0.1, 0.2]"
    assert "tqdm.asyncio" in texts[1] or "tqdm.std" in texts[1]
    assert texts[2].split() == ["browser", "5", "ray"], "the user's choice wins"
    assert not {"TQDM_MININTERVAL", "WORKBENCH_BACKEND"} & os.environ.keys()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["01_a.ipynb"]


def test_a_failing_cell_is_an_error_with_the_notebook_and_never_a_finished_one(tmp_path):
    notebook(tmp_path / "nb", "01_a", "print('before')", "1 / 0")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "01_a.ipynb").write_text("of an earlier run")
    said = r"01_a.ipynb failed in cell In \[3\]: ZeroDivisionError"
    with pytest.raises(NotebookError, match=said):
        run(tmp_path, ["01_a"])
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["01_a.failed.ipynb"]


def test_images_are_drawn_after_the_last_notebook_whatever_became_of_it(
    tmp_path, monkeypatch, capsys
):
    """Of what was saved; why there are none is said once."""
    cell = "import os, pathlib\npathlib.Path(os.environ['WORKBENCH_DRAW_LATER'], 'a').touch()"
    notebook(tmp_path / "nb", "01_a", cell)
    notebook(tmp_path / "nb", "02_b", "1 / 0")
    seen = []

    def draw(waiting):
        seen.extend(file.name for file in waiting.iterdir())
        return [SavedFigure(name, tmp_path, (), "no browser here") for name in "ab"]

    monkeypatch.setattr(notebooks, "draw_waiting", draw)
    with pytest.raises(NotebookError):
        run(tmp_path, None)
    assert seen == ["a"] and "WORKBENCH_DRAW_LATER" not in os.environ
    assert capsys.readouterr().err.count("no browser here") == 1


def test_plain_papermill_refuses_an_unknown_parameter_too(tmp_path):
    """papermill itself only warns; the notebook's first cell refuses."""
    file = notebook(tmp_path / "nb", "01_a", CHECK)
    words = [sys.executable, "-m", "papermill", str(file), "out.ipynb", "--no-progress-bar"]
    done = subprocess.run(
        [*words, "-y", "profil: quick"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "Did you mean 'profile'?" in done.stderr


def test_cells_are_checked_only_where_papermill_put_one():
    check_parameters(["", "a = 1", "# Parameters\na = 2\n", "b = 3"])
    check_parameters(["", "a = 1", "b = 3"])
    with pytest.raises(ConfigError, match="no parameter 'b'"):
        check_parameters(["", "a = 1", "# Parameters\nb = 2\n"])


# -- pages --


def test_a_page_draws_its_figures_without_a_network(tmp_path):
    """An executed notebook with one figure; its progress bars are left out."""
    figure = prefix_hits(synthetic.hit_rows(), synthetic.PROVENANCE).to_plotly_json()
    notebook = nbformat.v4.new_notebook()
    cell = nbformat.v4.new_code_cell("fig", execution_count=1)
    data = nbformat.from_dict({notebooks.FIGURE: json.loads(pio.to_json(figure, validate=False))})
    cell.outputs = [nbformat.v4.new_output("display_data", data)]
    cell.outputs.append(nbformat.v4.new_output("stream", name="stderr", text="14 runs:  50%"))
    notebook.cells = [nbformat.v4.new_markdown_cell("# What is <hit>?\n\nText."), cell]
    nbformat.write(notebook, tmp_path / "05_prefix_cache.ipynb")
    page = notebooks.write_page(tmp_path / "05_prefix_cache.ipynb").read_text()
    assert (tmp_path / "plotly.min.js").is_file()
    assert "<title>What is &lt;hit&gt;?</title>" in page
    assert "Plotly.newPlot" in page and "14 runs" not in page
    assert re.findall('<script[^>]* src="([^"]*)"', page) == ["plotly.min.js"]
