"""What the what-if widget answers with, called as plain functions: no widget, no process."""

import pandas as pd
import pytest

from tests.widgets.small_search import SmallSearch
from workbench.errors import ConfigError, OutOfMemory, RecordingError
from workbench.plots.theme import MODELS
from workbench.replay.devices import PRESETS, write_device
from workbench.widgets.what_if import first_position, parameters_of, what_if
from workbench.widgets.what_if_answers import (
    ESTIMATE,
    EXACT,
    estimate,
    exact,
    moved,
    share_curve,
    spread_shares,
)
from workbench.widgets.what_if_blocks import block_rows, blocks_figure, fill_blocks, unit_of
from workbench.widgets.what_if_curve import agreement, replayed_view
from workbench.widgets.what_if_position import device_names, kept_recordings, position_on
from workbench.widgets.what_if_share import fill, reframe, share_figure
from workbench.widgets.what_if_view import Ghost, View
from workbench.widgets.what_if_words import (
    agreement_in_words,
    best_in_words,
    cost_in_words,
    face_of,
    in_words,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return SmallSearch(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def view(small):
    answer = estimate(small.first, small.position, small.basis)
    curve = share_curve(small.first, small.position, small.basis, [0.15, 0.2, 0.3])
    feasible = small.first.feasible(small.position.bytes, 16)
    return View(answer, curve, feasible, face=face_of(small.first, small.position))


def trace(fig, key):
    return next(t for t in fig.data if t.meta == key)


def marks(fig):
    return [a.text for a in fig.layout.annotations if a.name == "mark"]


def test_what_is_not_given_is_as_recorded(small):
    """Memory, share and limits are the recording's; every value can be another."""
    position = position_on(small.first)
    assert position.to_dict() == {
        "recording": small.first.name,
        "device": "h100",
        "total_memory": 64 << 20,
        "llm_share": 0.3,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "policy": None,
    }
    assert position_on(small.first, policy="FirstCome", block_size=None).policy == "FirstCome"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"device": "h1000"}, "h100"),
        ({"policy": "FirstComes"}, "FirstCome"),
        ({"llm_share": "0.3"}, "llm_share"),
        ({"llm_share": 1.5}, "llm_share"),
        ({"llm_share": 0.99}, "infeasible"),
        ({"max_num_seqs": 4.5}, "max_num_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"total_memory": "lots"}, "lots"),
        ({"total_memory": "20MiB", "policy": "FirstCome"}, "at least"),
        ({"llmshare": 0.3}, "llm_share"),
    ],
)
def test_what_cannot_be_is_refused_by_name(small, given, named):
    """A wrong type, an unknown device, policy or setting, too little memory: a named error."""
    with pytest.raises(ConfigError, match=named):
        position_on(small.first, **given)


def test_a_memory_that_the_device_lacks_is_refused(small):
    """Weights and KV of both models beyond what the device has."""
    with pytest.raises(OutOfMemory, match="RTX 4090 has 24"):
        position_on(small.first, device="rtx-4090", total_memory="25GiB")


def test_a_calibrated_device_is_offered_beside_the_presets(tmp_path, monkeypatch):
    """Where `workbench calibrate` left it in the project; no other file is."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    assert device_names() == list(PRESETS)
    write_device(PRESETS["l40s"], tmp_path / "device.json")
    assert device_names()[-1] == str(tmp_path / "device.json")


def test_recordings_are_found_by_name_and_by_file(small):
    """The package's come by name; a name it does not have is refused, none at all too."""
    assert small.first.n == 4 and small.second.n == 16
    assert kept_recordings(["tiny-16-n4"])["tiny-16-n4"].num_problems == 16
    with pytest.raises(RecordingError, match="tiny-16-n4"):
        kept_recordings(["tiny-16-n5"])
    with pytest.raises(ConfigError, match="workbench record"):
        first_position({})


def test_shares_offered_are_those_that_fit(small):
    """Hundredths; the ends hold one request of each model, what is beyond does not."""
    shares = small.first.shares(small.position.bytes, 16)
    found = small.first.feasible(small.position.bytes, 16)
    assert found.at(shares[0]).fits and found.at(shares[-1]).fits
    assert not found.at(shares[0] - 0.01).fits and not found.at(shares[-1] + 0.01).fits
    assert all(small.first.feasible(m, 16).high > 0 for m in small.first.memories(64 << 20, 16))
    assert spread_shares(shares, 3)[0] == shares[0] and spread_shares(shares, 3)[-1] == shares[-1]


