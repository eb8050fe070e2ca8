"""Tails: the tokens in the last, partly filled block of a sequence that left.

A tail is found by the hash of the block before it and its own tokens. Of the tails after one block
none begins another, so in sorted order the longest common beginning of any tokens is that of a
neighbour. What it does not do: hold blocks or evict (prefix.py), or copy (storage.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

Tokens = tuple[int, ...]


class Found(NamedTuple):
    """A tail, by its digest and length, and how many of the tokens asked for it begins with."""

    digest: bytes
    length: int
    num_tokens: int


def tail_digest(parent: bytes, tail: Tokens) -> bytes:
    """Its hash, which no full block has: more tokens than these go into one."""
    return sha256(parent + array("i", tail).tobytes()).digest()


class TailIndex:
    """parent -> its tails in sorted order. Invariant: no tail of a parent begins another."""

    def __init__(self) -> None:
        self._of_parent: dict[bytes, list[Tokens]] = {}
        self._place: dict[bytes, tuple[bytes, Tokens]] = {}  # digest -> parent, tail

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, digest: object) -> bool:
        return digest in self._place

    def longest(self, parent: bytes, tokens: Tokens) -> Found | None:
        """The tail that shares the longest beginning with what follows `parent`, if any does."""
        tails = self._of_parent.get(parent)
        if tails is None:
            return None
        at = bisect_left(tails, tokens)
        near = tails[max(0, at - 1) : at + 1]
        common, best = max((common_prefix(tail, tokens), tail) for tail in near)
        return Found(tail_digest(parent, best), len(best), common) if common else None

    def add(self, parent: bytes, tail: Tokens) -> bytes:
        """A tail more; neither does it begin another nor another it. Answers its digest."""
        digest = tail_digest(parent, tail)
        tails = self._of_parent.setdefault(parent, [])
        tails.insert(bisect_left(tails, tail), tail)
        self._place[digest] = parent, tail
        return digest

    def remove(self, digest: bytes) -> None:
        """Forget the tail of this digest."""
        parent, tail = self._place.pop(digest)
        tails = self._of_parent[parent]
        del tails[bisect_left(tails, tail)]
        if not tails:
            del self._of_parent[parent]

    def clear(self) -> None:
        """Forget all."""
        self._of_parent.clear()
        self._place.clear()

    def check(self) -> None:
        """Raise unless both maps hold the same tails, in order, and none begins another."""
        listed = {(p, tail) for p, tails in self._of_parent.items() for tail in tails}
        assert listed == set(self._place.values()), "a tail is listed and not placed"
        assert all(tail_digest(*place) == d for d, place in self._place.items()), "wrong digest"
        for tails in self._of_parent.values():
            assert tails, "a parent without tails"
            for one, other in pairwise(tails):
                assert one < other, "tails out of order"
                assert other[: len(one)] != one, "a tail begins another"


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    for i, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return i
    return min(len(one), len(other))
