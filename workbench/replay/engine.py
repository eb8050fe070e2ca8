"""An engine without a model: the real scheduler and cache, recorded tokens, a simulated clock.

Stands where workbench.engine.engine.Engine stands in a search, and writes the same trace. A step
lasts as long as its cost says. What it does not do: sample, or read any clock of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from workbench.core import RequestOutput, SamplingParams, ScoreParams, Sequence, Tag
from workbench.engine.scheduler import Scheduler
from workbench.engine.static_batch import StaticScheduler
from workbench.errors import ConfigError, RecordingError, nearest, require_types
from workbench.replay.answers import Answers, RecordedExecutor, SampledNode
from workbench.replay.lines import ChainedCache, Line
from workbench.replay.scheduling import ReplayScheduler
from workbench.replay.work import DEFAULT_BLOCK_SIZE, StepWork, block_size_of, work_of
from workbench.search.record import RecordedEngine
from workbench.trace import Recorder, StepCounts

Cost = Callable[[StepWork], float]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What may differ from the recorded engine: the cache and the limits of a step.

    num_blocks: None where the memory says it, or nobody does.
    """

    num_blocks: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    reuse_partial_blocks: bool = False
    watermark: float = 0.01
    batching: str = "continuous"

    def __post_init__(self) -> None:
        require_types(self)
        for name in ("num_blocks", "block_size"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ConfigError(f"{name} is {given}; allowed: >= 1.")

    @classmethod
    def of(cls, engine: RecordedEngine, changes: Mapping[str, Any] | None = None) -> Self:
        """The recorded engine's own, with these changes. ConfigError names what is unknown.

        A block size other than the recorded one keeps the memory: num_blocks follows.
        """
        known = [field.name for field in fields(cls)]
        changes = dict(changes or {})
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"A replay of {engine.name} cannot change {name!r}; allowed: "
                    f"{', '.join(known)}.{nearest(name, known)}"
                )
        own = {n: v for n, v in (engine.config or {}).items() if n in known and v is not None}
        own["num_blocks"] = engine.num_blocks
        if "block_size" in changes and "num_blocks" not in changes and engine.num_blocks:
            tokens = engine.num_blocks * block_size_of(engine)
            own["num_blocks"] = tokens // max(1, int(changes["block_size"]))
        return cls(**own | changes)


