"""The what-if widget without a browser: controls move, an estimate is drawn, the replay follows."""

import re
import time

import pytest

from tests.widgets.small_search import SmallSearch
from workbench.widgets.parts import outcome_in_words
from workbench.widgets.what_if import WhatIfWidget
from workbench.widgets.what_if_answers import exact
from workbench.widgets.what_if_desk import DONE, MORE, WAITING
from workbench.widgets.what_if_words import mark_in_html
from workbench.widgets.what_if_worker import Reply


class FakeWorker:
    """Takes requests; the test answers them."""

    def __init__(self):
        self.requests = []
        self.number = 0

    def ask(self, position, *, wants_basis=False, others=()):
        self.requests.append((position, wants_basis, tuple(others)))
        return self.cancel()

    def cancel(self):
        self.number += 1
        return self.number

    def close(self):
        pass


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return SmallSearch(tmp_path_factory.mktemp("recordings"))


@pytest.fixture
def widget(small, tmp_path):
    bases = [(small.position, small.basis)]
    return WhatIfWidget(
        small.kept, small.position, bases, folder=str(tmp_path), worker=FakeWorker()
    )


def trace(fig, key):
    return next(t for t in fig.data if t.meta == key)


def mark(widget):
    """What stands out above both figures."""
    first, second = (
        re.match("<b[^>]*>(.*?)</b>", each.value)[1] for each in (widget.words, widget.cost)
    )
    assert first == second
    return first


def answer(widget, small, kind="exact"):
    """Let the worker's answer to the last request arrive."""
    position, *_ = widget.worker.requests[-1]
    kept = small.kept[position.recording]
    content = exact(kept, position, small.answers)
    widget.hear(Reply(widget.worker.number, kind, content))
    return content


def test_it_starts_with_an_estimate_and_asks_for_the_replay(widget, small):
    """Both figures are marked, the words say so, and the worker knows what is wanted."""
    assert mark(widget) == "ESTIMATE"
    assert "ESTIMATE</b>: at an LLM share" in widget.words.value
    position, wants_basis, others = widget.worker.requests[-1]
    assert (position, wants_basis) == (small.position, False)
    assert others and small.position not in others
    assert widget.status.value == WAITING


def test_a_moved_slider_repaints_an_estimate_then_the_replay_takes_its_place(widget, small):
    """The ring and the blocks move at once; what arrives later is drawn as exact."""
    blocks = trace(widget.blocks, "llm/total").y[0]
    widget.controls.share.slider.value = 0.2
    assert trace(widget.share, "tokens_per_s/ring").x == (0.2,)
    assert trace(widget.blocks, "llm/total").y[0] < blocks
    assert mark(widget) == "ESTIMATE"
    found = answer(widget, small)
    assert "EXACT REPLAY" in mark(widget)
    assert trace(widget.share, "tokens_per_s/ring").y == (found.tokens_per_s,)
    assert trace(widget.share, "tokens_per_s/exact").x == (0.2,)
    assert "</b>: at an LLM share of 0.20" in widget.words.value
    assert widget.status.value == MORE
    widget.hear(Reply(widget.worker.number, "done"))
    assert widget.status.value == DONE


def test_what_is_known_already_is_shown_exactly_at_once(widget, small):
    """Back at a share that was replayed: no estimate, though other shares may be asked for."""
    answer(widget, small)
    widget.controls.share.typed.value = 0.2
    assert "ESTIMATE" in mark(widget)
    widget.controls.share.typed.value = 0.3
    assert "EXACT REPLAY" in mark(widget)


def test_replies_to_what_was_asked_before_are_ignored(widget, small):
    """A superseded request changes nothing, however late it comes."""
    late = widget.worker.number
    widget.controls.share.slider.value = 0.2
    found = exact(small.first, small.position, small.answers)
    widget.hear(Reply(late, "exact", found))
    assert mark(widget) == "ESTIMATE"


