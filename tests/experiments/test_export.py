"""Exported figures: complete, equal for equal input, honest without a browser, drawable again."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest

from tests.plots import synthetic
from workbench.errors import ConfigError, RunStoreError
from workbench.experiments import export
from workbench.experiments.export import print_version, save_figure, tex
from workbench.plots import FIGURES, memory_split

IMAGES = {".svg", ".pdf", ".tex"}
ENDINGS = {".html", ".parquet", ".json"} | IMAGES
PARAMETERS = {"profile": "quick", "n": 16}


def drawn():
    return memory_split(synthetic.split_rows(), synthetic.PROVENANCE)


@pytest.mark.browser
def test_all_six_files_are_written_and_equal_for_equal_figures(tmp_path, monkeypatch):
    """One whose images wait is drawn like another. The PDF is 150 mm wide, on one page, with
    embedded fonts and no title.
    """
    rows, measured = synthetic.split_rows(), {"git": {"commit": "c0ffee"}}
    measured |= {"versions": {"torch": "2.13"}, "machine": {"gpu": "H200"}}
    for folder in (tmp_path / "a", tmp_path / "b"):
        saved = save_figure(drawn(), rows, "memory_split", folder, PARAMETERS, measured=measured)
        assert set(saved.endings) == ENDINGS
        assert saved.problem is None
    with monkeypatch.context() as patch:
        (tmp_path / "later").mkdir()
        patch.setenv(export.DRAW_LATER, str(tmp_path / "later"))
        other = {**PARAMETERS, "n": 8}  # the record is the last one's, the images are drawn once
        for told in (other, PARAMETERS):
            how = drawn(), rows, "memory_split", tmp_path / "c", told
            assert set(save_figure(*how, measured=measured).endings) == ENDINGS - IMAGES
    (saved,) = export.draw_waiting(tmp_path / "later")
    assert set(saved.endings) == ENDINGS and saved.problem is None
    for a, b in zip(*(sorted(p.iterdir()) for p in (tmp_path / "a", tmp_path / "c")), strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    for a, b in zip(*(sorted(p.iterdir()) for p in (tmp_path / "a", tmp_path / "b")), strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "a" / "memory_split.parquet"), rows)
    pdf = (tmp_path / "a" / "memory_split.pdf").read_bytes()
    width = float(re.search(rb"MediaBox ?\[0 0 ([\d.]+)", pdf)[1]) / 72 * 25.4
    assert width == pytest.approx(150, abs=0.5)
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page/") in (0, 1)
    assert b"/FontFile" in pdf
    svg = (tmp_path / "a" / "memory_split.svg").read_text()
    assert "Throughput against the memory split" in svg
    paper = print_version(drawn())
    assert paper.layout.title.text is None
    assert not [a for a in paper.layout.annotations if a.name == "provenance"]
    assert paper.layout.template.layout.font.size == 12  # px, which is 9 pt


@pytest.mark.browser
def test_an_equal_figure_keeps_its_images_and_another_is_drawn_anew(tmp_path, monkeypatch):
    """A notebook that is run again starts no browser; a file that was changed is made again."""
    rows = synthetic.split_rows()
    files = [tmp_path / f"memory_split.{end}" for end in ("svg", "pdf")]
    save_figure(drawn(), rows, "memory_split", tmp_path, PARAMETERS)
    before = [file.read_bytes() for file in files]
    with monkeypatch.context() as patch:
        patch.setattr(export.Browser, "images", lambda *_: pytest.fail("drawn again"))
        assert len(save_figure(drawn(), rows, "memory_split", tmp_path, PARAMETERS).endings) == 6
    files[0].write_text("changed by hand")
    save_figure(drawn(), rows, "memory_split", tmp_path, PARAMETERS, width_mm=120)
    after = [file.read_bytes() for file in files]
    assert after[0] == before[0] and after[1] != before[1]


def test_without_a_browser_page_rows_and_record_are_written_and_the_rest_said(tmp_path, no_browser):
    (tmp_path / "memory_split.svg").write_text("old")
    saved = save_figure(drawn(), synthetic.split_rows(), "memory_split", tmp_path, PARAMETERS)
    assert set(saved.endings) == {".html", ".parquet", ".json"}
    assert "apt-get install chromium" in repr(saved)
    assert "Older than these rows: memory_split.svg" in repr(saved)
    record = json.loads((tmp_path / "memory_split.json").read_text())
    assert set(record) == {"parameters", "versions", "git", "machine"}
    assert record["parameters"]["profile"] == "quick"
    assert "measured tiny" in record["parameters"]["provenance"]
    assert record["machine"]["cores"] >= 1
    save_figure(drawn(), synthetic.split_rows(), "two", tmp_path, PARAMETERS)
    assert [p.name for p in tmp_path.glob("*.js")] == ["plotly.min.js"], "pages share it"
    page = (tmp_path / "two.html").read_text()
    assert '<script src="plotly.min.js">' in page and len(page) < 200_000
    assert "<figcaption>Throughput of the search" in page
    assert '"remove":["sendChartToCloud"]' in page


def test_what_the_processor_measured_names_no_gpu(tmp_path, no_browser, monkeypatch):
    monkeypatch.setattr(export, "machine_facts", lambda device: {"gpu": device})
    for given, told in (({}, "cpu"), ({"device": "h100"}, "cpu"), ({"device": "cuda:1"}, "cuda:1")):
        save_figure(drawn(), synthetic.split_rows(), "one", tmp_path, PARAMETERS | given)
        assert json.loads((tmp_path / "one.json").read_text())["machine"]["gpu"] == told


def test_nothing_is_left_aside_when_writing_fails(tmp_path, no_browser, monkeypatch):
    """Neither where rows cannot be written, nor where the disk is full at the second file."""
    rows = synthetic.split_rows()
    odd = rows.assign(odd=[object()] * len(rows))
    export.share_plotly_js(tmp_path)
    with pytest.raises(Exception, match="odd"):
        save_figure(drawn(), odd, "memory_split", tmp_path, PARAMETERS)
    full = Mock(side_effect=[9, OSError("disk full")])
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="disk full"):
        save_figure(drawn(), rows, "memory_split", tmp_path, PARAMETERS)
    assert full.call_count == 2
    assert {p.name for p in tmp_path.iterdir()} == {"plotly.min.js"}


def test_stored_rows_are_drawn_again_with_the_machine_they_were_measured_on(tmp_path, no_browser):
    measured = {"versions": {}, "git": {}, "machine": {"gpu": "H200"}}
    rows = synthetic.hit_rows()
    fig = FIGURES["prefix_hits"](rows, synthetic.PROVENANCE)
    save_figure(fig, rows, "prefix_hits", tmp_path, PARAMETERS, measured=measured)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert [saved.name for saved in export.replot(tmp_path, FIGURES)] == ["prefix_hits"]
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_figure_that_is_unknown_or_was_never_drawn_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'memory_split'"):
        export.replot(tmp_path, FIGURES, ["memory_spilt"])
    with pytest.raises(RunStoreError, match="No figure has stored rows"):
        export.replot(tmp_path / "none", FIGURES)
    with pytest.raises(RunStoreError, match="run `workbench figures` first"):
        export.replot(tmp_path, FIGURES, ["memory_split"])


def test_captions_compile():
    assert export.tex_escaped("95 % of a_b & {c} #1 $2") == "95 \\% of a\\_b \\& \\{c\\} \\#1 \\$2"
    assert export.tex_escaped("\\") == "\\textbackslash{}"
    assert export.tex_escaped("a ≤ 5 µs") == "a \\ensuremath{\\leq} 5 \\ensuremath{\\mu}s"


def test_a_float_is_at_print_size_with_a_short_title_and_what_was_measured_apart():
    """No width that overfills a narrower text; only one command brings the second paragraph."""
    text = tex(drawn(), "memory_split")
    assert "\\makebox[\\linewidth]{\\includegraphics{memory_split.pdf}}" in text
    assert "[{Throughput against the memory split}]{\\footnotesize Throughput of the search" in text
    assert text.startswith("\\providecommand{\\provenance}[1]{}\n")
    assert "Bars" in text.split("\\provenance{")[0]  # of the caption itself
    assert synthetic.PROVENANCE[:9] in text.split("\\provenance{")[-1]
    depth = [text[:at].count("{") - text[:at].count("}") for at in range(len(text))]
    assert min(depth) == 0 and text.count("{") == text.count("}")


def test_a_figure_is_drawn_at_a_text_width_with_other_labels_elsewhere(tmp_path, no_browser):
    """Letters stay 9 pt, what is stored stays as it is; a width that is no page's is refused."""
    assert print_version(drawn(), 100).layout.width == round(100 / 25.4 * 96)
    assert print_version(drawn(), 100).layout.template.layout.font.size == 12
    with pytest.raises(ConfigError, match="width_mm is 15; allowed: 60 to 400"):
        print_version(drawn(), 15)
    save_figure(drawn(), synthetic.split_rows(), "memory_split", tmp_path, PARAMETERS)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = {"to": tmp_path / "there", "change": lambda fig: fig.update_xaxes(title_text="Anteil")}
    export.replot(tmp_path, FIGURES, ["memory_split"], width_mm=126, **other)
    assert "Anteil" in (tmp_path / "there" / "memory_split.html").read_text()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


@pytest.mark.browser
def test_a_browser_draws_both_images_and_ends():
    browser = export.Browser()
    svg, pdf = browser.images(drawn(), export.print_version(drawn()))
    browser.close()
    assert not browser._thread.is_alive()
    assert svg.startswith(b"<svg")
    assert pdf.startswith(b"%PDF")
