"""The thread in which all engines of a server step, how requests get in and out; metrics.

Requests wait in a bounded queue of each model, ordered by priority, until its engine has a place
for them. What a search asks for waits there too, unbounded but in turn with requests, so that
neither starves the other. Engines take a step in turn; a lock guards the queues only, so nothing
that submits or aborts waits for a step. Every job that is not aborted gets exactly one output.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workbench.core import RequestOutput, SamplingParams, ScoreParams
from workbench.core import Sequence as EngineSequence
from workbench.engine.engine import Engine
from workbench.errors import StepError, WorkbenchError
from workbench.kvcache.arena import KVArena
from workbench.serving.protocol import Logprobs, Refused

log = logging.getLogger(__name__)
CLOSING = "The server is shutting down."


class ServedEngine(Engine):
    """An Engine whose requests can be watched while they run."""

    admit = Engine._queue  # its sequence, which grows with every step


@dataclass(slots=True, eq=False)
class Job:
    """One sequence asked of one model. sink: is handed the job when there is news of it.

    streams: new tokens are news, not its output alone. inner: asked for by a search, which was
    admitted as a whole. The last three are the engine thread's to write.
    """

    model: str
    token_ids: list[int]
    sink: Callable[[Job], None]
    params: SamplingParams | None = None  # exactly one of params and score
    score: ScoreParams | None = None
    streams: bool = False
    priority: int = 0
    inner: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    num_taken: int = 0  # sampled tokens that `take` has returned
    sequence: EngineSequence | None = None  # once its engine has it
    last_token_s: float = 0.0
    # By the last step: tokens sampled, and the output once it has ended. Written as one, so that
    # the last token is not taken before it is known to be the last.
    reached: tuple[int, RequestOutput | None] = (0, None)

    @property
    def output(self) -> RequestOutput | None:
        """Once it has ended."""
        return self.reached[1]

    def take(self) -> News:
        """From one thread, not the engines'."""
        (end, output), sequence = self.reached, self.sequence
        if sequence is None:
            return News([], [], output)
        begin, first = self.num_taken, sequence.num_prompt_tokens
        tokens = sequence.token_ids[first + begin : first + end]
        self.num_taken += len(tokens)  # after a repair there may be less of them for a while
        return News(tokens, sequence.logprobs[begin:end], output)


class News(NamedTuple):
    """Of a job: tokens not taken yet, their logprobs if asked for, and its output at the end."""

    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs]
    output: RequestOutput | None


