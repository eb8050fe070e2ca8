"""The sliders of notebooks 03 and 06: they stand on what was measured, and say what that is."""

import pytest

from tests.experiments.fake_sweep import SHARES, FakeSweep
from workbench.errors import ConfigError
from workbench.experiments.rows import thrashing_rows
from workbench.widgets import occupancy, split, thrash


@pytest.fixture(scope="module")
def sweep():
    return FakeSweep()


@pytest.fixture(scope="module")
def tables(sweep):
    return occupancy.share_steps(sweep)


@pytest.fixture(scope="module")
def rows(sweep):
    return thrashing_rows(sweep)


@pytest.fixture(scope="module")
def lost(rows):
    """Evicted tokens cost a second at every share, of ten."""
    one = rows.drop_duplicates("llm_share")[["llm_share", "llm_kv_tokens", "prm_kv_tokens"]]
    return one.assign(part=thrash.AGAIN, seconds=1.0, wall_s=10.0)


def cursor(fig):
    return next(s.x0 for s in fig.layout.shapes if s.name == occupancy.CURSOR)


def rings(fig):
    return {t.meta: (t.x[0], t.y[0]) for t in fig.data if t.meta}


def test_a_step_is_read_as_it_was_recorded(tables):
    """Active, cached and free add up; what was taken and evicted adds up to the step."""
    rows = tables[0.5]
    at = occupancy.reading(rows, 7)
    assert at["active"] == rows["blocks_active"][7]
    assert at["active"] + at["cached"] + at["free"] == at["total"]
    assert at["evicted"] == rows["evicted"][:8].sum()
    assert occupancy.reading(rows, 10**6)["step"] == len(rows) - 1
    assert "step 7 of" in occupancy.in_words(rows, 0.5, 7)
    with pytest.raises(ConfigError, match="share_steps"):
        occupancy.reading(rows.iloc[:0], 0)


def test_the_cursor_stands_on_the_step_and_another_share_brings_its_own_blocks(tables):
    """The cursor moves alone; the areas change with the share, on the same axes."""
    fig = occupancy.occupancy_figure(tables[0.3], 5)
    assert cursor(fig) == 5.5
    before, axis = list(fig.data[0].y), fig.layout.yaxis.range
    occupancy.move_cursor(fig, tables[0.3], 9)
    assert cursor(fig) == 9.5 and list(fig.data[0].y) == before
    occupancy.other_share(fig, tables[0.5], 9)
    assert fig.data[2].name != "" and fig.layout.yaxis.range == axis
    assert "0.50" in fig.layout.title.text


def test_both_sliders_of_03_move_the_figure_and_the_words(tables):
    """Each has a label and a typed twin; a share or a step typed is drawn."""
    box = occupancy.build_occupancy(tables, 0.3)
    share, step, words, fig, tools = box.children
    assert [b.children[0].value for b in (share, step)] == [
        "LLM share of total memory",
        "PRM scheduling step",
    ]
    step.children[2].value = 4
    assert cursor(fig) == 4.5 and "step 4 of" in words.children[0].value
    share.children[1].value = 0.5
    assert "0.50" in fig.layout.title.text and "share of 0.50" in words.children[0].value
    assert tools.children[2].text.endswith("-y 'upper_share: 0.5'")


def test_thrash_is_read_at_every_share(rows, lost):
    """A row a share with both models' counts and what computing again costs."""
    readings = thrash.thrash_readings(rows, lost)
    assert readings["llm_share"].tolist() == list(SHARES)
    one = rows[(rows["engine"] == "prm") & (rows["metric"] == "blocks")].set_index("llm_share")
    assert readings["prm_blocks"].tolist() == one["value"].reindex(SHARES).tolist()
    assert "1.00 of 10.00 s (10.0%)" in thrash.in_words(readings, 0.5)


def test_the_slider_of_06_moves_rings_and_words(rows, lost):
    """Rings stand on the lines, at a measured share whatever is typed."""
    readings = thrash.thrash_readings(rows, lost)
    share, words, fig, tools = thrash.build_thrash(rows, readings, 0.5).children
    share.children[2].value = 0.21
    row = split.reading(readings, 0.2)
    assert rings(fig) == {
        f"{model}_{metric}": (0.2, row[f"{model}_{metric}"])
        for model in ("llm", "prm")
        for metric in thrash.METRICS
    }
    assert "share of 0.20" in words.children[0].value
    assert tools.children[2].text.endswith("-y 'slider_share: 0.2'")


def test_no_slider_where_nobody_can_move_it(sweep, rows, lost, monkeypatch):
    """Under papermill a sentence stands in their place."""
    for name in split.LIVE:
        monkeypatch.delenv(name, raising=False)
    assert occupancy.occupancy_slider(sweep, 0.3) == split.NOT_LIVE
    assert thrash.thrash_slider(rows, lost).endswith(f"(10.0%). {split.NOT_LIVE}")
