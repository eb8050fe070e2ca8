"""A recorded search re-enacted: real engines compute every token of it, and are told what to say.

With `dummy:` weights a machine with a GPU so measures models of true size that it does not have.
Nodes are sampled by the engine and then replaced by the recorded tokens, so that lengths, prefixes
and the tree are the recorded ones, and every step costs what it costs. Scores are recorded ones
too. What it does not do: choose a memory (bench/reenact.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.core import RequestOutput, SamplingParams, StepPlan, StepResult, Tag
from workbench.engine.engine import Engine
from workbench.engine.executor import Executor, StepHandle
from workbench.errors import ConfigError
from workbench.replay.answers import Answers, RecordedExecutor, RecordedTokens, SampledNode
from workbench.replay.simulator import Changes, play, replayed_switches
from workbench.search.recording import RecordedEngine
from workbench.search.result import Throughput
from workbench.trace import Recorder, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Reenactment:
    """What a re-enacted search brings: a measured run's trace, and how fast it was."""

    trace: Trace
    throughput: Throughput


class ForcedExecutor:
    """A real executor that computes and samples, and then returns the recorded tokens."""

    def __init__(self, executor: Executor, recorded: RecordedTokens) -> None:
        self._executor, self._recorded = executor, RecordedExecutor(recorded)
        self.storage = executor.storage

    def submit(self, plan: StepPlan) -> StepHandle:
        """The step, carried out; its sampled tokens are the recorded ones."""
        outcome = self._executor.submit(plan).outcome
        if isinstance(outcome, StepResult) and len(plan.sampling):
            outcome = replace(outcome, tokens=self._recorded.run(plan).tokens)
        return StepHandle(outcome)


class ReenactedEngine:
    """A real engine in the place of a recorded one; use it while the `with` statement lasts.

    What is not here is the engine's own. Raises ConfigError where the engine's requests must be
    shorter than the recorded one's, or its vocabulary lacks a recorded token.
    """

    capabilities = frozenset({"trace"})
    tokenizer = None

    def __init__(self, engine: Engine, recorded: RecordedEngine, answers: Answers) -> None:
        _require_fit(engine, recorded, answers)
        self.engine, self._answers = engine, answers
        self.max_model_len = recorded.max_model_len
        self._nodes: dict[int, SampledNode] = {}
        self._own = engine.executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __enter__(self) -> ReenactedEngine:
        forced: Any = ForcedExecutor(self._own, self._answers.tokens)
        self.engine.executor = forced
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.executor = self._own

    def add(self, prompt: Sequence[int], params: SamplingParams, *, tag: Tag) -> int:
        """Queue the node that the tag names; it ends when it has as many tokens as recorded."""
        node = self._answers.node(tag.problem_id, tag.node_id)
        count = len(node.step.tokens)
        asked = replace(params, max_tokens=count, stop=(), ignore_eos=True)
        number = self.engine.add(list(prompt), asked, tag=tag)
        self._nodes[number] = node
        return number

    def add_score(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        columns: Sequence[int],
        *,
        tag: Tag | None = None,
    ) -> int:
        """Queue a scoring request; as many columns are computed as the recorded PRM was asked."""
        return self.engine.add_score(list(token_ids), positions, range(len(columns)), tag=tag)

    def abort(self, request_id: int) -> None:
        """Drop a request; an unknown or finished id is ignored."""
        self._nodes.pop(request_id, None)
        self.engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One scheduling step of the engine; finished nodes are told as they were recorded."""
        return [self._told(output) for output in self.engine.step()]

    def _told(self, output: RequestOutput) -> RequestOutput:
        node = self._nodes.pop(output.request_id, None)
        if node is None or output.error is not None or output.finish_reason == "abort":
            return output
        step = node.step
        assert output.token_ids == step.tokens, "the engine was told what to sample"
        return replace(output, text=step.text, finish_reason=step.finish_reason)


def reenact(
    answers: Answers,
    llm: Engine,
    prm: Engine,
    min_problem_batch: int | None = None,
    switches: Changes | None = None,
) -> Reenactment:
    """The recorded search on these engines, from empty caches; both stay usable.

    min_problem_batch: None is the recorded one. switches: changed SearchSwitches; what no recording
    tells is refused by name. Raises RecordingError and ConfigError.
    """
    recording = answers.recording
    replayed_switches(recording.settings, switches or {})
    for engine in (llm, prm):
        engine.cache.reset()
    with (
        ReenactedEngine(llm, recording.llm, answers) as sampling,
        ReenactedEngine(prm, recording.prm, answers) as scoring,
    ):
        recorder = Recorder("reenact")
        speed = play(
            answers,
            (sampling, scoring),
            recorder,
            time.perf_counter,
            min_problem_batch=min_problem_batch,
            switches=switches,
        )
        return Reenactment(recorder.trace(), speed)


def _require_fit(engine: Engine, recorded: RecordedEngine, answers: Answers) -> None:
    if engine.max_model_len < recorded.max_model_len:
        raise ConfigError(
            f"{engine.name} has max_model_len {engine.max_model_len}; the recorded "
            f"{recorded.name} had {recorded.max_model_len}: give it at least that."
        )
    every = [
        tokens  # of both tries and the prompts
        for problem in answers.recording.problems
        for tokens in (
            problem.prompt,
            *(step.tokens for step in problem.steps),
            *(solution.tokens for solution in problem.solutions),
        )
    ]
    most = max(max(tokens, default=0) for tokens in every)
    if most >= engine.spec.vocab:
        raise ConfigError(
            f"The recording has token {most}; {engine.name} knows {engine.spec.vocab} tokens: "
            "give a model with a larger vocabulary."
        )
