"""Who gets the memory under each policy. That none starves a model: test_arena_stateful.py."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from workbench.kvcache import policies
from workbench.kvcache.arena import BlockShape, KVArena, PageShape
from workbench.kvcache.policies import FirstCome, MarginalValue, ModelState

SIZE = 4  # tokens a block
PAGE = PageShape(slabs=1, stripe=256)
LLM = BlockShape("llm", 1, 64, floor_blocks=8)  # 4 blocks a page, floor of 2 pages
PRM = BlockShape("prm", 1, 256, floor_blocks=4)  # 1 block a page, floor of 4 pages


def arena_of(policy: policies.Policy, share: float = 0.5) -> KVArena:
    kept = share if policy.keeps_split else None
    return KVArena(40 * PAGE.page_bytes, [LLM, PRM], policy, kept, page=PAGE)


def fill(arena: KVArena, model: str, which: int = 0) -> int:
    """As many cached blocks as one sequence can leave behind."""
    cache = arena.cache(model, SIZE)
    cache.apply()
    count = cache.num_free + cache.num_cached
    assert cache.allocate(which, [which] * (count * SIZE)) is not None
    cache.free(which)
    return count


def held(arena: KVArena) -> list[int]:
    return [pool.held for pool in arena.pools]


def test_first_come_takes_all_but_the_floors_and_the_oldest_page_goes_first() -> None:
    arena = arena_of(FirstCome())
    assert fill(arena, "llm") == 36 * 4, "all but the PRM's floor"
    assert held(arena) == [36, 0]
    assert fill(arena, "prm", which=1) == 38
    assert held(arena) == [2, 38]
    llm = arena.cache("llm", SIZE)
    assert llm.allocate(2, [2] * (4 * SIZE)) is not None
    assert held(arena) == [2, 38], "its own pages were used longest ago"
    assert llm.allocate(3, [3] * (8 * SIZE)) is not None
    assert held(arena) == [3, 37]
    arena.check()


def test_phase_aware_gives_the_pages_of_the_model_that_rests_to_the_one_that_runs() -> None:
    arena = arena_of(policies.PhaseAware())
    llm, prm = arena.cache("llm", SIZE), arena.cache("prm", SIZE)
    fill(arena, "llm")
    assert held(arena) == [36, 0]
    prm.apply()
    assert prm.allocate(1, [1] * (10 * SIZE)) is not None
    assert held(arena) == [30, 10], "pages of the resting model went, although none was free"
    assert prm.stats.evicted == 0
    llm.apply()
    assert arena.target == {"llm": 20, "prm": 20}, "both run: the split holds"
    prm.free(1)
    llm.apply()
    assert arena.target == {"llm": 20, "prm": 4}


def steps(
    policy: MarginalValue,
    gains: list[tuple[float, float]],
    losses: tuple[float, float] = (0.0, 0.0),
    preempted: dict[int, int] | None = None,
) -> list[tuple[int, ...]]:
    """Splits of 64 pages after each step; gains: up to then; preempted: step -> which model was."""
    policy.split([32, 32])
    splits, preemptions = [], [0, 0]
    for number, pair in enumerate(gains):
        if preempted and number in preempted:
            preemptions[preempted[number]] += 1
        states = [
            ModelState(f"m{i}", 4, number % 2 == i, number * 5, gain, number * losses[i], times)
            for i, (gain, times) in enumerate(zip(pair, preemptions))
        ]
        splits.append(tuple(grant.target for grant in policy.grants(states, 64)))
    return splits


def test_marginal_value_moves_pages_to_the_steeper_slope_until_the_other_is_at_its_floor() -> None:
    """The more the gain outweighs the loss, the larger a step; none that is worth more in place."""
    splits = steps(MarginalValue(), [(float(n), n * 2.0) for n in range(60)])
    assert splits[0] == (32, 32), "nothing was seen yet"
    assert splits[-1] == (4, 60)
    for gain, pages in ((2.0, 1), (3.1, 2), (100.0, 4)):
        splits = steps(MarginalValue(), [(float(n), n * gain) for n in range(10)])
        moved = {after[1] - before[1] for before, after in pairwise(splits) if after != before}
        assert moved == {pages}
    gains = [(0.0, n * 2.0) for n in range(60)]
    assert set(steps(MarginalValue(), gains, losses=(3.0, 0.0))) == {(32, 32)}
    assert steps(MarginalValue(), gains, losses=(1.0, 0.0))[-1] == (4, 60)


def test_marginal_value_gives_first_to_a_model_that_had_to_preempt() -> None:
    """Whatever the slopes say; and for some decisions it gives nothing back."""
    gains = [(float(n), n * 2.0) for n in range(60)]
    splits = steps(MarginalValue(), gains, preempted={20: 0})
    before = splits[19]
    after = next(split for split in splits[20:] if split != before)
    assert after[0] > before[0]
    assert splits.count(after) >= 2 * MarginalValue.REST


def test_a_split_by_hand_is_judged_by_what_is_missed_after_it() -> None:
    """Guards that what was seen under another split moves nothing."""
    policy = MarginalValue()
    steps(policy, [(float(n), n * 2.0) for n in range(9)])
    policy.split([48, 16])
    late = [ModelState(f"m{i}", 4, i == 0, 45, (9.0, 18.0)[i]) for i in range(2)]
    early = [replace(state, running=not state.running) for state in late]
    for states in (late, early, late):
        assert [grant.target for grant in policy.grants(states, 64)] == [48, 16]


def test_marginal_value_lends_until_something_is_missed() -> None:
    """What is lent later is taken back page by page, which costs more than it brings."""
    policy = MarginalValue()
    policy.split([32, 32])
    unseen = [ModelState(f"m{i}", 4, i == 0, 0, 0.0) for i in range(2)]
    for change, limit in ({}, 60), ({}, 60), ({"misses": 1}, 32), ({"preemptions": 1}, 32):
        states = [replace(state, **change) for state in unseen]
        assert [grant.limit for grant in policy.grants(states, 64)] == [limit, limit]


def search_like(arena: KVArena, llm_set: int, prm_set: int, rounds: int, seed: int = 0) -> int:
    """Rounds in which each model asks again for one of its prompts; answers tokens missed."""
    random.seed(seed)
    for number in range(rounds):
        for model, prompts in (("llm", llm_set), ("prm", prm_set)):
            cache = arena.cache(model, SIZE)
            for _ in range(4):
                cache.apply()
                which = random.randrange(prompts)
                admitted = cache.allocate(number, [which] * (3 * SIZE) + [number])
                assert admitted is not None, "a floor's worth is always admitted"
                cache.free(number)
    stats = [arena.cache(model, SIZE).stats for model in arena.models]
    return sum(s.query_tokens - s.hit_tokens for s in stats)


@pytest.mark.parametrize("sets", [(4, 9, 250), (45, 2, 500)])
def test_marginal_value_comes_near_the_best_static_split(sets: tuple[int, int, int]) -> None:
    """Its way there included, and without being told which model needs the memory."""
    shares = (0.1, 0.3, 0.5, 0.7, 0.9)
    static = {s: search_like(arena_of(policies.StaticSplit(), s), *sets) for s in shares}
    ours = search_like(arena_of(MarginalValue()), *sets)
    assert ours <= static[0.5]
    assert ours <= 1.05 * min(static.values())
