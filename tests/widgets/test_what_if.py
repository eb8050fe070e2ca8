"""The what-if widget without a browser: controls move, figures and words follow, replays arrive."""

import asyncio
from dataclasses import replace

import pytest

from tests.widgets.conftest import OTHER, SHARES, SMALL
from workbench.errors import OutOfMemory
from workbench.plots.theme import MODELS
from workbench.replay.cost import BOUND
from workbench.replay.devices import PRESETS
from workbench.widgets import what_if as w
from workbench.widgets import what_if_replay as r
from workbench.widgets.parts import NOT_LIVE


@pytest.fixture(scope="module")
def view(infos, replays):
    return w.make_view(infos[SMALL], replays[1], replays)


@pytest.fixture(scope="module")
def at_once(infos, position, replays):
    """A replayer that returns one real replay of each recording, wherever it is asked."""
    other = r.replay(infos[OTHER], infos[OTHER].position())

    async def replayer(info, at):
        if at.llm_share > 0.6:
            raise OutOfMemory("no room for one request")
        return replace(replays[1] if info.name == SMALL else other, position=at)

    return replayer


def trace(fig, key):
    return next(t for t in fig.data if t.meta == key)


@pytest.fixture
def by_hand(infos, position, replays, at_once, monkeypatch):
    """Makes some moves on a widget in an event loop."""
    monkeypatch.setattr(r, "replay_elsewhere", at_once)

    async def act(moves):
        await moves(w.WhatIfWidget(infos, position, replays))

    return lambda moves: asyncio.run(act(moves))


# -- figures and words --


def test_the_share_figure_shows_replays_line_ring_and_pins(infos, view, replays):
    """Each at its place; exact and interpolated are told apart in words."""
    pinned = replace(view, rows=view.rows.assign(tokens_per_s=1.0))
    first, guess = replays[0], r.interpolated(replays[0].position.at(0.25), replays)
    exact, between = (
        w.make_view(infos[SMALL], chosen, replays, {"p": pinned}) for chosen in (first, guess)
    )
    fig = w.share_figure(exact)
    ring, line = trace(fig, "tokens_per_s/ring"), trace(fig, "tokens_per_s/line")
    assert (ring.x[0], ring.y[0]) == (0.2, first.row["tokens_per_s"])
    assert list(line.x) == list(trace(fig, "tokens_per_s/exact").x) == list(SHARES)
    assert list(line.y) == [one.row["tokens_per_s"] for one in replays]
    assert set(trace(fig, "tokens_per_s/pin0").y) == {1.0}
    assert trace(fig, "prm_hit_rate/line").line.color == MODELS["prm"].colour
    assert trace(fig, "llm_hit_rate/ring").y[0] == 100 * first.row["llm_hit_rate"]
    grey = [shape.label.text for shape in fig.layout.shapes]
    assert len({*grey}) == 2 and all("lacks room: it needs" in text for text in grey)
    for drawn, said in ((exact, "EXACT REPLAY"), (between, "INTERPOLATED")):
        for fig in (w.share_figure(drawn), w.blocks_figure(drawn)):
            assert [said in a.text for a in fig.layout.annotations if a.name == "mark"] == [True]


def test_the_blocks_figure_stacks_blocks_and_divides_a_problem(infos, view, replays):
    """Active and cached never pass the line; bars add up to the time of a problem."""
    fig = w.blocks_figure(view)
    for model in MODELS:
        names = ("blocks_active", "blocks_cached", "total")
        active, cached, total = (trace(fig, f"{model}/{name}").y for name in names)
        assert all(a + c <= t for a, c, t in zip(active, cached, total))
    bars = [trace(fig, f"cost/{part}").x[0] for part in w.COSTS]
    assert sum(bars) == pytest.approx(view.chosen.row["seconds_per_problem"])
    assert fig.layout.xaxis3.ticksuffix == "s"
    fig = w.blocks_figure(w.make_view(infos[SMALL], replays[1], replays, {"before": view}))
    assert trace(fig, "cost/llm_seconds").y == ("now", "before")


def test_words_say_what_it_is_and_no_price_is_made_up(view, position, replays):
    """An interpolated value is called one; a price is named only where one was given."""
    guess = r.interpolated(position.at(0.24), replays)
    assert w.in_words(replays[1]).startswith("Exact replay: at an LLM share of 0.30 of 48.0 MiB")
    assert w.in_words(guess).startswith("Interpolated: at an LLM share of 0.24")
    assert "at most" in w.in_words(guess) and "roofline alone" in view.provenance
    assert "hour" not in w.cost_in_words(guess)
    assert "at the nearest replay" in w.cost_in_words(guess)
    told = w.cost_in_words(replays[1], 2.5)  # of a roofline's seconds, a bound from below
    assert "takes at least" in told and "at 2.5 an hour that is at least" in told
    for drawn in w.drawings(view).values():
        for said in ("tiny-solver", "48.0 MiB", BOUND):
            assert said in drawn.figure.layout.meta["provenance"]
        assert len(drawn.rows) and drawn.parameters["llm_share"] == 0.3


# -- the widget --


