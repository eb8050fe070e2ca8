"""The KV cache as pure bookkeeping: block tables of sequences, prefix hits, exact statistics.

A block's hash is sha256(hash of the block before it, its token ids), so equal hashes mean equal
whole prefixes; a chain starts from the model's namespace and the request's salt, which keep models
and tenants apart. A hash is published as soon as room is made for the tokens that fill its block,
so requests of one step share; `free(seq_id, num_computed)` withdraws what was never computed, and
can leave a partly filled last block to be hit, by copy, by a sequence that goes on with it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol, cast

from workbench.errors import ConfigError
from workbench.kvcache.pool import Block, BlockPool, ResizeAnswer, Tokens, common_prefix

MOST_PER_PARENT = 64  # unfilled blocks remembered after one block


# -- hash chains --


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
    """Token ids that carry the hashes of their blocks."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> Any: ...

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """Hashes of at least the full blocks, in order; root: `chain_root` of model and salt.

        Read only: it may be the sequence's own list, which grows with it.
        """
        ...


TokenIds = SequenceOf[int] | HashedTokens
"""What a cache is given: a plain sequence is hashed anew at each call."""


class TokenList(list[int]):
    """Token ids that are only appended to; each block is hashed once for each root and size."""

    __slots__ = ("_chains",)

    def __init__(self, token_ids: SequenceOf[int] = ()) -> None:
        super().__init__(token_ids)
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}

    def block_hashes(self, root: bytes, block_size: int) -> list[bytes]:
        """See HashedTokens."""
        chain = self._chains.setdefault((root, block_size), [])
        extend_chain(root, chain, self, block_size)
        return chain


# -- admissions --


@dataclass(frozen=True, slots=True)
class Lost:
    """Positions of an admitted sequence that were computed before: ascending, disjoint.

    evicted: in full blocks that were evicted; partial: in blocks that were never full.
    preempted_end: positions below it were lost by this request's own preemption, and count as that.
    """

    evicted: tuple[range, ...] = ()
    partial: tuple[range, ...] = ()
    preempted_end: int = 0

    def count(self, start: int, end: int) -> tuple[int, int, int]:
        """Positions in [start, end) by reason, each once: (evicted, preempted, partial)."""
        rest = min(max(start, self.preempted_end), end)
        return _overlap(self.evicted, rest, end), rest - start, _overlap(self.partial, rest, end)


NOTHING_LOST = Lost()


def _overlap(spans: tuple[range, ...], start: int, end: int) -> int:
    return sum(max(0, min(span.stop, end) - max(span.start, start)) for span in spans)


@dataclass(frozen=True, slots=True)
class Allocation:
    """An admission: tokens found cached, the whole block table; what was lost: for the trace."""

    num_cached_tokens: int
    block_ids: list[int]
    lost: Lost = field(default=NOTHING_LOST, compare=False)


@dataclass(slots=True, eq=False)
class _Table:
    """Blocks of a sequence in position order; room was made for num_tokens tokens.

    root: the parent of block 0. chain: hashes of the full blocks, which may be more than there is
    room for; the first num_published were offered to the index.
    """

    root: bytes
    blocks: list[Block]
    chain: list[bytes]
    num_published: int
    num_tokens: int


