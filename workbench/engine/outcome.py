"""Takes the result of a step into the sequences: sampled tokens, wanted logits, who is done, and
what is told of them.

What it does not do: free blocks or drop rows (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.core import RequestOutput, SamplingParams, Sequence, StepResult
from workbench.engine.inputs import Batch, PlannedStep, tokens_to_compute


class StopChecker(Protocol):
    """What the scheduler needs of stop conditions (sampling.py has the real one).

    suspects(tokens): which of these tokens may end their sequence, without looking at it.
    finish_reason(seq): "eos", "stop" or None, judged by the sequence's newest token.
    """

    def add(self, request_id: int, params: SamplingParams) -> None: ...
    def remove(self, request_id: int) -> None: ...
    def suspects(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]: ...
    def finish_reason(self, seq: Sequence) -> str | None: ...


def output_of(
    sequence: Sequence,
    reason: str,
    to_bytes: Callable[[SequenceOf[int]], bytes],
    error: Exception | None = None,
) -> RequestOutput:
    """What is told of a request that has ended. to_bytes: the UTF-8 of token ids."""
    token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
    params, score, rows = sequence.params, sequence.score, sequence.score_rows
    wants_logprobs = params is not None and params.logprobs is not None
    return RequestOutput(
        sequence.request_id,
        token_ids,
        to_bytes(token_ids).decode(errors="replace"),
        reason,
        sequence.num_cached_tokens,
        tuple(sequence.logprobs) if wants_logprobs else None,
        np.stack([rows[p] for p in score.positions]) if score and reason == "score" else None,
        error,
    )


def take_tokens(
    batch: Batch, step: PlannedStep, result: StepResult, clock: Callable[[], float]
) -> None:
    """Append what was sampled to the sequences."""
    batch.append_tokens(step.sampled, np.asarray(result.tokens, np.int64))
    for row, logprobs in zip(step.sampled.tolist(), result.logprobs):
        if logprobs is not None:
            batch.sequences[row].logprobs.append(logprobs)
    for row in step.sampled[step.num_decodes :].tolist():
        if batch.sequences[row].first_token_s is None:
            batch.sequences[row].first_token_s = clock()


def stopped(
    batch: Batch, step: PlannedStep, result: StepResult, stops: StopChecker, but: Container[int]
) -> dict[int, str]:
    """row -> why its sequence ends; looks only at those that may have ended. but: request ids."""
    rows = step.sampled
    at_limit = batch.length[rows] >= batch.limit[rows]
    suspects = at_limit | stops.suspects(np.asarray(result.tokens, np.int64))
    reasons = {}
    for i in np.flatnonzero(suspects).tolist():
        sequence = batch.sequences[rows[i]]
        if sequence.request_id not in but:
            reason = stops.finish_reason(sequence) or ("length" if at_limit[i] else None)
            if reason is not None:
                reasons[int(rows[i])] = reason
    return reasons


def take_scores(step: PlannedStep, result: StepResult, but: Container[int]) -> dict[int, str]:
    """Keep the wanted logits; row -> "score" for requests that now have all of theirs."""
    for owners, values in zip(step.wanted, result.wanted):
        for (sequence, position), row in zip(owners, values):
            sequence.score_rows[position] = np.array(row)
    return {
        chunk.row: "score"
        for chunk in step.chunks
        if chunk.sequence.score is not None
        and chunk.end == tokens_to_compute(chunk.sequence)
        and chunk.sequence.request_id not in but
    }
