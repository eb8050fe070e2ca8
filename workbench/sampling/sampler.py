"""Seeded sampling of many rows at once; a row's token depends on nothing but its own row.

Order, as in vLLM and transformers: temperature, then top_k, top_p, min_p, each on what the one
before left. The token is the inverse CDF of u = uniform(seed, position) over ascending token ids,
in float64. Temperature 0 takes the largest logit, the lowest id on ties. Log probabilities are of
the unfiltered distribution at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from workbench.core import SamplingRows
from workbench.errors import StepError
from workbench.sampling.noise import uniform

Logprobs = tuple[dict[int, float] | None, ...]


# Tokens of logits [R, vocab], temperatures [R] above 0 and noise [R], without filters.
Draw = Callable[[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]], NDArray[np.int64]]


def sample(
    logits: NDArray[np.float32], rows: SamplingRows, draw: Draw | None = None
) -> tuple[NDArray[np.int64], Logprobs]:
    """Tokens int64 [R] of logits float32 [R, vocab]; log probabilities of rows that want them.

    draw: what draws the tokens of rows without filters, `inverse_cdf` if not given. Raises
    StepError naming the rows whose logits are NaN or unbounded.
    """
    tokens = logits.argmax(axis=1)  # the first of equal ones; of a row with NaN, that NaN
    require_finite(logits[np.arange(len(tokens)), tokens], rows.rows)
    warm, filtered = rows.temperature > 0, _filtered(rows, logits.shape[1])
    _draw_some(logits, rows, warm & ~filtered, draw or inverse_cdf, tokens)
    for row in np.flatnonzero(warm & filtered):
        tokens[row] = _draw_filtered(logits[row], rows, row)
    return tokens, _logprobs(logits, rows, tokens)


def require_finite(values: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    """StepError unless all values are finite; values[i], one or several, are of rows[i]."""
    finite = np.isfinite(values)
    if not finite.all():
        require_finite_rows(np.asarray(finite.reshape(len(values), -1).all(axis=1)), rows)


def require_finite_rows(finite: NDArray[np.bool_], rows: NDArray[np.int64]) -> None:
    """StepError naming those of the rows that are not."""
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise StepError(
            f"The logits of {len(bad)} of {len(finite)} rows are not finite: the model's weights "
            "are damaged, or its numbers exceed its dtype. Fetch the model again, or use float32.",
            rows[bad].tolist(),
        )


def _draw_some(
    logits: NDArray[np.float32],
    rows: SamplingRows,
    which: NDArray[np.bool_],
    draw: Draw,
    tokens: NDArray[np.int64],
) -> None:
    """Fills in the tokens of some rows, in whose logits nothing is copied where they are all."""
    if which.any():
        at = slice(None) if which.all() else which
        noise = uniform(rows.seeds[at], rows.positions[at])
        tokens[at] = draw(logits[at], rows.temperature[at], noise)


def inverse_cdf(
    logits: NDArray[np.float32], temperature: NDArray[np.float64], noise: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Each row's token: the first whose weights up to it exceed noise times all of them."""
    return _at_noise(_weights(logits, temperature), noise)


def _draw_filtered(logits: NDArray[np.float32], rows: SamplingRows, row: np.int64) -> np.int64:
    """The token of one row's logits [vocab], by itself: filters sort."""
    at = slice(row, row + 1)
    weights = _weights(logits[None], rows.temperature[at])
    top_k, top_p, min_p = int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row])
    _filter_row(weights[0], top_k, top_p, min_p)
    token: np.int64 = _at_noise(weights, uniform(rows.seeds[at], rows.positions[at]))[0]
    return token


def _at_noise(weights: NDArray[np.float64], noise: NDArray[np.float64]) -> NDArray[np.int64]:
    sums = np.cumsum(weights, axis=1)
    tokens = np.count_nonzero(sums <= (noise * sums[:, -1])[:, None], axis=1)
    for i in np.flatnonzero(tokens == sums.shape[1]):  # noise < 1, yet the product rounded up
        tokens[i] = np.flatnonzero(weights[i])[-1]
    return tokens


def _weights(logits: NDArray[np.float32], temperature: NDArray[np.float64]) -> NDArray[np.float64]:
    """Unnormalised softmax, float64 [R, vocab]: exp((logit - largest) / temperature), at most 1."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide /= temperature[:, None]
    return np.exp(wide, out=wide)


def _filtered(rows: SamplingRows, vocab: int) -> NDArray[np.bool_]:
    """[R] Whether a row leaves tokens out."""
    some = (rows.top_k > 0) & (rows.top_k < vocab)
    return some | (rows.top_p < 1) | (rows.min_p > 0)


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
