"""The parts every widget is made of: labels, typed twins, text to copy, figures to save."""

import shlex

import comm
import pandas as pd
import plotly.graph_objects as go
import pytest
import yaml
from comm.base_comm import BaseComm

from workbench.errors import ConfigError
from workbench.widgets import parts
from workbench.widgets.commands import papermill_command
from workbench.widgets.plot import PlotWidget, without_reports


@pytest.fixture
def dial():
    return parts.Dial("LLM share of total memory", [0.1, 0.2, 0.5], 0.24, "{:.2f}")


def test_a_dial_has_a_label_a_slider_and_a_typed_twin(dial):
    """The three are shown, and start at the option nearest to the value asked for."""
    label, slider, typed = dial.box.children
    assert label.value == "LLM share of total memory"
    assert slider.description and typed.description
    assert dial.value == slider.value == typed.value == 0.2
    assert [text for text, _ in slider.options] == ["0.10", "0.20", "0.50"]


def test_either_twin_moves_the_other_and_observers_hear_once(dial):
    """A value between two options becomes the nearest; one move is one call."""
    heard = []
    dial.observe(heard.append)
    dial.slider.value = 0.5
    assert (dial.typed.value, heard) == (0.5, [0.5])
    dial.typed.value = 0.13
    assert (dial.slider.value, dial.typed.value, heard) == (0.1, 0.1, [0.5, 0.1])
    dial.typed.value = 99
    assert (dial.value, dial.typed.value, heard[-1]) == (0.5, 0.5, 0.5)


def test_other_options_keep_the_nearest_value(dial):
    """Observers hear only where the value had to change."""
    heard = []
    dial.observe(heard.append)
    dial.offer([0.2, 0.3])
    assert (dial.value, heard) == (0.2, [])
    dial.offer([0.7, 0.6])
    assert (dial.value, dial.typed.value, heard) == (0.6, 0.6, [0.6])
    dial.slider.value = 0.7
    assert dial.typed.value == 0.7


def test_a_choice_offers_what_there_is():
    """What was chosen stays where it still can be, else the first is taken."""
    choice, heard = parts.Choice("beams (n)", [4, 16], 16), []
    choice.observe(heard.append)
    choice.offer([8, 16])
    assert (choice.value, heard) == (16, [])
    choice.offer([64])
    assert (choice.value, heard) == (64, [64])


def test_a_command_gives_its_parameters_as_yaml():
    """Every value comes back with its type; names with spaces are quoted for a shell."""
    given = {"llm_share": 0.3, "device": "my h100.json", "n": 16, "models": None}
    command = papermill_command("what_if", given)
    words = shlex.split(command)
    assert words[:3] == ["papermill", "notebooks/what_if.ipynb", "what_if.run.ipynb"]
    found = [yaml.safe_load(word) for word in words[4::2]]
    assert {k: v for pair in found for k, v in pair.items()} == given


def test_the_copied_text_is_shown():
    """The text is a trait of the widget, so that it can be changed and read."""
    line = parts.CopyText(text="papermill x")
    assert line.text == "papermill x"
    assert "papermill" in line.name


def test_figures_are_saved_where_the_user_says_and_the_place_is_told(tmp_path, monkeypatch):
    """Through the project's save_figure, rows and record beside the drawing."""
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))  # no image: that takes seconds
    fig, rows = go.Figure(go.Scatter(x=[1], y=[2])), pd.DataFrame({"x": [1], "y": [2]})
    place = tmp_path / "mine"
    box = parts.save_box(lambda: {"what_if_share": (fig, rows, {"llm_share": 0.3})}, str(place))
    box.children[1].click()
    said = box.children[2].value
    assert str(place) in said
    assert (place / "what_if_share.html").is_file()
    assert "0.3" in (place / "what_if_share.json").read_text()


def test_what_cannot_be_saved_is_said_beside_the_button():
    """An empty folder name is a named error in words, not an exception in a log."""
    with pytest.raises(ConfigError, match="folder"):
        parts.save_figures({}, "  ")
    box = parts.save_box(dict, "")
    box.children[1].click()
    assert "ConfigError" in box.children[2].value


