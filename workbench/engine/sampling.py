"""From logits to tokens: seeded noise, the sampler, and when a sequence stops.

Noise is a function of seed and position alone: counter-based (Salmon et al. 2011), splitmix64's
finaliser (Steele, Lea and Flood 2014) over the seed and then seed and position together. A row's
token depends on nothing but its own row: temperature, then top_k, top_p, min_p, each on what the
one before left, as in vLLM and transformers; the token is the inverse CDF of u = uniform(seed,
position) over ascending token ids, in float64. Temperature 0 takes the largest logit, the lowest id
on ties. Log probabilities are of the unfiltered distribution at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from workbench.core import SamplingParams, SamplingRows, Sequence
from workbench.errors import StepError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = (np.uint64(n) for n in (30, 27, 31, 11))


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: a bijection of 64 bits in which every bit depends on every bit."""
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 in [0, 1), a multiple of 2^-53, one for each pair (seeds[i], positions[i])."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = mix(mix(seeds + _GOLDEN) + counters)
    return (bits >> _11).astype(np.float64) * 2.0**-53


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
    warm, sorts = rows.temperature > 0, filtered(rows, logits.shape[1])
    plain = warm & ~sorts
    if plain.any():  # where all rows are, nothing of their logits is copied
        at = slice(None) if plain.all() else plain
        noise = uniform(rows.seeds[at], rows.positions[at])
        tokens[at] = (draw or inverse_cdf)(logits[at], rows.temperature[at], noise)
    for row in np.flatnonzero(warm & sorts):  # by itself: filters sort
        one = slice(row, row + 1)
        weights = _weights(logits[one], rows.temperature[one])
        _filter_row(
            weights[0], int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row])
        )
        tokens[row] = _at_noise(weights, uniform(rows.seeds[one], rows.positions[one]))[0]
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


def inverse_cdf(
    logits: NDArray[np.float32], temperature: NDArray[np.float64], noise: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Each row's token: the first whose weights up to it exceed noise times all of them."""
    return _at_noise(_weights(logits, temperature), noise)


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


def filtered(rows: SamplingRows, vocab: int) -> NDArray[np.bool_]:
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
    found: list[dict[int, float] | None] = [None] * len(tokens)
    for i in np.flatnonzero(rows.logprobs >= 0):
        wide = logits[i].astype(np.float64)
        wide -= wide.max()
        wide -= np.log(np.exp(wide).sum())
        best = np.argsort(-wide, kind="stable")[: rows.logprobs[i]]
        found[i] = {int(t): float(wide[t]) for t in (tokens[i], *best)}
    return tuple(found)


class StopChecker:
    """Stop conditions of the requests in flight, over each token id's bytes (special ones: b"")."""

    def __init__(self, token_bytes: SequenceOf[bytes], eos_ids: Iterable[int]) -> None:
        self._bytes = token_bytes
        self._eos = frozenset(eos_ids)
        self._able: dict[str, NDArray[np.int64]] = {}  # ids that may complete a stop string
        self.clear()

    def clear(self) -> None:
        """Watch no request."""
        self._params: dict[int, SamplingParams] = {}
        self._users: dict[str | int, int] = {}  # stop string or stop id -> requests that have it
        highest = max((len(self._bytes) - 1, *self._eos))
        self._reasons = np.zeros(highest + 2, np.int64)  # the last one is that of all higher ids
        self._reasons[list(self._eos)] += 1

    def add(self, request_id: int, params: SamplingParams) -> None:
        """Watch a request; adding it again replaces its conditions."""
        self.remove(request_id)
        self._params[request_id] = params
        for condition in _conditions(params):
            self._users[condition] = self._users.get(condition, 0) + 1
            if self._users[condition] == 1:
                self._count(condition, 1)

    def remove(self, request_id: int) -> None:
        """Forget a request; an unknown id is ignored."""
        params = self._params.pop(request_id, None)
        if params is None:
            return
        for condition in _conditions(params):
            self._users[condition] -= 1
            if self._users[condition] == 0:
                del self._users[condition]
                self._count(condition, -1)

    def suspects(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens may finish a sequence: never False for one that does."""
        found: NDArray[np.bool_] = self._reasons[np.minimum(tokens, len(self._reasons) - 1)] > 0
        return found

    def finish_reason(self, seq: Sequence) -> str | None:
        """Whether the last sampled token finishes its sequence: "eos", "stop" or None."""
        params = self._params.get(seq.request_id)
        if params is None or seq.num_output_tokens < 1:
            return None
        last = seq.token_ids[-1]
        if last in self._eos and not params.ignore_eos:
            return "eos"
        if last in params.stop_token_ids:
            return "stop"
        return "stop" if any(self._completes(seq, stop.encode()) for stop in params.stop) else None

    def _completes(self, seq: Sequence, stop: bytes) -> bool:
        """Whether an occurrence of `stop` in the output ends within the last token."""
        added = len(self._token(seq.token_ids[-1]))
        if added == 0:
            return False
        text = b""
        for token in reversed(seq.token_ids[seq.num_prompt_tokens :]):
            text = self._token(token) + text
            if len(text) >= added + len(stop) - 1:
                break
        return text.find(stop, max(0, len(text) - added - len(stop) + 1)) >= 0

    def _token(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def _count(self, condition: str | int, change: int) -> None:
        if isinstance(condition, int):
            missing = max(0, condition + 2 - len(self._reasons))
            self._reasons = np.pad(self._reasons, (0, missing))
            self._reasons[condition] += change
            return
        if condition not in self._able:
            # a token can complete it that holds it, or whose beginning is an end of it
            stop = condition.encode()
            ends = tuple(stop[k:] for k in range(len(stop)))
            able = [i for i, t in enumerate(self._bytes) if stop in t or t.startswith(ends)]
            self._able[condition] = np.array(able, np.int64)
        self._reasons[self._able[condition]] += change


def _conditions(params: SamplingParams) -> set[str | int]:
    return {*params.stop, *params.stop_token_ids}
