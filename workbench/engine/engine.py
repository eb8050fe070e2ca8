"""The engine a user holds: prompts in, finished outputs out, every step recorded.

A step is three calls: the scheduler plans, the executor computes, the scheduler takes the result
in. The engine itself numbers the requests, turns tokens into text and writes the trace; parts.py
builds what it is made of.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from typing import Any

from workbench.config import EngineConfig
from workbench.core import (
    CacheRoom,
    RequestOutput,
    SamplingParams,
    ScoreParams,
    Sequence,
    StepPlan,
    Tag,
)
from workbench.engine.limits import paired, require_request, require_text, whole_numbers
from workbench.engine.outcome import output_of
from workbench.engine.parts import Weights, build_parts
from workbench.engine.shared import ArenaPlace
from workbench.errors import StepError
from workbench.kvcache.arena import KVArena
from workbench.kvcache.prefix import TokenList
from workbench.trace import Recorder, Trace

Prompt = str | SequenceOf[int]
TokenLines = SequenceOf[SequenceOf[int]]
NO_TAG = Tag()


class Engine:
    """One model, its paged KV cache and its scheduler.

    model: a short name, a local folder, a .gguf file, a hub id, or `dummy:NAME`; settings: the
    fields of EngineConfig (memory="1GiB", block_size=16, ...). arena: where its KV cache lies
    instead of in memory of its own, under arena_name or else the model's (see shared.py). Its
    resizing may be called from any thread, all else from one at a time. weights: those of another
    engine (`other.weights`), shared, never written, and counted in the memory of both. Raises
    ModelError for weights that cannot be used, OutOfMemory when the budget leaves no room for one
    request of max_model_len, ConfigError for a setting that is unknown or out of range.
    """

    capabilities = frozenset({"token_identity", "trace", "resplit", "forget"})

    def __init__(
        self,
        model: str = "tiny-solver",
        *,
        arena: KVArena | None = None,
        arena_name: str | None = None,
        weights: Weights | None = None,
        **settings: object,
    ) -> None:
        self.config = EngineConfig.from_dict({"model": model, **settings})
        place = None if arena is None else ArenaPlace(arena, arena_name or model)
        parts = build_parts(self.config, place, weights)
        self.name, self.spec, self.fingerprint = model, parts.spec, parts.fingerprint
        self.architecture, head = self.spec.architecture, self.spec.value_head
        self.value_outputs = None if head is None else head.outputs
        self.tokenizer, self._token_bytes = parts.tokenizer, parts.token_bytes
        self.max_model_len, self.memory = parts.max_model_len, parts.memory
        self.executor, self.cache, self.scheduler = parts.executor, parts.cache, parts.scheduler
        self.weights = Weights(parts.executor.model, self.config)
        self.forward_s = self.sampling_s = 0.0
        self._next_id = self._next_step = 0
        self._held: list[RequestOutput] = []  # finished while a call waited for others
        self.trace_as(Recorder("engine"), model)

    # -- requests --

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tag: Tag | None = None,
        salt: bytes = b"",
    ) -> int:
        """Queue a prompt: text, tokenised as it is, or token ids; answers its request id.

        salt: keeps this request's cache entries apart from others'. PromptError, and nothing has
        changed, when the prompt is empty, holds an unknown token id, has max_model_len tokens or
        more, when a stop id is unknown, or when the model has a value head and cannot generate.
        """
        return self._queue(self._encode(prompt), params, tag=tag, salt=salt).request_id

    def add_score(
        self,
        token_ids: SequenceOf[int],
        positions: SequenceOf[int],
        columns: SequenceOf[int],
        *,
        tag: Tag | None = None,
        salt: bytes = b"",
    ) -> int:
        """Queue a scoring request: of the logits that follow token_ids[: p + 1], for each position
        p, the given columns (token ids; outputs of a value head). Its output carries .logits
        [positions, columns].
        """
        found = whole_numbers(positions, "positions"), whole_numbers(columns, "columns")
        score = ScoreParams(tuple(found[0]), tuple(found[1]))
        return self._queue(self._encode(token_ids), score=score, tag=tag, salt=salt).request_id

    def _encode(self, prompt: Prompt) -> list[int]:
        """A list of our own of the prompt's token ids."""
        if isinstance(prompt, str):
            require_text(prompt)
            return self.tokenizer.encode(prompt)
        return whole_numbers(prompt, "token ids")

    def _queue(
        self,
        token_ids: list[int],
        params: SamplingParams | None = None,
        score: ScoreParams | None = None,
        tag: Tag | None = None,
        salt: bytes = b"",
    ) -> Sequence:
        tag = NO_TAG if tag is None else tag
        tokens = TokenList(token_ids)
        sequence = Sequence(self._next_id, tokens, len(tokens), params, score, salt, tag)
        require_request(sequence, self.spec, self.name)
        sequence.arrival_s = time.perf_counter()
        self.scheduler.add(sequence)
        self._next_id += 1
        return sequence

    def forget(self, lines: TokenLines, kept: TokenLines = ()) -> int:
        """`KVCacheManager.forget`: their cached KV is given up; no token depends on it."""
        with self.cache.lock:
            return self.cache.forget(lines, kept)

    def abort(self, request_id: int) -> None:
        """Drop a request; an unknown or finished id is ignored."""
        with self.cache.lock:
            sequence = self.scheduler.abort(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work or bool(self._held)

    # -- steps --

    def step(self) -> list[RequestOutput]:
        """One scheduling step; answers the requests that finished in it.

        A forward pass that fails finishes the requests of its step with the error in `.error`; the
        engine and all other requests go on.
        """
        (held, self._held), start = (self._held, []), time.perf_counter()
        with self.cache.lock:
            plan = self.scheduler.schedule()
            if plan is None:
                return held
            self.executor.storage.settle(self.cache)
        scheduled = time.perf_counter()
        outputs = self._carry_out(plan)
        self._record(start, scheduled)
        return held + outputs if held else outputs

    def _carry_out(self, plan: StepPlan) -> list[RequestOutput]:
        try:
            result = self.executor.submit(plan).result()
        except StepError as error:
            named = self._name_requests(error)
            return [self._finish(s, "error", named) for s in self._fail(plan)]
        except BaseException:  # an interrupt takes the step's requests along; the engine goes on
            for sequence in self._fail(plan):
                self._finish(sequence, "abort")
            raise
        self.forward_s += result.forward_s
        self.sampling_s += result.sampling_s
        with self.cache.lock:
            finished = self.scheduler.update(plan, result)
        return [self._finish(sequence, reason) for sequence, reason in finished]

    def _fail(self, plan: StepPlan) -> list[Sequence]:
        with self.cache.lock:
            return self.scheduler.fail(plan)

    def _name_requests(self, error: StepError) -> StepError:
        """The error with the ids of the requests whose rows are at fault, where that is known."""
        if not error.rows:
            return error
        ids = ", ".join(map(str, self.scheduler.requests_of(error.rows)))
        return StepError(f"{error} At fault: request {ids}.", error.rows)

    def _record(self, start: float, scheduled: float) -> None:
        counts = self.scheduler.counts
        assert counts is not None
        timing, target = (time.perf_counter() - start, scheduled - start), self.cache.target
        self._recorder.step(
            self._trace_name, self._next_step, start, *timing, counts, blocks_target=target
        )
        self._next_step += 1

    def _finish(
        self, sequence: Sequence, reason: str, error: Exception | None = None
    ) -> RequestOutput:
        self._recorder.request(self._trace_name, sequence, reason, time.perf_counter())
        return output_of(sequence, reason, self._bytes, error)

    def _bytes(self, token_ids: SequenceOf[int]) -> bytes:
        """The text of sampled tokens; special ones, such as the end of sequence, have none."""
        return b"".join([self._token_bytes[k] for k in token_ids])

    # -- whole requests --

    def generate(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams]
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs in the prompts' order. params: one for all, or a list.

        Raises StepError, once all have ended, when a forward pass failed.
        """
        return self._run_all(self.add, paired(prompts, params))

    def score(
        self,
        token_ids: SequenceOf[int],
        positions: SequenceOf[int],
        columns: SequenceOf[int],
    ) -> RequestOutput:
        """add_score, run to its end."""
        return self._run_all(self.add_score, [(token_ids, positions, columns)])[0]

    def _run_all(
        self, queue: Callable[..., int], calls: list[tuple[Any, ...]]
    ) -> list[RequestOutput]:
        """Queue every call, step until all have finished; what else finishes is held for step()."""
        ids: list[int] = []
        try:
            for arguments in calls:
                ids.append(queue(*arguments))
            found = self._wait_for(set(ids))
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        outputs = [found[request_id] for request_id in ids]
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def _wait_for(self, ids: set[int]) -> dict[int, RequestOutput]:
        found: dict[int, RequestOutput] = {}
        others: list[RequestOutput] = []
        try:
            while len(found) < len(ids):
                for output in self.step():
                    if output.request_id in ids:
                        found[output.request_id] = output
                    else:
                        others.append(output)
        finally:
            self._held = others + self._held
        return found

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
        """The text of one request, piece by piece as tokens come; closing the iterator aborts it.

        The pieces together are the output's text; a piece ends with a whole character.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        sequence = self._queue(self._encode(prompt), params)
        shown, finished, others = sequence.num_tokens, False, []
        try:
            while not finished:
                outputs = self.step()
                finished = any(o.request_id == sequence.request_id for o in outputs)
                others += [o for o in outputs if o.request_id != sequence.request_id]
                piece = decoder.decode(self._bytes(sequence.token_ids[shown:]), final=finished)
                shown = sequence.num_tokens
                if piece:
                    yield piece
        finally:
            self.abort(sequence.request_id)
            self._held = others + self._held

    # -- what a search may know of it --

    @property
    def cache_room(self) -> CacheRoom:
        """Blocks that its cache may come to hold under the present split."""
        return CacheRoom(self.cache.room, self.cache.block_size)

    @property
    def description(self) -> dict[str, Any]:
        """What a recording keeps of it."""
        return {
            "config": self.config.to_dict(),
            "spec": asdict(self.spec),
            "num_blocks": self.memory.num_blocks,
            "weight_bytes": self.memory.weights,
            "block_bytes": self.memory.block_bytes,
        }

    # -- trace --

    def trace_as(self, recorder: Recorder, name: str) -> None:
        """Write steps and requests from now on to this recorder, under this name."""
        self._recorder, self._trace_name = recorder, name

    @property
    def trace(self) -> Trace:
        """What the present recorder holds, as frames."""
        return self._recorder.trace()

    def __repr__(self) -> str:
        blocks = f"{self.memory.num_blocks} blocks of {self.config.block_size} tokens"
        return f"Engine({self.name!r}, {blocks}, max_model_len={self.max_model_len})"