def test_a_move_is_interpolated_at_once_and_then_replayed(by_hand):
    """What is shown before anything is awaited; the exact replay takes its place by itself."""

    async def moves(widget):
        for share in (0.21, 0.22, 0.23):
            widget.sliders["llm_share"].slider.value = share
        assert widget.words.text.startswith("Interpolated: at an LLM share of 0.23")
        assert widget.status.text.startswith("Waiting for the controls")
        share, blocks = widget.figures
        assert trace(share, "tokens_per_s/ring").x == (0.23,)
        assert max(trace(blocks, "llm/total").y) > 0
        await widget.task
        assert widget.words.text.startswith("Exact replay")
        assert widget.status.text == "Exact."
        assert len(widget.view.rows) > len(SHARES)  # the line's other shares
        assert "llm_share: 0.23" in widget.copy.value

    by_hand(moves)


def test_what_is_not_known_is_said_until_it_is_replayed(by_hand):
    """Another memory waits for its replay; a share without room says so; then it goes on."""

    async def moves(widget):
        widget.sliders["llm_share"].slider.value = 0.9
        await widget.task
        assert "LLM share of 0.90" in widget.status.text and "OutOfMemory" in widget.status.text
        assert widget.words.text.startswith("NotReplayed: no replay of this place")
        widget.sliders["llm_share"].slider.value = 0.3
        assert "Exact replay" in widget.words.text
        widget.sliders["total_memory"].typed.value = 60
        assert widget.words.text.startswith("NotReplayed: no replay of this place")
        with pytest.raises(w.NotReplayed):
            widget.pin()
        await widget.task
        assert "Exact replay" in widget.words.text
        assert widget.position.total_memory == 60 << 20

    by_hand(moves)


def test_another_recording_brings_its_own_memory_and_limits(infos, by_hand):
    """Device and policy stay; pins of both stand side by side, named by recording."""

    async def moves(widget):
        widget.menus["device"].value = "l40s"
        await widget.task
        widget.pin()
        widget.menus["recording"].value = OTHER
        await widget.task
        widget.pin()
        assert widget.position == infos[OTHER].position(device="l40s")
        assert [name.split(",")[0] for name in widget.pins] == [OTHER, SMALL]

    by_hand(moves)


def test_memory_that_a_device_lacks_is_taken_back_and_said(by_hand, monkeypatch):
    """The budget follows the device, never without a word."""
    small = replace(PRESETS["l40s"], name="a small card", memory_bytes=40 << 20)
    monkeypatch.setitem(PRESETS, "l40s", small)

    async def moves(widget):
        widget.menus["device"].value = "l40s"
        memory = widget.sliders["total_memory"]
        assert widget.position.total_memory == 40 << 20 and memory.slider.max == 40
        assert memory.said.text == "a small card has 40.0 MiB, not 48.0 MiB: 40.0 MiB is taken."
        await widget.task

    by_hand(moves)


def test_a_share_that_a_policy_ignores_is_not_offered(by_hand):
    """Neither slider, sentence nor grey zones speak of it; another policy brings it back."""

    async def moves(widget):
        share = widget.sliders["llm_share"]
        widget.menus["policy"].value = "first_come"
        await widget.task
        assert share.slider.disabled and share.typed.disabled
        assert share.said.text == "The policy first_come sets the split by itself."
        told = w.in_words(widget.view.chosen)
        assert "the policy first_come sets the split" in told and "LLM share" not in told
        shapes = w.share_figure(widget.view).layout.shapes
        assert not any("lacks room" in (shape.label.text or "") for shape in shapes)
        widget.menus["policy"].value = "marginal_value"
        await widget.task
        assert not share.slider.disabled and not share.said.text

    by_hand(moves)


def test_a_pin_that_was_interpolated_says_so_until_it_is_replayed(by_hand):
    """Also where what is drawn now is exact; shares that read alike are told apart."""

    async def moves(widget):
        share = widget.sliders["llm_share"].slider
        share.value = 0.23
        widget.pin()
        (name,) = widget.pins
        assert f"{name} (interpolated)" in widget.view.costs
        await widget.task
        share.value = 0.3
        assert name in widget.view.costs
        cost = widget.view.costs[name]
        assert cost.is_exact and cost.position.llm_share == 0.23
        widget.task.cancel()

    by_hand(moves)


def test_pinned_curves_stay_up_to_three(by_hand):
    """The oldest goes; the bars show them too; clearing lets all go."""

    def drawn(widget):
        share, blocks = widget.figures
        curves = sum(t.meta.startswith("tokens_per_s/pin") for t in share.data if t.meta)
        return curves, len(trace(blocks, "cost/llm_seconds").y)

    async def moves(widget):
        for share in (*SHARES, 0.25):
            widget.sliders["llm_share"].slider.value = share
            assert f"{share:.2f}" in widget.pin()
        assert drawn(widget) == (w.PINS, w.PINS + 1)
        widget.unpin()
        widget.task.cancel()
        assert drawn(widget) == (0, 1)

    by_hand(moves)


def test_without_a_front_end_a_sentence_stands_in(open_front_end, position, infos, monkeypatch):
    """Under papermill no widget is built, and no process started."""
    monkeypatch.setattr(r, "find_recordings", lambda names=(OTHER,): {n: infos[n] for n in names})
    assert w.what_if() == NOT_LIVE

    async def shown():
        return w.what_if(position).children

    open_front_end()
    assert asyncio.run(shown())
