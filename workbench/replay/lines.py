"""Token ids that remember their hash chain, and the cache that asks them instead of hashing.

A recorded search is a trie, and so are the hashes of its blocks: an entry extends its parent's
chain, once for each block size, whatever is replayed how often. What it does not do: decide
anything; ChainedCache is a KVCacheManager in all that it answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import Any

from workbench.kvcache.arena_cache import ArenaCache
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.prefix import chain_root, extend_chain


class Entry:
    """One entry of a trie of token ids. tokens: its own; length: with all before it."""

    __slots__ = ("_chains", "length", "parent", "tokens")

    def __init__(self, parent: Entry | None, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.length: int = len(tokens) + (parent.length if parent else 0)
        self._chains: dict[int, list[bytes]] = {}

    def line(self) -> Line:
        """All token ids from the root to here."""
        parts = [entry.tokens for entry in self._lineage()]
        return Line(chain.from_iterable(reversed(parts)), self)

    def chain(self, root: bytes, block_size: int) -> list[bytes]:
        """Hashes of the full blocks from the root to here; kept, so do not change it."""
        found = self._chains.get(block_size)
        if found is None:
            before = self.parent.chain(root, block_size) if self.parent else []
            found = before + extend_chain(root, before, self.line(), block_size)
            self._chains[block_size] = found
        return found

    def _lineage(self) -> Iterator[Entry]:
        entry: Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.parent


class Line(list[int]):
    """Token ids that are, or will become, those of an entry; their beginnings are lines too.

    A beginning that is the whole is the line itself, not a copy.
    """

    __slots__ = ("entry",)

    def __init__(self, tokens: Any, entry: Entry) -> None:
        super().__init__(tokens)
        self.entry = entry

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and not key.start and key.step is None:
            if key.stop is None or key.stop >= len(self):
                return self
            return Line(super().__getitem__(key), self.entry)
        return super().__getitem__(key)


class ChainedCache(KVCacheManager):
    """A KVCacheManager that hashes no line. All its sequences have the same, empty salt."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._root = chain_root(self._namespace, b"")

    @property
    def num_block_ids(self) -> int:
        """Block ids are below it; there may be more than blocks."""
        return len(self._pool.blocks)

    def extend(self, seq_id: int, token_ids: list[int]) -> list[int] | None:
        """As KVCacheManager, with the hashes that the line remembers."""
        if isinstance(token_ids, Line) and self.enable_prefix_caching:
            table, full = self._table(seq_id), len(token_ids) // self.block_size
            if len(table.chain) < full:
                chain = token_ids.entry.chain(self._root, self.block_size)
                table.chain += chain[len(table.chain) : full]
        return super().extend(seq_id, token_ids)

    def _hashed(
        self, token_ids: SequenceOf[int], salt: bytes
    ) -> tuple[list[int], bytes, list[bytes]]:
        if not isinstance(token_ids, Line) or salt:
            return super()._hashed(token_ids, salt)
        if not self.enable_prefix_caching:
            return token_ids, self._root, []
        chain = token_ids.entry.chain(self._root, self.block_size)
        return token_ids, self._root, chain[: len(token_ids) // self.block_size]


class ChainedArenaCache(ChainedCache, ArenaCache):
    """The same for a model in an arena."""
