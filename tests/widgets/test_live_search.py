"""A live search: paused, re-split and stopped as it runs, and never another token for it."""

import asyncio
import random
import threading
import time
from itertools import pairwise

import pytest

from workbench.errors import ConfigError
from workbench.search.problems import load_problems
from workbench.search.strategies import BeamSearch
from workbench.widgets.live_blocks import STATES
from workbench.widgets.live_gate import SearchStopped
from workbench.widgets.live_pair import POLICIES, shared_pair
from workbench.widgets.live_script import different_nodes, move_while_it_runs, sameness_in_words
from workbench.widgets.live_search import LiveSearch

LONGEST_GAP_S = 5.0  # steps and splits take milliseconds; the rest is for a machine with others on
LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def pair():
    return shared_pair(memory="4MiB", kv_share=0.4, **LIMITS)


def small(pair, problems=3, max_depth=8):
    strategy = BeamSearch(n=8, beam_width=4, max_depth=max_depth)
    chosen = load_problems("tiny", limit=problems)
    return LiveSearch(chosen, pair, strategy=strategy, seed=1, min_problem_batch=1)


@pytest.fixture(scope="module")
def undisturbed(pair):
    live = small(pair)
    live.start()
    return live.wait()


def assert_at_rest(live):
    """No leak: nobody holds a block or waits, the laws hold, no thread is left."""
    live.pair.arena.check()
    assert not live.is_alive
    assert not [t for t in threading.enumerate() if t.name == "live search"]
    for engine in live.pair.engines:
        assert engine.cache.num_active == 0
        assert not engine.has_work


def test_fifty_moves_change_no_token_and_leave_an_event_loop_free(pair, undisturbed):
    """50 random splits and snapshots from a kernel's loop while it searches: equal tokens, no
    leak, and the loop's other work never waits for long, whatever a split or a step takes."""
    live, draw, turns = small(pair), random.Random(3), []

    async def other_work():
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def drag():
        beside, outcomes, seen = asyncio.create_task(other_work()), [], []
        turns.append(time.monotonic())
        live.start()
        while len(outcomes) < 50 and live.is_alive:
            steps = live.snapshot().steps
            while live.is_alive and live.snapshot().steps == steps:
                await asyncio.sleep(0)
            share = draw.uniform(pair.lowest_share, pair.highest_share)
            outcomes.append(live.resplit(share).outcome)
            seen.append(live.snapshot())
        beside.cancel()
        turns.append(time.monotonic())
        return outcomes, seen

    outcomes, seen = asyncio.run(drag())
    result = live.wait()
    assert len(outcomes) == 50
    assert set(outcomes) <= {"reached", "later"}
    assert {snapshot.state for snapshot in seen[:-1]} == {"running"}
    gaps = [after - before for before, after in pairwise(turns)]
    assert max(gaps) < min(LONGEST_GAP_S, sum(gaps) / 2), "the loop is held while it searches"
    assert different_nodes(undisturbed, result) == 0
    assert_at_rest(live)


def stopped_at(live):
    """Stop; answers the steps there were once no other could begin. Before, others still may."""
    shut, seen = live._gate.shut, []
    live._gate.shut = lambda: (shut(), seen.append(live.snapshot().steps))
    live.stop()
    return seen[0]


def test_stop_takes_at_most_the_step_in_flight_and_leaves_the_engines_usable(pair, undisturbed):
    """Guards the way out: within one step, nothing left behind, the same search again is equal."""
    live = small(pair)
    live.start()
    live.wait_for_steps(7)
    steps = stopped_at(live)
    assert live.state == "stopped"
    assert live.snapshot().steps <= steps + 1
    assert_at_rest(live)
    with pytest.raises(SearchStopped, match="start it again"):
        live.wait()
    live.start()
    assert different_nodes(undisturbed, live.wait()) == 0
    assert live.state == "finished"
    assert_at_rest(live)


def test_a_paused_search_takes_no_step_and_its_clock_stands(pair, undisturbed):
    """Guards pause and resume, a re-split in between, and a stop that need not resume first."""
    live = small(pair)
    live.start()
    live.wait_for_steps(3)
    live.pause()
    time.sleep(0.3)  # the step in flight
    before = live.snapshot()
    live.resplit(0.3)
    time.sleep(0.05)
    after = live.snapshot()
    assert (before.state, after.state, after.phase) == ("paused", "paused", "")
    assert (after.steps, after.seconds) == (before.steps, before.seconds)
    assert [move.outcome for move in after.moves] in (["reached"], ["later"])
    live.resume()
    assert live.wait_for_steps(1)
    live.pause()
    live.stop()
    assert live.state == "stopped"
    assert_at_rest(live)