class EngineThread(threading.Thread):
    """make: loads the engines, in the thread. notify: is handed jobs of which there is news, soon
    after each step, and must not block. on_ready: called once they are loaded, and with what ends
    the thread.
    """

    def __init__(
        self,
        arena: KVArena,
        make: Callable[[], Mapping[str, ServedEngine]],
        max_queue: int,
        notify: Callable[[list[Job]], None],
        on_ready: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(name="engines", daemon=True)
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
        self._news: list[Job] = []

    # -- from any thread --

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs of one model and kind, all or none.

        Refused where more than max_queue would wait, beside those that the engine has a place for.
        """
        name, inner = jobs[0].model, jobs[0].inner
        with self._changed:
            if self._closed:
                raise Refused(503, CLOSING)
            waiting = self._waiting[name]
            turns = [turn for _, turn, _, job in waiting if job.inner is inner]
            at_once = max(0, self._places(name) - (len(waiting) - len(turns)))
            if not inner and len(turns) + len(jobs) > self._max_queue + at_once:
                full = f"{len(turns)} requests wait for {name}, {len(jobs)} more are too many"
                raise Refused(503, f"{full}; try again.", code="queue_full")
            last = max([self._turn[name], *turns])  # of its kind: then the k-th waits for k
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
        self.join(None if self.engines else 0)

    def state(self, model: str) -> dict[str, float]:
        """What /arena and /metrics tell of a model now: requests, blocks, pages, prefix cache."""
        cache, counts = self.engines[model].cache, self.engines[model].scheduler.counts
        admitted = len(self._running[model])  # of which some wait, the preempted among them
        without_blocks = min(admitted, counts.waiting if counts else 0)
        pool = self.arena.pools[self.arena.models.index(model)]
        with self.arena.lock:
            blocks = cache.num_active + cache.num_cached + cache.num_free
            return {
                "running": admitted - without_blocks,
                "waiting": without_blocks + len(self._waiting[model]),
                "blocks_active": cache.num_active,
                "blocks_cached": cache.num_cached,
                "blocks_free": cache.num_free,
                "usage": cache.num_active / max(1, blocks),
                "pages_held": pool.held,
                "pages_target": pool.grant.target,
                "queries": cache.stats.query_tokens,
                "hits": cache.stats.hit_tokens,
                "thrashed": cache.stats.thrashed,
            }

    # -- the thread --

    def run(self) -> None:
        """Load, then serve until it is closed."""
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
                left = [*self._running[name], *(entry[-1] for entry in self._waiting[name])]
                self._fail(left, Refused(503, CLOSING))
        self._notify(self._news)

    def _serve(self) -> None:
        """Until it is closed: take in and out what changed, step, tell."""
        queues = [*self._waiting.values(), *self._running.values()]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._unwanted or any(queues))
                if self._closed:
                    return
                unwanted, self._unwanted = self._unwanted, []
            self._drop(unwanted)
            admitted = list[Job]()
            with self._changed:
                for name, waiting in self._waiting.items():
                    for _ in range(min(len(waiting), self._places(name))):
                        _, turn, _, job = heapq.heappop(waiting)
                        self._turn[name] = max(turn, self._turn[name])
                        self._running[name][job] = None
                        admitted.append(job)
            for job in admitted:
                try:
                    wanted = job.token_ids, job.params, job.score
                    job.sequence = self.engines[job.model].admit(*wanted)
                except WorkbenchError as error:
                    self._fail([job], error)
                except Exception as error:  # of memory, or a fault of ours: it fails alone
                    log.exception("%s could not admit a request", job.model)
                    told = f"The request could not be admitted: {type(error).__name__}."
                    self._fail([job], Refused(500, told, code="not_admitted"))
            for name, engine in self.engines.items():
                self._step(name, engine)
            if self._news:
                self._notify(self._news)
                self._news = []

    def _places(self, name: str) -> int:
        """Requests that the engine has room for beside those it has."""
        return self.engines[name].config.max_num_seqs - len(self._running[name])

    def _drop(self, jobs: Iterable[Job]) -> None:
        """Take jobs from where they are."""
        dropped = {job for job in jobs if job.output is None}
        for job in dropped:
            if job.sequence is not None:
                self.engines[job.model].abort(job.sequence.request_id)
        with self._changed:
            for job in dropped:
                self._running[job.model].pop(job, None)
            for name in {job.model for job in dropped}:
                waiting = self._waiting[name]
                waiting[:] = (entry for entry in waiting if entry[-1] not in dropped)
                heapq.heapify(waiting)

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        """Give jobs up with an error."""
        self._drop(jobs)
        for job in jobs:
            job.reached = job.reached[0], RequestOutput(-1, (), "", "error", error=error)
        self._news += jobs

    def _step(self, name: str, engine: ServedEngine) -> None:
        """One step of one engine that has work; what is new is to be told."""
        running, planned = self._running[name], engine.scheduler.counts
        try:
            outputs = engine.step() if engine.has_work else []
        except Exception as error:  # a fault of ours: its requests fail, the server goes on
            log.exception("a step of %s failed", name)
            self._fail([*running], StepError(f"A step failed: {type(error).__name__}."))
            return
        now, ended = time.perf_counter(), {output.request_id: output for output in outputs}
        sampled = 0
        for job in [*running]:
            assert job.sequence is not None
            before, output = job.reached[0], ended.get(job.sequence.request_id)
            number = max(before, job.sequence.num_output_tokens)
            job.reached = number, output
            sampled += number - before
            if number > before:
                self.metrics.sampled(job, job.sequence, now)
                job.last_token_s = now
            if output is not None:
                del running[job]
                self.metrics.ended(job, job.sequence, output, now)
            if output is not None or (number > before and job.streams):
                self._news.append(job)
        self.metrics.of[name]["generation_tokens"].inc(sampled)
        counts = engine.scheduler.counts
        if counts is not None and counts is not planned:
            self.metrics.of[name]["num_preemptions"].inc(counts.preempted)


# -- metrics: vLLM's names and meanings, and blocks and pages beside --

LABEL = ["model_name"]
BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 20, 40, 80, 160, 640),
)
SECONDS = {
    "time_to_first_token": "from arrival to the first token",
    "inter_token_latency": "between two tokens of a request",
    "e2e_request_latency": "from arrival to the end",
    "request_queue_time": "from arrival to admission",
}
COUNTS = {
    "prompt_tokens": "of prompts that were computed",
    "generation_tokens": "that were sampled, whatever became of their requests",
    "num_preemptions": "times that a request lost its blocks, to be computed again",
}
READ: dict[str, tuple[Any, str, str]] = {  # by the names of `EngineThread.state`
    "running": (GaugeMetricFamily, "vllm:num_requests_running", "requests being computed"),
    "waiting": (GaugeMetricFamily, "vllm:num_requests_waiting", "requests that wait"),
    "usage": (GaugeMetricFamily, "vllm:kv_cache_usage_perc", "blocks in use over all; 1 is all"),
    "queries": (CounterMetricFamily, "vllm:prefix_cache_queries", "tokens asked for"),
    "hits": (CounterMetricFamily, "vllm:prefix_cache_hits", "tokens found"),
    "thrashed": (CounterMetricFamily, "workbench:kv_blocks_thrashed", "evicted, then asked for"),
    "blocks_active": (GaugeMetricFamily, "workbench:kv_blocks_active", "that requests use"),
    "blocks_cached": (GaugeMetricFamily, "workbench:kv_blocks_cached", "that can be hit"),
    "blocks_free": (GaugeMetricFamily, "workbench:kv_blocks_free", "without content"),
    "pages_held": (GaugeMetricFamily, "workbench:arena_pages_held", "that a model holds"),
    "pages_target": (GaugeMetricFamily, "workbench:arena_pages_target", "it should come to"),
}


class Metrics(Collector):
    """Of one server. SECONDS and COUNTS are written by the engine thread, `refused` by the event
    loop; what READ names is read when it is asked for.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread, self.registry = thread, CollectorRegistry()
        own: Any = {"registry": self.registry}
        families: dict[str, Any] = {
            name: Histogram(f"vllm:{name}_seconds", text, LABEL, buckets=BUCKETS, **own)
            for name, text in SECONDS.items()
        }
        for name, text in COUNTS.items():
            families[name] = Counter(f"vllm:{name}", text, LABEL, **own)
        self.of = {
            model: {name: family.labels(model) for name, family in families.items()}
            for model in thread.arena.models
        }  # looked up once, not at every token
        reason = [*LABEL, "finished_reason"]
        self._success = Counter("vllm:request_success", "finished requests", reason, **own)
        self.refused = Counter("workbench:refused", "requests by HTTP status", ["status"], **own)
        self.registry.register(self)

    def sampled(self, job: Job, sequence: EngineSequence, now: float) -> None:
        """A step brought a request a token."""
        own = self.of[job.model]
        if job.last_token_s:
            own["inter_token_latency"].observe(now - job.last_token_s)
        else:
            own["time_to_first_token"].observe(now - job.arrived)
            own["prompt_tokens"].inc(sequence.num_prompt_tokens)

    def ended(self, job: Job, sequence: EngineSequence, output: RequestOutput, now: float) -> None:
        """A request came to its end in a step."""
        own, reason = self.of[job.model], output.finish_reason
        if sequence.scheduled_s is not None:
            own["request_queue_time"].observe(max(0.0, sequence.scheduled_s - job.arrived))
        own["e2e_request_latency"].observe(now - job.arrived)
        if reason == "score":
            own["prompt_tokens"].inc(sequence.num_prompt_tokens)
        told = "stop" if reason in ("eos", "score") else reason
        self._success.labels(job.model, told).inc()

    def collect(self) -> Iterator[Metric]:
        """What is read now."""
        states = {model: self._thread.state(model) for model in self._thread.engines}
        for name, (kind, metric, text) in READ.items():
            family = kind(metric, text, labels=LABEL)
            for model, state in states.items():
                family.add_metric([model], state[name])
            yield family
