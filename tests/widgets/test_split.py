"""The split slider: it shows what was measured, and stays away where nobody can move it."""

import pandas as pd
import pytest

from tests.experiments.fake_sweep import SHARES, FakeSweep
from workbench.widgets import split


@pytest.fixture(scope="module")
def readings():
    sweep = FakeSweep()
    return split.split_readings(sweep.runs, sweep.table("steps"))


def marker_places(fig):
    return [(t.x[0], t.y[0]) for t in fig.data if t.meta == "marker"]


def test_readings_are_one_row_a_share_with_every_number(readings):
    assert list(readings["llm_share"]) == list(SHARES)
    assert list(readings.columns[1:]) == list(split.COLUMNS)
    row = split.reading(readings, 0.3)
    assert row["tokens_per_s"] == pytest.approx(40)
    assert row["prm_occupancy"] == 0.5
    assert row["prm_hit_rate"] == 0.95


def test_a_share_between_two_measured_ones_is_the_nearest(readings):
    assert split.nearest_share(readings, 0.27) == 0.3
    assert split.nearest_share(readings, 7) == 0.5
    assert "At a share of 0.30" in split.in_words(readings, 0.26)


def test_the_marker_stands_on_the_lines_at_every_share(readings):
    fig = split.split_figure(readings, 0.3)
    for share in SHARES:
        split.move_marker(fig, readings, share)
        row = split.reading(readings, share)
        wanted = [row["tokens_per_s"], *(100 * row[name] for name in list(split.COLUMNS)[1:])]
        assert marker_places(fig) == [(share, pytest.approx(value)) for value in wanted]


def test_a_front_end_is_needed(readings, monkeypatch):
    for name in split.LIVE:
        monkeypatch.delenv(name, raising=False)
    said = split.split_slider(readings, share=0.21)
    assert said == f"{split.in_words(readings, 0.2)} {split.NOT_LIVE}"
    monkeypatch.setenv("JPY_SESSION_NAME", "02_memory_split.ipynb")
    assert split.is_live()


def test_slider_and_typed_twin_move_each_other_the_marker_and_the_words(readings):
    dial, words, fig, _ = split.build_slider(readings).children
    label, slider, typed = dial.children
    assert "share" in label.value
    assert slider.description
    assert typed.description
    slider.value = 0.5
    assert typed.value == 0.5
    assert "0.50" in words.children[0].value
    assert {x for x, _ in marker_places(fig)} == {0.5}
    typed.value = 0.21
    assert (slider.value, typed.value) == (0.2, 0.2)
    assert {x for x, _ in marker_places(fig)} == {0.2}


def test_the_slider_is_pinned_saved_and_copied_where_it_stands(readings, tmp_path):
    """The command runs the same notebook on the same runs; what is None there is not told."""
    parameters = {"profile": "quick", "shares": [0.3, 0.5], "prm": None}
    dial, words, _, tools = split.build_slider(readings, "", 0.3, parameters).children
    pin, save, copy = tools.children
    pin.children[0].click()
    dial.children[1].value = 0.5
    assert "0.50" in words.children[0].value
    assert words.children[1].value == f"Pinned: {split.in_words(readings, 0.3)}"
    given = "-y 'profile: \"quick\"' -y 'shares: [0.3, 0.5]' -y 'slider_share: 0.5'"
    assert copy.text == (
        f"papermill notebooks/02_memory_split.ipynb 02_memory_split.run.ipynb {given}"
    )
    save.children[0].value = str(tmp_path)
    save.children[1].click()
    assert "Saved in" in save.children[2].value
    assert (tmp_path / "split_slider.parquet").is_file()


def test_one_share_alone_still_makes_a_slider(readings):
    assert split.build_slider(pd.DataFrame(readings.iloc[[2]])).children