class Told(BaseComm):
    """A channel that keeps what a browser would be told."""

    def publish_msg(self, msg_type, data=None, **_):
        if not hasattr(self, "told"):
            self.told = []
        self.told.append((msg_type, data))


@pytest.fixture
def told(monkeypatch):
    """Messages to the browser of the widget opened last."""
    opened = []

    def create(**given):
        opened.append(Told(**given))
        return opened[-1]

    monkeypatch.setattr(comm, "create_comm", create)
    return lambda: opened[-1].told


def test_a_figure_reaches_the_browser_whole(told):
    """Its first message has data and layout already, and nothing follows while it draws."""
    fig = PlotWidget(go.Figure(go.Scatter(x=[1, 2], y=[3, 9]), {"title": {"text": "whole"}}))
    kind, first = told()[0]
    assert kind == "comm_open"
    assert first["state"]["_widget_data"][0]["y"] == [3, 9]
    assert first["state"]["_widget_layout"]["title"]["text"] == "whole"
    before = len(told())
    fig.data[0].y = [9, 3]
    fig.layout.title.text = "changed"
    with fig.batch_update():
        fig.data[0].x = [5, 6]
    assert not [state for _, data in told()[before:] for state in data["state"].values() if state]
    fig._js2py_traceDeltas = {"trace_deltas": [], "trace_edit_id": 0}
    before = len(told())
    fig.data[0].y = [4, 4]
    assert [d["state"] for _, d in told()[before:] if d["state"].get("_py2js_restyle")]


def test_a_figure_that_was_drawn_late_catches_up_once(told):
    """Of what changed while the browser loaded, the latest is sent once it has drawn."""
    fig = PlotWidget(go.Figure([go.Scatter(x=[1], y=[3]), go.Bar(x=[1], y=[2])]))
    fig.data[1].y = [6]
    with fig.batch_update():
        fig.data[1].y = [7]
        fig.layout.xaxis.title.text = "axis"
    before = len(told())
    fig._js2py_traceDeltas = {"trace_deltas": [], "trace_edit_id": 0}
    states = [data["state"] for _, data in told()[before:]]
    (traces,) = [s["_py2js_restyle"] for s in states if s.get("_py2js_restyle")]
    (layout,) = [s["_py2js_relayout"] for s in states if s.get("_py2js_relayout")]
    assert (traces["restyle_traces"], traces["restyle_data"]["y"]) == ([1], [[7]])
    assert layout["relayout_data"] == {"xaxis.title.text": "axis"}
    before = len(told())
    fig._js2py_traceDeltas = {"trace_deltas": [], "trace_edit_id": 1}
    assert not [d for _, d in told()[before:] if d["state"].get("_py2js_restyle")]


def test_points_move_without_a_redraw(told):
    """A third of a browser's work, none where nothing moved; before it has drawn, it waits."""
    fig = PlotWidget(go.Figure([go.Scatter(x=[1], y=[3]), go.Bar(x=[1], y=[2])]))

    def move(y):
        before = len(told())
        with fig.batch_move():
            fig.data[1].y = [y]
        return [data["state"] for _, data in told()[before:]]

    move(5)
    fig._js2py_traceDeltas = {"trace_deltas": [], "trace_edit_id": 0}
    states = [data["state"] for _, data in told()]
    (traces,) = [s["_py2js_restyle"] for s in states if s.get("_py2js_restyle")]
    assert (traces["restyle_traces"], traces["restyle_data"]["y"]) == ([1], [[5]])
    (moved,) = [s["_py2js_animate"] for s in move(7) if s.get("_py2js_animate")]
    assert (moved["style_data"], moved["style_traces"]) == ([{"y": [7]}], [1])
    assert moved["animation_opts"]["frame"]["redraw"] is False
    assert fig.data[1].y == (7,)
    assert not move(7)
    with pytest.raises(AssertionError, match="not moved"), fig.batch_move():
        fig.layout.title.text = "other"


def test_what_a_figure_filled_in_is_reported_once():
    """Guards against a plotly whose script is written otherwise: right, but half as fast."""
    script = without_reports(str(go.FigureWidget._esm))
    for told_of in ("TraceDeltas", "LayoutDelta"):
        assert script.count(f"if(this.told_send{told_of})return;") == 1
