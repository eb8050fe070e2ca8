"""The sliders of 02, 03 and 06: they stand on what was measured, and say what that is."""

from functools import partial

import pytest

from tests.experiments.fake_sweep import SHARES, FakeSweep
from workbench.experiments.rows import block_rows, thrashing_rows
from workbench.widgets import sliders
from workbench.widgets.parts import NOT_LIVE


@pytest.fixture(scope="module")
def sweep():
    return FakeSweep()


@pytest.fixture(scope="module")
def readings(sweep):
    return sliders.split_readings(sweep.runs, sweep.table("steps"))


@pytest.fixture(scope="module")
def rows(sweep):
    return thrashing_rows(sweep)


@pytest.fixture(scope="module")
def lost(rows):
    """Evicted tokens cost a second at every share, of ten."""
    one = rows.drop_duplicates("llm_share")[["llm_share", "llm_kv_tokens", "prm_kv_tokens"]]
    return one.assign(part="recomputed_evicted", seconds=1.0, wall_s=10.0)


@pytest.fixture
def by_share(readings):
    draw = partial(sliders.split_drawing, readings)
    return partial(sliders.share_slider, "02_memory_split", "split_slider", readings, draw)


def rings(fig):
    marked = [t for t in fig.data if (t.meta or "").startswith("ring ")]
    return {t.meta.removeprefix("ring "): (t.x[0], t.y[0]) for t in marked}


def test_the_rings_stand_on_the_lines_at_every_share(readings):
    """One row a share; rates in percent, throughput as it is; the sentence names the share."""
    assert list(readings["llm_share"]) == list(SHARES)
    row = sliders.nearest_row(readings, 0.27)
    assert (row["llm_share"], row["prm_occupancy"], row["prm_hit_rate"]) == (0.3, 0.5, 0.95)
    assert row["tokens_per_s"] == pytest.approx(40)
    for share in SHARES:
        drawn, row = sliders.split_drawing(readings, share), sliders.nearest_row(readings, share)
        found = rings(drawn.figure)
        assert found.pop("tokens_per_s") == (share, row["tokens_per_s"])
        assert found == {name: (share, 100 * row[name]) for name in found}
        assert f"At a share of {share:.2f}" in drawn.words
    assert len(found) == 4


def test_thrash_is_read_at_every_share(rows, lost):
    """A row a share with both models' counts and what computing again costs; rings stand there."""
    readings = sliders.thrash_readings(rows, lost)
    assert readings["llm_share"].tolist() == list(SHARES)
    one = rows[(rows["engine"] == "prm") & (rows["metric"] == "blocks")].set_index("llm_share")
    assert readings["prm_blocks"].tolist() == one["value"].reindex(SHARES).tolist()
    drawn = sliders.thrash_drawing(rows, readings, 0.21)
    assert "1.00 of 10.00 s (10.0%)" in drawn.words
    row = sliders.nearest_row(readings, 0.2)
    found = rings(drawn.figure)
    assert len(found) == 4
    assert found == {name: (0.2, row[name]) for name in found}


def test_a_step_is_read_as_it_was_recorded(sweep):
    """The stroke stands on the step; active, cached and free add up; evicted adds up to it."""
    rows = block_rows(sweep, 0.5)
    drawn = sliders.occupancy_drawing(rows, 0.5, 7)
    row = rows[["blocks_total", "blocks_active", "blocks_cached"]].astype(int).iloc[7]
    assert [s.x0 for s in drawn.figure.layout.shapes if s.name == "cursor"] == [7.5]
    free = row["blocks_total"] - row["blocks_active"] - row["blocks_cached"]
    assert f"step 7 of {len(rows) - 1}" in drawn.words
    assert f"{row['blocks_cached']:,} cached and {free:,} free" in drawn.words
    assert f"{int(rows['evicted'][:8].sum()):,} evicted." in drawn.words
    last = sliders.occupancy_drawing(rows, 0.5, 10**6)
    assert f"step {len(rows) - 1} of" in last.words


def test_a_moved_slider_moves_figure_words_and_command(sweep, by_share, open_front_end):
    """Both widgets: the share is the nearest measured one, the command runs the notebook."""
    open_front_end()
    given = {"profile": "quick", "shares": [0.3, 0.5], "prm": None}
    share, words, *_, copy = by_share(0.3, **given).children
    share.typed.value = 0.21
    assert share.value == 0.2 and "At a share of 0.20" in words.value
    told = "-y 'profile: \"quick\"' -y 'shares: [0.3, 0.5]' -y 'prm: null' -y 'slider_share: 0.2'"
    assert copy.value.endswith(told)
    assert by_share().children[0].value == max(SHARES)
    share, step, words, *_, copy = sliders.occupancy_slider(sweep, 0.3).children
    step.typed.value, share.slider.value = 4, 0.5
    assert "share of 0.50, step 4 of" in words.value
    assert copy.value.endswith("-y 'upper_share: 0.5'")


def test_a_step_that_a_share_has_not_is_its_last_and_said(sweep, open_front_end, monkeypatch):
    """Slider, stroke and words tell one step, also where another share has more."""
    open_front_end()

    def few(of, at, beside):
        return block_rows(of, at, beside).head(5 if at == 0.5 else 99)

    monkeypatch.setattr(sliders, "block_rows", few)
    share, step, words, *_ = sliders.occupancy_slider(sweep, 0.3).children
    step.slider.value, share.slider.value = step.options[-1], 0.5
    assert step.value == 4 and "share of 0.50, step 4 of 4" in words.value
    assert step.said.text == "At a share of 0.50 the last step is 4."
    step.typed.value = 7  # of the longer share: typed, it comes to the same
    assert step.value == step.typed.value == 4 and "step 4 of 4" in words.value
    assert step.said.text == "At a share of 0.50 the last step is 4."


def test_no_slider_where_it_cannot_be_moved(sweep, by_share, open_front_end):
    """Under papermill the sentence stands in its place."""
    assert by_share(0.3).startswith("At a share of 0.30") and by_share().endswith(NOT_LIVE)
    assert sliders.occupancy_slider(sweep, 0.3) == NOT_LIVE
