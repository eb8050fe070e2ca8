"""What continuous batching and the KV cache are measured against: static batches, and no cache.

Static, padded, request-level batching: requests are taken max_num_seqs at a time and none joins
until the slowest of them is done (thesis 2.2.5). Prompts are padded to the longest: every step of
the prefill computes as many rows of each member. A member that has ended repeats its last row until
the batch ends, and from the start each has blocks for the longest of them. All of this is computed,
so measured time holds the waste; the tokens are those of continuous batching. Prefixes are not
shared: rows of one length cannot skip different parts. Attention reads a row's own keys only, as a
kernel that honours the mask does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.config import EngineConfig
from workbench.core import Sequence, StepPlan, StepResult
from workbench.engine.requests import length_limit
from workbench.engine.scheduler import Chunk, Scheduler, StopConditions
from workbench.errors import OutOfMemory
from workbench.kvcache.manager import KVCacheManager, TokenList


class StaticScheduler(Scheduler):
    """A Scheduler of whole batches, over a cache that shares no prefixes.

    In the trace prefill_tokens and decode_tokens are rows computed, padding included; what they
    exceed the requests' own tokens by is padding.
    """

    def __init__(self, cache: KVCacheManager, offsets: NDArray[np.int64], **limits: Any) -> None:
        assert not cache.enable_prefix_caching, "no cached part of a padded prompt is skipped"
        super().__init__(cache, offsets, **limits)
        self._built_with = cache.room  # blocks, whatever the split of the moment
        self._over: dict[int, str] = {}  # request id of a member that waits for the slowest: why
        self._columns_left = 0  # of the padded prompts, still to be computed

    def require_servable(self, sequence: Sequence) -> None:
        """OutOfMemory, too, unless a whole batch padded to it fits the cache."""
        super().require_servable(sequence)
        most = length_limit(sequence, self._max_model_len)
        blocks = -(-most // self._cache.block_size)
        needed = self._max_num_seqs * blocks
        if needed > self._built_with:
            raise OutOfMemory(
                f"A batch of max_num_seqs={self._max_num_seqs} requests padded to "
                f"{most} tokens needs {needed:,} KV blocks of "
                f"{self._cache.block_size}; there are {self._built_with:,}. Give more "
                "memory, or lower max_num_seqs, max_tokens or the prompt's length."
            )

    def recover(self, stops: StopConditions) -> list[tuple[Sequence, str]]:
        """A batch that was cut short begins anew, with the prompts of its members."""
        ended = super().recover(stops)
        for sequence in self._waiting:
            sequence.token_ids = TokenList(sequence.token_ids[: sequence.num_prompt_tokens])
            sequence.logprobs.clear()
        self._over, self._columns_left = {}, 0
        return ended

    def _decoding_rows(self) -> NDArray[np.int64]:
        """All that generate, ended or not, once the last prompt is computed."""
        return super()._decoding_rows() if not self._columns_left else np.empty(0, np.int64)

    def _make_room_for_decodes(self) -> None:
        """Blocks were taken when the batch was formed."""

    def _plan_chunks(self, budget: int) -> list[Chunk]:
        """The next columns of the padded prompts, as many rows of each member."""
        if not len(self._batch):
            self._form_batch()
        width = min(self._columns_left, budget // max(len(self._batch), 1))
        chunks = []
        for row, sequence in enumerate(self._batch.sequences if width else ()):
            start, scores = int(self._batch.computed[row]), sequence.score is not None
            prompt = sequence.num_to_compute if scores else sequence.num_prompt_tokens
            end = min(start + width, max(start, prompt))  # what its prompt still has, then padding
            chunks.append(Chunk(sequence, row, start, end, padding=width - (end - start)))
        return chunks

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """No request joins a batch."""

    def _form_batch(self) -> None:
        """The next max_num_seqs waiting requests, each with blocks for the longest of them; fewer
        where the cache has shrunk since they were queued.
        """
        members, most, size = list[Sequence](), 0, self._cache.block_size
        for waiting in islice(self._waiting, self._max_num_seqs):
            longest = max(most, length_limit(waiting, self._max_model_len))
            if members and (len(members) + 1) * -(-longest // size) > self._cache.num_blocks:
                break
            members.append(waiting)
            most = longest
        for member in members:
            self._waiting.popleft()
            tokens = member.token_ids[: member.num_to_compute]
            allocation = self._cache.allocate(member.request_id, tokens)
            reserved = self._cache.extend(member.request_id, [0] * most)
            assert allocation is not None and reserved is not None, "a batch fits: it was seen"
            self._account.admit(member, allocation)
            self._stamp_admission(member, 0)
            blocks = allocation.block_ids + reserved
            self._batch.append(member, length_limit(member, self._max_model_len), 0, blocks)
        self._columns_left = max(member.num_to_compute for member in members)

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, str]]:
        """Take in a computed step; returns the whole batch once its slowest member is done."""
        step, members = self._close_step(plan), self._batch.sequences
        self._columns_left -= max((chunk.num_tokens for chunk in step.chunks), default=0)
        going_on = self._going_on(step.rows)
        self._batch.advance(step.rows[going_on], step.computed[going_on])
        if len(step.sampled):  # what was sampled for members that are done is left out
            kept = self._going_on(step.sampled)
            logprobs = tuple(each for each, keep in zip(result.logprobs, kept) if keep)
            result = replace(result, tokens=np.asarray(result.tokens)[kept], logprobs=logprobs)
            step = replace(step, sampled=step.sampled[kept])
        reasons = self._take_in(step, result)
        self._over |= {members[row].request_id: reason for row, reason in reasons.items()}
        if self._going_on(np.arange(len(self._batch))).any():
            return []
        ended = [(s, self._over[s.request_id]) for s in members if s.request_id in self._over]
        finished = [(s, why) for s, why in ended if s.request_id not in self._aborted]
        self.ended = finished
        self._leave([sequence for sequence, _ in finished])
        return finished

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The step raised: the whole batch goes with it; what waits goes on."""
        self._close_step(plan)
        failed = [s for s in self._batch.sequences if s.request_id not in self._aborted]
        self.ended = [(sequence, "error") for sequence in failed]
        self._leave(failed)
        return failed

    def _going_on(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows' members have neither ended nor been aborted."""
        over, members = self._over.keys() | self._aborted, self._batch.sequences
        return np.array([members[row].request_id not in over for row in rows.tolist()], bool)

    def _leave(self, sequences: list[Sequence]) -> None:
        """The batch is over; these are its requests that were not aborted."""
        for sequence in sequences:
            self._finish(sequence)
        self._release(set(range(len(self._batch))))
        self._over, self._columns_left = {}, 0

    def _release_aborted(self) -> None:
        """An aborted member's row stays until its batch ends, unless all members are aborted."""
        if all(s.request_id in self._aborted for s in self._batch.sequences):
            self._leave([])


class RecomputingScheduler(Scheduler):
    """A Scheduler that keeps nothing between steps: each token computes its whole sequence again.

    What one step stored the next overwrites, in the same blocks. All rows are prefill_tokens in the
    trace. The cache must not share prefixes; EngineConfig sees to it.
    """

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, str]]:
        """Take in a computed step; what goes on generating has computed nothing."""
        finished = super().update(plan, result)
        batch, rows = self._batch, self._decoding_rows()
        batch.computed[rows], batch.decoding[rows] = 0, False
        for row in rows.tolist():
            batch.sequences[row].num_computed = 0
        return finished


def make_scheduler(
    config: EngineConfig, cache: KVCacheManager, offsets: NDArray[np.int64], **more: Any
) -> Scheduler:
    """The scheduler that an engine of these settings has. more: of Scheduler."""
    kind = Scheduler if config.use_kv_cache else RecomputingScheduler
    kind = StaticScheduler if config.batching == "static" else kind
    names = ("max_num_seqs", "max_num_batched_tokens", "watermark")
    return kind(cache, offsets, **{name: getattr(config, name) for name in names}, **more)
