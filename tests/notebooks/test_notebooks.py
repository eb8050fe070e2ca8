"""Committed notebooks keep the house rules; each runs from top to bottom with tiny parameters."""

import ast
import json
import re
from contextlib import contextmanager
from html import escape
from pathlib import Path
from types import SimpleNamespace

import nbformat
import papermill
import pytest
from IPython.display import Markdown
from jupyter_client import AsyncKernelManager
from jupyter_client.utils import run_sync
from nbclient import NotebookClient
from nbconvert.filters import markdown2html

from tests.widgets.conftest import HOSTILE
from workbench.experiments.notebooks import notebook_files, parameters_of, run_notebooks
from workbench.plots import FIGURES
from workbench.widgets.live import in_words
from workbench.widgets.live_search import Snapshot
from workbench.widgets.parts import as_markdown

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TINY = {"shares": [0.3, 0.5], "num_problems": 2, "seeds": [0], "n": 4, "max_depth": 3}
TINY |= {"llm_share": 0.3, "recording": "tiny-16-n4"}
TINY |= {"grid_seqs": [4, 16], "grid_tokens": [8, 128], "compared_seqs": [4], "block_sizes": [16]}
TINY |= {"queue_problems": 0, "depth_limits": [2], "budgets": [2.0], "kv_shares": [0.3]}
TINY |= {"beam_counts": [4], "writing_shares": [0.44], "writing_num_problems": 2}
ENGINE = {"model": "tiny-solver", "prompt_tokens": [8], "new_tokens": [8, 24], "stride": 4}
ENGINE |= {"batches": [1, 2], "counted_batches": [1, 4], "block_sizes": [1, 16], "block_batch": 2}
ENGINE |= {"lengths": [4, 12], "kv_memory": "8MiB", "repeats": 1}
MISSING = {"values": ["block size", "preempted requests"], "rounds": 4, "replays": 3}
MISSING |= {"asked": {"n": 4, "in_flight": 2, "max_num_seqs": 16}}
LOAD = {"model": "tiny-solver", "second": "dummy:tiny-solver", "prompt_tokens": 8, "rounds": 1}
LOAD |= {"new_tokens": 8, "clients": [1, 2], "offered": [0.5], "requests": 4, "shares": [0.4, 0.6]}
LOAD |= {"split_clients": [3, 1]}
TOUR = {"num_problems": 1, "n": 4, "max_depth": 3}
WHAT_IF = {"recording": "tiny-16-n4", "num_replays": 2, "llm_share": 0.2}
LIVE = {"num_problems": 1, "n": 4, "max_depth": 4, "every": 4}
DRAWN = {
    "01_memory_requirements": ("memory_parts", "kv_blocks"),
    "02_memory_split": ("memory_split", "critiques_replayed"),
    "03_block_occupancy": ("prm_blocks_030", "prm_blocks_050"),
    "04_batching": ("llm_batch", "prm_batch", "balance"),
    "05_prefix_cache": ("prefix_hits",),
    "06_cache_thrashing": ("thrashing", "lost_time", "miss_ratio", "miss_ratio_replayed"),
    "07_modifications": ("modifications",),
    "08_optimisation": ("optimisation", "optimisation_replayed"),
    "09_missing_values": ("sensitivity",),
    "11_strategies": ("search_strategies",),
    "12_serving": ("serving_load", "serving_split"),
    "13_engine": ("engine_cache", "engine_batch", "engine_memory"),
}


def code_cells(file):
    return [c for c in nbformat.read(file, as_version=4).cells if c.cell_type == "code"]


def test_the_notebooks_of_the_study_are_there():
    assert {"00_tour", *DRAWN} <= {file.stem for file in NOTEBOOKS}
    assert {name for names in DRAWN.values() for name in names} == set(FIGURES)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_a_notebook_is_prose_with_short_cells(file):
    cells = nbformat.read(file, as_version=4).cells
    code = code_cells(file)
    assert cells[0].cell_type == "markdown"
    assert "**Question" in cells[0].source
    assert len(code) <= 25
    assert "Markdown(" in cells[-1].source, "the last cell states the answer with its numbers"
    for cell in code:
        tree = ast.parse(cell.source)
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        assert all(n.end_lineno - n.lineno < 3 for n in functions)
        tagged = "tags" in cell.metadata
        assert tagged or len(cell.source.splitlines()) <= 20


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_parameters_come_first_and_are_independent_literals(file):
    cells = code_cells(file)
    assert cells[0].metadata.tags == ["parameters"]
    assert not any("tags" in cell.metadata for cell in cells[1:])
    for node in ast.parse(cells[0].source).body:
        assert isinstance(node, ast.Assign)
        ast.literal_eval(node.value)
    assert "check_parameters()" in cells[1].source
    assert parameters_of([file], ())[file]


TEXT = f"{HOSTILE} **a** [b](c) | `d` |"
FAILED = Snapshot("failed", 1.0, "", *[0] * 6, None, (), [], {"llm": 0, "prm": 0}, problem=TEXT)
NAMED = SimpleNamespace(config=SimpleNamespace(llm=TEXT, prm=TEXT), how="measured", shares=TEXT)
OF_NAMED = SimpleNamespace(pairs=[NAMED])


