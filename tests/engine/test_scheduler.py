"""The scheduler's rules, one example each, with an executor that checks every KV entry."""

import pickle

import numpy as np
import pytest

from tests.engine.fake_executor import FakeExecutor, FakeStops, expected_logits, expected_tokens
from workbench.core import SamplingParams, ScoreParams, Sequence, StepPlan, StepResult
from workbench.engine.scheduler import Scheduler
from workbench.errors import ConfigError, OutOfMemory, PromptError
from workbench.kvcache.manager import KVCacheManager


class Rig:
    """A scheduler, its cache and an executor; prompts of tokens that no two requests share."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **options) -> None:
        self.cache = KVCacheManager(num_blocks, block_size, options.pop("caching", True))
        settings = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": min(64, num_blocks * block_size),
            "watermark": 0.0,
        }
        self.stops = FakeStops()
        self.scheduler = Scheduler(
            self.cache, np.arange(num_blocks) * 1000, stops=self.stops, **settings | options
        )
        self.executor = FakeExecutor(block_size)
        self.finished: dict[int, str] = {}
        self.count = 0

    def add(self, length: int, max_tokens: int = 50, tokens: list[int] | None = None) -> Sequence:
        self.count += 1
        tokens = [10 * self.count] * length if tokens is None else tokens
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=self.count)
        sequence = Sequence(self.count, list(tokens), len(tokens), params)
        self.scheduler.add(sequence)
        return sequence

    def add_score(self, tokens: list[int], positions: tuple[int, ...], columns=(1, 2)) -> Sequence:
        self.count += 1
        score = ScoreParams(positions, columns)
        sequence = Sequence(self.count, list(tokens), len(tokens), score=score)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        for sequence, reason in self.scheduler.update(plan, self.executor.run(plan)):
            self.finished[sequence.request_id] = reason
        self.cache.check()
        return plan

    def rows(self, plan: StepPlan) -> list[int]:
        """Tokens of each sequence of the plan, in its order."""
        return np.diff(plan.query_start).tolist()


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once_at_its_end() -> None:
    rig = Rig(max_num_batched_tokens=8)
    sequence = rig.add(20)
    chunks = [rig.step() for _ in range(3)]
    assert [rig.rows(plan) for plan in chunks] == [[8], [8], [4]]
    assert [len(plan.sampling) for plan in chunks] == [0, 0, 1]
    assert chunks[2].sampling.positions.tolist() == [20]
    assert (sequence.num_tokens, sequence.num_computed) == (21, 20)


def test_decodes_go_first_and_never_wait_for_a_prefill() -> None:
    rig = Rig(max_num_batched_tokens=8)
    short = rig.add(2)
    rig.step()
    rig.add(40)
    for _ in range(4):
        before = short.num_tokens
        plan = rig.step()
        assert rig.rows(plan) == [1, 7]
        assert short.num_tokens == before + 1
    assert (rig.scheduler.counts.decode_tokens, rig.scheduler.counts.prefill_tokens) == (1, 7)


def test_running_prefills_come_before_waiting_requests() -> None:
    rig = Rig(max_num_batched_tokens=8)
    first, second = rig.add(12), rig.add(12)
    rig.step()
    plan = rig.step()
    assert rig.rows(plan) == [4, 4]
    assert (first.num_computed, second.num_computed) == (12, 4)


def test_admission_needs_room_for_the_whole_sequence_and_stops_at_the_first_that_lacks_it() -> None:
    rig = Rig(10, max_num_batched_tokens=8, max_model_len=40)
    rig.add(16)
    rig.add(28)  # seven blocks, six are left
    rig.add(2)  # would fit
    rig.step()
    rig.step()
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 2)


def test_the_watermark_holds_blocks_back_unless_nothing_runs() -> None:
    rig = Rig(8, watermark=0.25, max_model_len=32)
    rig.add(31, max_tokens=1)
    rig.step()
    assert rig.finished == {1: "length"}, "alone, it may take the whole cache"
    rig.add(16)
    rig.add(12)
    rig.add(4)
    rig.step()
    assert rig.scheduler.num_running == 1, "12 tokens would leave 1 block, 2 are held back"


def test_no_more_than_max_num_seqs_run() -> None:
    rig = Rig(max_num_seqs=3)
    for _ in range(5):
        rig.add(2)
    rig.step()
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (3, 2)


def test_the_latest_is_preempted_waits_at_the_head_and_is_recomputed() -> None:
    rig = Rig(6, max_model_len=24)
    first, second = rig.add(8, 12), rig.add(8, 12)
    rig.step()
    rig.add(4)
    while not second.preemptions:
        assert first.preemptions == 0
        rig.step()
    assert rig.scheduler.counts.preempted == 1
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 2), "and none admitted"
    while 2 not in rig.finished:
        rig.step()
    assert 3 not in rig.finished, "the preempted request came back before the one behind it"
    for sequence in (first, second):
        assert sequence.token_ids[8:] == expected_tokens(
            sequence.token_ids[:8], sequence.params.seed, 12, True
        )
    assert second.readmit_cached_tokens > 0
    assert rig.cache.stats.query_tokens == 8 + 8 + 4
    assert rig.cache.stats.readmit_query_tokens > 8


def test_recomputed_tokens_of_a_preempted_request_count_as_preempted() -> None:
    rig = Rig(6, max_model_len=24, caching=False)
    rig.add(8, 12)
    second = rig.add(8, 12)
    lost = recomputed = 0
    while len(rig.finished) < 2:
        held = second.num_computed
        preempted_before = second.preemptions
        rig.step()
        lost += held * (second.preemptions - preempted_before)
        recomputed += rig.scheduler.counts.recomputed_tokens_preempted
    assert lost == recomputed > 0


def test_a_prefill_gives_way_to_decodes_that_are_planned() -> None:
    """It is the victim of its own lack of blocks, and comes back when the decodes are done."""
    rig = Rig(6, max_num_seqs=2, max_num_batched_tokens=5, max_model_len=24)
    decoder = rig.add(3, 17)
    rig.step()
    prefill = rig.add(20, 1)
    while not prefill.preemptions:
        before = decoder.num_tokens
        rig.step()
        assert decoder.num_tokens == before + 1
        assert prefill.num_computed < 20
    while rig.scheduler.has_work:
        rig.step()
    assert rig.finished == {1: "length", 2: "length"}
    assert decoder.preemptions == 0


def test_what_two_preemptions_lost_counts_as_often_as_it_is_computed_again() -> None:
    """The second took less than the first, yet everything the first took is computed again."""
    rig = Rig(max_num_batched_tokens=8, caching=False)
    rig.add(20, 1)
    recomputed = []
    for chunks in (2, 1, 3):
        for _ in range(chunks):
            rig.step()
            recomputed.append(rig.scheduler.counts.recomputed_tokens_preempted)
        if rig.scheduler.has_work:
            rig.scheduler._preempt(0)
    assert recomputed == [0, 0, 8, 8, 8, 0]


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


def test_a_readmitted_score_request_wants_only_what_it_lacks() -> None:
    rig = Rig(max_num_batched_tokens=11)
    decoder = rig.add(4, 20)
    rig.step()
    sequence = rig.add_score(list(range(16)), (2, 9, 15))
    asked: list[int] = []
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule()
        asked += [int(plan.positions[row]) for w in plan.wanted for row in w.rows.tolist()]
        rig.scheduler.update(plan, rig.executor.run(plan))
        if sequence.num_computed == 10 and not sequence.preemptions:
            rig.scheduler._preempt(1)
    assert sequence.preemptions == 1
    assert asked == [2, 9, 15]
    assert sequence.readmit_cached_tokens == 8, "9 is computed again, not asked again"
    assert decoder.num_output_tokens == 20


def test_score_requests_with_equal_columns_share_one_group() -> None:
    rig = Rig()
    rig.add_score([1, 2, 3], (1, 2), (7, 8))
    rig.add_score([4, 5, 6], (2,), (7, 8))
    rig.add_score([7, 8, 9], (0,), (5,))
    plan = rig.step()
    assert [(w.rows.tolist(), w.columns.tolist()) for w in plan.wanted] == [
        ([1, 2, 5], [7, 8]),
        ([6], [5]),
    ]
    assert rig.scheduler.counts.score_requests == 3


def test_equal_prompts_admitted_in_one_step_share_and_read_each_other_s_kv() -> None:
    rig = Rig()
    one, two = rig.add(0, tokens=[5] * 12), rig.add(0, tokens=[5] * 12)
    plan = rig.step()
    assert rig.rows(plan) == [12, 4]
    assert two.num_cached_tokens == 8
    assert rig.scheduler.counts.blocks_active == 4
    assert rig.scheduler.counts.tokens_held == 16, "12 and the private copy of the last 4"
    assert one.num_computed == two.num_computed == 12


def test_a_failed_step_leaves_nothing_to_be_hit_and_the_rest_go_on() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add(0, tokens=[5] * 12)
    rig.add(0, tokens=[5] * 12)
    waiting = rig.add(16)
    plan = rig.scheduler.schedule()
    rig.executor.crash(plan, 3)
    failed = rig.scheduler.fail(plan)
    assert [s.request_id for s in failed] == [1, 2]
    assert rig.cache.match([5] * 13) == 0
    assert rig.cache.num_active == rig.cache.num_cached == 0
    rig.cache.check()
    rig.step()
    assert waiting.num_computed == 16


def test_a_step_that_fails_a_readmitted_request_leaves_nothing_of_it() -> None:
    """What it had computed before it was preempted is no excuse for what it lacks now."""
    rig = Rig(6, max_model_len=24, caching=True)
    sequence = rig.add(12)
    rig.step()
    rig.scheduler._preempt(0)
    rig.cache.allocate(99, list(range(500, 524)))  # takes every block, so all is evicted
    rig.cache.free(99, 0)
    plan = rig.scheduler.schedule()
    assert rig.rows(plan) == [13]
    rig.executor.crash(plan, 0)
    assert rig.scheduler.fail(plan) == [sequence]
    assert rig.cache.num_cached == 0


def test_a_failed_decode_keeps_what_was_computed_before() -> None:
    """Only the block that the failed step should have filled is withdrawn."""
    rig = Rig()
    sequence = rig.add(7)
    rig.step()  # computes 7, samples the 8th, which fills the second block in the next step
    plan = rig.scheduler.schedule()
    assert rig.cache.match([*sequence.token_ids, 0]) == 8
    rig.executor.crash(plan, 0)
    rig.scheduler.fail(plan)
    assert rig.cache.match([*sequence.token_ids, 0]) == 4


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


def test_abort_in_flight_is_not_answered_and_frees_after_the_step() -> None:
    rig = Rig()
    sequence = rig.add(8, 1)
    plan = rig.scheduler.schedule()
    assert rig.scheduler.abort(1) is sequence
    assert rig.cache.num_active == 2
    assert rig.scheduler.update(plan, rig.executor.run(plan)) == []
    assert rig.cache.num_active == 0
    assert rig.scheduler.schedule() is None


def test_max_tokens_is_cut_to_max_model_len() -> None:
    rig = Rig(max_model_len=12)
    sequence = rig.add(9, 50)
    while rig.scheduler.has_work:
        rig.step()
    assert rig.finished == {1: "length"}
    assert sequence.num_tokens == 12


def test_what_can_never_be_served_is_refused_with_the_numbers() -> None:
    rig = Rig(max_model_len=12)
    with pytest.raises(PromptError, match="12 tokens; allowed are at most 11"):
        rig.add(12)
    with pytest.raises(PromptError, match="empty"):
        rig.add(0, tokens=[])
    with pytest.raises(PromptError, match=r"positions \(5, 3\)"):
        rig.add_score([1] * 8, (5, 3))
    with pytest.raises(PromptError, match="0 to 7"):
        rig.add_score([1] * 8, (8,))
    rig.add_score([1] * 12, (11,))  # nothing is sampled, so it may fill max_model_len
    with pytest.raises(PromptError, match="13 tokens"):
        rig.add_score([1] * 13, (12,))
    with pytest.raises(OutOfMemory, match=r"needs 4.*at most 12"):
        Rig(3, max_model_len=13)
    with pytest.raises(ConfigError, match="max_num_seqs=9 and max_num_batched_tokens=8"):
        Rig(max_num_seqs=9, max_num_batched_tokens=8)


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


def test_sampling_columns_come_from_the_request() -> None:
    rig = Rig()
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=2**64 + 5, logprobs=2, ignore_eos=True
    )
    sequence = Sequence(1, [1, 2, 3], 3, params)
    rig.scheduler.add(sequence)
    plan = rig.scheduler.schedule()
    rows = plan.sampling
    assert (rows.temperature[0], rows.top_k[0], rows.top_p[0], rows.min_p[0]) == (0.5, 7, 0.9, 0.1)
    assert (rows.seeds[0], rows.logprobs[0], rows.positions[0], rows.rows[0]) == (5, 2, 3, 2)
    assert rows.seeds.dtype == np.uint64
    rig.scheduler.update(plan, StepResult(np.array([1]), ({1: -0.5},)))
    assert sequence.logprobs == [{1: -0.5}]


def test_times_are_stamped_once() -> None:
    ticks = iter(range(100))
    rig = Rig(max_num_batched_tokens=8, clock=lambda: float(next(ticks)))
    sequence = rig.add(12)
    rig.step()
    assert (sequence.scheduled_s, sequence.first_token_s) == (0.0, None)
    rig.step()
    rig.step()
    assert (sequence.scheduled_s, sequence.first_token_s) == (0.0, 1.0)


def test_a_plan_must_be_answered_before_the_next_one() -> None:
    rig = Rig()
    rig.add(4)
    plan = rig.scheduler.schedule()
    with pytest.raises(AssertionError, match="neither updated nor failed"):
        rig.scheduler.schedule()
    rig.scheduler.fail(plan)
    with pytest.raises(AssertionError, match="no plan is in flight"):
        rig.scheduler.fail(plan)
