"""Content that nobody will ask for again is given up at once, and not when its turn comes.

Who searches knows which beams it has dropped; a cache that must guess keeps what was used last, so
that the dropped push out what is needed. What it does not do: know beams (search/pruning.py), or
touch a block that is in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from workbench.kvcache.pool import BlockPool
from workbench.kvcache.tails import Tokens

Line = tuple[bytes, list[bytes], Tokens]
"""A sequence: its chain's root, the hashes of its full blocks, the tokens behind them."""


def forget(pool: BlockPool, lines: Iterable[Line], kept: Iterable[Line]) -> int:
    """Give up cached blocks of `lines` that no line of `kept` begins with; answers how many."""
    needed = {digest for line in kept for digest in _digests(pool, line)}
    given_up = 0
    for line in lines:
        for digest in _digests(pool, line):
            block = None if digest in needed else pool.find(digest)
            if block is not None and block.ref_count == 0:
                pool.give_up(block)
                given_up += 1
    return given_up


def _digests(pool: BlockPool, line: Line) -> Iterator[bytes]:
    """Hashes of a line's full blocks, and of the tail that goes on behind them, if one does."""
    root, chain, rest = line
    yield from chain
    found = pool.index.tails.longest(chain[-1] if chain else root, rest)
    if found is not None and found.num_tokens == found.length:
        yield found.digest
