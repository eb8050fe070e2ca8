"""JupyterLab on loopback and a browser without a window that opens notebooks in it, for tests."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import nbformat

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
