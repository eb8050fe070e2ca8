"""A live search: paused, re-split and stopped as it runs, and never another token for it."""

import asyncio
import random
import threading
import time
from itertools import pairwise
from unittest.mock import Mock

import pytest

from workbench.bench.identity import nodes_of
from workbench.errors import ConfigError
from workbench.search.problems import load_problems
from workbench.search.strategies import BeamSearch
from workbench.widgets import live_search as ls

LONGEST_GAP_S = 5.0  # steps and splits take milliseconds; the rest is for a machine with others on
LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def pair():
    return ls.SharedPair(memory="4MiB", kv_share=0.4, **LIMITS)


def small(pair, problems=3, max_depth=8, **settings):
    strategy = BeamSearch(n=8, beam_width=4, max_depth=max_depth)
    settings |= {"strategy": strategy, "seed": 1, "min_problem_batch": 1}
    return ls.LiveSearch(load_problems("tiny", limit=problems), pair, **settings)


@pytest.fixture(scope="module")
def undisturbed(pair):
    live = small(pair)
    live.start()
    return live.wait()


def assert_at_rest(live):
    """No leak: no block is held, no request waits, the laws hold, no thread is left."""
    live.pair.arena.check()
    assert not live.is_alive
    assert not [t for t in threading.enumerate() if t.name == "live search"]
    for engine in live.pair.engines.values():
        assert engine.cache.num_active == 0
        assert not engine.has_work


def test_fifty_moves_change_no_token_and_leave_an_event_loop_free(pair, undisturbed):
    """Equal tokens, no leak, and the loop's other work never waits for long, 50 times over."""
    live, draw, turns = small(pair), random.Random(3), [time.monotonic()]

    async def other_work():
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def drag():
        beside, states = asyncio.create_task(other_work()), []
        live.start()
        while len(states) < 50 and live.is_alive:
            steps = live.snapshot().steps
            while live.is_alive and live.snapshot().steps == steps:
                await asyncio.sleep(0)
            share = draw.uniform(*pair.share_limits)
            assert live.resplit(share).outcome in ("reached", "later")
            states.append(live.snapshot().state)
        beside.cancel()
        return states

    states = asyncio.run(drag())
    turns.append(time.monotonic())
    result = live.wait()
    assert (len(states), set(states[:-1])) == (50, {"running"})
    gaps = [after - before for before, after in pairwise(turns)]
    assert max(gaps) < min(LONGEST_GAP_S, sum(gaps) / 2), "the loop is held while it searches"
    assert nodes_of(undisturbed) == nodes_of(result)
    assert_at_rest(live)


@pytest.mark.parametrize("answered", [0, 1])
def test_a_stopped_search_leaves_the_engines_usable_and_keeps_answers(pair, undisturbed, answered):
    """Nothing goes on or is left behind; what `wait` raises has the problems answered by then, as
    `run_search`'s error has.
    """
    live = small(pair)
    live.start()
    live.wait_for_steps(7)
    while live.snapshot().answered < answered and live.wait_for_steps(1):
        pass
    live.stop()
    seen = live.snapshot()
    assert live.state == "stopped" and seen.answered >= answered
    assert seen.steps < len(undisturbed.trace.steps)
    assert_at_rest(live)
    with pytest.raises(ls.SearchStopped, match="start it again") as caught:
        live.wait()
    if answered:
        assert len(kept := caught.value.result.problems) == seen.answered
        assert f"{len(kept)} of 3 problems" in caught.value.__notes__[0]


def test_a_paused_search_takes_no_step_and_its_clock_stands(pair, undisturbed):
    """Guards pause before the start too, a re-split in between, and a stop without resuming."""
    live = small(pair)
    live.pause()
    assert live.state == "ready"
    live.start()
    time.sleep(0.1)
    assert (live.state, live.snapshot().steps) == ("paused", 0)
    live.resume()
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
    assert (live.state, live.is_paused) == ("stopped", False)
    live.start()
    assert nodes_of(undisturbed) == nodes_of(live.wait())
    assert_at_rest(live)


def test_a_snapshot_accounts_for_every_block_and_token(pair, undisturbed):
    """The map's counts are the caches' own, and the time line holds all tokens and steps."""
    live = small(pair)
    assert live.state == "ready"
    result = ls.move_while_it_runs(live, [0.3, 0.5], every=6)
    seen = live.snapshot()
    counts = seen.block_counts
    for role, engine in pair.engines.items():
        assert counts[f"{role}_active"] == engine.cache.num_active == 0
        assert counts[f"{role}_cached"] == engine.cache.num_cached > 0
    assert len(seen.blocks) == pair.arena.num_pages
    assert set(counts) == set(ls.BLOCK_STATES)
    assert seen.tokens == result.throughput.tokens
    assert seen.steps == len(result.trace.steps)
    assert seen.answered == seen.problems == 3
    assert seen.target == pytest.approx(0.5, abs=1 / pair.arena.num_pages)
    assert [round(move.share, 1) for move in seen.moves] == [0.3, 0.5]


