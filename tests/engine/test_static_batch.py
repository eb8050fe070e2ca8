"""The schedulers that are compared with: static padded batches, and none of it kept in a cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_executor import Rig, expected_logits, expected_tokens
from workbench.engine.static_batch import RecomputingScheduler, StaticScheduler
from workbench.errors import OutOfMemory


class Padded(Rig):
    """A static scheduler over blocks of 4."""

    kind, caching = StaticScheduler, False

    def __init__(self, num_blocks: int = 256, **limits) -> None:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
        super().__init__(num_blocks, **sizes | limits)


def test_prompts_are_padded_to_the_longest_and_the_padding_is_computed() -> None:
    rig = Padded()
    short, long = rig.add(3), rig.add(10)
    plan = rig.step()
    assert rig.rows(plan) == [10, 10]
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
    assert [rig.rows(plan) for plan in plans] == [[4, 4], [4, 4], [2, 2], [1, 1]]
    assert [len(plan.sampling) for plan in plans] == [1, 0, 1, 2]


def test_nobody_joins_before_the_slowest_is_done_and_who_ended_keeps_its_row() -> None:
    rig = Padded(max_num_seqs=2)
    rig.add(4, max_tokens=2)
    rig.add(4, max_tokens=5)
    rig.add(4, max_tokens=1)
    for _ in range(4):
        assert rig.rows(rig.step()) in ([4, 4], [1, 1])
        assert not rig.finished
    rig.step()
    assert rig.finished == {1: "length", 2: "length"}, "a batch returns as a whole"
    assert rig.cache.num_active == 0
    assert rig.rows(rig.step()) == [4]
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


def test_a_cache_that_has_shrunk_makes_smaller_batches() -> None:
    """Also where a whole batch fitted when its requests were queued."""
    rig = Padded(num_blocks=20)
    for _ in range(4):
        rig.add(10, max_tokens=10)
    assert not rig.cache.resize(12).refused
    rig.run()
    assert list(rig.finished) == [1, 2, 3, 4]
    assert max(counts.running for _, counts in rig.plans) == 2


def test_a_failed_step_ends_its_batch_and_what_waits_goes_on() -> None:
    rig = Padded(max_num_seqs=2)
    early, late, waiting = rig.add(3, 1), rig.add(5, 9), rig.add(4, 2)
    rig.step()
    plan = rig.scheduler.schedule()
    assert rig.scheduler.fail(plan) == [early, late]
    assert rig.cache.num_active == 0
    rig.run()
    assert rig.finished == {waiting.request_id: "length"}


# -- without a KV cache: every sequence anew at each step --


class Recomputing(Rig):
    """It over blocks of 4."""

    kind, caching = RecomputingScheduler, False


def test_each_token_computes_its_whole_sequence() -> None:
    """With memory that holds nothing from one step to the next."""
    rig = Recomputing()
    rig.add(5, max_tokens=4)
    rig.add(2, max_tokens=2)
    while rig.scheduler.has_work:
        rig.executor.memory.clear()
        rig.step()
    assert [rig.rows(plan) for plan, _ in rig.plans] == [[5, 2], [6, 3], [7], [8]]
    assert rig.finished == {1: "length", 2: "length"}


def test_a_sequence_longer_than_a_step_goes_on_in_the_next() -> None:
    """What a token computes of its own sequence, in two chunks, it does not compute twice."""
    rig = Recomputing(max_num_batched_tokens=8)
    rig.add(10, max_tokens=2)
    rig.run()
    assert [rig.rows(plan) for plan, _ in rig.plans] == [[8], [2], [8], [3]]


# -- both: tokens and logits are those of each request alone --

PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=12)
REQUESTS = st.lists(st.tuples(PROMPT, st.integers(0, 6), st.booleans()), min_size=1, max_size=9)
"""Tokens, max_tokens (0 stands for a scoring request of the prompt) and ignore_eos."""
MANY = settings(max_examples=150, deadline=None)


def check_answers(rig: Rig, requests, aborted=()) -> None:
    """Run the requests to their end; aborted: (step, request id)."""
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


@MANY
@given(
    requests=REQUESTS,
    seqs=st.integers(1, 4),
    extra=st.integers(0, 20),
    aborted=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 12)), max_size=2),
)
def test_padding_changes_no_answer(requests, seqs, extra, aborted) -> None:
    """Every row of a step counts, and a step is a rectangle."""
    rig = Padded(max_num_seqs=seqs, max_num_batched_tokens=seqs + extra)
    check_answers(rig, requests, aborted)
    for plan, counts in rig.plans:
        assert counts.prefill_tokens + counts.decode_tokens == plan.num_tokens
        assert plan.num_tokens <= seqs + extra
        assert len(set(rig.rows(plan))) == 1


@MANY
@given(
    requests=REQUESTS, blocks=st.integers(5, 40), seqs=st.integers(1, 4), extra=st.integers(0, 20)
)
def test_recomputing_changes_no_answer(requests, blocks, seqs, extra) -> None:
    """Few blocks preempt."""
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": seqs + extra}
    check_answers(Recomputing(blocks, max_model_len=20, **limits), requests)
