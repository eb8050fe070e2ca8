"""Around the sampler: seeded noise, what a row leaves out, and when a sequence stops.

Noise is a function of seed and position alone: counter-based (Salmon et al. 2011), splitmix64's
finaliser (Steele, Lea and Flood 2014) over the seed and then seed and position together. A row's
token depends on nothing but its own row and u = uniform(seed, position): `Kernels.choose`, which
takes temperature, then top_k, top_p, min_p, as vLLM and transformers do.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from typing import Any

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


COLUMNS = {"seeds": np.uint64, "temperature": np.float64, "top_k": np.int64,
           "top_p": np.float64, "min_p": np.float64, "logprobs": np.int64}  # fmt: skip
"""Of SamplingRows what follows from a request's params, and its type."""


def columns_of(params: SamplingParams) -> dict[str, float]:
    """What a row of the request has in each of COLUMNS."""
    own = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    likely = -1 if params.logprobs is None else params.logprobs
    return {**own, "seeds": params.seed & 0xFFFF_FFFF_FFFF_FFFF, "logprobs": likely}


def rows_of(
    params: SamplingParams, rows: NDArray[np.int64], positions: NDArray[np.int64]
) -> SamplingRows:
    """Rows that are all sampled by the same params."""
    own = columns_of(params).items()
    columns: dict[str, Any] = {n: np.full(len(rows), v, COLUMNS[n]) for n, v in own}
    return SamplingRows(rows, positions, **columns)


def filters_of(rows: SamplingRows, vocab: int) -> NDArray[np.float64] | None:
    """[R, 3] of top_k, top_p and min_p, for `Kernels.choose`; None where no warm row has one."""
    some = ((rows.top_k > 0) & (rows.top_k < vocab)) | (rows.top_p < 1) | (rows.min_p > 0)
    some &= rows.temperature > 0
    return np.stack([rows.top_k, rows.top_p, rows.min_p], axis=1) if some.any() else None


UNUSED_STOPS = 8  # stop strings whose tokens are remembered when no request has them


class StopChecker:
    """Stop conditions of the requests in flight, over each token id's bytes (special ones: b"")."""

    def __init__(self, token_bytes: SequenceOf[bytes], eos_ids: Iterable[int]) -> None:
        self._bytes = token_bytes
        self._eos = frozenset(eos_ids)
        self._able: dict[str, NDArray[np.int64]] = {}  # ids that may complete a stop string
        self._completing = lru_cache(UNUSED_STOPS)(self._find_completing)
        self._text = np.zeros(0, np.uint8)  # all tokens in a row, once there is a stop
        self._ends = np.zeros(0, np.int64)  # of each token in the text
        self._starts = np.zeros(0, np.int64)  # of those that are not empty
        self._longest = 0  # bytes of a token
        self._params: dict[int, SamplingParams] = {}
        self._users: dict[str | int, int] = {}  # stop string or stop id -> requests that have it
        highest = max((len(token_bytes) - 1, *self._eos))
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
        if change > 0:
            self._able[condition] = self._completing(condition.encode())
        self._reasons[self._able[condition]] += change
        if change < 0:
            del self._able[condition]

    def _find_completing(self, stop: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that can complete it: they hold it, or begin with an end of it."""
        if not len(self._text):
            self._text = np.frombuffer(b"".join(self._bytes), np.uint8)
            lengths = np.fromiter(map(len, self._bytes), np.int64, len(self._bytes))
            self._ends = np.cumsum(lengths)
            self._starts = (self._ends - lengths)[lengths > 0]
            self._longest = int(lengths.max(initial=0))
        found = [self._holding(stop, np.flatnonzero(self._text == stop[0]))]
        ends = range(max(0, len(stop) - self._longest), len(stop))  # no token begins with more
        found += [self._holding(stop[start:], self._starts) for start in ends]
        return np.unique(np.concatenate(found))

    def _holding(self, part: bytes, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the tokens in which the part stands at one of these places of the text."""
        places = places[self._text[places] == part[0]]
        owners = np.searchsorted(self._ends, places, side="right")
        inside = places + len(part) <= self._ends[owners]
        places, owners = places[inside], owners[inside]
        for i, byte in enumerate(part[1:], 1):
            if not len(places):
                break
            same = self._text[places + i] == byte
            places, owners = places[same], owners[same]
        return owners


def _conditions(params: SamplingParams) -> set[str | int]:
    return {*params.stop, *params.stop_token_ids}
