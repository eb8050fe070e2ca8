"""The live widget without a browser: what it draws and says is the search's own snapshot."""

import asyncio
import time
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest

from workbench.search.problems import load_problems
from workbench.search.strategies import BeamSearch
from workbench.widgets import live
from workbench.widgets.live_blocks import BlockMap
from workbench.widgets.live_figure import figure_rows, live_figure
from workbench.widgets.live_gate import Gate
from workbench.widgets.live_map import MapGrid
from workbench.widgets.live_pair import shared_pair
from workbench.widgets.live_script import move_while_it_runs
from workbench.widgets.live_search import LiveSearch
from workbench.widgets.live_timeline import LEVELS, Timeline

GIVEN = {"n": 4, "seed": 0}


@pytest.fixture(scope="module")
def searched():
    """A search of one problem, finished, with one move in it."""
    pair = shared_pair(memory="4MiB", kv_share=0.4, max_num_seqs=16, max_num_batched_tokens=512)
    strategy = BeamSearch(n=4, beam_width=2, max_depth=3)
    found = LiveSearch(load_problems("tiny", limit=1), pair, strategy=strategy)
    move_while_it_runs(found, [0.3], every=3)
    return found


def test_a_front_end_is_needed(searched, monkeypatch):
    for name in ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD"):
        monkeypatch.delenv(name, raising=False)
    assert live.live_widget(searched) == live.NOT_LIVE
    monkeypatch.setenv("JPY_SESSION_NAME", "live_memory_split.ipynb")
    assert live.live_widget(searched, **GIVEN).children


def test_the_widget_moves_the_split_says_so_and_writes_the_command(searched):
    """Slider, typed twin, sentence and command agree with the arena."""
    view = live.LiveView(searched, "", GIVEN)
    view.dial.value = 0.55
    assert view.dial.typed.value == 0.55
    pages = searched.pair.arena.num_pages
    assert "0.55" in view.answer.value
    assert "reached" in view.answer.value
    assert view.copy.text.startswith("papermill notebooks/live_memory_split.ipynb")
    assert "kv_share: 0.55" in view.copy.text
    assert "n: 4" in view.copy.text
    assert searched.pair.arena.resplit(0.3).target == round(0.3 * pages)


def test_the_widget_watches_a_search_to_its_end(searched):
    """Start, pause, resume, pin: figure and words follow, from the event loop alone."""

    async def by_hand():
        view = live.LiveView(searched, "", GIVEN)
        view.start()
        view._toggle()
        paused = view.words.value, view._pause.description
        view._toggle()
        await view._task
        return view, paused

    view, paused = asyncio.run(by_hand())
    assert "paused" in paused[0]
    assert paused[1] == "resume"
    assert "finished" in view.words.value
    assert "1 of 1 problems answered" in view.words.value
    pinned = view.pin()
    traces = {trace.meta: trace for trace in view.figure.data if trace.meta}
    assert "tokens/s" in pinned
    assert list(traces["pinned"].x) == list(traces["tokens_per_s"].x) != []


def test_the_figure_draws_the_snapshot(searched):
    """Every line is the time line's, every move has its stroke, the cloud button is gone."""
    snapshot = searched.snapshot()
    fig = live_figure(snapshot, "what was measured")
    rows = figure_rows(snapshot)
    traces = {trace.meta: trace for trace in fig.data if trace.meta}
    for name in ("tokens_per_s", "llm_busy", "prm_held", "llm_target"):
        np.testing.assert_array_equal(traces[name].y, rows[name])
    assert (rows[["llm_held", "unheld", "prm_held"]].sum(axis=1) - 100).abs().max() < 1e-9
    assert len(traces["moves 4"].x) == 3 * len(snapshot.moves)
    assert "sendChartToCloud" in fig.layout.template.layout.modebar.remove
    assert fig.layout.meta["face"] == "what was measured"


def test_every_block_is_one_rectangle_with_a_gap_beside_it():
    """A page of two blocks, one of a single block, one that nobody has; four cells each."""
    cells = np.array([[1, 1, 2, 2], [3, 3, 3, 3], [0, 0, 0, 0]], dtype=np.int8)
    grid = MapGrid(3, 4)
    heights = grid.heights(BlockMap(cells, np.array([2, 1, 0], dtype=np.int16), {}))
    assert (grid.per_row, grid.rows) == (3, 1)
    assert len(grid.edges()) == len(heights[0]) + 1
    text = "".join("-" if cell is None else str(cell) for cell in heights[0])
    drawn = [text[at : at + 8] for at in (0, 8, 16)]
    assert drawn == ["111-222-", "3333333-", "0000000-"]


