"""An executor without a model that still notices every wrong, stale or never computed KV entry.

Each computed token writes (its position, itself, a hash of the whole prefix read back from memory)
to its block and slot. Each row checks that all it attends to is one unbroken chain of prefixes, and
what it samples depends on all of it, so tokens can be compared with those of a run without cache.
"""

from typing import NamedTuple

import numpy as np

from workbench.core import SamplingParams, ScoreParams, Sequence, StepPlan, StepResult
from workbench.engine.scheduler import Scheduler
from workbench.kvcache.manager import KVCacheManager
from workbench.trace import StepCounts

VOCABULARY = 4  # few tokens: many equal prefixes
EOS = 3


class Entry(NamedTuple):
    position: int
    token: int
    prefix: int


def prefix_hash(prefix: int, token: int) -> int:
    return hash((prefix, token))


def sampled_token(prefix: int, seed: int, position: int) -> int:
    return hash((prefix, seed, position)) % VOCABULARY


def logit(prefix: int, column: int) -> float:
    return hash((prefix, column)) % 1000


class FakeStops:
    """Stops at EOS unless it is ignored; insists on being told of every request once."""

    def __init__(self) -> None:
        self.params = {}
        self.examined = 0

    def add(self, request_id, params) -> None:
        assert request_id not in self.params
        self.params[request_id] = params

    def remove(self, request_id) -> None:
        del self.params[request_id]

    def suspects(self, tokens):
        return tokens == EOS

    def finish_reason(self, seq: Sequence) -> str | None:
        self.examined += 1
        ends = seq.token_ids[-1] == EOS and not self.params[seq.request_id].ignore_eos
        return "eos" if ends else None


class FakeExecutor:
    """memory: (element offset of a block, slot) -> what was written there last."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.memory: dict[tuple[int, int], Entry] = {}

    def settle(self, cache, offsets) -> None:
        """Carry out the cache's copies, whole blocks: all are read before any is written."""
        before, nothing = dict(self.memory), Entry(-1, -1, -1)
        for source, to in cache.take_moves():
            for slot in range(self.block_size):
                entry = before.get((int(offsets[source]), slot), nothing)
                self.memory[int(offsets[to]), slot] = entry

    def run(self, plan: StepPlan) -> StepResult:
        prefixes = self.store(plan, plan.num_tokens)
        self.check_attended(plan)
        sampling = plan.sampling
        chosen = zip(sampling.rows.tolist(), sampling.seeds.tolist(), sampling.positions.tolist())
        tokens = [sampled_token(prefixes[row], seed, position) for row, seed, position in chosen]
        wanted = tuple(
            np.array([[logit(prefixes[r], c) for c in w.columns.tolist()] for r in w.rows.tolist()])
            for w in plan.wanted
        )
        return StepResult(np.array(tokens, np.int64), wanted=wanted)

    def crash(self, plan: StepPlan, num_rows: int) -> None:
        """Die after num_rows rows; the rest of the step's slots hold rubbish."""
        self.store(plan, num_rows)
        for row in range(num_rows, plan.num_tokens):
            place = self.place(plan, self.owner(plan, row), int(plan.positions[row]))
            self.memory[place] = Entry(-1, -1, -1)

    def store(self, plan: StepPlan, num_rows: int) -> list[int]:
        """Write the first rows' entries, one after the other; answers their prefix hashes."""
        prefixes = []
        for row in range(num_rows):
            sequence, position = self.owner(plan, row), int(plan.positions[row])
            before = 0
            if position:
                before = self.memory[self.place(plan, sequence, position - 1)].prefix
            token = int(plan.tokens[row])
            prefixes.append(prefix_hash(before, token))
            place = self.place(plan, sequence, position)
            self.memory[place] = Entry(position, token, prefixes[-1])
        return prefixes

    def owner(self, plan: StepPlan, row: int) -> int:
        return int(np.searchsorted(plan.query_start, row, side="right")) - 1

    def place(self, plan: StepPlan, sequence: int, position: int) -> tuple[int, int]:
        block, slot = divmod(position, self.block_size)
        return int(plan.block_offsets[sequence, block]), slot

    def check_attended(self, plan: StepPlan) -> None:
        """Every sequence's context is one chain of prefixes and ends with its own rows."""
        for sequence, context in enumerate(plan.context_len.tolist()):
            start, end = plan.query_start[sequence : sequence + 2].tolist()
            positions = plan.positions[start:end].tolist()
            assert positions == list(range(context - (end - start), context))
            before = 0
            for position in range(context):
                entry = self.memory[self.place(plan, sequence, position)]
                assert entry.position == position, "a slot holds another position's KV, or none"
                before = prefix_hash(before, entry.token)
                assert entry.prefix == before, "a slot holds the KV of another prefix"
            own = [self.memory[self.place(plan, sequence, p)].token for p in positions]
            assert own == plan.tokens[start:end].tolist()


def expected_tokens(prompt: list[int], seed: int, max_tokens: int, ignore_eos: bool) -> list[int]:
    """What generation without any cache, batch or preemption samples."""
    prefix = 0
    for token in prompt:
        prefix = prefix_hash(prefix, token)
    sampled: list[int] = []
    while len(sampled) < max_tokens:
        sampled.append(sampled_token(prefix, seed, len(prompt) + len(sampled)))
        if sampled[-1] == EOS and not ignore_eos:
            break
        prefix = prefix_hash(prefix, sampled[-1])
    return sampled


def expected_logits(tokens: list[int], positions, columns) -> dict[int, list[float]]:
    """position -> what a scoring request must be answered."""
    prefix, answers = 0, {}
    for position, token in enumerate(tokens):
        prefix = prefix_hash(prefix, token)
        if position in positions:
            answers[position] = [logit(prefix, column) for column in columns]
    return answers


class Rig:
    """A scheduler, its cache and an executor; prompts of tokens that no two requests share."""

    kind, caching = Scheduler, True

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **options) -> None:
        self.cache = KVCacheManager(num_blocks, block_size, self.caching)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "watermark": 0.0}
        settings |= {"max_model_len": min(64, num_blocks * block_size)} | options
        self.stops, offsets = FakeStops(), np.arange(num_blocks) * 1000
        self.scheduler = self.kind(self.cache, offsets, stops=self.stops, **settings)
        self.executor = FakeExecutor(block_size)
        self.finished: dict[int, str] = {}
        self.count = 0
        self.plans: list[tuple[StepPlan, StepCounts]] = []

    def add(self, length: int, max_tokens: int = 50, tokens=None, ignore_eos=True) -> Sequence:
        self.count += 1
        tokens = [10 * self.count] * length if tokens is None else tokens
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, seed=self.count)
        sequence = Sequence(self.count, list(tokens), len(tokens), params)
        self.scheduler.require_servable(sequence)
        self.scheduler.add(sequence)
        return sequence

    def add_score(self, tokens: list[int], positions: tuple[int, ...], columns=(1, 2)) -> Sequence:
        self.count += 1
        score = ScoreParams(positions, columns)
        sequence = Sequence(self.count, list(tokens), len(tokens), score=score)
        self.scheduler.require_servable(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append((plan, self.scheduler.counts))
        for sequence, reason in self.scheduler.update(plan, self.executor.run(plan)):
            self.finished[sequence.request_id] = reason
        self.cache.check()
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def rows(self, plan: StepPlan) -> list[int]:
        """Tokens of each sequence of the plan, in its order."""
        return np.diff(plan.query_start).tolist()
