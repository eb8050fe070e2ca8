"""Static padded batches: their rules, that padding is computed, and that tokens do not change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_executor import FakeStops, Rig, expected_logits, expected_tokens
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.static_batch import StaticScheduler
from workbench.errors import ConfigError, OutOfMemory
from workbench.kvcache.manager import KVCacheManager


class Padded(Rig):
    """A static scheduler over blocks of 4."""

    kind, caching = StaticScheduler, False

    def __init__(self, num_blocks: int = 256, **limits) -> None:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
        super().__init__(num_blocks, **sizes | limits)


def rows(plan) -> list[int]:
    return np.diff(plan.query_start).tolist()


def test_prompts_are_padded_to_the_longest_and_the_padding_is_computed() -> None:
    rig = Padded()
    short, long = rig.add(3), rig.add(10)
    plan = rig.step()
    assert rows(plan) == [10, 10]
    assert plan.sampling.rows.tolist() == [2, 19], "the last token of each prompt, not padding"
    assert (short.num_computed, long.num_computed) == (3, 10)
    assert rig.plans[0][1].blocks_active == 2 * 15, "each has blocks for the longest"
    assert rig.plans[0][1].prefill_tokens == 20
    assert rig.plans[0][1].tokens_held == 13


def test_a_token_budget_cuts_the_padded_prompts_into_columns() -> None:
    rig = Padded(max_num_batched_tokens=8)
    rig.add(2)
    rig.add(10)
    plans = [rig.step() for _ in range(4)]
    assert [rows(plan) for plan in plans] == [[4, 4], [4, 4], [2, 2], [1, 1]]
    assert [len(plan.sampling) for plan in plans] == [1, 0, 1, 2]


def test_nobody_joins_before_the_slowest_is_done_and_who_ended_keeps_its_row() -> None:
    rig = Padded(max_num_seqs=2)
    rig.add(4, max_tokens=2)
    rig.add(4, max_tokens=5)
    rig.add(4, max_tokens=1)
    for _ in range(4):
        assert rows(rig.step()) in ([4, 4], [1, 1])
        assert not rig.finished
    rig.step()
    assert rig.finished == {1: "length", 2: "length"}, "a batch returns as a whole"
    assert rig.cache.num_active == 0
    assert rows(rig.step()) == [4]
    assert rig.finished[3] == "length"


def test_a_request_whose_padded_batch_cannot_fit_is_refused_with_the_numbers() -> None:
    rig = Padded(num_blocks=20)
    rig.add(10, max_tokens=10)
    with pytest.raises(OutOfMemory, match=r"max_num_seqs=4.*24 tokens.*needs 24.*there are 20"):
        rig.add(14, max_tokens=10)
    with pytest.raises(OutOfMemory, match="28 tokens"):
        rig.add_score([1] * 28, (27,))
    rig.run()
    assert list(rig.finished) == [1]


def test_prefix_caching_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        Engine("tiny-solver", batching="static")
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8}
    with pytest.raises(ConfigError, match="enable_prefix_caching=False"):
        StaticScheduler(KVCacheManager(8, 4), np.arange(8), stops=FakeStops(), **sizes)
    with pytest.raises(ConfigError, match=r"'statik'.*Did you mean 'static'"):
        Engine("tiny-solver", batching="statik")


def test_a_failed_step_ends_its_batch_and_what_waits_goes_on() -> None:
    rig = Padded(max_num_seqs=2)
    early, late, waiting = rig.add(3, 1), rig.add(5, 9), rig.add(4, 2)
    rig.step()
    plan = rig.scheduler.schedule()
    assert rig.scheduler.fail(plan) == [early, late]
    assert rig.cache.num_active == 0
    rig.run()
    assert rig.finished == {waiting.request_id: "length"}


PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(PROMPT, st.integers(0, 6), st.booleans()), min_size=1, max_size=9),
    seqs=st.integers(1, 4),
    extra=st.integers(0, 20),
    aborted=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 12)), max_size=2),
)
def test_tokens_logits_and_counts_are_those_of_each_request_alone(
    requests, seqs, extra, aborted
) -> None:
    """max_tokens 0 stands for a scoring request of the prompt; aborted: (step, request id)."""
    rig = Padded(max_num_seqs=seqs, max_num_batched_tokens=seqs + extra)
    sequences, step, gone = [], 0, set()
    for tokens, max_tokens, ignore_eos in requests:
        if max_tokens:
            sequences.append(rig.add(0, max_tokens, tokens, ignore_eos))
        else:
            sequences.append(rig.add_score(tokens, (len(tokens) - 1,)))
    while rig.scheduler.has_work:
        rig.step()
        step += 1
        for when, number in aborted:
            if when == step and rig.scheduler.abort(number):
                gone.add(number)
    assert set(rig.finished) == set(range(1, len(requests) + 1)) - gone
    for sequence, (tokens, max_tokens, ignore_eos) in zip(sequences, requests, strict=True):
        if sequence.request_id in gone:
            continue
        if max_tokens:
            sampled = expected_tokens(tokens, sequence.request_id, max_tokens, ignore_eos)
            assert sequence.token_ids == tokens + sampled
        else:
            wanted = expected_logits(tokens, sequence.score.positions, (1, 2))
            assert {p: list(v) for p, v in sequence.score_rows.items()} == wanted
    assert rig.cache.num_active == 0
    for plan, counts in rig.plans:
        assert counts.prefill_tokens + counts.decode_tokens == plan.num_tokens
        assert plan.num_tokens <= seqs + extra
        assert len(set(rows(plan))) == 1, "a step is a rectangle"


def test_a_real_model_samples_and_scores_the_same_in_static_and_continuous_batches() -> None:
    """Prompts of many lengths, more than one batch of them, stops and seeds; bit for bit."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 90, 14)
    prompts = [rng.integers(5, 60, n).tolist() for n in lengths]
    params = [SamplingParams(max_tokens=int(4 + n % 23), seed=n, stop=("1",)) for n in range(14)]
    found = {}
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "max_model_len": 512}
    for batching in ("continuous", "static"):
        kind = {"batching": batching, "enable_prefix_caching": False, "num_blocks": 400}
        engine = Engine("tiny-solver", **kind, **limits)
        sampled = [o.token_ids for o in engine.generate(prompts, params)]
        numbers = [engine.add_score(p, (0, len(p) - 1), (7, 8, 9)) for p in prompts]
        logits = {}
        while engine.has_work:
            logits |= {o.request_id: o.logits for o in engine.step()}
        found[batching] = sampled, np.stack([logits[n] for n in numbers])
        assert engine.cache.num_active == 0
    assert found["static"][0] == found["continuous"][0]
    assert np.array_equal(found["static"][1], found["continuous"][1])