def test_an_estimate_with_room_is_the_exact_replay(small):
    """With room for all, both say the same of everything, blocks over time included."""
    position = position_on(small.first)
    guess, found = estimate(small.first, position, small.basis), None
    found = exact(small.first, position, small.answers)
    assert (guess.kind, found.kind) == (ESTIMATE, EXACT)
    assert guess.tokens_per_s == pytest.approx(found.tokens_per_s)
    assert guess.seconds == pytest.approx(found.seconds)
    assert guess.llm[:4] == pytest.approx(found.llm[:4])
    assert guess.prm[:4] == pytest.approx(found.prm[:4])
    assert guess.kv_share == pytest.approx(found.kv_share)
    assert (guess.blocks["blocks_active"] == found.blocks["blocks_active"]).all()


def test_every_control_changes_the_exact_replay(small):
    """Memory, device, limits, block size and policy reach the replay, and not its tokens."""
    usual = exact(small.first, small.position, small.answers)
    for change in (
        {"device": "l40s"},
        {"llm_share": 0.21},
        {"block_size": 32},
        {"max_num_seqs": 4},
        {"max_num_batched_tokens": 64},
    ):
        given = {"total_memory": "40MiB", "llm_share": 0.3, **change}
        other = exact(small.first, position_on(small.first, **given), small.answers)
        assert other.seconds != usual.seconds or other.llm != usual.llm, change
        assert texts_of(position_on(small.first, **given), small) == texts_of(small.position, small)
    lent = position_on(small.first, total_memory="40MiB", llm_share=0.3, policy="FirstCome")
    other = exact(small.first, lent, small.answers)
    assert other.blocks["blocks_total"].max() > usual.blocks["blocks_total"].max()
    assert texts_of(lent, small) == texts_of(small.position, small)


def texts_of(position, small):
    """Every node's tokens, by problem and path."""
    tree = position.question.answer(small.answers).tree
    return tree[["problem_id", "node_id", "token_ids"]].to_dict("list")


def test_other_block_sizes_and_policies_are_estimated_too(small):
    """From the basis of another block size as many tokens; a lender has all but a floor."""
    given = {"total_memory": "40MiB", "llm_share": 0.3}
    other = position_on(small.first, **given, block_size=32)
    guess = estimate(small.first, other, small.basis)
    usual = estimate(small.first, small.position, small.basis)
    assert guess.llm.kv_tokens == pytest.approx(usual.llm.kv_tokens, abs=64)
    assert guess.blocks["blocks_active"].max() <= usual.blocks["blocks_active"].max() / 2 + 1
    lent = estimate(
        small.first, position_on(small.first, **given, policy="PhaseAware"), small.basis
    )
    assert lent.llm.num_blocks > usual.llm.num_blocks and lent.prm.num_blocks > usual.prm.num_blocks


def test_a_curve_is_one_estimate_a_share(small):
    """Its rows are those of single estimates; the best place is said in words."""
    curve = share_curve(small.first, small.position, small.basis, [0.2, 0.3])
    assert curve["llm_share"].tolist() == [0.2, 0.3]
    alone = estimate(small.first, moved(small.position, 0.2), small.basis)
    assert curve["tokens_per_s"][0] == alone.tokens_per_s
    assert "share of **0." in best_in_words(curve)


def test_the_best_of_estimates_is_said_to_be_one(small):
    """The notebook's answer rests on a curve of estimates; of replays alone it is no estimate."""
    curve = share_curve(small.first, small.position, small.basis, [0.2, 0.3])
    assert best_in_words(curve).startswith("By estimate, throughput is highest")
    replays = [exact(small.first, moved(small.position, s), small.answers) for s in (0.2, 0.3)]
    table = pd.DataFrame([replay.row() for replay in replays])
    assert best_in_words(table).startswith("Throughput is highest")


def test_a_whole_figure_is_three_calls(small):
    """Curve, replays and how far they lie apart, as the notebook calls them."""
    found = exact(small.first, small.position, small.answers)
    view = replayed_view(small.first, small.position, small.basis, small.answers, found, 2)
    assert view.answer is found and len(view.replays) == 3 and len(view.curve) > 5
    errors = agreement(small.first, small.position, small.basis, view.replays)
    assert errors["llm_share"].tolist() == view.replays["llm_share"].tolist()
    assert "misses the replayed one" in agreement_in_words(errors)
    with_room = errors[errors["fits"]]
    assert with_room["error"].abs().max() < 0.1


