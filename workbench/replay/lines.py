"""Token ids that remember their hash chain, so that no cache hashes them.

A recorded search is a trie, and so are the hashes of its blocks: an entry extends its parent's
chain, once for each block size, whatever is replayed how often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, cast

from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.prefix import extend_chain


class Entry:
    """One entry of a trie of token ids. tokens: its own; length: with all before it."""

    __slots__ = ("_chains", "length", "parent", "tokens")

    def __init__(self, parent: Entry | None, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.length: int = len(tokens) + (parent.length if parent else 0)
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

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
        found = self._chains.get((root, block_size))
        if found is None:
            found = [*self.parent.chain(root, block_size)] if self.parent else []
            extend_chain(root, found, self.line().as_list, block_size)
            self._chains[root, block_size] = found
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

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """See HashedTokens: what the entry remembers."""
        return self.entry.chain(root, block_size)

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
    """A KVCacheManager whose `apply` can be done ahead, for a scheduler that coasts."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._applied: bool | None = None  # what `apply` will answer, having been done ahead

    def apply_ahead(self) -> None:
        """Do what the next `apply` does; for who must know what it leaves."""
        self._applied = self.apply()

    def apply(self) -> bool:
        """As KVCacheManager."""
        ahead, self._applied = self._applied, None
        return super().apply() if ahead is None else ahead
