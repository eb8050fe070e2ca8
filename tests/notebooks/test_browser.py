"""Every notebook with a widget, in JupyterLab and a real browser: run all, move, see it change."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import pytest

from tests.conftest import find_browser
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
QUIET = {  # a news toast would lie over what is clicked; cells out of sight would not be there
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}
NOT_OURS = ("favicon", "/api/", "Failed to load resource", "service-worker", "webgl", "WebGL")
"""What JupyterLab and the browser complain about by themselves."""
DONE = """() => {
    const panel = window.jupyterapp.shell.currentWidget;
    const kernel = panel?.sessionContext?.session?.kernel;
    const cells = panel?.content?.model?.toJSON().cells.filter(c => c.cell_type === "code") || [];
    const failed = cells.some(c => c.outputs.some(o => o.output_type === "error"));
    const all = cells.length && cells.every(c => c.execution_count !== null);
    return kernel?.status === "idle" && (all || failed);
}"""
READY = """() => {
    const context = window.jupyterapp?.shell?.currentWidget?.sessionContext;
    return context?.isReady && context.session?.kernel?.status === "idle";
}"""
RUN = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
ERRORS = """() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells
    .flatMap(c => c.outputs || []).filter(o => o.output_type === "error")
    .map(o => `${o.ename}: ${o.evalue}`)"""
pytestmark = [pytest.mark.browser, pytest.mark.slow]


# -- JupyterLab on loopback, and a browser without a window that opens notebooks in it --


def with_parameters(notebook, parameters, place):
    """A copy of a notebook whose parameters cell assigns these instead of its own."""
    book = nbformat.read(notebook, as_version=4)
    cell = next(c for c in book.cells if "parameters" in c.metadata.get("tags", ()))
    given = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    cell.source = f"{cell.source}\n{given}"
    nbformat.write(book, place / notebook.name)


@contextmanager
def lab_server(folder):
    """JupyterLab over `folder`, its settings and state beneath it; answers the address."""
    state = folder / ".lab"
    for plugin, settings in QUIET.items():
        file = state / "settings" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    homes = {
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
    }
    no_images = {"BROWSER_PATH": str(state / "no-browser")}  # figures are written as HTML alone
    variables = {name: str(state / place) for name, place in homes.items()} | no_images
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--IdentityProvider.token=here"]
    command += ["--LabApp.expose_app_in_browser=True", "--ServerApp.quit_button=False"]
    command += [f"--ServerApp.root_dir={folder}"]
    with (state / "log").open("wb") as log:
        server = subprocess.Popen(
            command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield _address(server, state)
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)
        server.kill()


def _address(server, state, seconds=300):
    """Where the server listens, once its own note says so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        for note in (state / "runtime").glob("jpserver-*.json"):
            with suppress(ValueError):
                return json.loads(note.read_text())["url"].rstrip("/")
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{(state / 'log').read_text()[-2000:]}")


class Notebook:
    """A notebook open in a page: run to its end, then looked at and taken hold of."""

    def __init__(self, page, address, name, seconds):
        self.page, self.errors = page, []
        page.set_default_timeout(1000 * seconds)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._listen)
        page.goto(f"{address}/lab/tree/{name}.ipynb?token=here&reset")
        page.wait_for_function(READY)
        page.evaluate(RUN)
        page.wait_for_function(DONE)
        self.failures = page.evaluate(ERRORS)

    def _listen(self, message):
        if message.type == "error" and not any(word in message.text for word in NOT_OURS):
            self.errors.append(message.text)

    def output(self, text):
        """The last output with a widget that shows this text."""
        found = self.page.locator(".jp-OutputArea-output", has_text=text)
        found.last.scroll_into_view_if_needed()
        return found.last

    def drawn(self, output):
        """What its figures show, as SVG."""
        return output.locator(".js-plotly-plot .svg-container").evaluate_all(
            "all => all.map(each => each.innerHTML).join()"
        )

    def wait_for_change(self, output, before):
        """Until its figures show something else; whether they ever do."""
        return self.wait(lambda: self.drawn(output) != before)

    def wait(self, fulfilled, seconds=120):
        """Until a condition holds; whether it does."""
        end = time.monotonic() + seconds
        while not (done := fulfilled()) and time.monotonic() < end:
            self.page.wait_for_timeout(100)
        return done

    def drag(self, row, by_px):
        """Drag the slider of a control by so many pixels, as a hand would."""
        handle = row.locator(".noUi-handle").first
        handle.scroll_into_view_if_needed()
        box = handle.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        for part in range(1, 6):
            self.page.mouse.move(x + by_px * part / 5, y)
        self.page.mouse.up()

    def click_marker(self, output, number):
        """Click one of the first figure's markers, by its place among them."""
        marker = output.locator(".js-plotly-plot .points path").nth(number)
        marker.scroll_into_view_if_needed()
        box = marker.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.page.wait_for_timeout(200)  # plotly clicks what it knows to be hovered
        self.page.mouse.down()
        self.page.mouse.up()


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