class KVCacheManager:
    """Blocks of one model's KV cache, shared between sequences with equal prefixes.

    num_blocks: all usable. namespace: the model's fingerprint, part of every hash.
    reuse_partial_blocks: a hit may end within a block, in what a sequence that left had computed of
    its last one. pool: where blocks come from (default: a pool of its own). stats: counts since
    creation, live; lock: to be held while a step is planned or taken in, where threads share the
    memory. Raises ConfigError on bad sizes, on a sequence id allocated twice, and on one that holds
    nothing.
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
        self.pool = BlockPool(num_blocks) if pool is None else pool
        self.stats, self.lock = self.pool.stats, self.pool.memory.lock
        self._namespace = namespace
        self._root = chain_root(namespace, b"")  # of sequences without a salt
        self._tables: dict[int, _Table] = {}
        # computed tokens of blocks that never filled, by the hash of the block before; oldest first
        self._unfilled: OrderedDict[bytes, dict[Tokens, None]] = OrderedDict()
        self._most_unfilled = max(4096, num_blocks)

    # -- state --

    @property
    def num_active(self) -> int:
        """Blocks that some sequence references."""
        return self.pool.num_active

    @property
    def num_cached(self) -> int:
        """Blocks that nothing references and whose content can still be hit."""
        return self.pool.num_cached

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return self.pool.num_free

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's block ids, in position order (a copy)."""
        return [block.id for block in self._table(seq_id).blocks]

    # -- sequences --

    def match(self, token_ids: TokenIds, *, salt: bytes = b"", max_hit: int | None = None) -> int:
        """How many tokens a request for these would find cached now; changes nothing."""
        return self._hit(*self._hashed(token_ids, salt), max_hit)[2]

    def coverable(self, num_tokens: int, max_hit: int | None = None) -> int:
        """Full blocks of so many tokens that a hit could cover."""
        return _most(num_tokens, max_hit) // self.block_size

    def allocate(
        self,
        seq_id: int,
        token_ids: TokenIds,
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
        shared, partial, num_hit = self._hit(tokens, root, chain, max_hit)
        pool, length = self.pool, len(tokens)
        blocks = self._blocks_for(length)
        unreferenced = [block.ref_count for block in shared].count(0)
        needed = blocks - len(shared) + unreferenced + keep_free
        if needed > pool.num_available:
            pool.refused(pool.num_active + needed)
            return None
        missed = range(len(shared), self.coverable(length, max_hit))
        pool.admitted(chain[missed.start : missed.stop])
        lost = self._find_lost(tokens, root, chain, missed)
        stats, thrashed = self.stats, len(lost.evicted)
        stats.thrashed += thrashed
        stats.thrash_events += thrashed > 0
        if readmission:
            stats.readmit_query_tokens += length
            stats.readmit_hit_tokens += num_hit
            stats.thrashed_readmit += thrashed
        else:
            stats.query_tokens += length
            stats.hit_tokens += num_hit
        pool.share(shared)
        copied = [] if partial is None else [pool.copy(partial)]
        table = _Table(root, shared + copied, chain, len(shared), num_hit)
        self._tables[seq_id] = table
        self._grow(table, length if num_tokens is None else min(num_tokens, length))
        return Allocation(num_hit, [block.id for block in table.blocks], lost)

    def extend(self, seq_id: int, token_ids: TokenIds) -> list[int] | None:
        """Make room for all of token_ids, the whole sequence so far; returns the new block ids.

        None, and nothing has changed, when the blocks do not suffice.
        """
        table, length, size = self._table(seq_id), len(token_ids), self.block_size
        missing = self._blocks_for(length) - len(table.blocks)
        if missing > 0 and missing > self.pool.num_available:
            return None
        if self.enable_prefix_caching and length // size > len(table.chain):
            if hasattr(token_ids, "block_hashes"):
                table.chain = token_ids.block_hashes(table.root, size)
            else:
                table.chain = [*table.chain]  # it may be a sequence's own
                extend_chain(table.root, table.chain, token_ids, size)
        return self._grow(table, length)

    def free(
        self, seq_id: int, num_computed: int | None = None, *, token_ids: TokenIds | None = None
    ) -> None:
        """Release a sequence's blocks, the last first; those past num_computed can not be hit.

        num_computed: tokens whose KV exists (default: all that room was made for). token_ids: the
        sequence, if what it computed of a partly filled block shall be remembered: for the trace,
        and to be hit if partial blocks are reused.
        """
        table = self._table(seq_id)
        computed = table.num_tokens if num_computed is None else num_computed
        full = computed // self.block_size
        for block in table.blocks[full:]:
            if block.digest is not None:
                del self.pool.holders[block.digest]
                block.digest = None
        if token_ids is not None and self.enable_prefix_caching:
            if partial := tuple(token_ids[full * self.block_size : computed]):
                parent = table.chain[full - 1] if full else table.root
                unfilled = self._unfilled.setdefault(parent, {})
                self._unfilled.move_to_end(parent)
                unfilled.pop(partial, None)
                unfilled[partial] = None
                if len(unfilled) > MOST_PER_PARENT:
                    del unfilled[next(iter(unfilled))]
                if len(self._unfilled) > self._most_unfilled:
                    self._unfilled.popitem(last=False)
                if self.reuse_partial_blocks and table.blocks[full].ref_count == 1:
                    self.pool.publish_partial(table.blocks[full], parent, partial)
        self.pool.release(reversed(table.blocks))
        del self._tables[seq_id]

    def free_all(self) -> None:
        """Release every sequence of an owner that is gone; nothing counts as computed."""
        for seq_id in list(self._tables):
            self.free(seq_id, 0)

    def forget(
        self, dropped: Iterable[TokenIds], kept: Iterable[TokenIds] = (), *, salt: bytes = b""
    ) -> int:
        """Give up cached blocks of dropped sequences that no kept one begins with; returns how
        many. For a search that knows what is never asked for again; blocks in use stay.
        """
        needed = {digest for tokens in kept for digest in self._digests(tokens, salt)}
        given_up = 0
        for tokens in dropped:
            for digest in self._digests(tokens, salt):
                block = None if digest in needed else self.pool.holders.get(digest)
                if block is not None and block.ref_count == 0:
                    self.pool.give_up(block)
                    given_up += 1
        return given_up

    @contextmanager
    def change(self) -> Iterator[None]:
        """All of a change or nothing of it: what anything cut short within it, here or in the cache
        of another model of the arena, is repaired before the next one. Enter with `lock` held: a
        generator that is interrupted as it is entered keeps what it has taken.
        """
        if self.pool.memory.changing is not None:
            self.pool.memory.changing.recover()
        self.pool.memory.changing = self
        yield
        self.pool.memory.changing = None

    def recover(self) -> None:
        """After a call that anything may have cut short, anywhere: no sequence holds blocks, no
        content can be hit; in an arena, what other models have in use stays.
        """
        with self.lock:
            memory = self.pool.memory
            if memory.changing is not None:  # what it says of its blocks may be half told
                memory.changing.drop_sequences()
            memory.changing = self  # cut short here, it is done again
            self.drop_sequences()
            memory.recover()

    def drop_sequences(self) -> None:
        """Forget whose blocks they are, without giving them back."""
        self._tables.clear()
        self._unfilled.clear()

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence holds blocks."""
        return seq_id in self._tables

    def tables(self) -> list[list[Block]]:
        """The blocks of each sequence, in position order: read only."""
        return [table.blocks for table in self._tables.values()]

    def reset(self) -> None:
        """Forget content and evicted hashes, not statistics. ConfigError if a block is in use."""
        if self._tables:
            raise ConfigError(
                f"reset while {len(self._tables)} sequences hold blocks; free or abort them first."
            )
        self.pool.clear()
        self._unfilled.clear()

    def check(self) -> None:
        """Raise AssertionError if a law is broken; O(blocks + table entries)."""
        references, size = Counter[int](), self.block_size
        for seq_id, table in self._tables.items():
            name, ids = f"sequence {seq_id!r}", {block.id for block in table.blocks}
            assert len(ids) == len(table.blocks), f"{name}: a block is twice in its table"
            room = len(ids) * size
            assert room - size < table.num_tokens <= room, f"{name}: room and table differ"
            assert table.num_published * size <= table.num_tokens, f"{name}: published too much"
            for i, block in enumerate(table.blocks):
                if block.digest is not None:
                    assert i < table.num_published, f"{name}: block {i} can be hit, but is not full"
                    assert block.digest == table.chain[i], f"{name}: block {i} of another prefix"
            references.update(ids)
        self.pool.check(references)

    # -- size --

    @property
    def num_blocks(self) -> int:
        """Blocks that can be used now: active + cached + free."""
        return self.pool.num_blocks

    @property
    def target(self) -> int:
        """Blocks asked for last."""
        return self.pool.target

    @property
    def room(self) -> int:
        """Blocks to count on for long: the target, in an arena the part of the split."""
        return self.pool.room

    def require(self, num_blocks: int) -> None:
        """Raise the floor to so many blocks: what one request needs."""
        self.pool.floor = max(self.pool.floor, num_blocks)

    def resize(self, num_blocks: int) -> ResizeAnswer:
        """Ask for so many blocks, from any thread; the answer says whether and when."""
        return self.pool.resize(num_blocks)

    def apply(self) -> bool:
        """Between steps, before scheduling: come as near to the target as can be.

        True when a block in use has another id now: block tables must be read anew.
        """
        return self.pool.settle()

    def take_moves(self) -> list[tuple[int, int]]:
        """(source, destination) of blocks to be copied before the next store, each once.

        All sources are read before any destination is written.
        """
        return self.pool.copies.take()

    # -- how --

    def _table(self, seq_id: int) -> _Table:
        table = self._tables.get(seq_id)
        if table is None:
            raise ConfigError(f"sequence {seq_id!r} holds no blocks; allocate it first.")
        return table

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _hashed(self, token_ids: TokenIds, salt: bytes) -> tuple[HashedTokens, bytes, list[bytes]]:
        """The tokens, the chain's root and at least the hashes of the full blocks."""
        tokens = token_ids if hasattr(token_ids, "block_hashes") else TokenList(token_ids)
        root = chain_root(self._namespace, salt) if salt else self._root
        if not self.enable_prefix_caching:
            return tokens, root, []
        return tokens, root, tokens.block_hashes(root, self.block_size)

    def _hit(
        self, tokens: HashedTokens, root: bytes, chain: list[bytes], max_hit: int | None
    ) -> tuple[list[Block], Block | None, int]:
        """The longest run of published blocks from block 0, to be shared; a cached partial one
        that goes on where it ends, to be copied; and the tokens of both.
        """
        size, most = self.block_size, _most(len(tokens), max_hit)
        found = list(map(self.pool.holders.get, chain[: most // size]))
        run = cast("list[Block]", found[: found.index(None)] if None in found else found)
        start = len(run) * size
        if not self.reuse_partial_blocks:
            return run, None, start
        rest = tuple(tokens[start : min(most, start + size - 1)])
        partial = self.pool.partials.longest(chain[len(run) - 1] if run else root, rest)
        if partial is None:
            return run, None, start
        return run, self.pool.holders[partial.digest], start + partial.num_tokens

    def _grow(self, table: _Table, num_tokens: int) -> list[int]:
        """Take the blocks that num_tokens need and publish those they fill; returns their ids."""
        missing = self._blocks_for(num_tokens) - len(table.blocks)
        new = [self.pool.take() for _ in range(missing)]
        table.blocks += new
        table.num_tokens = max(table.num_tokens, num_tokens)
        full = min(num_tokens // self.block_size, len(table.chain))
        for i in range(table.num_published, full):
            self.pool.publish(table.blocks[i], table.chain[i])
        table.num_published = max(table.num_published, full)
        return [block.id for block in new]

    def _find_lost(
        self, tokens: HashedTokens, root: bytes, chain: list[bytes], missed: range
    ) -> Lost:
        """What an admission computes again. missed: full blocks a hit could have covered.

        A full block counts as evicted if its content was, else a block counts as partial as far as
        some block that never filled reaches into it.
        """
        if not self.enable_prefix_caching:
            return NOTHING_LOST
        pool, size, full = self.pool, self.block_size, len(tokens) // self.block_size
        evicted, partial = [], []
        for i in range(missed.start, self._blocks_for(len(tokens))):
            start = i * size
            if i < full and chain[i] in pool.holders:
                continue
            if i < full and chain[i] in pool.evicted:
                if i in missed:
                    evicted.append(range(start, start + size))
            elif unfilled := self._unfilled.get(chain[i - 1] if i else root):
                own = tuple(tokens[start : start + size])
                common = max(common_prefix(other, own) for other in unfilled)
                partial.append(range(start, start + common))
        return Lost(tuple(evicted), tuple(partial))

    def _digests(self, token_ids: TokenIds, salt: bytes) -> Iterator[bytes]:
        """Hashes of a sequence's full blocks, and of the partial one that it ends with, if any."""
        tokens, root, chain = self._hashed(token_ids, salt)
        full = len(tokens) // self.block_size if chain else 0
        yield from chain[:full]
        rest = tuple(tokens[full * self.block_size :])
        found = self.pool.partials.longest(chain[full - 1] if full else root, rest)
        if found is not None and found.num_tokens == found.length:
            yield found.digest


def _most(num_tokens: int, max_hit: int | None) -> int:
    """Tokens a hit may cover: logits of the last one and from position max_hit on are wanted."""
    return max(0, num_tokens - 1 if max_hit is None else min(num_tokens - 1, max_hit))
