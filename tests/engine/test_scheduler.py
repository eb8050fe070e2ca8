"""The scheduler's rules, one example each, with an executor that checks every KV entry."""

import pickle

import numpy as np
import pytest

from tests.engine.fake_executor import Rig, expected_logits, expected_tokens
from workbench.errors import OutOfMemory, PromptError


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once_at_its_end() -> None:
    ticks = iter(range(100))
    rig = Rig(max_num_batched_tokens=8, clock=lambda: float(next(ticks)))
    sequence = rig.add(20)
    chunks = [rig.step() for _ in range(3)]
    assert [rig.rows(plan) for plan in chunks] == [[8], [8], [4]]
    assert [len(plan.sampling) for plan in chunks] == [0, 0, 1]
    assert chunks[2].sampling.positions.tolist() == [20]
    assert (len(sequence.token_ids), sequence.num_computed) == (21, 20)
    rig.step()
    assert (sequence.scheduled_s, sequence.first_token_s) == (0.0, 1.0), "stamped once"


def test_decodes_go_first_and_never_wait_for_a_prefill() -> None:
    rig = Rig(max_num_batched_tokens=8)
    short = rig.add(2)
    rig.step()
    rig.add(40)
    for _ in range(4):
        before = len(short.token_ids)
        plan = rig.step()
        assert rig.rows(plan) == [1, 7]
        assert len(short.token_ids) == before + 1
    assert (rig.scheduler.counts.decode_tokens, rig.scheduler.counts.prefill_tokens) == (1, 7)
    waiting = rig.add(12)
    plans = [rig.rows(rig.step()) for _ in range(2)]
    assert plans == [[1, 7], [1, 5, 2]], "a prefill that runs comes before a request that waits"
    assert waiting.num_computed == 2


def test_admission_needs_room_for_the_whole_sequence_and_stops_at_the_first_that_lacks_it() -> None:
    rig = Rig(10)
    rig.add(16)
    rig.add(28)  # seven blocks, six are left
    rig.add(2)  # would fit
    rig.step()
    assert (rig.scheduler.counts.running, rig.scheduler.counts.waiting) == (1, 2)


def test_the_watermark_holds_blocks_back_unless_nothing_runs() -> None:
    rig = Rig(8, watermark=0.25, max_model_len=32)
    rig.add(31, max_tokens=1)
    rig.step()
    assert rig.finished == {1: "length"}, "alone, it may take the whole cache"
    rig.add(16)
    rig.add(12)
    rig.add(4)
    rig.step()
    assert rig.scheduler.counts.running == 1, "12 tokens would leave 1 block, 2 are held back"


def test_the_latest_is_preempted_waits_at_the_head_and_is_recomputed() -> None:
    rig = Rig(6, max_model_len=24)
    first, second = rig.add(8, 12), rig.add(8, 12)
    rig.step()
    rig.add(4)
    while not second.preemptions:
        assert first.preemptions == 0
        rig.step()
    assert rig.scheduler.counts.preempted == 1
    counts = rig.scheduler.counts
    assert (counts.running, counts.waiting) == (1, 2), "and none admitted"
    while 2 not in rig.finished:
        rig.step()
    assert 3 not in rig.finished, "the preempted request came back before the one behind it"
    for sequence in (first, second):
        prompt, sampled = sequence.token_ids[:8], sequence.token_ids[8:]
        assert sampled == expected_tokens(prompt, sequence.params.seed, 12, True)
    assert second.readmit_cached_tokens > 0
    assert rig.cache.stats.query_tokens == 8 + 8 + 4
    assert rig.cache.stats.readmit_query_tokens > 8


def test_a_prefill_gives_way_to_decodes_that_are_planned() -> None:
    """It is the victim of its own lack of blocks, and comes back when the decodes are done."""
    rig = Rig(6, max_num_seqs=2, max_num_batched_tokens=5, max_model_len=24)
    decoder = rig.add(3, 17)
    rig.step()
    prefill = rig.add(20, 1)
    while not prefill.preemptions:
        before = len(decoder.token_ids)
        rig.step()
        assert len(decoder.token_ids) == before + 1
        assert prefill.num_computed < 20
    rig.run()
    assert rig.finished == {1: "length", 2: "length"}
    assert decoder.preemptions == 0


