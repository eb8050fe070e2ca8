"""The live widget without a browser: what it draws and says is the search's own snapshot."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.widgets.conftest import HOSTILE
from workbench.search.problems import load_problems
from workbench.search.strategies import BeamSearch
from workbench.widgets.live import LiveView, figure_rows, in_words, live_figure
from workbench.widgets.live_search import LiveSearch, SharedPair, move_while_it_runs

GIVEN = {"n": 4, "seed": 0}


@pytest.fixture(scope="module")
def searched():
    """A search of one problem, finished, with one move in it."""
    pair = SharedPair(memory="4MiB", kv_share=0.4, max_num_seqs=16, max_num_batched_tokens=512)
    strategy = BeamSearch(n=4, beam_width=2, max_depth=3)
    found = LiveSearch(load_problems("tiny", limit=1), pair, strategy=strategy)
    move_while_it_runs(found, [0.3], every=3)
    return found


def traces(fig):
    return {trace.meta: trace for trace in fig.data if trace.meta}


def test_the_widget_moves_the_split_says_so_and_writes_the_command(searched):
    """Slider, typed twin, sentence and command agree with the arena."""
    view = LiveView(searched, **GIVEN)
    view.share.slider.value = 0.55
    assert view.share.typed.value == 0.55
    assert "0.55" in view.answer.value and "reached" in view.answer.value
    assert view.copy.value.startswith("papermill notebooks/live_memory_split.ipynb")
    assert "kv_share: 0.55" in view.copy.value and "n: 4" in view.copy.value
    view.resplit(0.5)
    view._awaited = 0.5  # as if blocks in use had to be waited for
    view.answer.say("later: in use")
    view.show()
    assert view.answer.text == "LLM share 0.50: reached."
    pages = searched.pair.arena.num_pages
    assert searched.pair.arena.resplit(0.3).target == round(0.3 * pages)


def test_the_widget_watches_a_search_to_its_end(searched):
    """Start, pause, resume, pin: figure and words follow, from the event loop alone."""

    async def by_hand():
        view = LiveView(searched, **GIVEN)
        view.start()
        view.toggle()
        assert "paused" in view.words.value and view.pause.description == "resume"
        view.toggle()
        await view.task
        return view

    view = asyncio.run(by_hand())
    assert "finished" in view.words.value
    assert "1 of 1 problems answered" in view.words.value
    assert "tokens/s" in view.pin()
    drawn = traces(view.figures[0])
    assert list(drawn["pinned"].x) == list(drawn["tokens_per_s"].x) != []


def test_a_search_whose_watching_was_interrupted_is_watched_again(searched):
    async def by_hand():
        view = LiveView(searched, **GIVEN)
        view.start()
        view.task.cancel()  # as an interrupt ends it
        await asyncio.wait([view.task])
        view.start()
        await view.task
        return view

    assert "finished" in asyncio.run(by_hand()).words.value


def test_the_figure_draws_the_snapshot(searched):
    """Every line is the time line's, every move has its stroke, the cloud button is gone."""
    snapshot = searched.snapshot()
    fig, rows = live_figure(snapshot, "what was measured"), figure_rows(snapshot)
    drawn = traces(fig)
    evicted = {model: rows[f"{model}_evicted"].sum() for model in ("llm", "prm")}
    assert evicted == snapshot.evicted
    assert f"evicted {evicted['llm']:,.0f} and" in in_words(snapshot)
    for name in ("tokens_per_s", "llm_busy", "prm_held", "llm_target", "llm_evicted"):
        np.testing.assert_array_equal(drawn[name].y, rows[name])
    assert (rows[["llm_held", "unheld", "prm_held"]].sum(axis=1) - 100).abs().max() < 1e-9
    assert len(drawn["moves 5"].x) == 3 * len(snapshot.moves)
    assert fig.layout.meta["provenance"] == "what was measured"


def test_every_block_is_one_rectangle_with_a_gap_beside_it(searched):
    """Pages of two blocks, of four, of one, and one that no model holds; four cells each."""
    pages = [[1, 2], [3, 4, 0, 3], [3], []]
    drawn = traces(live_figure(replace(searched.snapshot(), blocks=pages)))["map"]
    (row,) = drawn.z
    assert len(drawn.x) == len(row) + 1
    text = "".join("-" if cell is None else str(cell) for cell in row)
    shown = [text[at : at + 8] for at in range(0, len(text), 8)]
    assert shown == ["111-222-", "3-4-0-3-", "3333333-", "0000000-"]


def test_a_view_that_cannot_be_drawn_any_more_says_why(searched, monkeypatch):
    """The task that watches is awaited by no caller; its end is not silent."""

    async def by_hand():
        view = LiveView(searched, **GIVEN)
        monkeypatch.setattr(view, "show", lambda: {}[HOSTILE])
        view.start()
        with pytest.raises(KeyError):
            await view.task
        return view

    view = asyncio.run(by_hand())
    searched.wait()
    assert view.answer.text == f"KeyError: '{HOSTILE}'"
    assert "<img" not in view.answer.value
