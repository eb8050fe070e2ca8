"""The report: works without a network, shows every claim, a sentence beside every figure."""

import json
import re

import nbformat
import pytest

from tests.plots import synthetic
from workbench.experiments.claims import Claim
from workbench.experiments.report import FIGURE, write_report
from workbench.plots import prefix_hits

FACE = "measured tiny\non a CPU"
CLAIMS = [
    Claim("C5", "Hit rates are <high>", "depends on", "81 % [79, 83]", "prefix_hits"),
    Claim("C6", "Thrashing is rare", "fails", "176 per 1,000", "thrashing"),
]


@pytest.fixture
def reports(tmp_path):
    """An executed notebook with one figure, reported."""
    figure = prefix_hits(synthetic.hit_rows(), synthetic.FACE).to_plotly_json()
    notebook = nbformat.v4.new_notebook()
    cell = nbformat.v4.new_code_cell("fig", execution_count=1)
    data = nbformat.from_dict({FIGURE: _plain(figure)})
    cell.outputs = [nbformat.v4.new_output("display_data", data)]
    notebook.cells = [nbformat.v4.new_markdown_cell("# Title"), cell]
    folder = tmp_path / "notebooks" / "quick"
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / "05_prefix_cache.ipynb")
    write_report([folder / "05_prefix_cache.ipynb"], CLAIMS, FACE, tmp_path, tmp_path / "figures")
    return tmp_path


def _plain(figure):
    import plotly.io as pio

    return json.loads(pio.to_json(figure, validate=False))


def test_the_index_links_the_notebooks_and_judges_the_claims(reports):
    index = (reports / "index.html").read_text()
    assert 'href="notebooks/quick/05_prefix_cache.html"' in index
    assert "Hit rates are &lt;high&gt;" in index
    assert "class='verdict depends'>depends on" in index
    assert 'href="figures/thrashing.html"' in index, "where this profile's figures lie"
    assert "measured tiny<br>on a CPU" in index


def test_a_page_draws_its_figures_without_a_network(reports):
    page = (reports / "notebooks" / "quick" / "05_prefix_cache.html").read_text()
    assert (reports / "notebooks" / "quick" / "plotly.min.js").is_file()
    assert '<script src="plotly.min.js">' in page
    assert "Plotly.newPlot" in page
    assert re.findall('<script[^>]* src="([^"]*)"', page) == ["plotly.min.js"]
    assert '"remove":["sendChartToCloud"]' in page


def test_every_figure_of_a_page_has_its_sentence(reports):
    page = (reports / "notebooks" / "quick" / "05_prefix_cache.html").read_text()
    assert page.count("<figcaption>Share of queried prompt tokens") == 1
