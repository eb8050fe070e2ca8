"""Figures of the replayed rung and over sizes: told apart at a glance, and true to their rows."""

import pandas as pd
import pytest

from tests.plots import synthetic
from workbench import plots
from workbench.plots.search import GROUND, as_replayed, rungs

PAIRS = {
    "memory_split": synthetic.split_rows,
    "prm_blocks": synthetic.block_rows,
    "prefix_hits": synthetic.hit_rows,
    "thrashing": synthetic.thrash_rows,
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_replayed_figure_is_told_apart(name) -> None:
    """Ground, badge, title, caption and dashes differ; the data do not."""
    draw, rows = getattr(plots, name), PAIRS[name]()
    measured, replayed = (how(rows, synthetic.PROVENANCE) for how in (draw, as_replayed(draw)))
    assert replayed.layout.plot_bgcolor == GROUND != measured.layout.plot_bgcolor
    assert "replayed 1B + 8B" in replayed.layout.title.text
    (badge,) = (a for a in replayed.layout.annotations if "REPLAYED" in (a.text or ""))
    top = replayed.layout.meta["on_paper"]["margin"]["t"]
    assert badge.yshift + 18 <= top, "the badge is inside the page on paper too"
    assert replayed.layout.meta["caption"].startswith("Replayed 1B + 8B, not measured.")
    for before, after in zip(measured.data, replayed.data, strict=True):
        assert list(before.y) == pytest.approx(list(after.y), nan_ok=True)
        if "lines" in (before.mode or "") and not (before.stackgroup or before.fill):
            assert (before.line.dash or "solid") != after.line.dash


def test_rungs_are_drawn_over_their_own_best() -> None:
    """One line a rung, in per cent; the replayed one dotted with open markers."""
    cells = [("measured tiny", False, 0.3, 1.0), ("measured tiny", False, 0.5, 0.7)]
    cells += [("replayed 1B + 8B", True, 0.3, 1.0), ("replayed 1B + 8B", True, 0.5, 0.5)]
    rows = pd.DataFrame(cells, columns=["rung", "replayed", "llm_share", "value"])
    rows = rows.assign(low=rows["value"] - 0.1, high=rows["value"] + 0.1)
    measured, replayed = rungs(rows, synthetic.PROVENANCE).data
    assert list(replayed.y) == [100, 50]
    assert (measured.line.dash, replayed.line.dash) == ("solid", "dot")
    assert replayed.marker.symbol.endswith("-open")


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
