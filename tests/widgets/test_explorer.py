"""The explorer: what can be picked of stored runs, figures of one and of two, and their words."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from tests.experiments import test_batching
from tests.experiments.fakes import IDENTITY, store_fake
from tests.widgets.conftest import HOSTILE
from workbench.errors import ConfigError, RunStoreError
from workbench.experiments.batching import run_batches
from workbench.experiments.plans import sweep_config
from workbench.experiments.rows import balance_rows
from workbench.experiments.runs import load_runs
from workbench.experiments.settings import RunSpec
from workbench.experiments.study import measured_of
from workbench.widgets import explorer

CONFIGURATION = sweep_config("quick", num_problems=4)


@pytest.fixture(scope="module")
def runs_dir(root):
    """Three shares of one sweep, and two of a second that differs in depth."""
    for share in (0.2, 0.3, 0.5):
        store_fake(root, RunSpec(CONFIGURATION, share, 0))
    for share in (0.3, 0.4):
        store_fake(root, RunSpec(replace(CONFIGURATION, max_depth=7), share, 0))
    return root


@pytest.fixture(scope="module")
def found(runs_dir):
    return explorer.picks(load_runs(runs_dir))


def test_runs_that_differ_in_share_alone_are_one_pick(found, sweeps):
    """Two sweeps, told apart where their names would be equal, then every run by itself."""
    assert sorted(len(pick.all_runs) for pick in sweeps) == [2, 3]
    assert len(found) == 2 + 5
    assert [p.shares for p in sweeps if "share 0.2 to 0.5" in p.name] == [[0.2, 0.3, 0.5]]


def test_runs_of_other_code_are_a_pick_of_their_own(tmp_path):
    for code in ("0.1.0", "0.2.0"):
        store_fake(tmp_path, RunSpec(CONFIGURATION, 0.3, 0), replace(IDENTITY, code=code))
    picks = explorer.picks(load_runs(tmp_path))
    both = {name: pick for name, pick in picks.items() if name.startswith("sweep")}
    assert [len(pick.runs) for pick in both.values()] == [1, 1]
    assert all("code=0." in name for name in both)


@pytest.fixture(scope="module")
def sweeps(found):
    return [pick for name, pick in found.items() if name.startswith("sweep")]


@pytest.mark.parametrize("name", ["memory_split", "prm_blocks", "lost_time"])  # fakes lack requests
def test_a_figure_of_two_picks_holds_both(sweeps, name):
    """B adds its lines to A's axes, its entries are no second legend, all rows say whose."""
    a, b = sweeps
    one, two = explorer.explore(name, a), explorer.explore(name, a, b)
    assert len(two.figure.data) > len(one.figure.data)
    seconds = [t for t in two.figure.data if (t.name or "").startswith("B: ")]
    assert seconds and all(t.showlegend is False for t in seconds)
    assert set(two.rows["pick"]) == {a.name, b.name}
    assert set(one.rows["pick"]) == {a.name}
    assert "tokens/s" in two.words


def test_two_memories_and_two_bases_are_told_apart(found, tmp_path):
    """B's ratios are over a share of its own, the room above is A's alone."""
    a = next(pick for pick in found.values() if len(pick.runs) == 3)
    single = found[next(name for name in found if name.startswith("split-0.500"))]
    said = explorer.explore("memory_split", a, single).figure.layout.meta["provenance"]
    assert "Ratios of A are over its 0.30, of B over its 0.50." in said and "Room" not in said
    for share in (0.3, 0.4):
        store_fake(tmp_path, RunSpec(replace(CONFIGURATION, total_memory="32MiB"), share, 0))
    less = explorer.picked(explorer.picks(load_runs(tmp_path)), None)
    drawn = explorer.explore("memory_split", a, less)
    assert "Room above: A's." in drawn.figure.layout.meta["provenance"]
    assert drawn.measured["machine"]["cpu"] == a.runs["machine_cpu"][0]
    above = dict(zip(drawn.figure.layout.xaxis9.tickvals, drawn.figure.layout.xaxis9.ticktext))
    assert above[0.3] == explorer.explore("memory_split", a).figure.layout.xaxis9.ticktext[1]
    assert above[0.4] == ""


