"""Which block holds which content: hash chains, hash -> block, and what is evicted next.

A block's hash is sha256(hash of the block before it, its token ids), so equal hashes mean equal
whole prefixes; a chain starts from the model's namespace and the request's salt, which keep models
and tenants apart. A *partial block* is the last, partly filled block of a sequence that left; it is
found by the hash of the block before it and its own tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

Tokens = tuple[int, ...]

PARTIAL_AGING = 4
"""A partial block is as old as a full one that was last used so many times longer ago: it holds
fewer tokens, and nothing cached leads on from it.

Counted on searches of the tiny pair. Aging alike (1), partial blocks made a PRM with 0.6 of its
working set compute 6 to 8 % more than without them; with 4 it computes 1 % less. With all of its
working set it keeps 70 to 82 % of what they save; evicted before all else, 50 to 70 %.
"""


def chain_root(namespace: bytes, salt: bytes) -> bytes:
    """The parent of a first block: 32 bytes that carry the model's namespace and the salt."""
    return sha256(len(namespace).to_bytes(8, "little") + namespace + salt).digest()


def extend_chain(
    root: bytes, chain: list[bytes], token_ids: SequenceOf[int], block_size: int
) -> None:
    """Append to `chain` the hashes of the full blocks of token_ids that it lacks."""
    first, end = len(chain), len(token_ids) // block_size
    if first >= end:
        return
    width = 4 * block_size
    content = array("i", token_ids[first * block_size : end * block_size]).tobytes()
    parent = chain[-1] if chain else root
    for start in range(0, len(content), width):
        parent = sha256(parent + content[start : start + width]).digest()
        chain.append(parent)