def test_a_score_request_answers_its_positions_and_computes_nothing_after_the_last() -> None:
    rig = Rig(max_num_batched_tokens=8)
    tokens = list(range(20))
    sequence = rig.add_score(tokens, (3, 9, 16), (1, 5))
    steps = 0
    while rig.scheduler.has_work:
        plan = rig.step()
        steps += plan.num_tokens
        assert len(plan.sampling) == 0
    assert steps == 17
    assert rig.finished == {1: "score"}
    expected = expected_logits(tokens, (3, 9, 16), (1, 5))
    assert {p: row.tolist() for p, row in sequence.score_rows.items()} == expected


def test_a_score_request_hits_at_most_up_to_its_first_wanted_position() -> None:
    rig = Rig()
    tokens = list(range(16))
    rig.add_score(tokens, (15,))
    rig.step()
    second = rig.add_score(tokens, (9, 15))
    plan = rig.step()
    assert second.num_cached_tokens == 8
    assert plan.positions.tolist() == list(range(8, 16))


def test_score_requests_with_equal_columns_share_one_group() -> None:
    rig = Rig()
    rig.add_score([1, 2, 3], (1, 2), (7, 8))
    rig.add_score([4, 5, 6], (2,), (7, 8))
    rig.add_score([7, 8, 9], (0,), (5,))
    plan = rig.step()
    wanted = [(w.rows.tolist(), w.columns.tolist()) for w in plan.wanted]
    assert wanted == [([1, 2, 5], [7, 8]), ([6], [5])]
    assert rig.scheduler.counts.score_requests == 3


def test_abort_between_steps_keeps_the_computed_blocks_cached() -> None:
    rig = Rig(max_num_batched_tokens=10)
    sequence, waiting = rig.add(16), rig.add(4)
    rig.step()
    assert rig.scheduler.abort(1) is sequence
    assert rig.cache.num_active == 0
    assert rig.cache.match(sequence.token_ids) == 8, "10 tokens were computed"
    assert rig.scheduler.abort(2) is waiting
    assert rig.scheduler.abort(2) is None
    assert not rig.scheduler.has_work
    assert rig.stops.params == {}


def test_what_can_never_be_served_is_refused_with_the_numbers() -> None:
    rig = Rig(max_model_len=12)
    with pytest.raises(PromptError, match="12 tokens; allowed are at most 11"):
        rig.add(12)
    with pytest.raises(PromptError, match="0 to 7"):
        rig.add_score([1] * 8, (8,))
    rig.add_score([1] * 12, (11,))  # nothing is sampled, so it may fill max_model_len
    with pytest.raises(PromptError, match="13 tokens"):
        rig.add_score([1] * 13, (12,))
    with pytest.raises(OutOfMemory, match=r"needs 4.*at most 12"):
        Rig(3, max_model_len=13)


def test_stop_conditions_are_examined_only_where_they_may_hold() -> None:
    rig = Rig()
    for _ in range(4):
        rig.add(4, 30)
    sampled = eos = 0
    for _ in range(20):
        plan = rig.scheduler.schedule()
        result = rig.executor.run(plan)
        sampled += len(result.tokens)
        eos += int(np.sum(result.tokens == 3))
        rig.scheduler.update(plan, result)
    assert rig.stops.examined == eos < sampled


def test_plans_are_plain_data_that_later_steps_do_not_change() -> None:
    rig = Rig()
    for length in (3, 9, 5):
        rig.add(length)
    rig.step()
    plan = rig.scheduler.schedule()
    frozen = pickle.dumps(plan)
    rig.scheduler.update(plan, rig.executor.run(plan))
    for _ in range(5):
        rig.step()
    assert pickle.dumps(plan) == frozen
    assert plan.block_offsets.dtype == np.int64
    assert plan.query_start.dtype == plan.context_len.dtype == np.int32