def test_a_policy_without_a_split_says_so():
    """FirstCome has nothing to set: it is shown working, and a re-split is refused."""
    blocks = {"block_size": 32}  # a setting of both engines reaches the arena, too
    pair = ls.SharedPair(memory="4MiB", policy="first_come", **LIMITS, **blocks)
    live = small(pair, 1, max_depth=2)
    assert "FirstCome keeps no split" in live.resplit(0.3).reason
    assert live.state == "ready"
    live.start()
    live.wait()
    assert (live.state, live.snapshot().moves) == ("finished", ())
    with pytest.raises(ConfigError, match=r"policy is 'statics'.*static, first_come"):
        ls.SharedPair(policy="statics")


def test_one_model_can_have_both_roles():
    pair = ls.SharedPair("tiny-prm", "tiny-prm", memory="4MiB", **LIMITS)
    assert [*pair.engines] == ["llm", "prm"] and pair.share_limits[0] < 0.5 < pair.share_limits[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_fault_in_a_step_is_told_and_leaves_engines_free(pair, undisturbed, seed, monkeypatch):
    """Of either engine, where it plans the step; the same search can then be started anew."""
    live, draw = small(pair), random.Random(seed)
    scheduler = draw.choice([*pair.engines.values()]).scheduler
    left = iter(range(draw.randrange(2, 12)))
    plan = scheduler.schedule

    def schedule():
        if next(left, None) is None:
            raise OSError("no more steps")
        return plan()

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "schedule", schedule)
        live.start()
        with pytest.raises(OSError, match="no more steps"):
            live.wait()
    assert live.state == "failed" and "no more steps" in live.snapshot().problem
    assert_at_rest(live)
    live.start()
    assert nodes_of(undisturbed) == nodes_of(live.wait())


def test_what_cannot_be_is_refused_while_it_runs(pair):
    """A second start of the pair is refused by name; a split below a floor too, and marked."""
    live, other = small(pair), small(pair)
    with pytest.raises(ConfigError, match="was not started"):
        live.wait()
    live.start()
    with pytest.raises(ConfigError, match="requests of another search"):
        other.start()  # before the first has asked anything
    live.wait_for_steps(2)
    answer = live.resplit(0.02)
    assert answer.refused and "one request needs" in answer.reason
    assert [move.outcome for move in live.snapshot().moves] == ["refused"]
    with pytest.raises(ConfigError, match="runs already"):
        live.start()
    with pytest.raises(ConfigError, match="requests of another search"):
        other.start()
    live.stop()


def test_an_interrupted_start_leaves_the_pair_to_others(pair, monkeypatch):
    live = small(pair)
    with monkeypatch.context() as patch:
        patch.setattr(ls.Thread, "start", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            live.start()
    assert live.state == "ready"
    live.start()
    live.stop()


def seen(is_prm, start_s, end_s, tokens=0, level=0.5):
    evicted = [3 * end_s // 1, 0.0]
    return ls.StepSeen(float(is_prm), start_s, end_s, tokens, *evicted, *[level] * len(ls.LEVELS))


def test_a_time_line_holds_every_token_and_second():
    """However long the search: at most so many buckets, levels as they were last."""
    line = ls.timeline([seen(k % 2, k + 0.1, k + 0.9, 5, k / 500) for k in range(500)])
    assert len(line) <= ls.MOST_BUCKETS
    width = 2 * line["time_s"].iloc[0]
    widths = [width] * (len(line) - 1) + [499.9 - width * (len(line) - 1)]
    assert (line["llm_busy"] * widths).sum() == pytest.approx(200)
    assert (line["prm_busy"] * widths).sum() == pytest.approx(200)
    assert (line["tokens_per_s"] * widths).sum() == pytest.approx(2500, abs=5)
    assert line["llm_target"].iloc[-1] == 499 / 500
    assert (line["llm_evicted"].sum(), line["prm_evicted"].sum()) == (1499, 0)


def test_an_even_rate_is_drawn_even_wherever_the_last_step_ended():
    """Steps of 40 ms, two tokens each: 50 tokens/s, over what has passed of the last bucket."""
    for count in (60, 77, 776):
        steps = [seen(0, k * 0.04, (k + 1) * 0.04 - 1e-6, 2) for k in range(count)]
        last = ls.timeline(steps).iloc[-1]
        assert last["tokens_per_s"] == pytest.approx(50, rel=0.03)
        assert last["llm_busy"] > 0.99
        assert last["time_s"] < count * 0.04
