"""The scheduler with an executor that fails, and requests that are aborted and preempted at random.

Guarded: nothing is hit or attended to whose KV was never computed, nothing leaks, nobody waits for
ever, tokens do not depend on any of it, and every count of the trace is what a naive model counts.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.fake_executor import FakeExecutor, FakeStops, expected_logits, expected_tokens
from tests.kvcache.naive import ComparedCache
from workbench.core import SamplingParams, ScoreParams, Sequence
from workbench.engine.scheduler import Scheduler
from workbench.kvcache.manager import KVCacheManager

MAX_MODEL_LEN = 16
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=8) | st.integers(1, 15).map(
    lambda n: [0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1, 0][:n]
)


class SchedulerMachine(RuleBasedStateMachine):
    """live: every request that was neither answered nor dropped."""

    @initialize(
        block_size=st.integers(1, 4), spare=st.integers(0, 5), max_num_seqs=st.integers(1, 6),
        budget=st.integers(0, 12), caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.1]), reuse=st.booleans(),
    )  # fmt: skip
    def create(self, block_size, spare, max_num_seqs, budget, caching, watermark, reuse) -> None:
        num_blocks = -(-MAX_MODEL_LEN // block_size) + spare
        reuse = caching and reuse
        manager = KVCacheManager(num_blocks, block_size, caching, reuse_partial_blocks=reuse)
        self.cache = ComparedCache(manager)
        self.stops = FakeStops()
        self.offsets = np.random.default_rng(0).permutation(num_blocks) * 2**33 + 2**31
        self.max_num_batched_tokens = max_num_seqs + budget
        self.max_num_seqs = max_num_seqs
        self.scheduler = Scheduler(
            self.cache, self.offsets, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens, max_model_len=MAX_MODEL_LEN,
            stops=self.stops, watermark=watermark,
        )  # fmt: skip
        self.executor = FakeExecutor(block_size)
        self.live: dict[int, Sequence] = {}
        self.computed_before: dict[int, int] = {}  # tokens a preempted request had computed
        self.next_id = 0

    # -- requests --

    def _add(self, sequence: Sequence) -> None:
        self.live[sequence.request_id] = sequence
        self.scheduler.require_servable(sequence)
        self.scheduler.add(sequence)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 15),
        seeds=st.lists(st.integers(-1, 2), min_size=1, max_size=4),
        ignore_eos=st.sampled_from([True, True, False]),
        salt=st.sampled_from([b"", b"", b"tenant"]),
    )
    def generate(self, prompt, max_tokens, seeds, ignore_eos, salt) -> None:
        """Siblings, as a search samples them."""
        for seed in seeds:
            self.next_id += 1
            own = {"temperature": self.next_id % 3 / 2, "top_k": self.next_id}
            params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos, **own)
            self._add(Sequence(self.next_id, list(prompt), len(prompt), params, salt=salt))

    @rule(prompt=PROMPTS, extra=st.integers(0, 1), data=st.data())
    def score(self, prompt, extra, data) -> None:
        self.next_id += 1
        tokens = prompt + [1] * extra
        positions = data.draw(st.sets(st.integers(0, len(tokens) - 1), min_size=1))
        columns = data.draw(st.sampled_from([(1, 2), (3,)]))
        score = ScoreParams(tuple(sorted(positions)), columns)
        self._add(Sequence(self.next_id, tokens, len(tokens), score=score))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.abort(request_id) is self.live.pop(request_id)
        assert self.scheduler.abort(request_id) is None

    # -- steps --

    def _plan(self):
        """Schedule, and check what holds of any plan; None when there is nothing to do."""
        self.stats_before = dict(self.cache.naive.stats)
        preempted = {i: s.preemptions for i, s in self.live.items()}
        held = {i: s.num_computed for i, s in self.live.items()}
        running = {i for i in self.live if i in self.cache.lost}
        plan = self.scheduler.schedule()
        self.executor.settle(self.cache, self.offsets)
        if plan is None:
            assert not self.live
            return None
        self.victims = [i for i, s in self.live.items() if s.preemptions > preempted[i]]
        for i in self.victims:
            self.computed_before[i] = max(self.computed_before.get(i, 0), held[i])
        self.admitted = {i for i in self.live if i in self.cache.lost} - running
        assert not (self.victims and self.admitted), "admitted in a step that preempted"
        assert 0 < plan.num_tokens <= self.max_num_batched_tokens
        assert plan.num_seqs <= self.max_num_seqs
        rows = plan.sampling
        own = [self.live[i].params for i in self.scheduler.requests_of(rows.rows)]
        assert [params.temperature for params in own] == rows.temperature.tolist()
        assert [params.top_k for params in own] == rows.top_k.tolist()
        self._check_counts(plan)
        return plan

    def _check_counts(self, plan) -> None:
        counts = self.scheduler.counts
        assert counts.prefill_tokens + counts.decode_tokens == plan.num_tokens
        assert counts.preempted == len(self.victims)
        assert counts.running + counts.waiting == len(self.live)
        assert counts.running == len(self.cache.lost)
        assert sum(self.cache.naive.counts()) == counts.blocks_total
        naive, blocks = self.cache.naive, (counts.blocks_active, counts.blocks_cached)
        assert (*blocks, counts.blocks_free) == naive.counts()
        for name, before in self.stats_before.items():
            if hasattr(counts, name):
                assert getattr(counts, name) == naive.stats[name] - before, name
        new_hits = naive.stats["hit_tokens"] - self.stats_before["hit_tokens"]
        new_hits += naive.stats["readmit_hit_tokens"] - self.stats_before["readmit_hit_tokens"]
        assert counts.cached_tokens == new_hits
        scored = [self.live[i] for i in self.admitted if self.live[i].score is not None]
        assert counts.score_requests == sum(s.preemptions == 0 for s in scored)

    def _tokens_held(self, blocks, sequences) -> int:
        """Tokens in distinct blocks, given what each sequence has computed after the step."""
        held: dict[int, int] = {}
        size = self.cache.block_size
        for request_id, table in blocks.items():
            for i, block in enumerate(table):
                tokens = min(size, sequences[request_id].num_computed - i * size)
                held[id(block)] = max(held.get(id(block), 0), tokens)
        return sum(held.values())

    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            plan = self._plan()
            if plan is not None:
                self._compute(plan)

    def _compute(self, plan) -> None:
        lost = {i: dict(reasons) for i, reasons in self.cache.lost.items()}
        # the first token of a running request that is not computed yet
        starts = {i: self.live[i].num_computed for i in lost}
        starts |= {i: self.cache.hits[i] for i in self.admitted}
        blocks = {i: list(s.blocks) for i, s in self.cache.naive.sequences.items()}
        finished = self.scheduler.update(plan, self.executor.run(plan))
        assert self.scheduler.counts.tokens_held == self._tokens_held(blocks, self.live)
        self._check_recomputed(lost, starts)
        for sequence, reason in finished:
            self._check_answer(sequence, reason)

    def _check_recomputed(self, lost, starts) -> None:
        seen = {"evicted": 0, "preempted": 0, "partial": 0}
        for request_id, reasons in lost.items():
            before = self.computed_before.get(request_id, 0)
            for position in range(starts[request_id], self.live[request_id].num_computed):
                reason = "preempted" if position < before else reasons.get(position)
                if reason is not None:
                    seen[reason] += 1
        for reason, tokens in seen.items():
            assert getattr(self.scheduler.counts, f"recomputed_tokens_{reason}") == tokens

    def _check_answer(self, sequence: Sequence, reason: str) -> None:
        """It is answered rightly, and live no more."""
        del self.live[sequence.request_id]
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        if sequence.score is not None:
            assert reason == "score"
            expected = expected_logits(prompt, sequence.score.positions, sequence.score.columns)
            assert {p: row.tolist() for p, row in sequence.score_rows.items()} == expected
            return
        params = sequence.params
        most = min(params.max_tokens, MAX_MODEL_LEN - len(prompt))
        seed = params.seed & (2**64 - 1)
        expected = expected_tokens(prompt, seed, most, params.ignore_eos)
        assert sequence.token_ids[len(prompt) :] == expected
        stopped = expected[-1] == 3 and not params.ignore_eos
        assert reason == ("eos" if stopped else "length")

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_with_aborts_in_flight(self, data) -> None:
        plan = self._plan()
        dropped = data.draw(st.sets(st.sampled_from(sorted(self.live)), min_size=1, max_size=2))
        for request_id in dropped:
            assert self.scheduler.abort(request_id) is self.live.pop(request_id)
        for sequence, reason in self.scheduler.update(plan, self.executor.run(plan)):
            self._check_answer(sequence, reason)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_that_fails(self, data) -> None:
        plan = self._plan()
        if data.draw(st.booleans()):
            dropped = data.draw(st.sampled_from(sorted(self.live)))
            assert self.scheduler.abort(dropped) is self.live.pop(dropped)
        blocks = {i: list(s.blocks) for i, s in self.cache.naive.sequences.items()}
        self.executor.crash(plan, data.draw(st.integers(0, plan.num_tokens)))
        failed = self.scheduler.fail(plan)
        assert len(failed) <= plan.num_seqs
        for sequence in failed:
            assert self.live.pop(sequence.request_id) is sequence
            if sequence.request_id in self.admitted:
                assert all(b.content is None for b in blocks[sequence.request_id]), "can be hit"

    # -- what always holds --

    @invariant()
    def laws_hold(self) -> None:
        self.cache.compare()
        assert set(self.stops.params) == {i for i, s in self.live.items() if s.params is not None}
        assert self.scheduler.has_work == bool(self.live)
        waiting = [s for i, s in self.live.items() if i not in self.cache.lost]
        assert all(s.num_computed == 0 for s in waiting)

    def teardown(self) -> None:
        """Whatever is left is answered in a bounded number of steps, and then holds no block."""
        if not hasattr(self, "cache"):
            return
        work = sum(MAX_MODEL_LEN * 4 for _ in self.live) + 1
        while self.live:
            work -= 1
            assert work > 0, "somebody waits for ever"
            self.steps(1)
        assert self.scheduler.schedule() is None
        assert self.cache.num_active == 0
        self.cache.compare()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