class HashedTokens(Protocol):
    """Token ids that carry the hashes of their blocks."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> Any: ...

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """Hashes of at least the full blocks, in order; root: `chain_root` of model and salt.

        Read only: it may be the sequence's own list, which grows with it.
        """
        ...


TokenIds = SequenceOf[int] | HashedTokens
"""What a cache is given: a plain sequence is hashed anew at each call."""


class TokenList(list[int]):
    """Token ids that are only appended to; each block is hashed once for each root and size."""

    __slots__ = ("_chains",)

    def __init__(self, token_ids: SequenceOf[int] = ()) -> None:
        super().__init__(token_ids)
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """See HashedTokens."""
        chain = self._chains.setdefault((root, block_size), [])
        extend_chain(root, chain, self, block_size)
        return chain


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    for i, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return i
    return min(len(one), len(other))


class Found(NamedTuple):
    """A partial block, by its hash and length, and how many of the tokens asked for it has."""

    digest: bytes
    length: int
    num_tokens: int


class PartialIndex:
    """Hash of the block before -> token ids of partial blocks, sorted.

    Invariant: of the partial blocks after one parent none begins another; so the longest common
    beginning with any tokens is that of a neighbour in sorted order.
    """

    def __init__(self) -> None:
        self._of_parent: dict[bytes, list[Tokens]] = {}
        self._place: dict[bytes, tuple[bytes, Tokens]] = {}  # hash -> parent, tokens

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, digest: object) -> bool:
        return digest in self._place

    def longest(self, parent: bytes, tokens: Tokens) -> Found | None:
        """The one that shares the longest beginning with what follows `parent`, if any does."""
        partials = self._of_parent.get(parent)
        if partials is None:
            return None
        at = bisect_left(partials, tokens)
        near = partials[max(0, at - 1) : at + 1]
        common, best = max((common_prefix(partial, tokens), partial) for partial in near)
        return Found(_digest(parent, best), len(best), common) if common else None

    def add(self, parent: bytes, tokens: Tokens) -> bytes:
        """One more, which neither begins another nor another it; returns its hash."""
        digest = _digest(parent, tokens)
        partials = self._of_parent.setdefault(parent, [])
        partials.insert(bisect_left(partials, tokens), tokens)
        self._place[digest] = parent, tokens
        return digest

    def remove(self, digest: bytes) -> None:
        """Forget the one with this hash."""
        parent, tokens = self._place.pop(digest)
        partials = self._of_parent[parent]
        del partials[bisect_left(partials, tokens)]
        if not partials:
            del self._of_parent[parent]

    def check(self) -> None:
        """Raise unless both maps hold the same ones, in order, and none begins another."""
        listed = {(p, tokens) for p, each in self._of_parent.items() for tokens in each}
        assert listed == set(self._place.values()), "a partial block is listed and not placed"
        assert all(_digest(*place) == d for d, place in self._place.items()), "wrong hash"
        for partials in self._of_parent.values():
            assert partials, "a parent without partial blocks"
            for one, other in pairwise(partials):
                assert one < other, "partial blocks out of order"
                assert other[: len(one)] != one, "a partial block begins another"


def _digest(parent: bytes, partial: Tokens) -> bytes:
    """A hash that no full block has: more tokens than these go into one."""
    return sha256(parent + array("i", partial).tobytes()).digest()


class PrefixIndex:
    """hash -> block id of what can be hit, its evictable blocks, and every hash ever evicted.

    Invariant: a hash has one holder and a block one hash; a holder without references is evictable,
    and holders of partial blocks are, or are about to be. Keeping the evicted hashes of full blocks
    (about 100 bytes each) is what makes a thrash countable exactly.
    """

    def __init__(self) -> None:
        self.holders: dict[bytes, int] = {}
        self.partials = PartialIndex()
        self.evicted: set[bytes] = set()
        self._full: OrderedDict[int, bytes] = OrderedDict()  # evictable: id -> hash, oldest first
        self._partial: OrderedDict[int, bytes] = OrderedDict()
        self._used: dict[int, int] = {}  # when a block was last made evictable, or touched
        self._now = 0  # counted in such uses, whatever a clock says

    @property
    def num_evictable(self) -> int:
        """Unreferenced blocks that can still be hit."""
        return len(self._full) + len(self._partial)

    @property
    def evictable(self) -> dict[int, bytes]:
        """block id -> hash of each evictable block (a copy)."""
        return dict(self._full | self._partial)

    @property
    def next_evicted(self) -> int | None:
        """The block that `evict` would choose; None if there is none."""
        return next(iter(self._order()), None)

    def add_evictable(self, digest: bytes, block_id: int) -> None:
        """The last reference to a holder is gone: it is the most recently used one."""
        self._now = self._used[block_id] = self._now + 1
        (self._partial if digest in self.partials else self._full)[block_id] = digest

    def remove_evictable(self, block_id: int) -> None:
        """An evictable full block is hit."""
        del self._full[block_id]

    def touch(self, block_id: int) -> None:
        """An evictable partial block was copied: it counts as used now."""
        self._now = self._used[block_id] = self._now + 1
        self._partial.move_to_end(block_id)

    def evict(self) -> int:
        """Give up the content of the least recently used block; returns its id."""
        order = self._order()
        block_id, digest = order.popitem(last=False)
        del self.holders[digest]
        if order is self._partial:
            self.partials.remove(digest)
        else:
            self.evicted.add(digest)
        return block_id

    def give_up(self, block_ids: list[int]) -> None:
        """Give up the contents of these evictable blocks; many at once."""
        if self._partial:
            for digest in [self._partial.pop(i) for i in block_ids if i in self._partial]:
                del self.holders[digest]
                self.partials.remove(digest)
            block_ids = [i for i in block_ids if i in self._full]
        digests = list(map(self._full.pop, block_ids))
        for digest in digests:
            del self.holders[digest]
        self.evicted.update(digests)

    def _order(self) -> OrderedDict[int, bytes]:
        """The list whose oldest block goes next."""
        if not self._partial or not self._full:
            return self._full or self._partial
        partial_age, full_age = (
            self._now - self._used[next(iter(oldest))] for oldest in (self._partial, self._full)
        )
        return self._partial if PARTIAL_AGING * partial_age >= full_age else self._full

    def check(self) -> None:
        """Raise unless partial blocks agree with each other and with those that are evictable."""
        self.partials.check()
        assert all(digest in self.partials for digest in self._partial.values()), "it is full"
        assert not any(digest in self.partials for digest in self._full.values()), "it is partial"
        assert len(self._partial) == len(self.partials), "a partial block that is not evictable"
