"""Figures of memory and of the ladder draw what their rows say, checked on the figure's data."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from workbench import plots
from workbench.plots import theme

MIB, GIB = 2**20, 2**30
SHARES = (0.04, 0.1, 0.3, 0.5, 0.65)
PARTS = {"weights": 4, "activations_longest": 2, "activations_limits": 3, "other": 0}


def part_rows():
    """Two pairs of equal shape, the second a thousand times as large; the ends do not fit."""
    rows, pairs = [], (("measured", MIB, 64), ("computed", GIB, 40))
    for (how, unit, total), model, share in product(pairs, theme.MODELS, SHARES):
        part = share if model == "llm" else 1 - share
        sizes = PARTS | {"kv": max(0.0, part * total - 4)}
        lacks = {("llm", 0.04): 2.5, ("prm", 0.65): 4.5}.get((model, share), 0)
        own = {"how": how, "model": model, "name": f"{how}-{model}", "llm_share": share}
        own |= {"budget_bytes": part * total * unit, "lacks_bytes": lacks * unit}
        own |= {"fits": 0.05 < share < 0.6}
        own |= {"llm_kv_tokens": 1000 * share, "prm_kv_tokens": 4000 * (1 - share)}
        rows += [own | {"part": p, "bytes": size * unit} for p, size in sizes.items()]
    return pd.DataFrame(rows)


def block_rows():
    """Lines, two engines built at 0.3, and a cross at either end."""
    rows, models = [], (("llm", 8000, 0.07, 0.04), ("prm", -2000, 0.6, 0.65))
    for how, (model, slope, zero, end) in product(("measured", "computed"), models):
        shared = {"how": how, "model": model, "name": f"{how}-{model}", "block_size": 16}
        shared |= {"low_end": 0.08, "high_end": 0.58, "lacks_bytes": 0}
        for share in np.arange(0.01, 0.7, 0.01):
            blocks = max(0, int(slope * (share - zero)))
            rows.append(shared | {"llm_share": share, "kind": "formula", "blocks": blocks})
        lacking = {"kind": "lacking", "blocks": 0, "lacks_bytes": 2.5 * MIB}
        rows.append(shared | {"llm_share": end} | lacking)
        if how == "measured":
            rows.append(shared | {"llm_share": 0.3, "kind": "built", "blocks": 600})
    return pd.DataFrame(rows)


def rung_rows():
    """Three rungs, one beside them, and two depth limits."""
    rates = {"first": 5.0, "second": 10.0, "third": 20.0, "static_requests": 8.0}
    rows = []
    for rung, rate in rates.items():
        for metric, value in (("problems_per_min", rate), ("tokens_per_s", 40 * rate)):
            rows.append((rung, metric, value, 0.9 * value, 1.2 * value, 40))
        rows.append((rung, "accuracy", 0.5, 0.25, 0.75, 40))
    rows += [("second", "gain", 2.0, 1.8, 2.2, 40), ("static_requests", "gain", 0.4, 0.3, 0.5, 40)]
    rows += [("third", "whole", 4.0, 3.0, 5.0, 40), ("third", "gain", 2.0, -np.inf, np.inf, 40)]
    rows += [("third", "stops", v, v - 0.1, v + 0.1, d) for d, v in ((4, 0.2), (40, 0.5))]
    rows += [("second", "finishes", v, v - 0.1, v + 0.1, d) for d, v in ((4, 0.6), (40, 0.5))]
    frame = pd.DataFrame(rows, columns=["setting", "metric", "value", "low", "high", "max_depth"])
    return frame.assign(label=frame["setting"].str.upper(), queued=frame["setting"] == "second")


def panel(fig, row, col, kind="bar"):
    """Traces of one panel of a 2 x 2 figure."""
    axis = {(1, 1): "y", (1, 2): "y2", (2, 1): "y3", (2, 2): "y4"}[row, col]
    return [t for t in fig.data if t.type == kind and t.yaxis == axis]


def test_memory_stacks_to_the_part_of_the_total_and_activations_beyond():
    """Shares that fit: weights and KV make the model's part, activations come on top, once."""
    fig, rows = plots.memory_parts(part_rows()), part_rows()
    for row, model in ((1, "llm"), (2, "prm")):
        for col, (how, unit) in enumerate((("measured", MIB), ("computed", GIB)), start=1):
            own = rows[(rows["how"] == how) & (rows["model"] == model) & rows["fits"]]
            budgets = own.drop_duplicates("llm_share")["budget_bytes"] / unit
            stack = [t for t in panel(fig, row, col) if t.name != "does not fit"]
            np.testing.assert_allclose(sum(np.asarray(t.y) for t in stack), budgets + 3)
            (stroke,) = panel(fig, row, col, "scatter")
            np.testing.assert_allclose(stroke.y[::3], budgets)
            (kv,) = [t for t in stack if t.name.startswith("KV")]
            assert kv.marker.color == theme.MODELS[model].colour