class SimulatedClock:
    """Seconds since the start of a replay; whoever does something moves it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ReplayEngine:
    """One recorded model. request_s: seconds that queueing a request takes, outside the steps."""

    capabilities = frozenset({"token_identity", "trace"})
    tokenizer = None

    def __init__(
        self,
        recorded: RecordedEngine,
        settings: CacheSettings,
        cache: ChainedCache,
        answers: Answers,
        clock: SimulatedClock,
        cost: Cost,
        request_s: float = 0.0,
    ) -> None:
        self.name, self.architecture = recorded.name, recorded.architecture
        self.fingerprint, self.value_outputs = recorded.fingerprint, recorded.value_outputs
        self.max_model_len = recorded.max_model_len
        self.settings = settings
        self._answers, self.clock, self._cost = answers, clock, cost
        self._request_s = request_s
        self.cache = cache
        self._executor = RecordedExecutor(answers.tokens)
        self.scheduler = _scheduler(self.cache, settings, self.max_model_len, self._executor, clock)
        self._nodes: dict[int, SampledNode] = {}
        self._next_id = self._next_step = 0
        self.trace_as(Recorder("replay", clock()), self.name)

    def trace_as(self, recorder: Recorder, name: str) -> None:
        """Write steps and requests from now on to this recorder, under this name."""
        self._recorder, self._trace_name = recorder, name

    def add(
        self, prompt: str | SequenceOf[int], params: SamplingParams, *, tag: Tag | None = None
    ) -> int:
        """Queue the node that the tag names; RecordingError if it was never sampled."""
        tag = Tag() if tag is None else tag
        node = self._answers.node(tag.problem_id, tag.node_id)
        own = len(node.step.tokens)
        if len(prompt) != node.entry.length - own:
            raise RecordingError(
                f"Node {tag.node_id!r} of problem {tag.problem_id!r} was sampled after "
                f"{node.entry.length - own} tokens; the replay has {len(prompt)}."
            )
        self._nodes[self._next_id] = node
        return self._queue(Line(node.entry, len(prompt)), tag, params=params)

    def add_score(
        self,
        token_ids: SequenceOf[int],
        positions: SequenceOf[int],
        columns: SequenceOf[int],
        *,
        tag: Tag | None = None,
    ) -> int:
        """Queue a scoring request for a recorded solution."""
        assert isinstance(token_ids, Line), "a replay is asked about recorded solutions"
        score = ScoreParams(tuple(positions), tuple(columns))
        return self._queue(token_ids, Tag() if tag is None else tag, score=score)

    def _queue(self, tokens: Line, tag: Tag, **wanted: Any) -> int:
        self.clock.now += self._request_s
        number = self._next_id
        sequence = Sequence(number, tokens.as_list, len(tokens), tag=tag, **wanted)
        sequence.arrival_s = self.clock()
        self.scheduler.add(sequence)
        self._next_id += 1
        return number

    def abort(self, request_id: int) -> None:
        """Drop a request; an unknown or finished id is ignored."""
        sequence = self.scheduler.abort(request_id)
        if sequence is not None:
            self._recorder.request(self._trace_name, sequence, "abort", self.clock())

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """One scheduling step of the real scheduler, or all up to the next that decides anything.

        Their costs pass on the clock.
        """
        outputs: list[RequestOutput] = []
        if isinstance(self.scheduler, ReplayScheduler):
            outputs = self._coast(self.scheduler)
        return outputs or self._decide()

    def _coast(self, scheduler: ReplayScheduler) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while (planned := scheduler.plan_decodes()) is not None:
            counts, work = planned
            start, duration = self.clock.now, self._cost(work)
            self.clock.now = start + duration
            outputs += [self._finish(*ended) for ended in scheduler.take_decodes()]
            self._record(start, duration, counts)
        return outputs

    def _decide(self) -> list[RequestOutput]:
        start = self.clock()
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        self.cache.take_moves()  # nobody copies bytes
        duration = self._cost(work_of(plan))
        self.clock.now += duration
        finished = self.scheduler.update(plan, self._executor.run(plan))
        outputs = [self._finish(sequence, reason) for sequence, reason in finished]
        assert self.scheduler.counts is not None
        self._record(start, duration, self.scheduler.counts)
        return outputs

    def _record(self, start: float, duration: float, counts: StepCounts) -> None:
        number, target = self._next_step, self.cache.target
        timing = (start, duration, 0.0)
        self._recorder.step(self._trace_name, number, *timing, counts, blocks_target=target)
        self._next_step += 1

    def _finish(self, sequence: Sequence, reason: str) -> RequestOutput:
        number, cached = sequence.request_id, sequence.num_cached_tokens
        if sequence.score is not None:
            output = RequestOutput(number, (), "", reason, cached)
        else:
            step = self._nodes.pop(number).step
            reason = step.request_reason
            output = RequestOutput(number, step.tokens, step.text, step.finish_reason, cached)
        self._recorder.request(self._trace_name, sequence, reason, self.clock())
        return output


def _scheduler(
    cache: ChainedCache,
    settings: CacheSettings,
    max_model_len: int,
    executor: RecordedExecutor,
    clock: SimulatedClock,
) -> Scheduler:
    limits: dict[str, Any] = {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "watermark": settings.watermark,
        "clock": clock,
    }
    if settings.batching == "static":
        offsets = np.arange(cache.num_block_ids, dtype=np.int64)
        return StaticScheduler(cache, offsets, stops=executor, **limits)
    return ReplayScheduler(cache, executor, **limits)