def test_bars_of_two_picks_stand_beside_each_other_at_their_own_shares(sweeps):
    """Guards columns drawn at the place of another share."""
    a, b = sweeps
    bars = [t for t in explorer.explore("lost_time", a, b).figure.data if t.type == "bar"]
    assert {t.offsetgroup for t in bars} == {"A", "B"}
    shares = sorted({*a.shares, *b.shares})
    for pick, group in ((a, "A"), (b, "B")):
        seconds = np.sum([t.y for t in bars if t.offsetgroup == group], axis=0)
        assert [share for share, s in zip(shares, seconds) if s > 0] == pick.shares


def test_settings_and_repetitions_of_a_study_are_no_one_pick(tmp_path):
    """Runs of unlike techniques are not drawn as one search, nor one that was carried out twice."""
    runs = [RunSpec(CONFIGURATION, 0.3, 0, "ablation", setting=name) for name in ("a", "b")]
    for run in (*runs, replace(runs[0], repeat=1)):
        store_fake(tmp_path, run)
    found = explorer.picks(load_runs(tmp_path))
    groups = [pick for name, pick in found.items() if name.startswith("ablation runs")]
    assert sorted(len(pick.all_runs) for pick in groups) == [1, 2]
    assert [len(pick.runs) for pick in groups] == [1, 1]


def test_cells_of_two_batching_studies_stand_beside_each_other(tmp_path):
    """Their heat maps have axes of their own limits."""
    for place, config in (("a", test_batching.CONFIG), ("b", replace(test_batching.CONFIG, n=8))):
        run_batches(config, test_batching.PLAN, tmp_path / place, execute=test_batching.fake_cell)
    both = explorer.picks(load_runs([tmp_path / "a", tmp_path / "b"]))
    a, b = [pick for pick in both.values() if pick.is_batches]
    drawn = explorer.explore("llm_batch", a, b)
    maps = [trace for trace in drawn.figure.data if trace.type == "heatmap"]
    assert len({trace.xaxis for trace in maps}) == len(maps) == 2
    assert set(drawn.rows["pick"]) == {a.name, b.name}


def test_what_cannot_be_drawn_is_said(found, tmp_path):
    a = explorer.picked(found, None)
    with pytest.raises(ConfigError, match=r"no figure 'memory'.*memory_split"):
        explorer.explore("memory", a)
    with pytest.raises(RunStoreError, match="no pick 'sweeps'"):
        explorer.picked(found, "sweeps")
    with pytest.raises(RunStoreError, match="`workbench figures` makes some"):
        explorer.picks(load_runs(tmp_path))
    assert explorer.figures_of(a) == list(explorer.OF_SEARCHES)


def test_a_sweep_and_batching_cells_make_the_balance(found, tmp_path):
    """Whichever of the two is picked first; of one kind alone there is none."""
    run_batches(test_batching.CONFIG, test_batching.PLAN, tmp_path, execute=test_batching.fake_cell)
    cells = next(pick for pick in explorer.picks(load_runs(tmp_path)).values() if pick.is_batches)
    sweep = explorer.picked(found, None)
    assert explorer.figures_of(sweep, cells) == explorer.figures_of(cells, sweep) == ["balance"]
    pairs = ((sweep, cells), (cells, sweep))
    one, other = (explorer.explore("balance", *pair) for pair in pairs)
    assert set(one.rows["metric"]) == {"steps_per_busy_s", "waste"}
    assert one.measured == other.measured == measured_of(sweep.runs.iloc[0])
    pd.testing.assert_frame_equal(one.rows, other.rows)
    with pytest.raises(ConfigError, match="no figure 'balance'"):
        explorer.explore("balance", sweep)
    replays = SimpleNamespace(table=lambda name: pd.DataFrame())
    with pytest.raises(RunStoreError, match="Replays sample no nodes"):
        balance_rows(replays, cells.all_runs)
    with pytest.raises(RunStoreError, match="no run with sampled nodes"):
        explorer.searched(0.3, cells)
    assert len(explorer.searched(0.3, cells, sweep)[1])
    words, tables = explorer.compared(cells, cells)
    assert "cells of a batching study search nothing" in words and not tables