def test_the_share_figure_shows_curve_ring_replays_and_ghosts(small, view):
    """Each at its place; estimates and exact replays are told apart in words."""
    found = exact(small.first, moved(small.position, 0.2), small.answers)
    ghost = Ghost("before", view.curve.assign(tokens_per_s=1.0), found)
    fig = share_figure(View(view.answer, view.curve, view.feasible, ghosts=(ghost,)))
    ring = trace(fig, "tokens_per_s/ring")
    assert (ring.x[0], ring.y[0]) == (0.3, view.answer.tokens_per_s)
    lines = [trace(fig, f"tokens_per_s/{part}").y for part in ("line", "dots")]
    drawn = [a if a is not None else b for a, b in zip(*lines)]
    assert drawn == view.curve["tokens_per_s"].tolist()
    assert trace(fig, "tokens_per_s/ghost0").y[0] == 1.0
    assert trace(fig, "prm_hit_rate/line").line.color == MODELS["prm"].colour
    assert marks(fig) == ["<b>ESTIMATE</b>"]
    table = pd.DataFrame([found.row()])
    fill(fig, View(found, view.curve, view.feasible, replays=table))
    assert trace(fig, "tokens_per_s/exact").x == (0.2,)
    assert trace(fig, "tokens_per_s/ring").x == (0.2,)
    assert trace(fig, "tokens_per_s/ghost0").y == ()
    assert "EXACT REPLAY" in marks(share_figure(View(found, view.curve, view.feasible)))[0]


def test_only_what_differs_is_drawn_again(small, view):
    """A share moved leaves the curve alone; another memory brings its own axis."""
    fig = share_figure(view)
    trace(fig, "tokens_per_s/line").y = [0, 0, 0]
    other = View(
        estimate(small.first, moved(small.position, 0.2), small.basis), view.curve, view.feasible
    )
    fill(fig, other, before=view)
    assert trace(fig, "tokens_per_s/ring").x == (0.2,)
    assert trace(fig, "tokens_per_s/line").y == (0, 0, 0)
    bigger = position_on(small.first)
    curve = share_curve(small.first, bigger, small.basis, [0.1, 0.5])
    answer = estimate(small.first, bigger, small.basis)
    reframe(fig, View(answer, curve, small.first.feasible(bigger.bytes, 16)))
    assert fig.layout.xaxis3.tickvals == (0.1, 0.5)
    assert trace(fig, "tokens_per_s/line").x == (0.1, 0.5)


def test_shares_that_do_not_fit_are_grey_and_say_what_lacks(view):
    """Both ends, with the bytes that the model lacks there."""
    fig = share_figure(view)
    texts = [a.text for a in fig.layout.annotations if a.text and "lacks" in a.text]
    assert len(fig.layout.shapes) == len(texts) == 2
    assert all("MiB" in text for text in texts)


def test_the_blocks_figure_stacks_blocks_below_what_there_is(small, view):
    """Active and cached never pass the line; bars add up to the time of a problem."""
    fig = blocks_figure(view)
    for model in MODELS:
        active, cached, total = (
            trace(fig, f"{model}/{c}").y for c in ("blocks_active", "blocks_cached", "total")
        )
        assert all(a + c <= t for a, c, t in zip(active, cached, total))
    unit, name = unit_of(view.answer.seconds)
    bars = [trace(fig, f"cost/{part}").x[0] for part in ("llm", "prm", "rest")]
    assert sum(bars) * unit == pytest.approx(view.answer.seconds)
    assert name in fig.layout.xaxis3.title.text
    other = exact(small.first, small.position, small.answers)
    fill_blocks(
        fig, View(other, view.curve, view.feasible, ghosts=(Ghost("g", view.curve, other),))
    )
    assert trace(fig, "cost/llm").y == ("now", "g")
    most = max(fig.layout.xaxis3.range)
    assert most >= sum(trace(fig, f"cost/{part}").x[1] for part in ("llm", "prm", "rest"))
    assert fig.layout.yaxis.range[1] > max(trace(fig, "llm/total").y)
    assert {"bar", "start_s"} <= set(block_rows(view).columns)


def test_figures_are_the_projects(view):
    """Its template without the cloud button, axes with units, a caption, the face."""
    for fig in (share_figure(view), blocks_figure(view)):
        assert "sendChartToCloud" in fig.layout.template.layout.modebar.remove
        assert fig.layout.meta["caption"] and "tiny-solver" in fig.layout.meta["face"]
        assert "bound from below" in fig.layout.meta["face"]


def test_words_say_what_it_is_and_no_price_is_made_up(small, view):
    """An estimate is called one; a price is named only where one was given."""
    text, cost = in_words(view.answer), cost_in_words(view.answer)
    assert text.startswith("Estimate:") and "0.30 of 40.0 MiB" in text and "kv_share" in text
    assert "hour" not in cost and "at most" in cost
    assert "at 2.5 an hour that is" in cost_in_words(view.answer, 2.5)
    found = exact(small.first, small.position, small.answers)
    assert in_words(found).startswith("Exact replay:")


def test_without_a_front_end_a_sentence_stands_in(monkeypatch, small):
    """Under papermill no widget is built, and no process started."""
    for name in ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD"):
        monkeypatch.delenv(name, raising=False)
    assert "live notebook" in what_if()
    assert parameters_of(small.position)["recording"] == str(small.first.path.resolve())
