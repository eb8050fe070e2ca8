"""The KV cache as pure bookkeeping: block tables of sequences, prefix hits, exact statistics.

A hash is published as soon as room is made for the tokens that fill its block, so requests of one
step share; `free(seq_id, num_computed)` withdraws what was never computed, and can leave a partly
filled last block to be hit, by copy, by whoever goes on with it; `check()` verifies the laws. What
it does not do: preempt or order requests (engine/scheduler.py), hold bytes (storage.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from workbench.errors import ConfigError
from workbench.kvcache.forgetting import Line, forget
from workbench.kvcache.matching import PrefixMatching
from workbench.kvcache.pool import BlockPool, CacheStats
from workbench.kvcache.prefix import HashedTokens, chain_root, extend_chain
from workbench.kvcache.recompute import NOTHING_LOST, Lost, PartialTails, find_lost
from workbench.kvcache.resizing import Resizable
from workbench.kvcache.table import BlockTable
from workbench.kvcache.tails import Tokens


@dataclass(frozen=True, slots=True)
class Allocation:
    """An admission: tokens found cached, the whole block table; what was lost: for the trace."""

    num_cached_tokens: int
    block_ids: list[int]
    lost: Lost = field(default=NOTHING_LOST, compare=False)


class KVCacheManager(PrefixMatching, Resizable):
    """Blocks of one model's KV cache, shared between sequences with equal prefixes.

    num_blocks: all usable. namespace: the model's fingerprint, part of every hash.
    reuse_partial_blocks: a hit may end within a block (matching.py). pool: who hands out the blocks
    (default: a pool of its own). Raises ConfigError on bad sizes, on a sequence id allocated twice,
    and on one that holds nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        namespace: bytes = b"",
        reuse_partial_blocks: bool = False,
        pool: BlockPool | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"KVCacheManager got num_blocks={num_blocks}, block_size={block_size}; "
                "allowed: at least 1 each."
            )
        if reuse_partial_blocks and not enable_prefix_caching:
            raise ConfigError(
                "KVCacheManager got reuse_partial_blocks=True and enable_prefix_caching=False; a "
                "partial block is found by the full ones before it: switch both on, or the first "
                "off."
            )
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reuse_partial_blocks = reuse_partial_blocks
        self._namespace = namespace
        self._pool: BlockPool = BlockPool(num_blocks) if pool is None else pool
        self._tables: dict[int, BlockTable] = {}
        self._tails = PartialTails(max_parents=max(4096, num_blocks))
        self._root = chain_root(namespace, b"")  # of all sequences without a salt

    # -- state --

    @property
    def num_active(self) -> int:
        """Blocks that some sequence references."""
        return self._pool.num_active

    @property
    def num_cached(self) -> int:
        """Blocks that nothing references and whose content can still be hit."""
        return self._pool.num_cached

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return self._pool.num_free

    @property
    def stats(self) -> CacheStats:
        """Counts since creation; live, do not change it."""
        return self._pool.stats

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's block ids, in position order (a copy)."""
        return [block.id for block in self._table(seq_id).blocks]

    # -- changes --

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
        """Admit a sequence: share its cached prefix, make room for its first num_tokens (all).

        max_hit: the first position whose logits are wanted. None, and nothing has changed, unless
        all of token_ids fits now with keep_free blocks to spare.
        """
        if seq_id in self._tables:
            raise ConfigError(f"sequence {seq_id!r} is allocated already; free it first.")
        tokens, root, chain = self._hashed(token_ids, salt)
        hit = self._hit(tokens, root, chain, max_hit)
        shared = hit.blocks
        unreferenced = [block.ref_count for block in shared].count(0)
        needed = self._blocks_for(len(tokens)) - len(shared) + unreferenced
        if needed + keep_free > self._pool.num_available:
            return None
        missed = range(len(shared), self._coverable(len(tokens), max_hit))
        lost = self._find_lost(tokens, root, chain, missed)
        num_cached_tokens = len(shared) * self.block_size + hit.tail_tokens
        self._count(len(tokens), num_cached_tokens, lost, readmission)
        self._pool.share_all(shared)
        copied = [] if hit.tail is None else [self._pool.copy(hit.tail)]
        table = BlockTable(root, shared + copied, chain, len(shared), num_cached_tokens)
        self._tables[seq_id] = table
        self._grow(table, len(tokens) if num_tokens is None else min(num_tokens, len(tokens)))
        return Allocation(num_cached_tokens, [block.id for block in table.blocks], lost)

    def extend(self, seq_id: int, token_ids: SequenceOf[int] | HashedTokens) -> list[int] | None:
        """Make room for all of token_ids, the whole sequence so far; answers the new block ids.

        None, and nothing has changed, when the blocks do not suffice.
        """
        table = self._table(seq_id)
        missing = self._blocks_for(len(token_ids)) - len(table.blocks)
        if missing > 0 and missing > self._pool.num_available:
            return None
        if self.enable_prefix_caching and len(token_ids) // self.block_size > len(table.chain):
            if hasattr(token_ids, "block_hashes"):
                table.chain = token_ids.block_hashes(table.root, self.block_size)
            else:
                extend_chain(table.root, table.chain, token_ids, self.block_size)
        return self._grow(table, len(token_ids))

    def fork(self, parent: int, child: int, num_tokens: int | None = None) -> Allocation | None:
        """A sequence that starts with the parent's first num_tokens tokens (all it has room for).

        Nothing of them is computed again, so their KV must exist. Full blocks are shared; a partial
        last one, which both go on to write, is copied (`take_moves`). None, and nothing has
        changed, when the copy needs a block and there is none. Goes on with `extend`. For who goes
        on from a sequence that runs; children of one that has left hit its last block instead
        (reuse_partial_blocks).
        """
        table, room = self._table(parent), self._table(parent).num_tokens
        tokens = room if num_tokens is None else num_tokens
        if child in self._tables or not 1 <= tokens <= room:
            raise ConfigError(
                f"fork of {tokens} tokens of sequence {parent!r} to {child!r}; allowed: 1 to "
                f"{room} tokens, to a sequence that holds nothing."
            )
        full, partial = divmod(tokens, self.block_size)
        if partial and not self._pool.num_available:
            return None
        blocks = table.blocks[:full]
        self._pool.share_all(blocks)
        if partial:
            blocks.append(self._pool.copy(table.blocks[full]))
        published = min(full, table.num_published)
        self._tables[child] = BlockTable(table.root, blocks, table.chain[:full], published, tokens)
        return Allocation(tokens, [block.id for block in blocks])

    def free(
        self,
        seq_id: int,
        num_computed: int | None = None,
        *,
        token_ids: SequenceOf[int] | HashedTokens | None = None,
    ) -> None:
        """Release a sequence's blocks, tail first; those that reach past num_computed are no hit.

        num_computed: tokens whose KV exists (default: all that room was made for). token_ids: the
        sequence, if its computed tail in a partial block shall be remembered: for the trace, and
        to be hit if partial blocks are reused.
        """
        table = self._table(seq_id)
        computed = table.num_tokens if num_computed is None else num_computed
        num_kept = computed // self.block_size
        for block in table.blocks[num_kept:]:
            self._pool.withdraw(block)
        if token_ids is not None and self.enable_prefix_caching:
            tail = tuple(token_ids[num_kept * self.block_size : computed])
            self._keep_tail(table, num_kept, tail)
        self._pool.release_all(reversed(table.blocks))
        del self._tables[seq_id]

    def free_all(self) -> None:
        """Release every sequence of an owner that is gone; how far it had computed nobody knows."""
        for seq_id in list(self._tables):
            self.free(seq_id, 0)

    def forget(
        self,
        lines: Iterable[SequenceOf[int] | HashedTokens],
        kept: Iterable[SequenceOf[int] | HashedTokens] = (),
        *,
        salt: bytes = b"",
    ) -> int:
        """Give up what is cached of these token ids and of no `kept` ones; answers how many blocks.

        For who knows that nobody will ask for them again. Blocks in use stay.
        """
        return forget(self._pool, self._lines(lines, salt), self._lines(kept, salt))

    def reset(self) -> None:
        """Forget content and evicted hashes, not statistics. ConfigError if a block is in use."""
        if self._tables:
            raise ConfigError(
                f"reset while {len(self._tables)} sequences hold blocks; free or abort them first."
            )
        self._pool.clear()
        self._tails.clear()

    def check(self) -> None:
        """Raise AssertionError if a law is broken; O(blocks + table entries)."""
        references: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            table.check(f"sequence {seq_id!r}", self.block_size)
            for block in table.blocks:
                references[block.id] = references.get(block.id, 0) + 1
        self._pool.check(references)

    # -- how --

    def _lines(self, many: Iterable[SequenceOf[int] | HashedTokens], salt: bytes) -> Iterator[Line]:
        for token_ids in many:
            tokens, root, chain = self._hashed(token_ids, salt)
            full = len(chain) and len(tokens) // self.block_size
            yield root, chain[:full], tuple(tokens[full * self.block_size :])

    def _table(self, seq_id: int) -> BlockTable:
        table = self._tables.get(seq_id)
        if table is None:
            raise ConfigError(f"sequence {seq_id!r} holds no blocks; allocate it first.")
        return table

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Take the blocks that num_tokens need and publish those they fill."""
        missing = self._blocks_for(num_tokens) - len(table.blocks)
        new = [self._pool.take() for _ in range(missing)]
        table.blocks += new
        table.num_tokens = max(table.num_tokens, num_tokens)
        full = min(num_tokens // self.block_size, len(table.chain))
        for i in range(table.num_published, full):
            self._pool.publish(table.blocks[i], table.chain[i])
        table.num_published = max(table.num_published, full)
        return [block.id for block in new]

    def _keep_tail(self, table: BlockTable, number: int, tail: Tokens) -> None:
        """What was computed of the table's block of this number, which is not full."""
        parent = table.parent_of(number)
        self._tails.remember(parent, tail)
        if tail and self.reuse_partial_blocks and table.blocks[number].ref_count == 1:
            self._pool.publish_tail(table.blocks[number], parent, tail)

    def _find_lost(
        self, tokens: HashedTokens, root: bytes, chain: list[bytes], missed: range
    ) -> Lost:
        if not self.enable_prefix_caching:
            return NOTHING_LOST
        return find_lost(
            self._pool.index, self._tails, tokens, root, chain, missed, self.block_size
        )

    def _count(self, num_tokens: int, num_hit: int, lost: Lost, readmission: bool) -> None:
        """Statistics of one successful admission."""
        stats, thrashed = self._pool.stats, len(lost.evicted)
        stats.thrashed += thrashed
        stats.thrash_events += thrashed > 0
        if readmission:
            stats.readmit_query_tokens += num_tokens
            stats.readmit_hit_tokens += num_hit
            stats.thrashed_readmit += thrashed
        else:
            stats.query_tokens += num_tokens
            stats.hit_tokens += num_hit