def test_a_search_of_a_pick_is_the_one_nearest_to_a_share(found, tmp_path):
    """A sentinel's is not: its run is not among the pick's."""
    a = next(pick for pick in found.values() if len(pick.runs) == 3)
    problems, nodes = explorer.searched(0.29, a)
    assert set(problems["run_id"]) == {r for r in a.runs["run_id"] if r.startswith("split-0.300")}
    assert set(nodes["problem_id"]) == set(problems["problem_id"])
    for role in ("sentinel", "measure"):
        store_fake(tmp_path, RunSpec(CONFIGURATION, 0.3, 0, role=role))
    pick = explorer.picked(explorer.picks(load_runs(tmp_path)), None)
    assert len(pick.all_runs) == 2
    problems, _ = explorer.searched(0.3, pick)
    assert set(problems["run_id"]) == set(pick.runs["run_id"])


def test_two_picks_are_compared_as_the_command_compares_them(found, says):
    """Line by line: hits, tokens computed again, accuracy by level with its intervals."""
    a, b = (found[name] for name in found if name.startswith(("split-0.200", "split-0.500")))
    tables = explorer.explore("memory_split", a, b).tables
    told = says("runs", "compare", *(pick.all_runs["folder"].item() for pick in (a, b)))
    printed = [line.split() for line in told.splitlines()]
    for table in tables:
        for row in ([*table], *table.to_numpy()):
            assert " ".join(row).split() in printed
    measured, levels, settings = (set(table.iloc[:, 0]) for table in tables)
    assert settings == {"llm_share"} and levels == {"all", "1", "2", "3", "4"}
    assert {"tokens_per_s", "llm_hit_rate", "prm_recomputed_tokens"} <= measured


def test_the_comparison_stands_below_the_words_and_is_made_once(tmp_path, monkeypatch):
    """Escaped; another share of the same two is drawn without comparing them again."""
    for prompt in (None, HOSTILE):
        for share in (0.2, 0.3):
            config = replace(CONFIGURATION, system_prompt=prompt)
            store_fake(tmp_path, RunSpec(config, share, 0))
    made = Mock(wraps=explorer.compare)
    monkeypatch.setattr(explorer, "compare", made)
    view = explorer.ExplorerView(tmp_path)
    view.name.value = "prm_blocks"
    view.second.value = list(view.picks)[1]
    view._share_row.children[0].slider.value = 0.2
    assert "A (share 0.20)" in view.figures[0].layout.meta["provenance"]
    assert made.call_count == 1
    assert "B minus A: +0 tokens/s." in view.words.text
    assert f'<td>"{HOSTILE.replace("<", "&lt;").replace(">", "&gt;")}"</td>' in view.words.value
    assert "<td>llm_hit_rate</td>" in view.words.value and "<img" not in view.words.value
    view.second.value = "none"
    assert "<table" not in view.words.value


def test_the_widget_draws_what_is_picked_and_writes_the_command(runs_dir):
    """Another pick, figure and share are drawn; what is pinned is laid over the next pick."""
    view = explorer.ExplorerView(runs_dir, problem=None)
    single = next(name for name in view.picks if name.startswith("split-0.500"))
    first = next(iter(view.picks))
    other = explorer.ExplorerView(runs_dir, single, first, "prm_blocks", 0.2)
    for told in (f'pick_a: "{single}"', f'pick_b: "{first}"', 'figure: "prm_blocks"'):
        assert told in other.copy.value
    view.name.value = "prm_blocks"
    view.second.value = single
    assert "B minus A" in view.words.value
    assert f'pick_b: "{single}"' in view.copy.value
    assert "llm_share: 0.3" in view.copy.value
    view.name.value = "memory_split"
    assert "llm_share" not in view.copy.value
    assert view.first.value in view.pin()
    assert view.second.value == view.first.value
    view.first.value = view.second.value = single  # which has no share of 0.3
    (slider,) = view._share_row.children
    assert slider.said.text == "0.30 is of neither pick; 0.50 is the nearest."