def test_errors_of_the_worker_are_said(widget):
    """The estimate stays what it is, and says that no replay will come."""
    widget.hear(Reply(widget.worker.number, "error", "no room for one request"))
    assert "No exact replay: no room for one request" in widget.status.value
    assert mark(widget) == "ESTIMATE"


def test_a_control_that_cannot_stand_there_says_why(widget):
    """More sequences than tokens in a step: a named error beside the controls, nothing asked."""
    asked = len(widget.worker.requests)
    widget.controls.steps["max_num_batched_tokens"].value = 64
    widget.controls.steps["max_num_seqs"].value = 512
    assert "ConfigError: max_num_batched_tokens is 64" in widget.status.value
    assert len(widget.worker.requests) == asked + 1  # the first of the two moves


def test_where_nothing_can_be_known_nothing_old_is_said(widget, small):
    """Impossible limits: marked, both sentences gone, the replay cancelled and not heard late."""
    late = widget.worker.number
    assert "tokens/s" in widget.words.value and "a problem takes" in widget.cost.value
    widget.controls.steps["max_num_batched_tokens"].value = 64
    widget.controls.steps["max_num_seqs"].value = 512
    assert widget.worker.number > late + 1  # one for the first move, one that cancels it
    assert widget.words.value == widget.cost.value == mark_in_html(None)
    asked = widget.worker.requests[-1][0]
    widget.hear(Reply(late + 1, "exact", exact(small.first, asked, small.answers)))
    assert "NOT YET KNOWN" in mark(widget)
    assert widget.status.value.startswith("ConfigError")


def test_another_recording_leaves_no_sentence_of_the_one_before(widget):
    """NOT YET KNOWN stands in the place of words and cost of the other recording."""
    widget.controls.menus["n"].value = 16
    assert widget.words.value == widget.cost.value == mark_in_html(None)


def test_an_error_in_another_share_is_said_of_that_share(widget, small):
    """The figure stays EXACT, so the sentence names the share that has no replay."""
    answer(widget, small)
    _, _, (other, *_) = widget.worker.requests[-1]
    widget.hear(Reply(widget.worker.number, "error", "no room"))
    assert "EXACT REPLAY" in mark(widget)
    assert widget.status.value == (
        f"Exact. No exact replay at an LLM share of {other.llm_share:.2f}: no room"
    )


def test_a_process_lost_when_all_is_known_takes_nothing_back(widget, small):
    """Every share is replayed already: the status says exact, and what happened."""
    position, _, others = widget.worker.requests[-1]
    for one in (position, *others):
        widget.hear(Reply(widget.worker.number, "other", exact(small.first, one, small.answers)))
    widget.hear(Reply(widget.worker.number, "error", "The replay process ended."))
    assert widget.status.value == "Exact. The replay process ended."


def test_memory_offers_the_shares_that_fit_and_draws_its_own_axis(widget, small):
    """A bigger total: more shares, other ticks, another curve; the share stays near."""
    ticks = widget.share.layout.xaxis3.tickvals
    widget.controls.memory.typed.value = 64
    assert widget.controls.position.total_memory == 64 << 20
    assert max(widget.controls.share.options) > max(small.first.shares(40 << 20, 16))
    assert widget.share.layout.xaxis3.tickvals != ticks
    for fig in (widget.share, widget.blocks):
        faces = [a.text for a in fig.layout.annotations if "total memory" in (a.text or "")]
        assert len(faces) == 1 and "64.0 MiB" in faces[0].replace("<br>", " ")


def test_recorded_values_only_are_offered_and_another_recording_waits_for_its_replay(widget, small):
    """n is a recording's: choosing it takes the other file, of which nothing is known yet."""
    assert widget.controls.menus["n"].menu.options == (4, 16)
    widget.controls.menus["n"].value = 16
    position, wants_basis, _ = widget.worker.requests[-1]
    assert position.recording == small.second.name and wants_basis
    assert widget.controls.menus["num_problems"].value == 1
    assert "NOT YET KNOWN" in mark(widget)
    assert widget.status.value == WAITING


