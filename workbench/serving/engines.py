"""The thread in which all engines of a server step, how requests get in and out; metrics.

Requests wait in a bounded queue of each model, ordered by priority, until its engine has a place
for them. What a search asks for waits there too, unbounded but in turn with requests, so that
neither starves the other. Engines take a step in turn; a lock guards the queues only, so nothing
that submits or aborts waits for a step. Every job that is not aborted gets exactly one last event.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workbench.core import RequestOutput, SamplingParams, ScoreParams
from workbench.core import Sequence as EngineSequence
from workbench.engine.engine import Engine
from workbench.engine.requests import encoded
from workbench.errors import StepError, WorkbenchError
from workbench.kvcache.arena import KVArena
from workbench.serving.protocol import Logprobs, Refused

log = logging.getLogger(__name__)
CLOSING = "The server is shutting down."


class ServedEngine(Engine):
    """An Engine whose requests can be watched while they run."""

    def admit(self, job: Job) -> EngineSequence:
        """Queue a job; its sequence, which grows with every step. Raises PromptError."""
        return self._queue(encoded(self.tokenizer, job.token_ids), job.params, job.score)


class Event(NamedTuple):
    """New tokens of a job, and its output once it has ended."""

    job: Job
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()
    output: RequestOutput | None = None

    def joined(self, later: Event) -> Event:
        """Both as one."""
        tokens, logprobs = [*self.token_ids, *later.token_ids], [*self.logprobs, *later.logprobs]
        return Event(self.job, tokens, logprobs, later.output)


@dataclass(slots=True, eq=False)
class Job:
    """One sequence asked of one model. sink: is handed its events.

    streams: it is told of tokens as they come; otherwise of its end alone. inner: asked for by a
    search, which was admitted as a whole.
    """

    model: str
    token_ids: Sequence[int]
    sink: Callable[[Event], None]
    params: SamplingParams | None = None  # exactly one of params and score
    score: ScoreParams | None = None
    streams: bool = False
    priority: int = 0
    inner: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    sequence: EngineSequence | None = None  # once its engine has it
    seen: int = 0  # of its tokens, prompt included: those counted
    told: int = 0  # and those its sink was handed
    last_token_s: float = 0.0


class EngineThread:
    """make: loads the engines, in the thread. notify: is handed events, soon after each step, and
    must not block. on_ready: called once they are loaded, and with what ends the thread.
    """

    def __init__(
        self,
        arena: KVArena,
        make: Callable[[], Mapping[str, ServedEngine]],
        max_queue: int,
        notify: Callable[[list[Event]], None],
        on_ready: Callable[[BaseException | None], None],
    ) -> None:
        self.arena, self.engines = arena, dict[str, ServedEngine]()
        self.metrics = Metrics(self)
        self._make, self._max_queue = make, max_queue
        self._notify, self._on_ready = notify, on_ready
        self._changed = threading.Condition()  # guards the next five
        # Heaps of (priority, turn, number, job): fair queueing of requests against searches.
        self._waiting = {name: list[tuple[int, int, int, Job]]() for name in arena.models}
        self._turn = dict.fromkeys(arena.models, 0)  # of the last job that left the queue
        self._unwanted: list[Job] = []
        self._closed = False
        self._numbers = count()
        self._running = {name: dict[Job, None]() for name in arena.models}  # the thread's to change
        self._events: list[Event] = []
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self.start = self._thread.start

    # -- from any thread --

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs of one model and kind, all or none.

        Refused where max_queue requests wait already, or none may and the engine has no place.
        """
        name, inner = jobs[0].model, jobs[0].inner
        with self._changed:
            if self._closed:
                raise Refused(503, CLOSING)
            waiting = self._waiting[name]
            turns = [turn for _, turn, _, job in waiting if job.inner is inner]
            at_once = max(0, self._places(name) - (len(waiting) - len(turns)))
            if not inner and len(turns) >= self._max_queue + at_once:
                full = f"{len(turns)} requests wait for {name}, the most allowed"
                raise Refused(503, f"{full}; try again.", code="queue_full")
            last = max(turns, default=self._turn[name])  # of its kind: then the k-th waits for k
            for turn, job in enumerate(jobs, last + 1):  # of the other kind at most
                heapq.heappush(waiting, (job.priority, turn, next(self._numbers), job))
            self._changed.notify()

    def abort(self, jobs: Sequence[Job]) -> None:
        """Drop jobs before the next step: no more is told of them. Ended ones are ignored."""
        with self._changed:
            self._unwanted += jobs
            self._changed.notify()

    def close(self) -> None:
        """End with 503 what is left, then the thread, which is not waited for while it loads."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(None if self.engines else 0)

    def state(self, model: str) -> dict[str, int]:
        """Requests, blocks and pages of a model now."""
        jobs, cache = list(self._running[model]), self.engines[model].cache
        sequences = (job.sequence for job in jobs)
        running = sum(s is not None and s.scheduled_s is not None for s in sequences)
        waiting = len(jobs) - running + len(self._waiting[model])
        pool = self.arena.pools[self.arena.models.index(model)]
        with self.arena.lock:
            states = {
                f"blocks_{s}": getattr(cache, f"num_{s}") for s in ("active", "cached", "free")
            }
            pages = {"pages_held": pool.held, "pages_target": pool.grant.target}
        return {"running": running, "waiting": waiting} | states | pages

    # -- the thread --

    def _run(self) -> None:
        try:
            self.engines = dict(self._make())
            self._on_ready(None)
            self._serve()
        except BaseException as error:  # nothing is served any more
            self._on_ready(error)
            for job in (job for jobs in self._running.values() for job in jobs):
                job.sequence = None  # nor is its engine asked for anything
        with self._changed:
            self._closed = True
            for name in self.engines:
                self._fail(self._running[name], Refused(503, CLOSING))
                self._fail([entry[-1] for entry in self._waiting[name]], Refused(503, CLOSING))
        self._tell()

    def _serve(self) -> None:
        """Until it is closed: take in and out what changed, step, tell."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closed:
                    return
                for job in self._unwanted:
                    self._abort(job)
                self._unwanted = []
                admitted = [job for name in self.engines for job in self._next(name)]
            for job in admitted:
                self._admit(job)
            for name, engine in self.engines.items():
                if engine.has_work:
                    self._step(name, engine)
            self._tell()

    def _has_work(self) -> bool:
        queued = any(self._waiting.values()) or any(self._running.values())
        return queued or self._closed or bool(self._unwanted)

    def _tell(self) -> None:
        if self._events:
            self._notify(self._events)
            self._events = []

    def _places(self, name: str) -> int:
        """Requests that the engine has room for beside those it has."""
        return self.engines[name].config.max_num_seqs - len(self._running[name])

    def _next(self, name: str) -> list[Job]:
        """As many of those that wait as the engine has places for; they take them."""
        waiting, found = self._waiting[name], list[Job]()
        for _ in range(min(len(waiting), self._places(name))):
            _, turn, _, job = heapq.heappop(waiting)
            self._turn[name] = max(turn, self._turn[name])
            found.append(job)
        self._running[name] |= dict.fromkeys(found)
        return found

    def _admit(self, job: Job) -> None:
        try:
            job.sequence = self.engines[job.model].admit(job)
        except WorkbenchError as error:
            self._fail([job], error)
            return
        job.seen = job.told = job.sequence.num_prompt_tokens

    def _abort(self, job: Job) -> None:
        """Take it from where it is."""
        if job.sequence is not None:
            self.engines[job.model].abort(job.sequence.request_id)
        with self._changed:
            if job in self._running[job.model]:
                del self._running[job.model][job]
            else:
                waiting = self._waiting[job.model]
                waiting[:] = (entry for entry in waiting if entry[-1] is not job)
                heapq.heapify(waiting)

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        """Give jobs up with an error."""
        for job in list(jobs):
            self._abort(job)
            output = RequestOutput(-1, (), "", "error", error=error)
            self._events.append(Event(job, output=output))

    def _step(self, name: str, engine: ServedEngine) -> None:
        """One step of one engine; what is new is to be told."""
        running, metrics = self._running[name], self.metrics
        try:
            outputs = engine.step()
        except Exception as error:  # a fault of ours: its requests fail, the server goes on
            log.exception("a step of %s failed", name)
            self._fail(running, StepError(f"A step failed: {type(error).__name__}."))
            return
        now, ended = time.perf_counter(), {output.request_id: output for output in outputs}
        first, further = (metrics.seconds[n].labels(name) for n in (FIRST_TOKEN, INTER_TOKEN))
        for job in list(running):
            sequence = job.sequence
            assert sequence is not None
            output, is_new = ended.get(sequence.request_id), sequence.num_tokens > job.seen
            if is_new and job.params is not None:
                since = job.last_token_s or job.arrived
                (further if job.last_token_s else first).observe(now - since)
                job.seen, job.last_token_s = sequence.num_tokens, now
            if output is not None:
                del running[job]
                metrics.ended(job, sequence, output, now)
            if output is not None or (is_new and job.streams):
                self._report(job, sequence, output)

    def _report(self, job: Job, sequence: EngineSequence, output: RequestOutput | None) -> None:
        """The tokens that its sink was not handed yet."""
        told, job.told = job.told, sequence.num_tokens
        logprobs = sequence.logprobs[told - sequence.num_prompt_tokens :]
        self._events.append(Event(job, sequence.token_ids[told:], logprobs, output))


