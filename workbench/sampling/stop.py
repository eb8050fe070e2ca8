"""When a sequence is finished by what it says: an end-of-sequence id, a stop id, or a stop string.

Every step asks first, for all its tokens at once, which of them could finish anybody (`suspects`);
only those few sequences are looked at one by one (`finish_reason`). Lengths are the scheduler's
business.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from workbench.core import SamplingParams, Sequence


class StopChecker:
    """Stop conditions of the requests in flight, over each token id's bytes (special ones: b"")."""

    def __init__(self, token_bytes: SequenceOf[bytes], eos_ids: Iterable[int]) -> None:
        self._bytes = token_bytes
        self._eos = frozenset(eos_ids)
        self._params: dict[int, SamplingParams] = {}
        self._users: dict[str | int, int] = {}  # stop string or stop id -> requests that have it
        self._able: dict[str, NDArray[np.int64]] = {}  # ids that may complete a stop string
        highest = max((len(token_bytes) - 1, *self._eos))
        self._reasons = np.zeros(highest + 2, np.int64)  # the last one answers for all higher ids
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
        """Which tokens may finish somebody's sequence: never False for one that does."""
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
        tail = b""
        for token in reversed(seq.token_ids[seq.num_prompt_tokens :]):
            tail = self._token(token) + tail
            if len(tail) >= added + len(stop) - 1:
                break
        return tail.find(stop, max(0, len(tail) - added - len(stop) + 1)) >= 0

    def _token(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def _count(self, condition: str | int, change: int) -> None:
        if isinstance(condition, int):
            self._make_room(condition)
            self._reasons[condition] += change
            return
        if condition not in self._able:
            stop = condition.encode()
            able = [i for i, token in enumerate(self._bytes) if _may_complete(token, stop)]
            self._able[condition] = np.array(able, np.int64)
        self._reasons[self._able[condition]] += change

    def _make_room(self, token: int) -> None:
        missing = token + 2 - len(self._reasons)
        if missing > 0:
            self._reasons = np.concatenate([self._reasons, np.zeros(missing, np.int64)])


def _conditions(params: SamplingParams) -> set[str | int]:
    return {*params.stop, *params.stop_token_ids}


def _may_complete(token: bytes, stop: bytes) -> bool:
    """Whether appending `token` can complete `stop`: a beginning of token is an end of stop."""
    return stop in token or any(
        stop.endswith(token[:k]) for k in range(1, min(len(token), len(stop)) + 1)
    )
