"""Every notebook with a widget, in JupyterLab and a real browser: run all, move, see it change."""

import os
from pathlib import Path

import pytest

from tests.conftest import find_browser
from tests.notebooks.lab import Notebook, lab_server, with_parameters
from workbench.experiments.plans import sweep_config
from workbench.experiments.study import run_sweep

FOLDER = Path(__file__).parents[2] / "notebooks"
SECONDS = 600  # for one notebook, on a busy machine
SWEEP = {"shares": [0.3, 0.5], "num_problems": 2, "seeds": [0], "n": 4, "max_depth": 3}
TINY = {**SWEEP, "profile": "quick"}
TINY |= {"writing_shares": [0.44], "writing_num_problems": 2}  # else 48 at four shares
GIVEN = {
    "live_memory_split": {"num_problems": 9, "n": 4, "max_depth": 12, "moves": [0.2], "every": 5},
    "what_if": {"recording": "tiny-16-n4", "num_replays": 7, "llm_share": 0.2},
    "02_memory_split": TINY,
    "10_explore": {"llm_share": 0.3},
}
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def open_notebook(tmp_path_factory):
    """Opens a notebook with tiny parameters and runs it; one server and one browser for all."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    place = tmp_path_factory.mktemp("lab")
    folders = {"runs_dir": str(place / "runs"), "figures_folder": str(place / "figures")}
    run_sweep(sweep_config("quick", **SWEEP), folders["runs_dir"])
    for name, given in GIVEN.items():
        known = (FOLDER / f"{name}.ipynb").read_text()
        fitting = {key: value for key, value in folders.items() if f"{key} = " in known}
        own = {key: value for key, value in given.items() if f"{key} = " in known}
        with_parameters(FOLDER / f"{name}.ipynb", own | fitting, place)
    with lab_server(place) as address, playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=find_browser())
        context = chromium.new_context(viewport={"width": 1280, "height": 1000})
        yield lambda name: Notebook(context.new_page(), address, name, SECONDS)
        chromium.close()


def shot(book, name):
    """A picture of the page, where a person asked for some."""
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        book.page.screenshot(path=Path(folder) / f"{name}.png")


def assert_sound(book):
    """No cell failed, the console is clean, and no button uploads a figure."""
    assert book.failures == []
    assert book.errors == []
    assert book.page.locator('[data-title*="Share"], [data-title*="cloud"]').count() == 0


def test_the_slider_of_a_measured_figure_moves_it(open_notebook):
    """Two measured shares; from the lower one to the upper."""
    book = open_notebook("02_memory_split")
    output = book.output("or type")
    row = output.locator(".widget-hbox", has_text="share").first
    book.drag(row, -200)
    book.page.wait_for_timeout(1000)
    before = book.drawn(output)
    book.drag(row, 200)
    assert book.wait_for_change(output, before)
    shot(book, "02_memory_split")
    assert_sound(book)


def test_the_live_search_is_paused_split_and_stopped_by_hand(open_notebook):
    """Paused before it starts, for it lasts a second; split while it waits; then on, to an end."""
    book = open_notebook("live_memory_split")
    output = book.output("LLM share of the arena")
    output.get_by_role("button", name="pause").click()
    output.get_by_role("button", name="start").click()
    assert book.wait(lambda: "paused after" in output.inner_text()), output.inner_text()
    book.drag(output, 60)
    assert book.wait(lambda: ": reached" in output.inner_text() or ": later" in output.inner_text())
    shot(book, "live_memory_split")
    before = book.drawn(output)
    output.get_by_role("button", name="resume").click()
    assert book.wait_for_change(output, before)
    output.get_by_role("button", name="stop").click()
    ends = ("stopped after", "finished after")
    assert book.wait(lambda: any(words in output.inner_text() for words in ends))
    assert_sound(book)


def test_what_if_answers_while_its_slider_moves(open_notebook):
    """Interpolated at once, an exact replay after it."""
    book = open_notebook("what_if")
    output = book.output("or type")
    assert book.wait(lambda: "Exact." in output.inner_text()), output.inner_text()
    row = output.locator(".widget-hbox", has_text="share").first
    before = book.drawn(output)
    book.drag(row, 15)  # some shares on, all between replayed ones
    assert book.wait_for_change(output, before)
    assert book.wait(lambda: "Exact." in output.inner_text()), output.inner_text()
    shot(book, "what_if")
    assert_sound(book)


def test_a_tree_is_clicked_and_a_figure_of_stored_runs_follows_its_slider(open_notebook):
    """A node's text, another figure and share, a second pick with a table of what differs."""
    book = open_notebook("10_explore")
    tree = book.output("node, or click one")
    text = tree.locator("pre").first
    before = text.inner_text()
    book.click_marker(tree, 0)
    assert book.wait(lambda: text.inner_text() != before)
    shot(book, "10_tree")
    explorer = book.output("B, over A or beside it")
    explorer.locator("select").nth(2).select_option("prm_blocks")
    assert book.wait(lambda: "scheduling step" in explorer.inner_text())
    before = book.drawn(explorer)
    book.drag(explorer.locator(".widget-hbox", has_text="LLM share").first, 200)
    assert book.wait_for_change(explorer, before)
    second = explorer.locator("select").nth(1)  # other notebooks may have stored replays there
    names = second.locator("option").all_inner_texts()
    second.select_option(label=next(name for name in names if name.startswith("split-")))
    assert book.wait(lambda: "llm_hit_rate" in explorer.inner_text())
    shot(book, "10_explorer")
    assert_sound(book)
