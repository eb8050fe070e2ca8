"""The KVCacheManager of one model in an arena: the same calls, blocks from leased pages.

It also tells the arena what no pool sees: which evicted contents were asked for again, and what a
refused admission lacked.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager

from workbench.kvcache.leases import LeasedPool
from workbench.kvcache.manager import Allocation, KVCacheManager
from workbench.kvcache.prefix import HashedTokens
from workbench.kvcache.recompute import Lost


class ArenaCache(KVCacheManager):
    """Made by KVArena.cache. lock: the arena's, held while a step is planned or taken in."""

    def __init__(
        self,
        pool: LeasedPool,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        namespace: bytes = b"",
        reuse_partial_blocks: bool = False,
        lock: AbstractContextManager[object],
    ) -> None:
        super().__init__(
            len(pool.blocks),
            block_size,
            enable_prefix_caching,
            namespace=namespace,
            reuse_partial_blocks=reuse_partial_blocks,
            pool=pool,
        )
        self._leases = pool
        self.lock = lock

    def is_as(
        self,
        block_size: int,
        enable_prefix_caching: bool,
        namespace: bytes,
        reuse_partial_blocks: bool,
    ) -> bool:
        """Whether it was made with these settings."""
        mine = (self.block_size, self.enable_prefix_caching, self._namespace)
        return mine == (block_size, enable_prefix_caching, namespace) and (
            self.reuse_partial_blocks == reuse_partial_blocks
        )

    def allocate(
        self,
        seq_id: int,
        token_ids: SequenceOf[int] | HashedTokens,
        num_tokens: int | None = None,
        *,
        salt: bytes = b"",
        max_hit: int | None = None,
        keep_free: int = 0,
        readmission: bool = False,
    ) -> Allocation | None:
        """See KVCacheManager; a refusal is remembered until the model's next step."""
        admitted = super().allocate(
            seq_id,
            token_ids,
            num_tokens,
            salt=salt,
            max_hit=max_hit,
            keep_free=keep_free,
            readmission=readmission,
        )
        pool = self._leases
        if admitted is not None:
            pool.readmissions += readmission
        else:
            blocks = pool.num_active + self._blocks_for(len(token_ids)) + keep_free
            pool.wanted = -(-blocks // pool.per_page)
        return admitted

    def _find_lost(
        self, tokens: HashedTokens, root: bytes, chain: list[bytes], missed: range
    ) -> Lost:
        self._leases.shadow.ask(chain[missed.start : missed.stop])
        return super()._find_lost(tokens, root, chain, missed)
