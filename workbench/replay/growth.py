"""A search grown without models: the real strategy, with steps and scores that somebody draws.

What comes out is a Recording, as if run_search had written it. What it does not do: know where
lengths, ends and scores are from (workload.py, completions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heapreplace
from typing import Any

from workbench.config import EngineConfig
from workbench.models.registry import held_bytes, model_spec
from workbench.search.problems import Problem
from workbench.search.recording import (
    RecordedEngine,
    RecordedProblem,
    RecordedSettings,
    RecordedSolution,
    RecordedStep,
    Recording,
)
from workbench.search.requests import Beam, Generate, Score, Step
from workbench.search.strategies import BeamSearch

DTYPE_BYTES = 2
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """One sampled node. text: equal texts below one parent are one solution to the PRM.

    score: the PRM's verdict on the step; ends: whether the model ends the solution with it.
    """

    tokens: Tokens
    text: str
    score: float
    ends: bool


@dataclass(frozen=True, slots=True)
class PRMTemplate:
    """Tokens the PRM's format puts around steps: before the problem, after a step, between two.

    dropped: white space at a step's end that the PRM is not shown.
    """

    head: Tokens
    verdict: Tokens
    between: Tokens
    dropped: int = 0

    def first(self, problem: Tokens, step: Tokens) -> Tokens:
        """What a solution of one step adds: everything."""
        return self.head + problem + self._shown(step) + self.verdict

    def next(self, step: Tokens) -> Tokens:
        """What one more step adds."""
        return self.between + self._shown(step) + self.verdict

    def _shown(self, step: Tokens) -> Tokens:
        return step[: max(1, len(step) - self.dropped)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A problem as both models read it: the LLM's whole prompt, and the problem alone."""

    problem: Problem
    prompt: Tokens
    problem_tokens: Tokens


Draw = Callable[[Sequence[Beam]], Sequence[DrawnStep]]
"""Steps for the beams of one iteration, whose paths name the nodes to be sampled."""


def grow(asked: Asked, template: PRMTemplate, strategy: BeamSearch, draw: Draw) -> RecordedProblem:
    """One problem's search; rounds are counted from 1, as if it had been the only one."""
    steps: list[RecordedStep] = []
    solutions: dict[tuple[str, ...], RecordedSolution] = {}
    search = strategy.search(asked.problem)
    reply: Any = None
    rounds = 0
    try:
        while True:
            request = search.send(reply)
            rounds += 1
            if isinstance(request, Generate):
                drawn = draw(request.beams)
                steps += _recorded(request.beams, drawn, rounds)
                for beam, step in zip(request.beams, drawn, strict=True):
                    texts = (*beam.steps, step.text)
                    if texts not in solutions:
                        solutions[texts] = _solution(asked, template, texts, step)
                reply = [Step(s.tokens, s.text, _reason(s)) for s in drawn]
            else:
                assert isinstance(request, Score)
                reply = [
                    tuple(solutions[b.steps[: k + 1]].score or 0.0 for k in range(len(b.steps)))
                    for b in request.beams
                ]
    except StopIteration:
        return RecordedProblem(asked.problem, asked.prompt, tuple(steps), tuple(solutions.values()))


def _recorded(beams: Sequence[Beam], drawn: Sequence[DrawnStep], number: int) -> list[RecordedStep]:
    return [
        RecordedStep(beam.path, s.tokens, s.text, slot, number, _reason(s), _reason(s))
        for slot, (beam, s) in enumerate(zip(beams, drawn, strict=True))
    ]


def _reason(step: DrawnStep) -> str:
    return "eos" if step.ends else "stop"


def _solution(
    asked: Asked, template: PRMTemplate, texts: tuple[str, ...], step: DrawnStep
) -> RecordedSolution:
    tokens = template.next(step.tokens)
    if len(texts) == 1:
        tokens = template.first(asked.problem_tokens, step.tokens)
    score = round(step.score * 65536) / 65536
    return RecordedSolution(texts, tokens, asks=True, fits=True, score=score)


def arrival_rounds(iterations: Sequence[int], in_flight: int) -> list[int]:
    """The round in which each problem is taken from the queue, by its number of iterations.

    An iteration is a round of sampling and one of scoring; a place is free in the round after the
    one that finds the search done.
    """
    free = [1] * in_flight
    heapify(free)
    return [heapreplace(free, free[0] + 2 * count + 1) for count in iterations]


def in_rounds(problems: Sequence[RecordedProblem], in_flight: int) -> tuple[RecordedProblem, ...]:
    """The problems with the rounds they have when so many are in flight."""
    iterations = [max(len(step.path) for step in problem.steps) for problem in problems]
    return tuple(
        _later(problem, first - 1)
        for problem, first in zip(problems, arrival_rounds(iterations, in_flight), strict=True)
    )


def _later(problem: RecordedProblem, rounds: int) -> RecordedProblem:
    moved = tuple(
        RecordedStep(
            s.path, s.tokens, s.text, s.slot, s.round + rounds, s.finish_reason, s.request_reason
        )
        for s in problem.steps
    )
    return RecordedProblem(problem.problem, problem.prompt, moved, problem.solutions)


def grown_recording(
    problems: Sequence[RecordedProblem],
    strategy: BeamSearch,
    *,
    llm: EngineConfig,
    prm: EngineConfig,
    prm_format: str,
    prm_columns: tuple[int, ...],
    in_flight: int,
    seed: int,
    max_step_tokens: int,
) -> Recording:
    """The recording of grown problems. llm, prm: settings with num_blocks; 16-bit weights."""
    settings = RecordedSettings(
        strategy="BeamSearch",
        strategy_settings=asdict(strategy),
        seed=seed,
        min_problem_batch=in_flight,
        score_cache=True,
        temperature=0.8,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_step_tokens=max_step_tokens,
        voting="weighted",
        score_shuffle_seed=None,
        prm_format=prm_format,
        prm_fingerprint=f"grown:{prm.model}",
        prm_columns=prm_columns,
    )
    return Recording(settings, _engine(llm), _engine(prm), in_rounds(problems, in_flight))


def _engine(config: EngineConfig) -> RecordedEngine:
    """What an engine of these settings would tell about itself."""
    spec = model_spec(config.model)
    assert config.max_model_len is not None
    return RecordedEngine(
        name=config.model,
        architecture=spec.architecture,
        fingerprint=f"grown:{config.model}",
        max_model_len=config.max_model_len,
        value_outputs=None,
        config=config.to_dict(),
        spec=asdict(spec),
        num_blocks=config.num_blocks,
        weight_bytes=held_bytes(config.model, DTYPE_BYTES) + spec.table_bytes(DTYPE_BYTES),
        block_bytes=spec.block_bytes(config.block_size, DTYPE_BYTES),
    )