@pytest.mark.parametrize(
    ("name", "part", "given"),
    [
        ("live_memory_split", "in_words(seen)", {"in_words": in_words, "seen": FAILED}),
        ("01_memory_requirements", "ends =", {"study": OF_NAMED, "beyond": ()}),
    ],
)
def test_what_an_error_or_a_model_says_of_itself_is_shown_as_text(name, part, given):
    """No tag, emphasis, link or table in it works where a cell puts it into Markdown."""
    (cell,) = (c for c in code_cells(FOLDER / f"{name}.ipynb") if part in c.source)
    *lines, last = cell.source.splitlines()
    names = {"Markdown": Markdown, "as_markdown": as_markdown, **given}
    exec("\n".join(lines), names)
    assert escape(TEXT) in markdown2html(eval(last, names).data)


class KernelForAll(AsyncKernelManager):
    """Ends its clients' channels, which papermill leaves to whoever made the kernel."""

    clients = ()

    def client(self, **how):
        self.clients = (*self.clients, super().client(**how))
        return self.clients[-1]

    def end_clients(self):
        for each in self.clients:
            each.stop_channels()
        self.clients = ()


@contextmanager
def one_kernel(patch):
    """papermill runs notebooks in one kernel, emptied before each: to start it and to import torch
    would take longer than most cells do, sixteen times. What is imported stays: in kernels of their
    own run those of test_browser.py.
    """
    execute, manager = papermill.execute_notebook, KernelForAll()
    empty = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("get_ipython().reset()")])

    def in_it(*given, **how):
        try:
            if manager.has_kernel:
                NotebookClient(empty, km=manager).execute()
            return execute(*given, **how, km=manager)
        finally:
            manager.end_clients()

    patch.setattr(papermill, "execute_notebook", in_it)
    try:
        yield
    finally:
        run_sync(manager.shutdown_kernel)()


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Every notebook once, over one tiny sweep: the first computes it, the others read it."""
    place = tmp_path_factory.mktemp("study")
    folders = {"runs_dir": str(place / "runs"), "figures_folder": str(place / "figures")}
    stored = {"runs_dir": folders["runs_dir"]}
    tools = {"00_tour": TOUR, "what_if": WHAT_IF, "live_memory_split": LIVE, "10_explore": stored}
    with pytest.MonkeyPatch.context() as patch, one_kernel(patch):
        patch.setenv("BROWSER_PATH", str(place / "no-browser"))  # figures as HTML alone
        alone = {"12_serving": LOAD, "13_engine": ENGINE, "09_missing_values": MISSING}
        studies = [name for name in DRAWN if name not in alone]
        run_notebooks(studies, "quick", TINY | folders, place / "out")
        for name, given in alone.items():
            given = given | {"figures_folder": folders["figures_folder"]}
            run_notebooks([name], "quick", given, place / "out")
        for name, given in tools.items():
            run_notebooks([name], "quick", given, place / "out")  # which they have no use for
    return place


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_a_notebook_runs_from_top_to_bottom(executed, file):
    done = nbformat.read(executed / "out" / file.name, as_version=4)
    assert not [o for c in done.cells for o in c.get("outputs", ()) if o.output_type == "error"]
    last = done.cells[-1].outputs[-1]["data"]["text/markdown"]
    assert any(character.isdigit() for character in last), last
    runs = list((executed / "runs").glob("split-*"))
    assert len(runs) == 2, "all read one sweep: two shares, one seed"


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_the_study_is_written_with_its_rows_and_record(executed, name):
    figures = executed / "figures"
    for ending in (".html", ".parquet", ".json"):
        assert (figures / f"{name}{ending}").stat().st_size > 0
    record = json.loads((figures / f"{name}.json").read_text())
    if name in DRAWN["13_engine"]:
        assert record["parameters"]["batches"] == [1, 2]
        assert "tiny-solver (its own weights" in record["parameters"]["provenance"]
        return
    if name == "sensitivity":
        assert record["parameters"]["asked"]["n"] == 4 and record["parameters"]["rounds"] == 4
        return
    if name in DRAWN["12_serving"]:
        assert record["parameters"]["new_tokens"] == 8
        assert "greedy, streamed" in record["parameters"]["provenance"]
        return
    assert record["parameters"]["n"] == 4
    searched = name not in DRAWN["01_memory_requirements"]
    what = "2 problems, 1 seed" if searched else "both engines built at 2 shares"
    what = "16 problems, 1 seed" if name == "miss_ratio" else what  # of a recording
    assert what in record["parameters"]["provenance"]


@pytest.mark.slow
def test_a_dry_run_knows_every_replay_that_the_notebooks_make(executed, says):
    """What it would replay is what they replayed: of the same settings nothing is left."""
    words = [word for name, value in TINY.items() for word in ("-p", f"{name}={json.dumps(value)}")]
    words += ["--dry-run", "--profile", "quick", "--runs", str(executed / "runs")]
    names = [name for name in DRAWN if name[:2] not in ("09", "12", "13")]
    shown = " ".join(says("figures", *names, *words).split())
    left = re.findall(r"replayed[^:]*: (\d+) of (\d+) replays to do", shown)
    assert len(left) == 8
    assert all(todo == "0" and int(total) > 0 for todo, total in left), left


def test_the_runner_finds_notebooks_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [file.stem for file in notebook_files()] == [file.stem for file in NOTEBOOKS]
