"""Seeded sampling of many rows at once; a row's token depends on nothing but its own row.

Order, as in vLLM and transformers: temperature, then top_k, top_p, min_p, each on what the one
before left. The token is the inverse CDF of u = uniform(seed, position) over ascending token ids,
in float64. Temperature 0 takes the largest logit, the lowest id on ties. Log probabilities are of
the unfiltered distribution at temperature 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.core import SamplingRows
from workbench.errors import StepError
from workbench.sampling.noise import uniform

_TOGETHER = 1 << 16  # float64 weights worked on at a time: they stay in cache, and memory small
Logprobs = tuple[dict[int, float] | None, ...]


def sample(logits: NDArray[np.float32], rows: SamplingRows) -> tuple[NDArray[np.int64], Logprobs]:
    """Tokens int64 [R] of logits float32 [R, vocab]; log probabilities of rows that want them.

    Raises StepError naming the rows whose logits are NaN or unbounded.
    """
    tokens = logits.argmax(axis=1)  # the first of equal ones; of a row with NaN, that NaN
    require_finite(logits[np.arange(len(tokens)), tokens], rows.rows)
    warm = np.flatnonzero(rows.temperature > 0)
    if len(warm) == len(tokens):
        tokens = _draw(logits, rows, warm)
    elif len(warm):
        tokens[warm] = _draw(logits[warm], rows, warm)
    return tokens, _logprobs(logits, rows, tokens)


def require_finite(values: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    """StepError unless all values are finite; values[i], one or several, are of rows[i]."""
    finite = np.isfinite(values)
    if not finite.all():
        bad = np.flatnonzero(~finite.reshape(len(values), -1).all(axis=1))
        raise StepError(
            f"The logits of {len(bad)} of {len(values)} rows are not finite: the model's weights "
            "are damaged, or its numbers exceed its dtype. Fetch the model again, or use float32.",
            rows[bad].tolist(),
        )


def _draw(
    logits: NDArray[np.float32], rows: SamplingRows, at: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Tokens of rows with a temperature: logits[i] belongs to rows[at[i]]."""
    weights = _weights(logits, rows.temperature[at])
    _filter(weights, rows, at)
    sums = np.cumsum(weights, axis=1)
    target = uniform(rows.seeds[at], rows.positions[at]) * sums[:, -1]
    tokens = np.count_nonzero(sums <= target[:, None], axis=1)
    for i in np.flatnonzero(tokens == sums.shape[1]):  # u < 1, yet u * total rounded up to total
        tokens[i] = np.flatnonzero(weights[i])[-1]
    return tokens


def _weights(logits: NDArray[np.float32], temperature: NDArray[np.float64]) -> NDArray[np.float64]:
    """Unnormalised softmax, float64 [R, vocab]: exp((logit - largest) / temperature), at most 1."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide /= temperature[:, None]
    return np.exp(wide, out=wide)


def _filter(weights: NDArray[np.float64], rows: SamplingRows, at: NDArray[np.int64]) -> None:
    """Sets the weights of filtered tokens to 0, where a row has filters; in place on our array."""
    vocab = weights.shape[1]
    filtered = (
        (rows.top_k[at] > 0) & (rows.top_k[at] < vocab)
        | (rows.top_p[at] < 1)
        | (rows.min_p[at] > 0)
    )
    for i in np.flatnonzero(filtered):
        r = at[i]
        _filter_row(weights[i], int(rows.top_k[r]), float(rows.top_p[r]), float(rows.min_p[r]))


def _filter_row(weights: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> None:
    """Which tokens stay, in token order.

    top_k keeps k tokens, of equal ones the lowest ids; top_p the fewest, most likely first, that
    reach it; min_p those of at least min_p times the most likely one's probability.
    """
    order = np.argsort(-weights, kind="stable")
    if 0 < top_k < len(order):
        weights[order[top_k:]] = 0
        order = order[:top_k]
    if top_p < 1:
        reached = np.cumsum(weights[order])
        kept = int(np.searchsorted(reached, top_p * reached[-1])) + 1
        weights[order[kept:]] = 0
    weights[weights < min_p * weights[order[0]]] = 0


def _logprobs(
    logits: NDArray[np.float32], rows: SamplingRows, tokens: NDArray[np.int64]
) -> Logprobs:
    """Empty when no row wants any, so that the common case costs one comparison."""
    if not (rows.logprobs >= 0).any():
        return ()
    answers: list[dict[int, float] | None] = [None] * len(tokens)
    for i in np.flatnonzero(rows.logprobs >= 0):
        wide = logits[i].astype(np.float64)
        wide -= wide.max()
        wide -= np.log(np.exp(wide).sum())
        best = np.argsort(-wide, kind="stable")[: rows.logprobs[i]]
        answers[i] = {int(t): float(wide[t]) for t in (tokens[i], *best)}
    return tuple(answers)