def test_what_does_not_fit_is_grey_and_says_what_lacks():
    """Both models are grey at such a share; the one that starves says by how much."""
    fig = plots.memory_parts(part_rows())
    for row, col in ((1, 1), (2, 2)):
        (grey,) = [t for t in panel(fig, row, col) if t.name == "does not fit"]
        assert list(grey.x) == [0, 4]
    lacking = [a.text for a in fig.layout.annotations if a.text.startswith("lacks")]
    assert lacking == ["lacks 2.5 MiB", "lacks 4.5 MiB", "lacks 2.5 GiB", "lacks 4.5 GiB"]


def test_blocks_are_a_line_with_the_built_engines_on_it():
    """Points are drawn for engines that were built, and only for these."""
    fig = plots.kv_blocks(block_rows())
    built = [t for t in fig.data if "built" in (t.name or "")]
    assert [(t.name, list(t.x), list(t.y)) for t in built] == [
        ("LLM, engine built", [0.3], [600]),
        ("PRM, engine built", [0.3], [600]),
    ]
    lines = [t for t in fig.data if "formula" in (t.name or "")]
    assert [t.line.dash for t in lines] == [theme.MODELS[m].dash for m in ("llm", "prm")] * 2
    assert fig.layout.yaxis2.range[1] == 16 * fig.layout.yaxis.range[1]
    bands = [(s.x0, round(s.x1, 2)) for s in fig.layout.shapes]
    assert bands == [(0, 0.08), (0.58, 0.69)] * 2
    assert sum("lacks<br>2.5 MiB" in a.text for a in fig.layout.annotations) == 4


def test_each_rung_has_its_rates_its_interval_and_the_factor_over_the_one_before():
    fig, rows = plots.modifications(rung_rows()), rung_rows()
    bars = [t for t in fig.data if t.type == "bar"]
    assert [t.name for t in bars] == ["problems/min", "generated tokens/s", "accuracy"]
    (gains,) = [t for t in fig.data if t.name == "gain"]
    rate = rows[rows["metric"] == "problems_per_min"]
    np.testing.assert_allclose(bars[0].x, rate["value"])
    np.testing.assert_allclose(bars[0].error_x.array, rate["high"] - rate["value"])
    assert list(bars[0].marker.pattern.shape) == ["", "", "", "/"]
    assert dict(zip(gains.y, gains.text)) == {1: "longer queue:<br>×2.00", 2: "×2.00", 3: "×0.40"}
    assert list(gains.marker.symbol) == ["diamond-open", "diamond", "diamond"], "open: of the queue"
    assert dict(zip(gains.y, gains.x)) == {1: 2.0, 2: 2.0, 3: 0.4}, "drawn as its number says"
    assert list(np.take(gains.error_x.arrayminus, [0, 1])) == pytest.approx([0.2, 0.1])
    assert list(fig.layout.yaxis.ticktext) == ["FIRST", "SECOND", "THIRD", "STATIC_REQUESTS"]


def test_ends_are_paired_by_place_and_a_rung_without_bounds_or_limits_is_drawn():
    """One problem has no interval, and a search may have no lower depth limit."""
    fig = plots.modifications(rung_rows())
    ends = {t.name: list(t.y) for t in fig.data if t.type == "scatter" and t.name != "gain"}
    assert ends == {"sampled to the end": [0.6, 0.5], "stopped, unfinished": [0.2, 0.5]}
    assert list(fig.layout.xaxis5.ticktext) == ["4", "40"]
    rows = rung_rows().assign(low=-np.inf, high=np.inf).query("max_depth == 40")
    fig = plots.modifications(rows)
    assert all(np.isfinite(axis.range).all() for axis in (fig.layout.xaxis, fig.layout.xaxis2))