def test_a_pause_before_the_start_holds_the_first_step_back(pair, undisturbed):
    """Nothing is stepped until resume, and a search that has ended begins anew unpaused."""
    live = small(pair)
    live.pause()
    assert live.state == "ready"
    live.start()
    time.sleep(0.1)
    assert (live.state, live.snapshot().steps) == ("paused", 0)
    live.resume()
    assert different_nodes(undisturbed, live.wait()) == 0
    assert not live.is_paused
    assert_at_rest(live)


def test_a_snapshot_accounts_for_every_block_and_token(pair, undisturbed):
    """The map's counts are the caches' own, and the time line holds all tokens and steps."""
    live = small(pair)
    assert live.state == "ready"
    result = move_while_it_runs(live, [0.3, 0.5], every=6)
    seen = live.snapshot()
    blocks = seen.blocks
    for role, engine in zip(("llm", "prm"), pair.engines):
        assert blocks.counts[f"{role}_active"] == engine.cache.num_active == 0
        assert blocks.counts[f"{role}_cached"] == engine.cache.num_cached > 0
    assert blocks.cells.shape == (pair.arena.num_pages, 4)
    assert set(blocks.counts) == set(STATES)
    assert seen.tokens == result.throughput.tokens
    assert seen.steps == len(result.trace.steps)
    assert seen.answered == seen.problems == 3
    assert seen.target["llm"] == pytest.approx(0.5, abs=1 / pair.arena.num_pages)
    assert [round(move.share, 1) for move in seen.moves] == [0.3, 0.5]
    words = sameness_in_words(undisturbed, result, seen)
    assert "anew **2** times" in words
    assert "**identical**" in words


def test_a_split_below_a_floor_is_refused_and_marked(pair):
    """The answer says whose request would not fit; the search goes on."""
    live = small(pair)
    live.start()
    answer = live.resplit(0.02)
    assert answer.refused
    assert "one request needs" in answer.reason
    assert [move.outcome for move in live.snapshot().moves] == ["refused"]
    live.stop()


def test_a_policy_without_a_split_says_so():
    """FirstCome has nothing to set: it is shown working, and a re-split is refused."""
    pair = shared_pair(memory="4MiB", policy="first-come", **LIMITS)
    live = small(pair, problems=1, max_depth=2)
    assert not pair.keeps_split
    assert "FirstCome keeps no split" in live.resplit(0.3).reason
    live.start()
    live.wait()
    assert live.snapshot().moves == ()
    assert set(POLICIES) == {"static", "first-come", "phase-aware", "marginal-value"}


def test_what_ends_a_search_is_told(pair):
    """A search that fails says why, in its snapshot and to whoever waits for it."""
    problems = load_problems("tiny", limit=1)
    strategy = BeamSearch(n=4, beam_width=2, max_depth=2)
    live = LiveSearch(problems, pair, strategy=strategy, voting="loudest")
    live.start()
    with pytest.raises(ConfigError, match="voting"):
        live.wait()
    assert live.state == "failed"
    assert "ConfigError" in live.snapshot().problem


def test_one_search_at_a_time(pair):
    """A second start, on this search or another of the pair, is refused by name."""
    live, other = small(pair), small(pair)
    with pytest.raises(ConfigError, match="was not started"):
        live.wait()
    live.start()
    live.wait_for_steps(2)
    with pytest.raises(ConfigError, match="runs already"):
        live.start()
    with pytest.raises(ConfigError, match="requests of another search"):
        other.start()
    live.stop()


def test_another_search_is_told_apart(pair, undisturbed):
    """The comparison can fail: one problem fewer lacks that problem's nodes."""
    other = small(pair, problems=2)
    other.start()
    lacking = undisturbed.tree["problem_id"].nunique() - 2
    assert lacking == 1
    assert 0 < different_nodes(undisturbed, other.wait()) < len(undisturbed.tree)


def test_an_unknown_policy_is_named():
    with pytest.raises(ConfigError, match="allowed: static, first-come"):
        shared_pair(policy="statics")
