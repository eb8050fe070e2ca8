"""The engine a user holds: prompts in, finished outputs out, every step recorded.

A step is three calls: the scheduler plans, the executor computes, the scheduler takes the result
in. The engine itself checks and numbers the requests, turns tokens into text and writes the trace.
"""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from operator import index
from threading import get_ident
from typing import Any

import numpy as np

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
from workbench.engine.executor import Executor
from workbench.engine.memory import (
    ArenaPlace,
    explain_out_of_memory,
    longest_request,
    plan_memory,
)
from workbench.engine.requests import (
    Ids,
    Prompt,
    encoded,
    known_tokens,
    output_of,
    paired,
    require_known,
    score_params,
)
from workbench.engine.sampling import StopChecker
from workbench.engine.static_batch import make_scheduler
from workbench.errors import ConfigError, StepError
from workbench.host import collection_paused
from workbench.kvcache.arena import KVArena
from workbench.kvcache.manager import KVCacheManager, TokenList
from workbench.kvcache.storage import BlockStorage, KVStorage
from workbench.models.llama import LlamaModel
from workbench.models.loading import load_model
from workbench.models.registry import DUMMY, load_tokenizer
from workbench.trace import MOST_ROWS, Recorder, Trace

NO_TAG = Tag()
LOADED_WITH = ("model", "dtype", "device", "batch_invariant")
"""Settings that weights depend on."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded model, which engines of one process may share: nothing writes to its tensors."""

    model: LlamaModel
    config: EngineConfig

    def fitting(self, config: EngineConfig) -> LlamaModel:
        """The model, for an engine of these settings; ConfigError if it was loaded otherwise."""
        for name in LOADED_WITH:
            here, there = getattr(config, name), getattr(self.config, name)
            if here != there:
                raise ConfigError(
                    f"Engine got {name}={here!r} and weights loaded with {name}={there!r}; give "
                    "both engines the same, or leave weights out."
                )
        return self.model


