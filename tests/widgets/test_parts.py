"""The parts every widget is made of: labels, typed twins, text to copy, figures to save."""

import shlex
from html import escape

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
import pytest
import yaml
from nbconvert.filters import markdown2html

from tests.conftest import find_browser
from tests.widgets.conftest import HOSTILE
from workbench.errors import ConfigError
from workbench.experiments.export import document
from workbench.experiments.export import drawing as drawing_of
from workbench.experiments.runs import Comparison
from workbench.experiments.statistics import Noise
from workbench.search.result import SHOWN, SearchResult
from workbench.widgets import parts


def test_a_number_slider_has_a_label_and_a_typed_twin_and_observers_hear_once():
    """All start at the option nearest to what is asked; one move is one call."""
    share = parts.NumberSlider("LLM share of total memory", [0.2, 0.1, 0.5], 0.24, "{:.2f}")
    label, slider, typed, _, said = share.children
    assert label.value == "LLM share of total memory"
    assert slider.description and typed.description
    assert share.value == slider.value == typed.value == 0.2
    assert [text for text, _ in slider.options] == ["0.10", "0.20", "0.50"]
    heard = []
    slider.observe(lambda change: heard.append(change["new"]), names="value")
    slider.value = 0.5
    assert (typed.value, heard) == (0.5, [0.5])
    for written, nearest, moves in ((0.13, 0.1, 2), (0.14, 0.1, 2), (99, 0.5, 3)):
        typed.value = written
        assert (share.value, typed.value, len(heard)) == (nearest, nearest, moves)
        assert f"{written:g} " in said.text and f"{nearest:.2f} is taken, the nearest" in said.text
    slider.value = 0.2
    assert said.text == "" and said.layout.display == "none"


def test_where_every_number_can_be_it_is_taken_as_typed_and_one_outside_is_said():
    """Guards a typed 80 that becomes 76.1 because no step of the slider is there."""
    size = parts.NumberSlider("memory", (20, 256), 64, "{:,.1f}", "MiB", 1.0)
    size.typed.value = 80.25
    assert (size.value, size.slider.value, size.said.text) == (80.25, 80.25, "")
    size.typed.value = 300
    assert size.value == size.typed.value == 256
    assert size.said.text == "300 lies outside 20.0 to 256.0; 256.0 MiB is taken, the nearest."


def test_a_command_gives_its_parameters_as_yaml():
    """Every value comes back with its type; names with spaces are quoted for a shell."""
    given = {"llm_share": 0.3, "device": "my h100.json", "n": 16, "models": None}
    words = shlex.split(parts.papermill_command("what_if", given))
    assert words[:3] == ["papermill", "notebooks/what_if.ipynb", "what_if.run.ipynb"]
    found = [yaml.safe_load(word) for word in words[4::2]]
    assert {k: v for pair in found for k, v in pair.items()} == given


def drawing(place, shares=(1, 2)):
    fig = go.Figure(go.Scatter(x=list(shares), y=[3, 4], marker={"color": "red"}))
    fig.update_layout(title_text=f"at {place}")
    if place == 1:
        fig.data[0].opacity = 0.5
    return parts.Drawing(fig, pd.DataFrame({"x": shares}), f"it stands on {place}", {"at": place})


@pytest.fixture
def view():
    slider = ipywidgets.IntSlider(1, 0, 9)

    def draw():
        if slider.value == 9:
            raise ConfigError("nine cannot be drawn")
        found = drawing(slider.value, (slider.value, 6))
        if slider.value == 8:
            found.figure.add_bar(y=[1])
        return found

    view = parts.FigureView("02_memory_split", [slider], lambda: {"name": draw()}, {"n": 4})
    slider.observe(view.show, names="value")
    return view


def control(view, name):
    """A button or field of the view by its description, and its row."""
    rows = [row for row in view.box.children if hasattr(row, "children")]
    found = [(each, row) for row in rows for each in row.children if hasattr(each, "description")]
    return next((each, row) for each, row in found if each.description == name)


def press(view, name):
    """Click a button of the view; returns what it says."""
    push, row = control(view, name)
    push.click()
    return row.children[-1].text


def test_a_figure_its_words_and_its_command_follow_the_controls(view):
    """The same figure is changed, but for what a user set in it; another is shown where traces
    differ; pinned words stay.
    """
    (before,) = view.figures
    assert press(view, "pin for comparison") == "pinned"
    before.data[0].visible = "legendonly"  # as a click on its name makes it
    view.box.children[0].value = 5
    assert view.figures == [before]
    assert before.data[0].opacity is None, "what the new figure lacks is gone"
    assert before.data[0].visible == "legendonly", "what the user set stays"
    assert before.layout.title.text == "at 5" and list(before.data[0].x) == [5, 6]
    assert view.words.text == "it stands on 5"
    assert view.pinned.text == "Pinned: it stands on 1"
    assert view.copy.value.endswith("-y 'n: 4' -y 'at: 5'")
    view.box.children[0].value = 8
    (after,) = view.figures
    assert [trace.type for trace in after.data] == ["scatter", "bar"] and len(before.data) == 1