# -- metrics: vLLM's names and meanings, and blocks and pages beside --

LABEL = ["model_name"]
BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 20, 40, 80, 160, 640),
)
FIRST_TOKEN, INTER_TOKEN = "time_to_first_token", "inter_token_latency"
SECONDS = {
    FIRST_TOKEN: "from arrival to the first token",
    INTER_TOKEN: "between two tokens of a request",
    "e2e_request_latency": "from arrival to the end",
    "request_queue_time": "from arrival to admission",
}
GAUGES = {
    "vllm:num_requests_running": "requests being computed",
    "vllm:num_requests_waiting": "requests not admitted yet",
    "vllm:kv_cache_usage_perc": "blocks in use over all; 1 is all",
    "workbench:kv_blocks_active": "blocks that requests use",
    "workbench:kv_blocks_cached": "blocks that can be hit",
    "workbench:kv_blocks_free": "blocks without content",
    "workbench:arena_pages_held": "pages of the arena that a model holds",
    "workbench:arena_pages_target": "pages of the arena that it should come to",
}
COUNTERS = {
    "vllm:prefix_cache_queries": "tokens asked for",
    "vllm:prefix_cache_hits": "tokens found",
    "workbench:kv_blocks_thrashed": "blocks evicted and then asked for again",
}


class Metrics(Collector):
    """Of one server. Histograms and counters are written by the engine thread, or the event loop
    (refused); the rest is read when it is asked for.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread, self.registry = thread, CollectorRegistry()

        def counter(name: str, text: str, labels: Sequence[str]) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.seconds = {
            name: Histogram(
                f"vllm:{name}_seconds", text, LABEL, registry=self.registry, buckets=BUCKETS
            )
            for name, text in SECONDS.items()
        }
        self._prompt = counter("vllm:prompt_tokens", "of finished requests", LABEL)
        self._generated = counter("vllm:generation_tokens", "of finished requests", LABEL)
        self._preempted = counter("vllm:num_preemptions", "of finished requests", LABEL)
        reason = [*LABEL, "finished_reason"]
        self._success = counter("vllm:request_success", "finished requests", reason)
        self.refused = counter("workbench:refused", "requests by HTTP status", ["status"])
        self.registry.register(self)

    def ended(self, job: Job, sequence: EngineSequence, output: RequestOutput, now: float) -> None:
        """A request that came to its end in a step."""
        model, reason = job.model, output.finish_reason
        if sequence.scheduled_s is not None:
            waited = max(0.0, sequence.scheduled_s - job.arrived)
            self.seconds["request_queue_time"].labels(model).observe(waited)
        self.seconds["e2e_request_latency"].labels(model).observe(now - job.arrived)
        self._prompt.labels(model).inc(sequence.num_prompt_tokens)
        self._generated.labels(model).inc(len(output.token_ids))
        self._preempted.labels(model).inc(sequence.preemptions)
        self._success.labels(model, "stop" if reason == "eos" else reason).inc()

    def collect(self) -> Iterator[Metric]:
        """What is read now."""
        families: list[GaugeMetricFamily | CounterMetricFamily] = [
            *(GaugeMetricFamily(*each, labels=LABEL) for each in GAUGES.items()),
            *(CounterMetricFamily(*each, labels=LABEL) for each in COUNTERS.items()),
        ]
        for model, engine in self._thread.engines.items():
            state, stats = self._thread.state(model), engine.cache.stats
            running, waiting, active, cached, free, *pages = state.values()
            usage = active / max(1, active + cached + free)
            found = [running, waiting, usage, active, cached, free, *pages]
            found += [stats.query_tokens, stats.hit_tokens, stats.thrashed]
            for family, value in zip(families, found, strict=True):
                family.add_metric([model], value)
        yield from families
