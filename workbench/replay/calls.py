"""The order of a cache's calls, kept while it runs: what a miss-ratio curve is made of.

Calls that succeeded, with blocks named by content: equal numbers, equal prefixes. The same order
can then be run at any other size. Watermarks are left out, since who is admitted when is part of
the order. What it does not do: hold tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.kvcache.manager import Allocation, KVCacheManager
from workbench.kvcache.pool import CacheStats
from workbench.kvcache.prefix import HashedTokens
from workbench.replay.lines import ChainedCache, Entry, Line

Contents = NDArray[np.int32]
ALLOCATE, EXTEND, FREE = range(3)  # calls where they are numbers: miss_ratio.py, one_size.py
STATS = (
    "query_tokens",
    "hit_tokens",
    "readmit_query_tokens",
    "readmit_hit_tokens",
    "allocated",
    "evicted",
    "thrashed",
    "thrashed_readmit",
    "thrash_events",
    "duplicates",
    "copied",
)  # a size counts these, in this order


@dataclass(frozen=True, slots=True, eq=False)
class Allocate:
    """An admission. contents: of its full blocks; room: tokens that room is made for; coverable:
    full blocks that a hit may cover.
    """

    sequence: int
    contents: Contents
    tokens: int
    room: int
    coverable: int
    readmission: bool


@dataclass(frozen=True, slots=True, eq=False)
class Extend:
    """More room. contents: of the full blocks beyond those named so far."""

    sequence: int
    contents: Contents
    tokens: int


@dataclass(frozen=True, slots=True)
class Free:
    """A sequence leaves. computed: tokens whose KV exists; None: all."""

    sequence: int
    computed: int | None


Call = Allocate | Extend | Free


@dataclass(frozen=True, slots=True, eq=False)
class CacheCalls:
    """An order of calls. num_contents: contents are numbered below it."""

    block_size: int
    num_contents: int
    calls: tuple[Call, ...]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


class LoggedCache(ChainedCache):
    """A cache that keeps its calls."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        if self.reuse_partial_blocks:
            raise ConfigError(
                "Calls are kept in full blocks; log_calls needs reuse_partial_blocks=False."
            )
        self._numbers: dict[bytes, int] = {}
        self._named: dict[int, int] = {}  # full blocks of each sequence that were named
        self._room: dict[int, int] = {}  # tokens that room was asked for
        self._log: list[Call] = []

    @property
    def calls(self) -> CacheCalls:
        """What was called so far."""
        return CacheCalls(self.block_size, len(self._numbers), tuple(self._log))

    def allocate(
        self,
        seq_id: int,
        token_ids: SequenceOf[int] | HashedTokens,
        num_tokens: int | None = None,
        **options: Any,
    ) -> Allocation | None:
        """As KVCacheManager."""
        found = super().allocate(seq_id, token_ids, num_tokens, **options)
        if found is not None:
            length = len(token_ids)
            room = length if num_tokens is None else min(num_tokens, length)
            coverable = self.coverable(length, options.get("max_hit"))
            contents = self._contents(seq_id, 0, length)
            readmission = options.get("readmission", False)
            self._room[seq_id] = room
            self._log.append(Allocate(seq_id, contents, length, room, coverable, readmission))
        return found

    def extend(self, seq_id: int, token_ids: SequenceOf[int] | HashedTokens) -> list[int] | None:
        """As KVCacheManager."""
        found = super().extend(seq_id, token_ids)
        if found is not None and self._changes(seq_id, len(token_ids)):
            self._room[seq_id] = len(token_ids)
            contents = self._contents(seq_id, self._named[seq_id], len(token_ids))
            self._log.append(Extend(seq_id, contents, len(token_ids)))
        return found

    def free(self, seq_id: int, num_computed: int | None = None, **options: Any) -> None:
        """As KVCacheManager."""
        super().free(seq_id, num_computed, **options)
        del self._named[seq_id], self._room[seq_id]
        self._log.append(Free(seq_id, num_computed))

    def _changes(self, seq_id: int, tokens: int) -> bool:
        """Whether room for so many tokens takes or fills a block, at any size."""
        before, size = self._room[seq_id], self.block_size
        return (
            self._blocks_for(tokens) > self._blocks_for(before) or tokens // size > before // size
        )

    def _contents(self, seq_id: int, first: int, num_tokens: int) -> Contents:
        """Numbers of the sequence's full blocks from `first` on."""
        chain, numbers = self._table(seq_id).chain, self._numbers
        full = len(chain) and max(first, num_tokens // self.block_size)
        self._named[seq_id] = full
        found = [numbers.setdefault(digest, len(numbers)) for digest in chain[first:full]]
        return np.array(found, np.int32)


def logged_calls(cache: KVCacheManager) -> CacheCalls:
    """What was called on a replayed engine's cache; ConfigError when it was not kept."""
    if not isinstance(cache, LoggedCache):
        raise ConfigError("This cache kept no calls; replay with log_calls=True.")
    return cache.calls


def run_calls(calls: CacheCalls, num_blocks: int) -> CacheStats | None:
    """The statistics of these calls at another size, by KVCacheManager itself; None: do not fit."""
    cache = ChainedCache(num_blocks, calls.block_size)
    lines: dict[int, list[int]] = {}
    for call in calls.calls:
        if not _apply(cache, call, lines, calls.block_size):
            return None
    return cache.stats


def _apply(
    cache: ChainedCache, call: Call, contents: dict[int, list[int]], block_size: int
) -> bool:
    if isinstance(call, Free):
        cache.free(call.sequence, call.computed)
        return True
    if isinstance(call, Extend):
        contents[call.sequence] += call.contents.tolist()
        line = _line(contents[call.sequence], call.tokens, block_size)
        return cache.extend(call.sequence, line) is not None
    contents[call.sequence] = call.contents.tolist()
    line = _line(contents[call.sequence], call.tokens, block_size)
    hit = min(call.tokens, call.coverable * block_size)
    readmission = call.readmission
    return (
        cache.allocate(call.sequence, line.as_list, call.room, max_hit=hit, readmission=readmission)
        is not None
    )


class _Named(Entry):
    """An entry whose chain is made of the numbers of its contents; nobody asks for its tokens."""

    __slots__ = ("_contents",)

    def __init__(self, contents: list[int], tokens: int) -> None:
        super().__init__(None, ())
        self.length = tokens
        self._contents = contents

    def chain(self, root: bytes, block_size: int) -> list[bytes]:
        """The numbers as hashes."""
        return [number.to_bytes(32, "little") for number in self._contents]


def _line(contents: list[int], tokens: int, block_size: int) -> Line:
    """Tokens of the right number, with these contents."""
    assert len(contents) == tokens // block_size
    return Line(_Named(contents, tokens), tokens)
