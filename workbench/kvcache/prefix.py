"""Which block holds which content: hash chain, map from hash to block, what is given up.

A block's hash is sha256(hash of the block before it, its token ids), so equal hashes mean equal
whole prefixes; the chain starts from the model's namespace and the request's salt, which keeps
models and tenants apart. What it does not do: count references or hand out blocks (pool.py), or
know sequences (manager.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from hashlib import sha256
from typing import Any, Protocol, cast

from workbench.kvcache.parked import ParkedBlocks
from workbench.kvcache.tails import TailIndex, Tokens


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
    """Token ids that carry the hashes of their blocks: what a cache's methods take, or a list."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Any: ...

    def __getitem__(self, places: slice, /) -> Any: ...

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """Hashes of at least the full blocks, in order; root: `chain_root` of model and salt.

        Read only: it may be the sequence's own list, which grows with it.
        """
        ...


class TokenList(list[int]):
    """Token ids that are only appended to; each block is hashed once for each root and size.

    A beginning, `tokens[:n]`, carries the same hashes: read it, and do not append to it.
    """

    __slots__ = ("_chains",)

    def __init__(
        self, token_ids: SequenceOf[int], chains: dict[tuple[bytes, int], list[bytes]] | None = None
    ) -> None:
        super().__init__(token_ids)
        self._chains = {} if chains is None else chains

    def __getitem__(self, places: Any) -> Any:
        found = super().__getitem__(places)
        if isinstance(places, slice) and not places.start and places.step is None:
            return TokenList(found, self._chains)
        return found

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """See HashedTokens."""
        chain = self._chains.setdefault((root, block_size), [])
        extend_chain(root, chain, self, block_size)
        return chain


def with_hashes(token_ids: SequenceOf[int] | HashedTokens) -> HashedTokens:
    """The sequence itself if it carries its hashes, else a list that does."""
    if hasattr(token_ids, "block_hashes"):
        return cast("HashedTokens", token_ids)
    return TokenList(token_ids)


class PrefixIndex:
    """hash -> block id, the unreferenced holders (parked.py), and every hash ever evicted.

    Invariant: a hash has one holder and a block one hash; parked blocks are holders nobody
    references. A holder of a tail (tails.py) is parked or about to be. The memory of evicted hashes
    of full blocks (about 100 bytes each) is what makes a thrash countable exactly.
    """

    def __init__(self) -> None:
        self._holder: dict[bytes, int] = {}
        self._parked = ParkedBlocks()
        self._evicted: set[bytes] = set()
        self.tails = TailIndex()

    @property
    def num_parked(self) -> int:
        """Unreferenced blocks that can still be hit."""
        return len(self._parked)

    @property
    def next_evicted(self) -> int | None:
        """The block that `evict` would answer."""
        return self._parked.next

    @property
    def parked(self) -> dict[int, bytes]:
        """block id -> hash of every parked block (a copy)."""
        return self._parked.to_dict()

    @property
    def holders(self) -> dict[bytes, int]:
        """hash -> block id of everything that can be hit (a copy)."""
        return dict(self._holder)

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._holder.get(digest)

    def find_run(self, digests: list[bytes]) -> list[int]:
        """The blocks that hold these contents, up to the first content that none holds."""
        found = list(map(self._holder.get, digests))
        run = found[: found.index(None)] if None in found else found
        return cast("list[int]", run)

    def was_evicted(self, digest: bytes) -> bool:
        """Whether this content is not held now although it once was, and was evicted."""
        return digest in self._evicted and digest not in self._holder

    def was_held(self, digest: bytes) -> bool:
        """Whether this content is held now or was evicted."""
        return digest in self._holder or digest in self._evicted

    def publish(self, digest: bytes, block_id: int) -> bool:
        """Let the block be hit under this hash; False, and no change, when another holds it."""
        return self._holder.setdefault(digest, block_id) == block_id

    def publish_tail(self, parent: bytes, tail: Tokens, block_id: int) -> bytes:
        """Let a partly filled block be hit by what goes on with its tokens; answers the hash."""
        digest = self.tails.add(parent, tail)
        self._holder[digest] = block_id
        return digest

    def withdraw(self, digest: bytes) -> None:
        """Nobody can hit this hash any more, and it does not count as evicted."""
        del self._holder[digest]

    def park(self, digest: bytes, block_id: int) -> None:
        """The last reference to a holder is gone: it becomes the most recently freed one."""
        self._parked.add(block_id, digest, digest in self.tails)

    def unpark(self, block_id: int) -> None:
        """A parked block is hit: it is no more to be evicted."""
        self._parked.remove(block_id)

    def touch(self, block_id: int) -> None:
        """The tail in a parked block was copied: it counts as used now."""
        self._parked.touch(block_id)

    def evict(self) -> int:
        """Give up the content of the block that is worth least (parked.py); answers its id."""
        block_id, digest = self._parked.pop()
        self._drop([digest])
        return block_id

    def evict_all(self, count: int) -> list[int]:
        """`evict` so many."""
        evicted = [self._parked.pop() for _ in range(count)]
        self._drop([digest for _, digest in evicted])
        return [block_id for block_id, _ in evicted]

    def give_up(self, block_ids: list[int]) -> None:
        """Give up the content of these parked blocks."""
        self._drop(self._parked.remove_all(block_ids))

    def _drop(self, digests: list[bytes]) -> None:
        for digest in digests:
            del self._holder[digest]
        if self.tails:
            tails = [digest for digest in digests if digest in self.tails]
            digests = [digest for digest in digests if digest not in self.tails]
            for digest in tails:
                self.tails.remove(digest)
        self._evicted.update(digests)

    def move(self, digest: bytes, block_id: int) -> None:
        """The content lies in another block now; its old one was referenced."""
        self._holder[digest] = block_id

    def clear(self) -> None:
        """Forget everything, the evicted hashes too."""
        self._holder.clear()
        self._parked.clear()
        self._evicted.clear()
        self.tails.clear()

    def check(self) -> None:
        """Raise unless the tails agree with each other and their holders are parked."""
        self.tails.check()
        tails = [digest for digest in self.parked.values() if digest in self.tails]
        assert len(tails) == len(self.tails), "a tail without a parked block"
