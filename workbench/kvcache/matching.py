"""What of a prompt is cached: full blocks from the first on, then the start of a partly filled one.

Looks, and changes nothing. What it does not do: admit anybody (manager.py), or keep the hashes and
tails that it looks up (prefix.py, tails.py).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from workbench.kvcache.pool import Block, BlockPool
from workbench.kvcache.prefix import HashedTokens, chain_root, with_hashes


@dataclass(frozen=True, slots=True)
class Hit:
    """Full blocks to be shared, and a cached one whose first tail_tokens tokens are to be copied.

    tail is None, and tail_tokens 0, where nothing but full blocks was found.
    """

    blocks: list[Block]
    tail: Block | None = None
    tail_tokens: int = 0


class PrefixMatching:
    """The looking half of a KVCacheManager.

    reuse_partial_blocks: what a sequence that left had computed in a partly filled block is hit,
    by copy, by whoever goes on with it.
    """

    block_size: int
    enable_prefix_caching: bool
    reuse_partial_blocks: bool
    _namespace: bytes
    _root: bytes
    _pool: BlockPool

    def match(
        self,
        token_ids: SequenceOf[int] | HashedTokens,
        *,
        salt: bytes = b"",
        max_hit: int | None = None,
    ) -> int:
        """How many tokens a request for these would find cached now; changes nothing."""
        tokens, root, chain = self._hashed(token_ids, salt)
        hit = self._hit(tokens, root, chain, max_hit)
        return self.block_size * len(hit.blocks) + hit.tail_tokens

    def _hashed(
        self, token_ids: SequenceOf[int] | HashedTokens, salt: bytes
    ) -> tuple[HashedTokens, bytes, list[bytes]]:
        """The tokens, the chain's root and at least the hashes of the full blocks."""
        tokens = with_hashes(token_ids)
        root = chain_root(self._namespace, salt) if salt else self._root
        if not self.enable_prefix_caching:
            return tokens, root, []
        return tokens, root, tokens.block_hashes(root, self.block_size)

    def _coverable(self, num_tokens: int, max_hit: int | None) -> int:
        """Full blocks that a hit may cover."""
        return _most(num_tokens, max_hit) // self.block_size

    def _hit(
        self, tokens: HashedTokens, root: bytes, chain: list[bytes], max_hit: int | None
    ) -> Hit:
        """The longest run of published blocks from block 0, and what goes on where it ends."""
        most = _most(len(tokens), max_hit)
        run = self._pool.find_run(chain[: most // self.block_size])
        if not self.reuse_partial_blocks:
            return Hit(run)
        start = len(run) * self.block_size
        rest = tuple(tokens[start : min(most, start + self.block_size - 1)])
        parent = chain[len(run) - 1] if run else root
        found = self._pool.index.tails.longest(parent, rest)
        if found is None:
            return Hit(run)
        return Hit(run, self._pool.holder(found.digest), found.num_tokens)


def _most(num_tokens: int, max_hit: int | None) -> int:
    """Tokens a hit may cover: logits of the last one and from position max_hit on are wanted."""
    most = num_tokens - 1 if max_hit is None else min(num_tokens - 1, max_hit)
    return max(most, 0)
