"""The fake language model behind the real scheduler and cache: rows, blocks, preemption, a trace.

One token a row and step, as an engine does; what is sampled is still the script's, by seed.
"""

import time
from types import SimpleNamespace

import numpy as np

from tests.search.conftest import FakeEngine, wander
from workbench.config import EngineConfig
from workbench.core import ScoreParams, Sequence, StepResult
from workbench.engine.scheduler import Scheduler
from workbench.kvcache.manager import KVCacheManager
from workbench.trace import Recorder


class SteppingEngine(FakeEngine):
    """`seen`: of every step the sequences that ran, waited, and waited for a second time."""

    capabilities = frozenset({"token_identity", "trace"})

    def __init__(self, script=wander, *, rows=8, num_blocks=4000, max_model_len=400) -> None:
        super().__init__(script, max_model_len=max_model_len)
        self.config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=256)
        self._outputs = {}
        self.cache = KVCacheManager(num_blocks, 4)
        self.scheduler = Scheduler(
            self.cache,
            np.arange(num_blocks),
            max_num_seqs=rows,
            max_num_batched_tokens=256,
            max_model_len=max_model_len,
            stops=Stops(self._outputs),
        )
        self.seen: list[SimpleNamespace] = []
        self._by_seed = {}
        self.trace_as(Recorder(), "fake")

    def trace_as(self, recorder, name):
        self.recorder, self.trace_name = recorder, name

    def _queue(self, token_ids, params, tag):
        number = super()._queue(token_ids, params, tag)
        kind = "score" if isinstance(params, ScoreParams) else "params"
        sequence = Sequence(number, list(token_ids), len(token_ids), tag=tag, **{kind: params})
        sequence.arrival_s = time.perf_counter()
        if kind == "params":
            self._outputs[number] = output = self._finish(number)
            self._by_seed[params.seed] = (len(token_ids), output.token_ids)
        self.scheduler.add(sequence)
        return number

    def watch(self, running, waiting):
        """Called once a step is planned; a test may put something here."""

    def step(self):
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        scheduler, counts = self.scheduler, self.scheduler.counts
        running, waiting = list(scheduler._batch.sequences), list(scheduler._waiting)
        preempted = [sequence for sequence in waiting if sequence.preemptions]
        self.seen.append(SimpleNamespace(running=running, waiting=waiting, preempted=preempted))
        self.watch(running, waiting)
        pairs = zip(plan.sampling.seeds.tolist(), plan.sampling.positions.tolist())
        places = [(*self._by_seed[seed], position) for seed, position in pairs]
        tokens = np.array([ids[position - first] for first, ids, position in places], np.int64)
        wanted = tuple(np.zeros((len(w.rows), 2), np.float32) for w in plan.wanted)
        finished = scheduler.update(plan, StepResult(tokens, wanted=wanted))
        row = (self.trace_name, len(self.seen), start, time.perf_counter() - start, 0.0)
        self.recorder.step(*row, counts)
        return [self._ended(sequence, reason) for sequence, reason in finished]

    def _ended(self, sequence, reason):
        number = sequence.request_id
        output = self._outputs.pop(number) if sequence.params else self._finish(number)
        self.recorder.request(self.trace_name, sequence, reason, time.perf_counter())
        return output

    def abort(self, request_id):
        sequence = self.scheduler.abort(request_id)
        if sequence is not None:
            self.aborted.append(request_id)
            self.recorder.request(self.trace_name, sequence, "abort", time.perf_counter())

    @property
    def has_work(self):
        return self.scheduler.has_work


class Stops:
    """A request ends with the last token of its output."""

    def __init__(self, outputs) -> None:
        self.outputs = outputs

    def add(self, request_id, params):
        """Nothing to be kept: the outputs are known."""

    def remove(self, request_id):
        """See add."""

    def suspects(self, tokens):
        return np.ones(len(tokens), bool)

    def finish_reason(self, sequence):
        output = self.outputs[sequence.request_id]
        return output.finish_reason if sequence.num_output_tokens >= len(output.token_ids) else None
