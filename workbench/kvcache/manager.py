"""The KV cache as pure bookkeeping: block tables of sequences, prefix hits, exact statistics.

A hash is published as soon as room is made for the tokens that fill its block, so requests of one
step share; `free(seq_id, num_computed)` withdraws what was never computed; `check()` verifies the
laws. What it does not do: preempt or order requests (engine/scheduler.py), hold bytes
(storage.py).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from workbench.errors import ConfigError
from workbench.kvcache.pool import Block, BlockPool, CacheStats
from workbench.kvcache.prefix import chain_root, extend_chain
from workbench.kvcache.recompute import NOTHING_LOST, Lost, PartialTails, find_lost
from workbench.kvcache.resizing import Resizable
from workbench.kvcache.table import BlockTable


@dataclass(frozen=True, slots=True)
class Allocation:
    """An admission: tokens found cached, the whole block table; what was lost: for the trace."""

    num_cached_tokens: int
    block_ids: list[int]
    lost: Lost = field(default=NOTHING_LOST, compare=False)


class KVCacheManager(Resizable):
    """Blocks of one model's KV cache, shared between sequences with equal prefixes.

    num_blocks: all usable. namespace: the model's fingerprint, part of every hash. pool: who hands
    out the blocks (default: a pool of its own). Raises ConfigError on bad sizes, on a sequence id
    allocated twice, and on one that holds nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        namespace: bytes = b"",
        pool: BlockPool | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"KVCacheManager got num_blocks={num_blocks}, block_size={block_size}; "
                "allowed: at least 1 each."
            )
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._namespace = namespace
        self._pool: BlockPool = BlockPool(num_blocks) if pool is None else pool
        self._tables: dict[int, BlockTable] = {}
        self._tails = PartialTails(max_parents=max(4096, num_blocks))
        self._last_chain: tuple[bytes, list[int], list[bytes]] = (b"", [], [])

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

    def match(
        self, token_ids: SequenceOf[int], *, salt: bytes = b"", max_hit: int | None = None
    ) -> int:
        """How many tokens a request for these would find cached now; changes nothing."""
        tokens, _, chain = self._hashed(token_ids, salt)
        return self.block_size * len(self._hit(chain, self._coverable(len(tokens), max_hit)))

    # -- changes --

    def allocate(
        self,
        seq_id: int,
        token_ids: SequenceOf[int],
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
        coverable = self._coverable(len(tokens), max_hit)
        hit = self._hit(chain, coverable)
        unreferenced = sum(block.ref_count == 0 for block in hit)
        needed = self._blocks_for(len(tokens)) - len(hit) + unreferenced
        if needed + keep_free > self._pool.num_available:
            return None
        lost = self._find_lost(tokens, root, chain, range(len(hit), coverable))
        self._count(len(tokens), len(hit), lost, readmission)
        num_cached_tokens = len(hit) * self.block_size
        for block in hit:
            self._pool.share(block)
        table = BlockTable(root, hit, list(chain), len(hit), num_cached_tokens)
        self._tables[seq_id] = table
        self._grow(table, len(tokens) if num_tokens is None else min(num_tokens, len(tokens)))
        return Allocation(num_cached_tokens, [block.id for block in table.blocks], lost)

    def extend(self, seq_id: int, token_ids: list[int]) -> list[int] | None:
        """Make room for all of token_ids, the whole sequence so far; answers the new block ids.

        None, and nothing has changed, when the blocks do not suffice.
        """
        table = self._table(seq_id)
        missing = self._blocks_for(len(token_ids)) - len(table.blocks)
        if missing > 0 and missing > self._pool.num_available:
            return None
        if self.enable_prefix_caching:
            table.chain += extend_chain(table.root, table.chain, token_ids, self.block_size)
        return self._grow(table, len(token_ids))

    def fork(self, parent: int, child: int, num_tokens: int | None = None) -> Allocation | None:
        """A sequence that starts with the parent's first num_tokens tokens (all it has room for).

        Nothing of them is computed again, so their KV must exist. Full blocks are shared; a partial
        last one, which both go on to write, is copied (`take_moves`). None, and nothing has
        changed, when the copy needs a block and there is none. Goes on with `extend`.
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
        for block in blocks:
            self._pool.share(block)
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
        token_ids: list[int] | None = None,
    ) -> None:
        """Release a sequence's blocks, tail first; those that reach past num_computed are no hit.

        num_computed: tokens whose KV exists (default: all that room was made for). token_ids: the
        sequence, if its computed tail in a partial block shall be remembered for the trace.
        """
        table = self._table(seq_id)
        computed = table.num_tokens if num_computed is None else num_computed
        num_kept = computed // self.block_size
        if token_ids is not None and self.enable_prefix_caching:
            tail = tuple(token_ids[num_kept * self.block_size : computed])
            self._tails.remember(table.parent_of(num_kept), tail)
        for block in table.blocks[num_kept:]:
            self._pool.withdraw(block)
        for block in reversed(table.blocks):
            self._pool.release(block)
        del self._tables[seq_id]

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

    def _table(self, seq_id: int) -> BlockTable:
        table = self._tables.get(seq_id)
        if table is None:
            raise ConfigError(f"sequence {seq_id!r} holds no blocks; allocate it first.")
        return table

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _coverable(self, num_tokens: int, max_hit: int | None) -> int:
        """Full blocks a hit may cover: logits of the last token and from max_hit on are wanted."""
        most = num_tokens - 1 if max_hit is None else min(num_tokens - 1, max_hit)
        return max(most, 0) // self.block_size

    def _hashed(
        self, token_ids: SequenceOf[int], salt: bytes
    ) -> tuple[list[int], bytes, list[bytes]]:
        """The tokens as a list, the chain's root and the hashes of the full blocks.

        The last answer is kept: the head of the waiting queue asks the same every step.
        """
        tokens = token_ids if isinstance(token_ids, list) else list(token_ids)
        root = chain_root(self._namespace, salt)
        if not self.enable_prefix_caching:
            return tokens, root, []
        last_root, last_tokens, last_chain = self._last_chain
        if last_root == root and last_tokens == tokens:
            return tokens, root, last_chain
        chain = extend_chain(root, [], tokens, self.block_size)
        self._last_chain = (root, tokens.copy(), chain)
        return tokens, root, chain

    def _hit(self, chain: list[bytes], coverable: int) -> list[Block]:
        """The longest run of published blocks from block 0, at most `coverable`."""
        run = []
        for digest in chain[:coverable]:
            block = self._pool.find(digest)
            if block is None:
                break
            run.append(block)
        return run

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

    def _find_lost(self, tokens: list[int], root: bytes, chain: list[bytes], missed: range) -> Lost:
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
            stats.readmit_hit_tokens += num_hit * self.block_size
            stats.thrashed_readmit += thrashed
        else:
            stats.query_tokens += num_tokens
            stats.hit_tokens += num_hit * self.block_size