def test_a_time_line_keeps_its_sums_while_it_grows():
    """Joined buckets hold every token and second; levels are the last ones seen."""
    line = Timeline(width_s=0.1, most=4)
    for k in range(20):
        levels = dict.fromkeys(LEVELS, k / 20)
        line.add("llm" if k % 2 else "prm", k * 0.1 + 0.01, k * 0.1 + 0.09, 5, levels)
    frame = line.frame()
    assert line.width_s == 0.8
    assert len(frame) == 3
    widths = [0.8, 0.8, 0.39]  # the last is as wide as what was seen of it
    seconds = (frame[["llm_busy", "prm_busy"]].sum(axis=1) * widths).sum()
    assert seconds == pytest.approx(20 * 0.08)
    assert frame["llm_target"].iloc[-1] == 19 / 20
    assert frame["tokens_per_s"].iloc[0] * line.width_s == 40


def test_a_step_longer_than_a_bucket_fills_all_of_them():
    """Guards the phase panel: a long step is seen for as long as it took."""
    line = Timeline(width_s=0.1, most=20)
    line.add("prm", 0.05, 0.75, 0, dict.fromkeys(LEVELS, 0.5))
    np.testing.assert_allclose(line.frame()["prm_busy"], [0.5, *[1.0] * 7])


def test_the_last_bucket_counts_by_what_has_passed_of_it():
    """An even rate is drawn even, wherever in a bucket the last step ended."""
    line, levels = Timeline(width_s=0.1, most=240), dict.fromkeys(LEVELS, 0.5)
    for k in range(777):  # steps of 40 ms, two tokens each: 50 tokens/s
        line.add("llm", k * 0.04, (k + 1) * 0.04 - 1e-6, 2, levels)
        last = line.frame().iloc[-1]
        assert last["tokens_per_s"] == pytest.approx(50, abs=2 / min(2.0, 0.04 * (k + 1)) + 0.1)
        assert last["llm_busy"] > 0.99
        assert last["time_s"] < (k + 1) * 0.04
    assert last["tokens_per_s"] == pytest.approx(50, rel=0.03)


def test_the_caption_tells_the_window_that_the_rates_have(searched):
    """Buckets grow with the search, and beyond MEAN_S a mean is over one of them."""
    line = Timeline()
    found = []
    for end_s in (10, 300, 500):
        line.add("llm", end_s - 1, end_s, 1, dict.fromkeys(LEVELS, 0.5))
        found.append(line.window_s)
    assert found == pytest.approx([2.0, 1.6, 3.2])
    caption = live_figure(searched.snapshot()).layout.meta["caption"]
    assert "mean of the last 2 s" in caption
    later = live_figure(replace(searched.snapshot(), window_s=3.2)).layout.meta["caption"]
    assert "mean of the last 3.2 s" in later


def test_the_clock_goes_on_until_a_step_waits():
    """The step in flight at a pause costs the time it takes; what passes after it does not."""
    now = [0.0]
    gate = Gate(lambda: now[0])
    gate.close()
    now[0] = 3.0  # the step in flight
    assert gate.clock() == 3.0
    waiting = Thread(target=gate.pass_through, daemon=True)
    waiting.start()
    while not gate._changed._waiters:
        time.sleep(0.001)
    now[0] = 10.0
    assert gate.clock() == 3.0
    gate.open()
    waiting.join(5)
    now[0] = 11.0
    assert gate.clock() == 4.0


def test_a_view_that_cannot_be_drawn_any_more_says_why(searched, monkeypatch):
    """Nobody awaits the task that watches; its end is not silent."""
    view = live.LiveView(searched, "", GIVEN)
    monkeypatch.setattr(view, "repaint", lambda: {}["nothing"])
    with pytest.raises(KeyError):
        asyncio.run(view._watch())
    assert view.answer.value == "<b>KeyError</b>: 'nothing'"
