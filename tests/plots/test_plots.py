"""What a figure draws is what its rows say; checked on the figure's data, never on pixels."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from tests.conftest import committed_tree
from tests.plots import synthetic, test_generation, test_optimisation, test_requirements
from workbench import plots
from workbench.experiments.export import print_version
from workbench.plots import theme
from workbench.plots.caching import BLOCK_COLUMNS, LOST_TIME, decimated
from workbench.plots.panels import APART, GROUND, by_rung

FIGURES = {
    "memory_split": (plots.memory_split, synthetic.split_rows),
    "critiques": (plots.critiques, synthetic.critique_rows),
    "prm_blocks": (plots.prm_blocks, synthetic.block_rows),
    "prefix_hits": (plots.prefix_hits, synthetic.hit_rows),
    "thrashing": (plots.thrashing, synthetic.thrash_rows),
    "lost_time": (plots.lost_time, synthetic.lost_rows),
    "llm_batch": (plots.batch_limits, synthetic.limit_rows),
    "balance": (plots.balance, synthetic.balance_rows),
    "search_tree": (plots.search_tree, synthetic.tree_nodes),
    "memory_parts": (plots.memory_parts, test_requirements.part_rows),
    "kv_blocks": (plots.kv_blocks, test_requirements.block_rows),
    "modifications": (plots.modifications, test_requirements.rung_rows),
    "optimisation": (plots.optimisation, test_optimisation.rows),
    "sensitivity": (plots.sensitivity, synthetic.sensitivity_rows),
    "search_strategies": (plots.search_strategies, synthetic.strategy_rows),
    "engine_cache": (plots.engine_cache, test_generation.cache_rows),
    "engine_batch": (plots.engine_batch, test_generation.batch_rows),
    "engine_memory": (plots.engine_memory, test_generation.memory_rows),
    "serving_load": (plots.serving_load, test_generation.load_rows),
    "serving_split": (plots.serving_split, test_generation.split_rows),
}
UNTITLED = {  # they share another's title
    "optimisation": ("yaxis2",),
    "sensitivity": ("yaxis2",),
    **dict.fromkeys(("thrashing", "prm_blocks", "critiques"), ("xaxis",)),
    "search_strategies": ("xaxis", "xaxis3"),  # above the titled one, of other lengths
    "memory_split": ("xaxis", "xaxis2"),
}
OVER_SHARES = ("memory_split", "prefix_hits", "thrashing", "lost_time", "balance", "critiques")


def drawn(name):
    draw, rows = FIGURES[name]
    return draw(rows(), synthetic.PROVENANCE)


def trace(fig, text, panel=None):
    found = [t for t in fig.data if text in (t.name or "") and panel in (None, t.yaxis)]
    assert len(found) == 1, [t.name for t in fig.data]
    return found[0]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_was_measured_names_its_axes_and_uploads_nothing(name):
    """A reader needs neither the notebook nor the caption to know what stands on an axis."""
    fig = drawn(name)
    texts = " ".join(a.text for a in fig.layout.annotations if a.name == theme.PROVENANCE)
    assert "measured tiny" in texts and "seconds do not" in texts
    assert fig.layout.template.layout.modebar.remove == ("sendChartToCloud",)
    assert len(fig.layout.meta["caption"]) > 40
    for key, axis in fig.to_plotly_json()["layout"].items():
        if key.startswith(("xaxis", "yaxis")) and axis.get("visible", True):
            named = axis.get("title", {}).get("text") or axis.get("ticktext")
            assert named or axis.get("matches") or key in UNTITLED.get(name, ()), key


@pytest.mark.parametrize("name", OVER_SHARES)
def test_split_figures_carry_the_share_below_and_kv_tokens_of_both_models_above(name):
    fig = drawn(name)
    upper = fig.layout.xaxis9
    assert (upper.side, len(upper.ticktext)) == ("top", len(upper.tickvals))
    assert "19k" in upper.ticktext[0] and "2.6k" in upper.ticktext[0]
    assert any(t.xaxis == "x9" for t in fig.data), "plotly hides an axis no trace uses"


def test_lines_draw_values_and_intervals_in_their_models_look():
    """Models differ in dash and marker, not colour only; the interval of the peak is a band."""
    fig, rows = drawn("memory_split"), synthetic.split_rows().query("metric == 'tokens_per_s'")
    line = trace(fig, "generated tokens/s (left axis)")
    np.testing.assert_allclose(line.y, rows["value"])
    np.testing.assert_allclose(line.error_y.array, rows["high"] - rows["value"])
    np.testing.assert_allclose(line.error_y.arrayminus, rows["value"] - rows["low"])
    ratio = trace(fig, "generated tokens/s over those at 0.30", "y")
    np.testing.assert_allclose(ratio.y, rows["ratio"])
    np.testing.assert_allclose(ratio.error_y.array, rows["ratio_high"] - rows["ratio"])
    plateau, band = fig.layout.shapes[:2]
    assert (plateau.y0, plateau.y1) == (0.98, 0.98)
    assert (band.x0, band.x1) == pytest.approx((0.2, 0.4), abs=0.01)
    assert "not kept" not in fig.layout.meta["caption"]
    lost = synthetic.split_rows().assign(ratio_low=np.nan, ratio_high=np.nan)
    assert "no bar its interval was not kept" in plots.memory_split(lost).layout.meta["caption"]
    assert trace(fig, "peak 0.20-0.40, not told apart (95 %)").x == (None,)
    rows = synthetic.split_rows()
    peak = rows[rows["metric"] == "peak_share"]
    alone = rows.assign(low=rows["low"].mask(rows["metric"] == "peak_share", 0.3))
    alone["high"] = alone["high"].mask(rows["metric"] == "peak_share", 0.3)
    assert trace(plots.memory_split(alone), "peak 0.30 (95 %)")
    same = pd.concat([rows, peak.assign(metric="same_work")])
    assert trace(plots.memory_split(same), "peak 0.20-0.40 (95 %: 0.20 to 0.40)")
    whole = rows.assign(low=rows["low"].where(rows["metric"] != "peak_share", 0.05))
    whole["high"] = whole["high"].where(whole["metric"] != "peak_share", 0.9)
    assert trace(plots.memory_split(whole), "no peak is shown")
    assert trace(drawn("thrashing"), "open markers: 0").x == (None,)
    hits, prm = drawn("prefix_hits"), synthetic.hit_rows().query("engine == 'prm'")
    np.testing.assert_allclose(trace(hits, "PRM").y, 100 * prm["value"])
    llm, prm = theme.MODELS["llm"], theme.MODELS["prm"]
    assert llm.dash != prm.dash and llm.symbol != prm.symbol
    for style in (llm, prm):
        line = trace(hits, style.label).line
        assert (line.color, line.dash) == (style.colour, style.dash)


def test_counts_are_a_line_and_where_a_cache_is_short_a_mark_on_the_ratio():
    rows = synthetic.split_rows()
    ratios = rows[rows["metric"] == "tokens_per_s"].set_index("llm_share")["ratio"]
    counted = rows[rows["metric"] == "tokens_per_s"].assign(metric="counted", ratio=0.9)
    short = rows.iloc[[0, 0]].assign(metric=["llm_short", "prm_short"], value=ratios.index[[1, -1]])
    fig = plots.memory_split(pd.concat([rows, counted, short]))
    assert set(trace(fig, "by counts at fitted prices").y) == {0.9}
    for text, share in (("LLM short up to here", 1), ("PRM short from here", -1)):
        mark = trace(fig, text)
        assert (*mark.x, *mark.y) == (ratios.index[share], ratios.iloc[share])
    assert fig.layout.margin.t > plots.memory_split(rows).layout.margin.t


def test_the_right_axis_reaches_beyond_the_highest_bar_and_bars_without_bounds_are_not_drawn():
    rows = synthetic.split_rows()
    wide = rows.assign(high=rows["high"].where(rows["metric"] == "peak_share", 3 * rows["value"]))
    top = plots.memory_split(wide).layout.yaxis3.range[1]
    assert top > wide.query("metric == 'problems_per_min'")["high"].max()
    endless = rows.assign(high=np.inf, low=-np.inf).query("metric != 'peak_share'")
    fig = plots.memory_split(endless)
    assert np.isfinite(fig.layout.yaxis3.range[1])
    assert pd.isna(trace(fig, "generated tokens/s (left axis)").error_y.array).all()


def test_a_zero_is_drawn_as_zero_with_its_upper_bound():
    line = trace(drawn("thrashing"), "PRM", "y")
    is_zero = np.asarray(line.y) == 0
    assert list(line.marker.symbol) == ["square-open" if zero else "square" for zero in is_zero]
    assert list(line.error_y.array[is_zero]) == pytest.approx([0.7] * is_zero.sum())
    assert is_zero.any()


def test_the_heat_map_holds_every_cell_and_hatches_what_cannot_be():
    fig, rows = drawn("llm_batch"), synthetic.limit_rows()
    (heat,) = (t for t in fig.data if t.type == "heatmap")
    cells = rows[rows["kind"] == "continuous"]
    grid = cells.pivot_table("tokens_per_s", "max_num_seqs", "max_num_batched_tokens", dropna=False)
    np.testing.assert_allclose(np.array(heat.z, float), grid)
    hatched = trace(fig, "no rate")
    assert (list(hatched.x), list(hatched.base)) == ([0], [1.5])
    assert tuple(hatched.customdata[0]) == ("infeasible", "more sequences than tokens")
    assert "99 blocks" not in fig.layout.meta["caption"], "plain words, true of every pair"


def test_static_batches_stand_beside_continuous_ones_and_a_cross_marks_what_does_not_fit():
    fig, most = drawn("llm_batch"), synthetic.limit_rows()["steps_per_s"].max()
    np.testing.assert_allclose(most * trace(fig, "no prefix cache").y, [9.0, 18.0])
    padded, refused = (t for t in fig.data if "static" in (t.name or ""))
    np.testing.assert_allclose(most * padded.y, [6.0, 12.0])
    np.testing.assert_allclose(most * padded.error_y.array, [1.2, 2.4])
    np.testing.assert_allclose(most * padded.error_y.arrayminus, [0.6, 1.2])
    assert (list(refused.x), list(refused.y)) == ([64], [0])
    assert "Bars are 95 % intervals" in fig.layout.meta["caption"]
    bounds = {"ratio_low": -np.inf, "ratio_high": np.inf}
    one_seed = plots.batch_limits(synthetic.limit_rows().assign(**bounds))
    assert "intervals" not in one_seed.layout.meta["caption"]
    limits = [t.name for t in fig.data if "tokens a step" in (t.name or "")]
    assert limits == ["256 tokens a step", "2,048 tokens a step", "16,384 tokens a step"]


def test_balance_draws_both_models_and_waste_in_per_cent():
    fig, rows = drawn("balance"), synthetic.balance_rows()
    busy = rows.query("metric == 'steps_per_busy_s' and model == 'prm'")
    np.testing.assert_allclose(trace(fig, "PRM", "y").y, busy["value"])
    own = rows.query("metric == 'waste' and model == 'llm' and max_num_seqs == 8")
    own = own[own["kind"] == "continuous"]
    np.testing.assert_allclose(trace(fig, "LLM, 8").y, 100 * own["value"])
    assert trace(fig, "PRM, static").text == ("8",)


def test_blocks_are_stacked_under_the_capacity_and_two_figures_can_have_the_same_axes():
    rows = synthetic.block_rows(steps=300)
    fig = plots.prm_blocks(rows)
    active, cached = trace(fig, "active"), trace(fig, "cached")
    assert active.stackgroup == cached.stackgroup
    assert (np.asarray(active.y) + np.asarray(cached.y)).max() <= trace(fig, "capacity").y[0]
    assert f"{rows['evicted'].sum():,}" in trace(fig, "evicted").name
    limits = {"axis_steps": 900, "axis_blocks": 380, "axis_events": 70}
    sizes = ((200, 90), (900, 380))
    rows = [synthetic.block_rows(steps=s, total=t).assign(**limits) for s, t in sizes]
    one, other = (plots.prm_blocks(own).layout for own in rows)
    for axis in ("xaxis", "yaxis", "yaxis2"):
        assert one[axis].range == other[axis].range


def test_decimation_keeps_every_extreme_and_the_order():
    rows = synthetic.block_rows(steps=20_000)
    rows.loc[12_345, "evicted"] = 10_000
    rows.loc[77, "blocks_active"] = -5
    thin, columns = decimated(rows, BLOCK_COLUMNS), list(BLOCK_COLUMNS)
    assert len(thin) < 3_300 and thin["step"].is_monotonic_increasing
    extremes = [each[columns].agg(["min", "max"]) for each in (thin, rows)]
    pd.testing.assert_frame_equal(*extremes)
    assert {0, 19_999, 12_345, 77} <= set(thin["step"])


def test_lost_time_stacks_to_the_wall_time():
    rows = synthetic.lost_rows()
    fig = plots.lost_time(rows)
    bars = [t for t in fig.data if t.type == "bar"]
    stack = sum(np.asarray(t.y, float) for t in bars)
    np.testing.assert_allclose(stack, trace(fig, "wall time").y[::3])
    assert [(t.name, t.marker.color) for t in bars] == list(LOST_TIME.values())
    looks = [colour for _, colour in LOST_TIME.values()]
    light = [sum(w * int(c[i : i + 2], 16) for w, i in ((3, 1), (6, 3), (1, 5))) for c in looks]
    assert all(abs(a - b) > 150 for a, b in pairwise(light)), "neighbours differ in a grey print"


def test_a_search_tree_shows_every_node_and_edge_once():
    nodes = synthetic.tree_nodes()
    fig = plots.search_tree(nodes)
    shown = [name for t in fig.data if t.customdata is not None for name in t.customdata]
    lines = [t for t in fig.data if t.mode == "lines"]
    assert sorted(shown) == sorted(nodes["node_id"])
    assert sum(len(t.x) for t in lines) == 3 * len(nodes)


def test_a_strategy_is_one_line_in_each_panel_from_few_beams_to_many():
    """Told apart by more than colour; on the left tokens, a little aside, on the right seconds."""
    fig, rows = drawn("search_strategies"), synthetic.strategy_rows()
    assert len(fig.data) == 3 * 2 * rows["strategy"].nunique()
    assert [[n for n, *_ in t.customdata] for t in fig.data] == [[4, 16]] * len(fig.data)
    named = [t for t in fig.data if t.showlegend]
    assert len({t.name for t in named}) == len(named) == rows["strategy"].nunique()
    assert len({(t.marker.symbol, t.line.dash) for t in named}) == len(named)
    own = rows[(rows["strategy"] == "dora") & (rows["levels"] == "levels from 4")]
    left, right = (t for t in fig.data if t.name == "DORA" and t.yaxis in ("y5", "y6"))
    assert "levels from 4" in fig.layout.yaxis5.title.text
    assert [tokens for _, tokens, _ in left.customdata] == list(own["tokens"])
    assert list(left.y) == list(right.y) == list(own["value"])
    assert list(right.x) == list(own["seconds"]), "seconds stand where they are"
    aside = np.array(left.x) / own["tokens"].to_numpy()
    assert len({*aside.round(9)}) == 1 and 1 / 1.27 < aside[0] < 1.27, "one strategy's in one place"
    at_n = {round(t.x[0] / t.customdata[0][1], 9) for t in named}
    assert len(at_n) == len(named), "bars of equal tokens do not cover each other"
    low, high = fig.layout.xaxis5.range
    assert 10**low < min(left.x) and max(left.x) < 10**high


def test_a_writing_prm_stands_beside_one_that_scores_at_once_each_over_its_own_best():
    """Guards that two rates five times apart can be compared by their shape, and say their size."""
    fig, rows = drawn("critiques"), synthetic.critique_rows()
    for text, best in (("scores at once", 30.0), ("writes critiques", 6.0)):
        line = trace(fig, text)
        assert max(line.y) == pytest.approx(100) and f"{best:.2f}/min" in line.name
    below = [t for t in fig.data if t.yaxis == "y2"]
    assert [t.showlegend for t in below] == [False, False, True, True]
    again = rows[(rows["kind"] == "critiques") & (rows["engine"] == "prm")]
    assert list(below[-1].y) == again["value"].tolist()


def test_one_share_alone_can_be_drawn_and_of_two_too_near_one_has_a_label():
    """Guards axes whose ends are one place; a label that touches another goes, the ends stay."""
    for name in ("prefix_hits", "lost_time"):
        draw, make = FIGURES[name]
        rows = make((0.3,))
        assert draw(rows).layout.xaxis9.ticktext == (theme.both_rooms(rows.iloc[0]),)
    kept = theme.thinned(synthetic.SHARES)
    assert (kept[0], kept[-1]) == (0, len(synthetic.SHARES) - 1)
    assert 1 not in kept, "0.10 would touch 0.08"


DRAWN = sorted((committed_tree() / "figures").glob("*.parquet"))


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.stem)
def test_every_figure_of_the_study_fits_a_page(file):
    """Guards that a figure in a chapter is neither scaled down nor cut: at most 150 x 200 mm."""
    fig = plots.FIGURES[file.stem](pd.read_parquet(file), synthetic.PROVENANCE)
    paper = fig.layout.meta["on_paper"]
    assert paper["width"] <= 150 / 25.4 * 96 + 1
    assert paper["height"] <= 200 / 25.4 * 96


def test_on_paper_a_drawing_too_high_for_a_page_has_lower_panels_and_the_room_between_them():
    """Guards legends and axis titles, whose letters keep their size, against what stands beside."""
    gaps, heights = [], []
    for fig in (drawn("memory_split"), print_version(drawn("memory_split"))):
        height = fig.layout.height - fig.layout.margin.t - fig.layout.margin.b
        ends = [fig.layout[axis].domain for axis in ("yaxis", "yaxis2")]
        gaps.append([height * (above[0] - below[1]) for above, below in pairwise(ends)])
        gaps[-1].append(height * (fig.layout.legend.y - 1))
        heights.append(height)
    assert heights[1] < heights[0] and gaps[1] == pytest.approx(gaps[0])


def test_settings_stand_by_effect_below_what_is_taken_and_one_that_does_not_fit_is_told():
    """The value whose losses move most comes first; bars are plateaus, in the order of labels."""
    fig = drawn("sensitivity")
    assert list(fig.layout.yaxis.ticktext) == [
        "<b>taken</b>", "n: 4", "n: 64", "seeds: seed 1", "dtype: float32",
    ]  # fmt: skip
    bars = trace(fig, "plateau")
    assert list(bars.x[:2]) == [0.1, 0.42] and list(bars.y[:2]) == [0, 0]
    upper = trace(fig, "loss at the upper end")
    assert list(upper.x) == pytest.approx([29, 0, 40, 30])
    assert [a.text for a in fig.layout.annotations if a.y == -4] == ["does not fit"]


RUNGS = ("measured tiny", "replayed SmolLM2", "replayed 1B + 8B")


def on_rungs(name):
    """The same rows for three rungs, each twice as high as the one before."""
    rows, parts = FIGURES[name][1](), []
    for number, rung in enumerate(RUNGS):
        higher = {c: rows[c] * 2**number for c in ("value", "low", "high") if c in rows}
        parts.append(rows.assign(**higher, rung=rung))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("name", ["memory_split", "prm_blocks", "prefix_hits", "thrashing"])
def test_rungs_are_panels_of_one_figure_side_by_side(name):
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
    legends = [name for name in fig.layout.to_plotly_json() if name.startswith("legend")]
    assert legends == sorted(legends), "equal figures have equal bytes, whatever a set's order"


def test_panels_of_the_split_say_how_many_problems_a_minute_are_the_most():
    """One number each, of its own rows, in place of the axis on the right."""
    rows = on_rungs("memory_split")
    fig = by_rung(plots.memory_split)(rows)
    most = rows.query("metric == 'problems_per_min'").groupby("rung", sort=False)["value"].max()
    told = [a.text for a in fig.layout.annotations if "problems/min" in a.text]
    assert told == [f"at most {value:,.3g}<br>problems/min" for value in most]
    assert "and the most problems per minute" in fig.layout.meta["caption"]


def test_batch_limits_of_two_rungs_are_two_heat_maps_and_each_line_is_named_once():
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


def test_batches_that_failed_are_not_called_infeasible():
    """Whose worker died: neither too few blocks nor more sequences than tokens."""
    rows = synthetic.limit_rows()
    died = rows["steps_per_s"].isna() & (rows["max_num_seqs"] == 64)
    fig = plots.batch_limits(rows.assign(status=rows["status"].mask(died, "failed")))
    assert "static, padded: failed" in [trace.name for trace in fig.data]
    assert "Some runs failed" in fig.layout.meta["caption"]
    usual = plots.batch_limits(rows)
    assert "static, padded: does not fit" in [trace.name for trace in usual.data]
    assert "failed" not in usual.layout.meta["caption"]


def test_what_was_replayed_has_another_ground():
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


def size_rows():
    """Two models, sizes from below the order's peak on; the optimum at one of them."""
    columns = ["kind", "tokens", "hit_ratio", "thrashed_per_1000", "llm_share"]
    cells = [
        ("replay", 1000, 0.4, 90.0, None),
        ("lru", 2000, 0.6, 50.0, None),
        ("lru", 4000, 0.8, 0.0, None),
        ("optimum", 2000, 0.7, None, None),
        ("replay", 2000, 0.61, 48.0, None),
        ("share", 3000, None, None, 0.3),
    ]
    parts = [pd.DataFrame(cells, columns=columns).assign(engine=e) for e in ("llm", "prm")]
    return pd.concat(parts, ignore_index=True)


def test_sizes_that_change_the_order_are_dashed():
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