def test_where_no_widget_can_be_shown_a_sentence_stands_in(open_front_end):
    made = "02_memory_split", [], lambda: {"name": drawing(1)}
    assert parts.FigureView.shown(*made, {}) == parts.NOT_LIVE
    open_front_end()
    assert parts.FigureView.shown(*made, parameters={}).children


def test_what_cannot_be_drawn_is_said_and_the_next_move_draws_again(view):
    """A named error stands in the words' place, and that the figure is not of this place."""
    view.box.children[0].value = 9
    assert view.words.text.startswith("ConfigError: nine cannot be drawn (Drawn below is the last")
    assert view.copy.value == "", "no command of another place"
    assert "there is nothing to pin" in press(view, "pin for comparison")
    view.box.children[0].value = 2
    assert view.words.text == "it stands on 2"
    assert view.figures[0].layout.title.text == "at 2"


def test_text_that_looks_like_html_is_shown_as_text(view):
    """Words, errors, tables, Markdown and what a button says: no tag in them reaches the page."""

    def fail():
        raise ConfigError(HOSTILE)

    said, table = parts.HtmlText(), parts.HtmlText()
    said.say(HOSTILE, HOSTILE)
    table.say("", tables=[pd.DataFrame({HOSTILE: [HOSTILE]})])
    pressed = [parts.button("b", action).children for action in (lambda: HOSTILE, fail)]
    for push, _ in pressed:
        push.click()
    view.words.say(HOSTILE)
    view.pin()
    texts = [said, table, view.words, view.pinned, *(shown for _, shown in pressed)]
    for each in texts:
        assert "&lt;img" in each.value and "<img" not in each.value
    page = markdown2html(parts.as_markdown(f"{HOSTILE} *a* [b](javascript:c) `d` $e$"))
    assert f"{escape(HOSTILE)} *a* [b](javascript:c) `d` $e$" in page


@pytest.mark.browser
def test_no_text_is_run_by_a_browser():
    """Of words, tables, Markdown, figures, saved pages and results; bare, it is run."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    said, failed, table = parts.HtmlText(), parts.HtmlText(), parts.HtmlText()
    said.say(HOSTILE, HOSTILE)
    failed.say_error(ConfigError(HOSTILE), HOSTILE)
    table.say("", tables=[pd.DataFrame({HOSTILE: [HOSTILE]})])
    fig = go.Figure(go.Bar(x=[HOSTILE], y=[1], name=HOSTILE, text=HOSTILE, hovertext=HOSTILE))
    fig.update_layout(title=HOSTILE, xaxis_title=HOSTILE, legend_title=HOSTILE, showlegend=True)
    fig.add_annotation(text=HOSTILE, hovertext=HOSTILE)
    pages = [each.value for each in (said, failed, table)]
    fig.update_layout(meta={"caption": HOSTILE, "provenance": HOSTILE})
    saved = document(HOSTILE, fig.to_html(full_html=False) + drawing_of(fig, "figure"))
    rows = pd.DataFrame({key: [HOSTILE] for key in SHOWN} | {"correct": [True]})
    result = SearchResult(rows, rows, rows, HOSTILE, None, "weighted")
    told, none = pd.DataFrame({key: [HOSTILE] for key in ("name", "a", "b")}), pd.DataFrame()
    found = Comparison(told, none, none, True, HOSTILE, False, Noise(), (HOSTILE,))
    pages += [markdown2html(parts.as_markdown(HOSTILE)), fig.to_html(), saved]
    pages += [result._repr_html_(), found._repr_html_(), HOSTILE]
    heard, found = [], []
    with sync.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser())
        page = browser.new_page()
        page.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
        for content in pages:
            page.set_content(content, wait_until="load")
            page.wait_for_timeout(200)
            found.append(len(heard))
        browser.close()
    assert found == [*[0] * (len(pages) - 1), 1]


def test_figures_are_saved_where_the_user_says_and_the_place_is_told(tmp_path, no_browser):
    """Rows and record beside the drawing; an empty folder name is said beside the button."""
    place = tmp_path / "mine"
    draw = {"what_if_share": drawing(7), "what_if_blocks": drawing(8)}
    theirs = {"machine": {"cpu": "theirs"}, "git": {}, "versions": {}}
    view = parts.FigureView("what_if", [], lambda: draw, {}, measured=theirs)
    assert len(view.figures) == 2
    control(view, "folder")[0].value = str(place)
    assert str(place) in press(view, "save as figure")
    assert (place / "what_if_share.html").is_file()
    told = (place / "what_if_blocks.json").read_text()
    assert '"at": 8' in told and '"cpu": "theirs"' in told
    assert (place / "what_if_share.parquet").is_file()
    control(view, "folder")[0].value = " "
    assert press(view, "save as figure").startswith("ConfigError: No folder is given")