def test_a_basis_that_arrives_makes_the_estimate(widget, small):
    """Without one nothing is drawn; then the curve is there."""
    fresh = WhatIfWidget(small.kept, small.position, worker=FakeWorker())
    assert fresh.desk.view is None and fresh.worker.requests[-1][1]
    assert "nothing to save" in outcome_in_words(lambda: str(fresh.drawings()))
    fresh.hear(Reply(1, "basis", (small.position, small.basis)))
    assert mark(fresh) == "ESTIMATE"
    assert len(trace(fresh.share, "tokens_per_s/line").x) > 5


def press(widget, name):
    """Click a button of the widget; what it says."""
    row = next(
        box
        for box in widget.box.children
        if getattr(box, "children", ()) and getattr(box.children[0], "description", "") == name
    )
    row.children[0].click()
    return row.children[-1].value


def test_pinned_curves_stay_as_ghosts(widget):
    """Up to three, the oldest goes; the bars show them too; clearing lets all go."""
    for share in (0.3, 0.2, 0.25, 0.18):
        widget.controls.share.slider.value = share
        assert f"{share:.2f}" in press(widget, "pin for comparison")
    assert len(widget.desk.pins) == 3
    assert len(trace(widget.share, "tokens_per_s/ghost2").x) > 5
    assert len(trace(widget.blocks, "cost/llm").y) == 4
    press(widget, "clear pins")
    assert trace(widget.share, "tokens_per_s/ghost0").x == ()
    assert trace(widget.blocks, "cost/llm").y == ("now",)


def test_pins_of_two_recordings_stand_side_by_side(widget, small):
    """The name says recording, n and width, so n = 16 does not take the place of n = 4."""
    press(widget, "pin for comparison")
    widget.controls.menus["n"].value = 16
    answer(widget, small)
    widget.desk.know(widget.desk.position, small.basis)
    widget.move(widget.controls.position)
    press(widget, "pin for comparison")
    second, first = (pin.name for pin in widget.desk.pins)
    for name, kept in ((first, small.first), (second, small.second)):
        assert name.startswith(f"{kept.path.stem}, n {kept.n}, width {kept.beam_width}: 40.0 MiB")


def test_a_curve_of_where_the_controls_stood_before_is_not_pinned(widget, small):
    """Nothing is known of the new place: pinning says so; clearing leaves it NOT YET KNOWN."""
    press(widget, "pin for comparison")
    widget.controls.menus["n"].value = 16
    assert "Nothing is pinned" in press(widget, "pin for comparison")
    assert [pin.answer.position for pin in widget.desk.pins] == [small.position]
    press(widget, "clear pins")
    assert trace(widget.share, "tokens_per_s/ghost0").x == ()
    assert "NOT YET KNOWN" in mark(widget)


def test_the_command_names_every_parameter_as_it_stands(widget):
    """What is copied runs the notebook at this position."""
    widget.controls.device.value = "l40s"
    assert "papermill notebooks/what_if.ipynb" in widget.command.text
    for pair in ('device: "l40s"', "llm_share: 0.3", "policy: null", "block_size: 16"):
        assert pair in widget.command.text


def test_figures_are_saved_as_they_stand(widget, tmp_path, monkeypatch):
    """Both, with rows and the position as parameters, where the user says."""
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    drawn = widget.drawings()
    assert set(drawn) == {"what_if_share", "what_if_blocks"}
    for _, rows, parameters in drawn.values():
        assert len(rows) and parameters["llm_share"] == 0.3
    saver = widget.box.children[5]
    saver.children[1].click()
    assert (tmp_path / "what_if_blocks.parquet").is_file()
    assert str(tmp_path) in saver.children[2].value


def test_a_move_is_painted_within_a_blink(widget):
    """From slider to figures, CPU time of this process: the least of five within 200 ms."""
    spent = []
    for share in (0.2, 0.21, 0.22, 0.23, 0.24):
        start = time.process_time()
        widget.controls.share.slider.value = share
        spent.append(time.process_time() - start)
    assert min(spent) < 0.2
