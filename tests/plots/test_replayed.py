"""Figures of several rungs and over sizes: told apart at a glance, and true to their rows."""

from itertools import pairwise

import pandas as pd
import pytest

from tests.plots import synthetic
from tests.plots.test_plots import FIGURES
from workbench import plots
from workbench.plots.panels import APART, GROUND, by_rung

RUNGS = ("measured tiny", "replayed SmolLM2", "replayed 1B + 8B")


def on_rungs(name) -> pd.DataFrame:
    """The same rows for three rungs, each twice as high as the one before."""
    rows, parts = FIGURES[name][1](), []
    for number, rung in enumerate(RUNGS):
        higher = {c: rows[c] * 2**number for c in ("value", "low", "high") if c in rows}
        parts.append(rows.assign(**higher, rung=rung))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("name", ["memory_split", "prm_blocks", "prefix_hits", "thrashing"])
def test_rungs_are_panels_of_one_figure_side_by_side(name) -> None:
    """Guards that no panel covers another, and that each draws its own rows on its own axes."""
    draw, rows = by_rung(getattr(plots, name)), on_rungs(name)
    fig = draw(rows, synthetic.PROVENANCE)
    titles = [a for a in fig.layout.annotations if (a.text or "").strip("</b>") in RUNGS]
    assert [a.text.strip("</b>") for a in titles] == list(RUNGS)
    axes = {n: fig.layout[n] for n in fig.layout if n.startswith("xaxis")}
    reaches = sorted({tuple(axis.domain) for axis in axes.values() if axis.domain})
    assert len(reaches) == len(RUNGS)
    assert all(a[1] < b[0] for a, b in pairwise(reaches))
    alone = draw(rows[rows["rung"] == RUNGS[2]], synthetic.PROVENANCE)
    drawn = [t for t in fig.data if int(t.xaxis.removeprefix("x") or 1) > 2 * APART]
    for own, single in zip(drawn, alone.data, strict=True):
        assert list(own.y) == pytest.approx(list(single.y), nan_ok=True)
    names = [t.name for t in fig.data if t.showlegend is not False]
    assert len(names) == len(set(names)), "a legend says each thing once"


def test_batch_limits_of_two_rungs_are_two_heat_maps_and_each_line_is_named_once() -> None:
    """What the measured rung lacks, a line of its own, is named where it first stands."""
    rows = synthetic.limit_rows()
    fits = rows[rows["steps_per_s"].notna() | (rows["kind"] == "continuous")]
    both = pd.concat([fits.assign(rung=RUNGS[0]), rows.assign(rung=RUNGS[2])])
    fig = plots.FIGURES["llm_batch"](both, synthetic.PROVENANCE)
    heats = [t for t in fig.data if t.type == "heatmap"]
    assert [t.xaxis for t in heats] == ["x", f"x{1 + APART}"]
    assert not any(t.showlegend for t in heats)
    names = [t.name for t in fig.data if t.showlegend is not False]
    assert len(names) == len(set(names)) and "static, padded: does not fit" in names
    assert "generated tokens/s (above)" in fig.layout.title.text
    assert not any("continuous batching" in (a.text or "") for a in fig.layout.annotations)


def test_what_was_replayed_has_another_ground() -> None:
    """A panel by a rectangle behind it, a figure of one rung by its ground and its title."""
    fig = by_rung(plots.prefix_hits)(on_rungs("prefix_hits"), synthetic.PROVENANCE)
    tinted = [s for s in fig.layout.shapes if s.fillcolor == GROUND]
    assert len(tinted) == 2 and min(s.x0 for s in tinted) > 0.3
    assert "tinted: replayed" in fig.layout.meta["caption"]
    rows = on_rungs("prefix_hits")
    for rung, ground in ((RUNGS[0], None), (RUNGS[2], GROUND)):
        fig = by_rung(plots.prefix_hits)(rows[rows["rung"] == rung], synthetic.PROVENANCE)
        assert fig.layout.plot_bgcolor == ground
        assert (rung in fig.layout.title.text) is (ground is not None)


def size_rows() -> pd.DataFrame:
    """Two models, sizes from below the order's peak on; the optimum at one of them."""
    columns = ["kind", "tokens", "fits", "hit_ratio", "thrashed_per_1000", "llm_share"]
    cells = [
        ("replay", 1000, True, 0.4, 90.0, None),
        ("lru", 2000, True, 0.6, 50.0, None),
        ("lru", 4000, True, 0.8, 0.0, None),
        ("optimum", 2000, True, 0.7, None, None),
        ("replay", 2000, True, 0.61, 48.0, None),
        ("share", 3000, None, None, None, 0.3),
    ]
    parts = [pd.DataFrame(cells, columns=columns).assign(engine=e) for e in ("llm", "prm")]
    return pd.concat(parts, ignore_index=True)


def test_sizes_that_change_the_order_are_dashed() -> None:
    """Where the order fits the line is solid, from replays below it dashed; the optimum beside."""
    fig = plots.miss_ratio(size_rows(), synthetic.PROVENANCE)
    hits = [t for t in fig.data if t.xaxis == "x" and t.yaxis == "y"]
    solid, dashed, best, crosses = hits
    assert list(solid.x) == [2000, 4000]
    assert list(dashed.x) == [1000, 2000]
    assert (solid.line.dash, dashed.line.dash) == ("solid", "dash")
    assert list(best.y) == [70]
    assert list(crosses.y) == [40, 61]
    assert any(a.text == "0.30" for a in fig.layout.annotations)
    assert "no bound where sequences fill equal blocks" in fig.layout.meta["caption"]
