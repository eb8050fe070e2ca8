"""A language model in a page: an engine whose tokens depend only on seed, prompt and position.

It keeps the engine's promises (stop strings, lengths, noise by seed and absolute position) so that
search can be tested without a model; how many requests it runs at once is a setting.
"""

import hashlib
import time
from collections.abc import Callable

import numpy as np
import pytest

from workbench.core import RequestOutput, SamplingParams, ScoreParams, Tag
from workbench.tokenizer import ByteTokenizer
from workbench.trace import StepCounts

EOS = 257
Script = Callable[[str, int], str]  # (text so far, seed) -> what comes next, "<eos>" at its end


def pick(*parts: object) -> int:
    """A number that depends on the parts alone."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


def wander(text: str, seed: int) -> str:
    """A few words and a blank line, or an answer and the end, by the seed."""
    draw = pick(seed)
    if draw % 5 == 0:
        return f"so \\boxed{{{draw % 3}}}<eos>"
    return f"step {draw % 7}\n\n"


def common_prefix(first, second):
    """Tokens two sequences begin with alike."""
    pairs = zip(first, second)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


class FakeEngine:
    """TokenEngine over a script and a judge. Every request it was given stays in `asked`."""

    architecture, value_outputs = "LlamaForCausalLM", None
    cache_room = None

    def __init__(self, script: Script = wander, batch=3, max_model_len=4096, traced=False) -> None:
        self.capabilities = frozenset({"token_identity"} | ({"trace"} if traced else set()))
        self.name, self.fingerprint = "fake-rlhflow", "fake-1"
        self.tokenizer = ByteTokenizer()
        self.max_model_len = max_model_len
        self.script, self.batch = script, batch
        self.asked: list[tuple[tuple[int, ...], SamplingParams | ScoreParams, Tag]] = []
        self.aborted: list[int] = []
        self._waiting: list[int] = []
        self.fail_on: int | None = None
        self.recorder, self.trace_name = None, ""
        self.description: dict[str, object] = {}

    def add(self, prompt, params, *, tag=None):
        assert 0 < len(prompt) < self.max_model_len
        return self._queue(prompt, params, tag)

    def add_score(self, token_ids, positions, columns, *, tag=None):
        assert 0 < len(token_ids) < self.max_model_len
        assert list(positions) == sorted(set(positions))
        return self._queue(token_ids, ScoreParams(tuple(positions), tuple(columns)), tag)

    def _queue(self, token_ids, params, tag):
        self.asked.append((tuple(token_ids), params, tag or Tag()))
        self._waiting.append(len(self.asked) - 1)
        return len(self.asked) - 1

    def trace_as(self, recorder, name):
        before = self.recorder, self.trace_name
        self.recorder, self.trace_name = recorder, name
        return before

    def step(self):
        start = time.perf_counter()
        taken, self._waiting = self._waiting[: self.batch], self._waiting[self.batch :]
        outputs = [self._finish(number) for number in reversed(taken)]
        if "trace" in self.capabilities:  # as the real one writes its steps
            counts, spent = StepCounts(*[0] * len(StepCounts._fields)), time.perf_counter() - start
            self.recorder.step(self.trace_name, len(self.asked), start, spent, 0.0, counts)
        return outputs

    def abort(self, request_id):
        self.aborted.append(request_id)
        self._waiting = [number for number in self._waiting if number != request_id]

    @property
    def has_work(self):
        return bool(self._waiting)

    def _finish(self, number):
        token_ids, params, _ = self.asked[number]
        if number == self.fail_on:
            return RequestOutput(number, (), "", "error", error=MemoryError("forward failed"))
        if isinstance(params, ScoreParams):
            rows = [self.judge(token_ids[: position + 1]) for position in params.positions]
            logits = np.array(rows, np.float32)
            return RequestOutput(number, (), "", "score", self._cached(number), logits=logits)
        return self._sample(number, token_ids, params)

    def _cached(self, number):
        """Tokens shared with an earlier request, before the first position that is wanted."""
        token_ids, params, _ = self.asked[number]
        shared = [common_prefix(token_ids, earlier) for earlier, _, _ in self.asked[:number]]
        return min(max(shared, default=0), params.positions[0])

    def judge(self, token_ids):
        """(good, bad) logits of a solution, by its text alone."""
        return (pick(token_ids) % 1000) / 250 - 2, 0.0

    def _sample(self, number, token_ids, params):
        text, ended = self.script(self.tokenizer.decode(token_ids), params.seed), False
        if text.endswith("<eos>"):
            text, ended = text.removesuffix("<eos>"), True
        for stop in params.stop:
            if stop in text:
                text, ended = text[: text.index(stop) + len(stop)], False
        ids = list(text.encode())[: params.max_tokens]
        reason = "stop" if params.stop and text.endswith(params.stop) else "length"
        if len(ids) < len(text.encode()):
            reason = "length"
        elif ended and len(ids) < params.max_tokens:
            ids, reason = [*ids, EOS], "eos"
        return RequestOutput(number, tuple(ids), self.tokenizer.decode(ids[: len(text)]), reason)


@pytest.fixture
def fake_engine() -> type[FakeEngine]:
    """The fake engine's class; tests choose its script, batch and length."""
    return FakeEngine


def tree(result):
    """What no setting of engines, order or batches may change: every node, answer and score."""
    columns = ["problem_id", "node_id", "token_ids", "score", "kept", "finished", "text"]
    nodes = result.tree[columns].sort_values(columns[:2]).to_dict("records")
    return nodes, result.answers, result.candidates["score"].tolist()
