"""Token ids that remember their hash chain, and the cache that asks them instead of hashing.

A recorded search is a trie, and so are the hashes of its blocks: an entry extends its parent's
chain, once for each block size, whatever is replayed how often. What it does not do: decide
anything; ChainedCache is a KVCacheManager in all that it answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, cast

from workbench.kvcache.arena_cache import ArenaCache
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.matching import Hit
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
        return Line(self, self.length)

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Those at these positions, counted from the root."""
        entry: Entry | None = self
        parts: list[tuple[int, ...]] = []
        while entry is not None and stop > start:
            first = entry.length - len(entry.tokens)
            if first < stop:
                parts.append(entry.tokens[max(0, start - first) : stop - first])
                stop = max(first, start)
            entry = entry.parent
        return [*chain.from_iterable(reversed(parts))]

    def chain(self, root: bytes, block_size: int) -> list[bytes]:
        """Hashes of the full blocks from the root to here; kept, so do not change it."""
        found = self._chains.get(block_size)
        if found is None:
            before = self.parent.chain(root, block_size) if self.parent else []
            found = before + extend_chain(root, before, self.line().as_list, block_size)
            self._chains[block_size] = found
        return found


class Line:
    """The first `length` token ids of an entry: a place in a trie, no list of numbers.

    Its beginnings are lines too; one that is the whole is the line itself, not a copy.
    """

    __slots__ = ("entry", "length")

    def __init__(self, entry: Entry, length: int) -> None:
        self.entry, self.length = entry, length

    @property
    def as_list(self) -> list[int]:
        """Itself, to those who ask for a list and only measure and slice it."""
        return cast("list[int]", self)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.entry.tokens_between(0, self.length))

    def append(self, token: int) -> None:
        """The entry's next token was sampled."""
        self.length += 1

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            place = range(self.length)[key]
            return self.entry.tokens_between(place, place + 1)[0]
        start, stop, step = key.indices(self.length)
        assert step == 1, "a line is sliced without steps"
        if start:
            return self.entry.tokens_between(start, stop)
        return self if stop == self.length else Line(self.entry, stop)


Tokens = Sequence[int] | Line


class ChainedCache(KVCacheManager):
    """A KVCacheManager that hashes no line. All its sequences have the same, empty salt."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._root = chain_root(self._namespace, b"")

        self._applied: bool | None = None  # what `apply` will answer, having been done ahead
        self._looked: tuple[Entry, int, int | None, Hit] | None = None  # by match, for allocate

    def apply_ahead(self) -> None:
        """Do what the next `apply` does; for who must know what it leaves."""
        self._applied = self.apply()

    def apply(self) -> bool:
        """As KVCacheManager."""
        self._looked = None
        ahead, self._applied = self._applied, None
        return super().apply() if ahead is None else ahead

    def match(
        self, token_ids: Sequence[int], *, salt: bytes = b"", max_hit: int | None = None
    ) -> int:
        """As KVCacheManager; what was found is kept for an admission that comes next."""
        self._looked = None
        tokens, root, chain = self._hashed(token_ids, salt)
        hit = self._hit(tokens, root, chain, max_hit)
        if type(token_ids) is Line:
            self._looked = token_ids.entry, token_ids.length, max_hit, hit
        return self.block_size * len(hit.blocks) + hit.tail_tokens

    def free(self, seq_id: int, num_computed: int | None = None, **options: Any) -> None:
        """As KVCacheManager."""
        self._looked = None
        super().free(seq_id, num_computed, **options)

    def _hit(
        self, tokens: list[int] | Line, root: bytes, chain: list[bytes], max_hit: int | None
    ) -> Hit:
        looked, self._looked = self._looked, None
        if looked is not None and type(tokens) is Line:
            *asked, hit = looked
            if asked == [tokens.entry, tokens.length, max_hit]:
                return hit
        return super()._hit(cast("list[int]", tokens), root, chain, max_hit)

    @property
    def num_block_ids(self) -> int:
        """Block ids are below it; there may be more than blocks."""
        return len(self._pool.blocks)

    def extend(self, seq_id: int, token_ids: Tokens) -> list[int] | None:
        """As KVCacheManager, with the hashes that the line remembers."""
        self._looked = None
        if type(token_ids) is Line and self.enable_prefix_caching:
            table, full = self._table(seq_id), token_ids.length // self.block_size
            if len(table.chain) < full:
                chain = token_ids.entry.chain(self._root, self.block_size)
                table.chain += chain[len(table.chain) : full]
        return super().extend(seq_id, cast("list[int]", token_ids))

    def _hashed(self, token_ids: Tokens, salt: bytes) -> tuple[list[int], bytes, list[bytes]]:
        if type(token_ids) is not Line or salt:
            return super()._hashed(cast("list[int]", token_ids), salt)
        if not self.enable_prefix_caching:
            return token_ids.as_list, self._root, []
        chain = token_ids.entry.chain(self._root, self.block_size)
        return token_ids.as_list, self._root, chain[: token_ids.length // self.block_size]


class ChainedArenaCache(ChainedCache, ArenaCache):
    """The same for a model in an arena."""