class Engine:
    """One model, its paged KV cache and its scheduler.

    model: a short name, a local folder, a .gguf file, a hub id, or `dummy:NAME`; settings: the
    fields of EngineConfig (memory="1GiB", block_size=16, ...). arena: where its KV cache lies
    instead of in memory of its own, under arena_name or else the model's (see memory.py). Its
    resizing may be called from any thread, all else from one at a time. weights: those of another
    engine (`other.weights`), shared, never written, and counted in the memory of both. Raises
    ModelError for weights that cannot be used, OutOfMemory when the budget leaves no room for one
    request of max_model_len, ConfigError for a setting that is unknown or out of range.
    """

    capabilities = frozenset({"token_identity", "trace", "resplit", "forget"})

    @collection_paused()
    def __init__(
        self,
        model: str = "tiny-solver",
        *,
        arena: KVArena | None = None,
        arena_name: str | None = None,
        weights: Weights | None = None,
        **settings: object,
    ) -> None:
        self.config = config = EngineConfig.from_dict({"model": model, **settings})
        if arena_name is not None and arena is None:
            raise ConfigError(
                f"Engine got arena_name={arena_name!r} and no arena; give both or neither."
            )
        if weights is None:
            loaded = load_model(
                config.model,
                dtype=config.dtype,
                device=config.device,
                batch_invariant=config.batch_invariant,
                block_size=config.block_size,
            )
        else:
            loaded = weights.fitting(config)
        self.weights, self.spec = Weights(loaded, config), loaded.spec
        loaded.kernels.require_takes(config.block_size, self.spec.head_dim)
        self.name, self.architecture = model, self.spec.architecture
        self.value_outputs = None if self.spec.value_head is None else self.spec.value_head.outputs
        self.tokenizer = load_tokenizer(loaded.source, dummy=model.startswith(DUMMY))
        known = self.tokenizer.token_bytes  # the vocabulary may be rounded up beyond them
        self._token_bytes = known + (b"",) * (self.spec.vocab - len(known))
        mode = "invariant" if config.batch_invariant else "fast"
        self.fingerprint = f"{loaded.fingerprint}/{self.tokenizer.fingerprint}/{mode}"
        self.max_model_len = longest_request(config, self.spec)
        place = None if arena is None else ArenaPlace(arena, arena_name or model)
        with nullcontext() if place is None else place.unless_built():
            self._build(loaded, place)
        self.forward_s = self.sampling_s = 0.0
        self._next_id = self._next_step = 0
        self._held: list[RequestOutput] = []  # finished, and not yet returned
        self._unwanted = deque[int]()  # request ids that the next change drops
        self._changing: int | None = None  # the thread that changes something
        self._cut_short = False  # the last change never ended
        self._recorder, self._trace_name = Recorder("engine", most_rows=MOST_ROWS), model

    def _build(self, model: LlamaModel, place: ArenaPlace | None) -> None:
        """How much memory there is, then the cache, the executor and the scheduler over it."""
        config, spec, longest = self.config, self.spec, self.max_model_len
        cached: dict[str, Any] = {
            "block_size": config.block_size,
            "enable_prefix_caching": config.enable_prefix_caching,
            "reuse_partial_blocks": config.reuse_partial_blocks,
            "namespace": model.fingerprint.encode(),
        }
        if place is None:
            self.memory = plan_memory(model, config, longest, config.num_blocks)
            sizes = self.memory.num_blocks, config.block_size, spec.layers, spec.kv_heads
            where = spec.head_dim, model.dtype, model.device
            storage: BlockStorage = KVStorage(*sizes, *where)
            self.cache = KVCacheManager(self.memory.num_blocks, **cached)
        else:
            place.require_guaranteed(config, longest, model)
            self.cache = place.arena.cache(place.name, **cached)
            blocks, held = self.cache.num_blocks, place.arena.storage is not None
            most = plan_memory(model, config, longest, blocks, held)
            kv = self.cache.room * most.block_bytes  # its part, whatever it may borrow
            total = most.total - most.kv + kv
            self.memory = replace(most, num_blocks=self.cache.room, kv=kv, total=total)
            storage = place.storage(config, model)
            with self.cache.lock, self.cache.change():
                self.cache.free_all()  # of an engine that had this name and was dropped
        self.cache.require(-(-longest // config.block_size))
        limits = config.max_num_batched_tokens, config.max_num_seqs, longest
        with explain_out_of_memory(config.model, model, self.memory.activations, self.memory.kv):
            self.executor = Executor(model, storage, *limits)
            self.executor.record_steps()
        given = {"max_model_len": longest, "stops": self._stops()}
        self.scheduler = make_scheduler(config, self.cache, storage.offsets, **given)
        if place is not None:  # last: the name is taken for as long as this engine lives
            place.arena.storage.users[place.name] = self

    def _stops(self) -> StopChecker:
        return StopChecker(self._token_bytes, self.tokenizer.eos_ids)

    # -- requests --

    def add(
        self, prompt: Prompt, params: SamplingParams, *, tag: Tag | None = None, salt: bytes = b""
    ) -> int:
        """Queue a prompt: text, tokenised as it is, or token ids; returns its request id.

        salt: keeps this request's cache entries apart from others'. Nothing is queued whatever is
        raised: PromptError when the prompt is empty, holds an unknown token id, has max_model_len
        tokens or more, when a stop id is unknown, or when the model has a value head and cannot
        generate.
        """
        return self._queue(encoded(self.tokenizer, prompt), params, tag=tag, salt=salt).request_id

    def add_score(
        self,
        token_ids: Ids,
        positions: Ids,
        columns: Ids,
        *,
        tag: Tag | None = None,
        salt: bytes = b"",
    ) -> int:
        """Queue a scoring request: of the logits that follow token_ids[: p + 1], for each position
        p, the given columns (token ids; outputs of a value head). Its output carries .logits
        [positions, columns].
        """
        ids, score = encoded(self.tokenizer, token_ids), score_params(positions, columns)
        return self._queue(ids, score=score, tag=tag, salt=salt).request_id

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
        require_known(sequence, self, self.spec.vocab)
        self.scheduler.require_servable(sequence)
        sequence.arrival_s = time.perf_counter()
        self._next_id += 1  # before anything that may fail: no later request gets this id
        try:
            with self._change():
                self.scheduler.add(sequence)
        except BaseException:
            self._unwanted += [sequence.request_id]
            self._drop_unwanted()
            raise
        return sequence

    def forget(self, lines: SequenceOf[Ids], kept: SequenceOf[Ids] = ()) -> int:
        """`KVCacheManager.forget`: their cached KV is given up; no token depends on it.

        PromptError for a token id that the model does not know.
        """
        gone, needed = ([known_tokens(t, self.spec.vocab) for t in each] for each in (lines, kept))
        with self._change(), self.cache.lock, self.cache.change():
            return self.cache.forget(gone, needed)

    def abort(self, request_id: int) -> None:
        """Drop a request, or what it came to; an unknown id is ignored."""
        self._unwanted += [index(request_id)]  # what is no number must not be kept
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        """Now or, where garbage collection closes a stream within a change, of this engine or of
        another in its arena, at the end of the next one here. Requests become unwanted before the
        call, where nothing is called: there no second interrupt of the user can come.
        """
        if self._changing is None and self.cache.pool.memory.changing in (None, self.cache):
            with self._change():
                pass

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs; another thread may ask while a step is under way."""
        if (self._cut_short or self._unwanted) and self._changing in (None, get_ident()):
            with self._change():
                pass
        return self.scheduler.has_work or bool(self._held)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """All of a call that changes state, or nothing of it: what the last one left half done is
        undone first. At its end what is unwanted is dropped.
        """
        self._changing = get_ident()
        try:
            if self._cut_short:
                self._repair()
            self._cut_short = True
            yield
            while self._unwanted:
                self._abort_now(self._unwanted[0])
                self._unwanted.popleft()
            self._cut_short = False
        finally:
            self._changing = None

    def _repair(self) -> None:
        """Undo what was cut short; what it had ended, its caller is told of."""
        ended = self.scheduler.recover(self._stops())
        told = {output.request_id for output in self._held}
        lost = StepError("The step failed, its error lost to an interrupt; send the request again.")
        for sequence, reason in ended:
            if sequence.request_id not in told:
                self._hold(sequence, reason, lost if reason == "error" else None)
        self.scheduler.ended = []

    def _abort_now(self, request_id: int) -> None:
        self._held = [output for output in self._held if output.request_id != request_id]
        with self.cache.lock, self.cache.change():
            sequence = self.scheduler.abort(request_id)
        if sequence is not None:
            self._recorder.request(self._trace_name, sequence, "abort", time.perf_counter())

    # -- steps --

    def step(self) -> list[RequestOutput]:
        """One scheduling step; returns the requests that finished in it.

        A forward pass that fails finishes the requests of its step with the error in `.error`; the
        engine and all other requests go on. Whatever else is raised, an interrupt of the user
        included, no request is lost: the next call computes again what was running.
        """
        self._advance()
        outputs, self._held = self._held, []
        return outputs

    def _advance(self) -> None:
        """A step; what ends in it is held."""
        start = time.perf_counter()
        with self._change():
            with self.cache.lock, self.cache.change():
                plan = self.scheduler.schedule()
                if plan is not None:
                    self.executor.storage.settle(self.cache)
            if plan is None:
                return
            scheduled = time.perf_counter()
            self._carry_out(plan)
            counts = self.scheduler.counts
            assert counts is not None
            self._recorder.step(
                self._trace_name,
                self._next_step,
                start_s=start,
                duration_s=time.perf_counter() - start,
                schedule_s=scheduled - start,
                counts=counts,
                blocks_target=self.cache.target,
            )
            self.scheduler.tell()
            self._next_step += 1

    def _taken(self, wanted: Container[int]) -> list[RequestOutput]:
        """Of what is held, the outputs of these requests."""
        found = [output for output in self._held if output.request_id in wanted]
        self._held = [output for output in self._held if output.request_id not in wanted]
        return found

    def _carry_out(self, plan: StepPlan) -> None:
        """What ends in it is held for the caller."""
        try:
            result = self.executor.submit(plan).result()
        except StepError as error:
            if error.rows:
                ids = ", ".join(map(str, self.scheduler.requests_of(error.rows)))
                error = StepError(f"{error} At fault: request {ids}.", error.rows)
            with self.cache.lock, self.cache.change():
                failed = self.scheduler.fail(plan)
            for sequence in failed:
                self._hold(sequence, "error", error)
        else:
            self.forward_s += result.forward_s
            self.sampling_s += result.sampling_s
            with self.cache.lock, self.cache.change():
                finished = self.scheduler.update(plan, result)
            for sequence, reason in finished:
                self._hold(sequence, reason)
        self.scheduler.ended = []

    def _hold(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        """Keep what the caller is told of a request that has ended, then its row of the trace."""
        score, rows, logits = sequence.score, sequence.score_rows, None
        if score is not None and reason == "score":
            logits = np.stack([rows[p] for p in score.positions])
        more = {"num_cached_tokens": sequence.num_cached_tokens, "logits": logits, "error": error}
        self._held.append(output_of(sequence, reason, self._token_bytes, **more))
        self._recorder.request(self._trace_name, sequence, reason, time.perf_counter())

    # -- whole requests --

    def generate(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams]
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs in the prompts' order. params: one for all, or a list.

        Raises StepError, once all have ended, when a forward pass failed. Whatever else is raised,
        by a prompt that is refused or an interrupt of the user, none of them is left.
        """
        return self._run_all(self.add, paired(prompts, params))

    def score(self, token_ids: Ids, positions: Ids, columns: Ids) -> RequestOutput:
        """add_score, run to its end."""
        return self._run_all(self.add_score, [(token_ids, positions, columns)])[0]

    def _run_all(
        self, queue: Callable[..., int], calls: list[tuple[Any, ...]]
    ) -> list[RequestOutput]:
        """Queue every call, step until all have finished; what else finishes is held for step()."""
        found, ids = dict[int, RequestOutput](), list[int]()
        try:
            for arguments in calls:
                ids.append(queue(*arguments))
            wanted = set(ids)
            while len(found) < len(ids):
                self._advance()
                found |= {output.request_id: output for output in self._taken(wanted)}
        except BaseException:
            self._unwanted += ids
            self._drop_unwanted()
            raise
        outputs = [found[request_id] for request_id in ids]
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
        """The text of one request, piece by piece as tokens come; closing the iterator aborts it.

        The pieces together are the output's text; a piece ends with a whole character. It also ends
        where another call took the output or dropped the request. Raises StepError when a forward
        pass failed.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        token_ids, ended = encoded(self.tokenizer, prompt), list[RequestOutput]()
        shown = len(token_ids)
        sequence = self._queue(token_ids, params)
        known = True
        try:
            while known and not ended:
                self._advance()
                known = sequence.request_id in self.scheduler
                ended = self._taken([sequence.request_id])
                if ended and ended[0].error is not None:
                    raise ended[0].error
                new = b"".join([self._token_bytes[k] for k in sequence.token_ids[shown:]])
                piece = decoder.decode(new, final=not known)
                shown = max(shown, len(sequence.token_ids))  # less of them after a repair
                if piece:
                    yield piece
        finally:
            self._unwanted += [sequence.request_id]
            self._drop_unwanted()

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

    def trace_as(self, recorder: Recorder, name: str) -> tuple[Recorder, str]:
        """Write steps and requests from now on to this recorder, under this name; returns those
        before it. At first it is one of the engine's own, which keeps the last MOST_ROWS rows.
        """
        before = self._recorder, self._trace_name
        self._recorder, self._trace_name = recorder, name
        return before

    @property
    def trace(self) -> Trace:
        """What the present recorder holds, as frames; its `dropped`: how many rows it lacks."""
        return self._recorder.trace()

    def __repr__(self) -> str:
        blocks = f"{self.memory.num_blocks} blocks of {self.config.block_size} tokens"
        return f"Engine({self.name!r}, {blocks}, max_model_len={self.max_model_len})"
