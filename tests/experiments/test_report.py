"""The report is what the committed rows say, loads nothing, and each number has a macro."""

import re
import shutil
import subprocess
from pathlib import Path

import jinja2.meta
import pytest

from workbench.experiments import report
from workbench.plots import FIGURES

ROOT = Path(__file__).parents[2]
FOLDER, REPORTS = ROOT / "figures", ROOT / "reports"
ENGINES = ("tectonic", "pdflatex", "lualatex", "xelatex")


@pytest.fixture(scope="module")
def drawn() -> report.Drawn:
    return report.Drawn(FOLDER)


def test_what_is_committed_is_what_the_rows_say(drawn) -> None:
    """The page, its numbers and its tables: `workbench figures --replot` writes them anew."""
    numbers = report.named_numbers(drawn)
    assert (REPORTS / "study.html").read_text() == report.page(drawn, numbers)
    assert (REPORTS / "numbers.tex").read_text() == report.numbers_tex(numbers)
    tables = report.tables(drawn)
    others = {"setting", "memory_parts", "ablation", "missing_values"}
    assert set(tables) == {"models", "claims", *others}
    for name, table in tables.items():
        assert (REPORTS / f"{name}.tex").read_text() == report.booktabs(name, table)


def test_every_number_of_the_prose_is_a_macro_and_every_macro_is_quoted(drawn) -> None:
    """No part is left out of the committed report, and no number stands in it by hand."""
    numbers = report.named_numbers(drawn)
    assert set(numbers) == set(report.PARTS)
    names = [name for own in numbers.values() for name in own]
    parsed = jinja2.Environment().parse(report.TEMPLATE.read_text())
    quoted = jinja2.meta.find_undeclared_variables(parsed)
    others = {"told", "figure", "table", "verdict", "provenance"}
    assert sorted(names) == sorted(quoted - others)
    defined = re.findall(r"\\newcommand\{\\(\w+)\}", (REPORTS / "numbers.tex").read_text())
    assert sorted(defined) == sorted(map(report.macro, names))
    assert all(name.isascii() and name.isalpha() for name in defined), "TeX reads letters alone"


def test_the_page_needs_nothing_beside_it_and_shows_every_figure_it_names(drawn) -> None:
    page = (REPORTS / "study.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]{0,40})', page) + re.findall(r"url\(", page)
    assert loaded and all(each.startswith(("data:image/svg+xml;base64,", "#")) for each in loaded)
    assert "<script" not in page and "<link" not in page
    shown = re.findall(r'<figure id="(\w+)">', page)
    asked = re.findall(r'figure\("(\w+)"\)', report.TEMPLATE.read_text())
    assert shown == asked and set(shown) <= set(FIGURES)
    for target in re.findall(r'href="#(\w+)"', page):
        assert f'id="{target}"' in page


def test_a_stranger_finds_the_six_answers_on_the_first_screen() -> None:
    """Where it peaks, how sure that is, why it falls, thrashing, gains, and what it depends on."""
    page = (REPORTS / "study.html").read_text()
    box = page[page.index('<div class="box">') : page.index("</div>")]
    for question in ("Where does throughput peak?", "How sure is that?", "Why does it fall at both",
                     "Is thrashing rare", "What do the optimisations gain?",
                     "What depends on an assumption?"):  # fmt: skip
        answer = box.partition(question)[2].partition("</li>")[0]
        assert re.search(r"\d", answer), question


def test_a_part_whose_figures_are_not_drawn_is_left_out(tmp_path) -> None:
    """As where few notebooks ran; the page lies beside its figures."""
    for name in ("memory_split", "lost_time"):
        for ending in (".parquet", ".json", ".html"):
            shutil.copy(FOLDER / f"{name}{ending}", tmp_path)
    page = report.write_report(tmp_path)
    assert page == tmp_path / "study.html"
    text = page.read_text()
    assert "There is a plateau from" in text and "a study of its own, notebook 08" in text
    assert "<figure" not in text, "there are no images: no browser was there"


def test_a_small_article_of_all_numbers_and_tables_compiles(tmp_path, drawn) -> None:
    """With whatever TeX is there; braces and special characters are checked in any case."""
    files = [*(f"{name}.tex" for name in report.tables(drawn)), "numbers.tex"]
    for name in files:
        text = (REPORTS / name).read_text()
        bare = re.sub(r"\\[\\{}%&$#_]", "", text)
        assert bare.count("{") == bare.count("}"), name
        assert not re.search(r"[$#~^]", re.sub(r"^%.*$", "", bare, flags=re.M)), name
        shutil.copy(REPORTS / name, tmp_path)
    macros = [report.macro(n) for own in report.named_numbers(drawn).values() for n in own]
    lines = [r"\documentclass[11pt]{article}", r"\usepackage{booktabs}", r"\input{numbers}"]
    lines += [r"\begin{document}", *(f"\\{name}{{}}," for name in macros)]
    lines += [f"\n\\noindent\\input{{{name}}}" for name in files[:-1]] + [r"\end{document}"]
    (tmp_path / "article.tex").write_text("\n".join(lines))
    engine = next(filter(shutil.which, ENGINES), None)
    if engine is None:
        pytest.skip(f"no TeX is here ({', '.join(ENGINES)}): the article was not compiled")
    how = [] if engine == "tectonic" else ["-interaction=nonstopmode", "-halt-on-error"]
    done = subprocess.run([engine, *how, "article.tex"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
