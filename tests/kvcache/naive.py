"""The laws of the KV cache, as plainly as possible: lists, scans, prefixes instead of hashes.

Slow on purpose; the real manager is compared with it call by call.
"""

from dataclasses import dataclass, field

from workbench.kvcache.manager import TokenList

Key = tuple[bytes, tuple[int, ...]]  # salt, all tokens up to the block's end


@dataclass(eq=False)
class NaiveBlock:
    content: Key | None = None  # under which it can be hit, whole, or from its start if not full
    users: list[int] = field(default_factory=list)
    used: int = 0  # when it was last released, or copied: counted in such events


@dataclass
class NaiveSequence:
    salt: bytes
    tokens: list[int]
    blocks: list[NaiveBlock]
    room: int
    offered: int  # full blocks that were offered for hits


class NaiveCache:
    """One answer, the same statistics and the same three counts for each call of the manager."""

    def __init__(
        self, num_blocks: int, block_size: int, caching: bool = True, reuse: bool = False
    ) -> None:
        self.size, self.caching, self.reuse = block_size, caching, reuse
        self.blocks = [NaiveBlock() for _ in range(num_blocks)]
        self.target = num_blocks
        self.unused = list(self.blocks)  # in the order of their last release or copy
        self.now = 0
        self.sequences: dict[int, NaiveSequence] = {}
        self.ever_evicted: set[Key] = set()
        self.unfilled: list[Key] = []  # computed tokens up to within a block
        names = "query_tokens hit_tokens readmit_query_tokens readmit_hit_tokens allocated evicted"
        names += " thrashed thrashed_readmit thrash_events duplicates copied"
        self.stats = dict.fromkeys(names.split(), 0)

    def counts(self) -> tuple[int, int, int]:
        active = sum(bool(b.users) for b in self.blocks)
        cached = sum(not b.users and b.content is not None for b in self.blocks)
        return active, cached, len(self.blocks) - active - cached

    def holder(self, key: Key) -> NaiveBlock | None:
        return next((b for b in self.blocks if b.content == key), None)

    def key(self, salt: bytes, tokens: list[int], block: int) -> Key:
        return salt, tuple(tokens[: (block + 1) * self.size])

    def most(self, tokens: list[int], max_hit: int | None) -> int:
        most = len(tokens) - 1
        return most if max_hit is None else min(most, max_hit)

    def coverable(self, tokens: list[int], max_hit: int | None) -> int:
        return self.most(tokens, max_hit) // self.size

    def hit(self, tokens: list[int], salt: bytes, max_hit: int | None) -> list[NaiveBlock]:
        found = []
        for i in range(self.coverable(tokens, max_hit)):
            block = self.holder(self.key(salt, tokens, i))
            if block is None:
                break
            found.append(block)
        return found

    def partial_after(self, tokens: list[int], salt: bytes, start: int, most: int):
        """(block that is not full and goes on at `start`, how many of tokens[start:most] it has).

        Of equally good ones the first in order that is not before the tokens, else the last.
        """
        asked = tuple(tokens[start : min(most, start + self.size - 1)])
        held = []
        for block in self.blocks:
            if self.reuse and block.content is not None and not block.users:
                own_salt, whole = block.content
                before = own_salt == salt and whole[:start] == tuple(tokens[:start])
                if before and start < len(whole) < start + self.size:
                    common = next(
                        (i for i, (a, b) in enumerate(zip(whole[start:], asked)) if a != b),
                        min(len(whole) - start, len(asked)),
                    )
                    held.append((common, whole[start:], block))
        best = max((common for common, _, _ in held), default=0)
        if best == 0:
            return None, 0
        alike = sorted(
            (partial, block.content, block) for common, partial, block in held if common == best
        )
        after = [entry for entry in alike if entry[0] >= asked]
        return (after[0] if after else alike[-1])[2], best

    def needed(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    def match(self, tokens: list[int], salt: bytes = b"", max_hit: int | None = None) -> int:
        return self.found(tokens, salt, max_hit)[3]

    def found(self, tokens: list[int], salt: bytes, max_hit: int | None):
        """(full blocks, block that goes on after them, tokens of it, tokens in all)."""
        hit = self.hit(tokens, salt, max_hit)
        start = len(hit) * self.size
        block, more = self.partial_after(tokens, salt, start, self.most(tokens, max_hit))
        return hit, block, more, start + more

    def allocate(
        self,
        seq_id,
        tokens,
        num_tokens=None,
        *,
        salt=b"",
        max_hit=None,
        keep_free=0,
        readmission=False,
    ) -> tuple[int, int, dict[int, str]] | None:
        """(cached tokens, blocks in the table, position -> why it is computed again)."""
        hit, partial, _, cached = self.found(tokens, salt, max_hit)
        spare = [b for b in self.blocks if not b.users and b not in hit]
        if self.needed(len(tokens)) - len(hit) + keep_free > len(spare):
            return None
        lost = self.lost(tokens, salt, len(hit), self.coverable(tokens, max_hit))
        thrashed = list(lost.values()).count("evicted") // self.size
        kind = "readmit_" if readmission else ""
        self.stats[kind + "query_tokens"] += len(tokens)
        self.stats[kind + "hit_tokens"] += cached
        self.stats["thrashed"] += thrashed
        self.stats["thrashed_readmit"] += thrashed if readmission else 0
        self.stats["thrash_events"] += 1 if thrashed else 0
        for block in hit:
            block.users.append(seq_id)
            if block in self.unused:
                self.unused.remove(block)
        room = len(tokens) if num_tokens is None else num_tokens
        self.sequences[seq_id] = NaiveSequence(salt, list(tokens), list(hit), 0, len(hit))
        if partial is not None:
            self.sequences[seq_id].blocks.append(self.copy(seq_id, partial))
        self.grow(seq_id, max(room, cached))
        return cached, len(self.sequences[seq_id].blocks), lost

    def copy(self, seq_id: int, partial: NaiveBlock) -> NaiveBlock:
        """It counts as used last; if it is the last there is, it is taken over."""
        self.used_last(partial)
        own = self.take(seq_id)
        self.stats["copied"] += own is not partial
        return own

    def used_last(self, block: NaiveBlock) -> None:
        self.unused.remove(block)
        self.left(block)

    def left(self, block: NaiveBlock) -> None:
        self.unused.append(block)
        if block.content is not None:
            self.now += 1
            block.used = self.now

    def lost(self, tokens, salt, num_hit, coverable) -> dict[int, str]:
        reasons: dict[int, str] = {}
        if not self.caching:
            return reasons
        for i in range(num_hit, self.needed(len(tokens))):
            start, end = i * self.size, (i + 1) * self.size
            key = self.key(salt, tokens, i)
            held_now = end <= len(tokens) and self.holder(key) is not None
            evicted = end <= len(tokens) and key in self.ever_evicted
            if evicted and not held_now and i < coverable:
                reasons |= dict.fromkeys(range(start, end), "evicted")
            if not evicted and not held_now:
                for position in range(start, min(end, len(tokens))):
                    if self.in_an_unfilled_block(salt, tuple(tokens[: position + 1]), start):
                        reasons[position] = "partial"
        return reasons

    def in_an_unfilled_block(self, salt: bytes, prefix: tuple[int, ...], start: int) -> bool:
        return any(
            s == salt
            and (len(t) - 1) // self.size * self.size == start
            and t[: len(prefix)] == prefix
            for s, t in self.unfilled
        )

    def extend(self, seq_id: int, tokens: list[int]) -> int | None:
        """Number of new blocks."""
        sequence = self.sequences[seq_id]
        missing = self.needed(len(tokens)) - len(sequence.blocks)
        if missing > len(self.unused):
            return None
        sequence.tokens = list(tokens) if len(tokens) > len(sequence.tokens) else sequence.tokens
        self.grow(seq_id, len(tokens))
        return max(missing, 0)

    def grow(self, seq_id: int, room: int) -> None:
        sequence = self.sequences[seq_id]
        while len(sequence.blocks) * self.size < room:
            sequence.blocks.append(self.take(seq_id))
        sequence.room = max(sequence.room, room)
        while self.caching and (sequence.offered + 1) * self.size <= room:
            key = self.key(sequence.salt, sequence.tokens, sequence.offered)
            if self.holder(key) is None:
                sequence.blocks[sequence.offered].content = key
            else:
                self.stats["duplicates"] += 1
            sequence.offered += 1

    def take(self, seq_id: int | None) -> NaiveBlock:
        block = next((b for b in self.unused if b.content is None), None) or self.victim()
        if block.content is not None:
            self.ever_evicted.add(block.content)
            self.stats["evicted"] += 1
            block.content = None
        self.stats["allocated"] += 1
        self.unused.remove(block)
        block.users.append(seq_id)
        return block

    def victim(self) -> NaiveBlock:
        """The least recently used, a partial block being four times as old as it is."""
        full = [b for b in self.unused if len(b.content[1]) % self.size == 0]
        partial = [b for b in self.unused if len(b.content[1]) % self.size]
        if partial and full:
            ages = [self.now - blocks[0].used for blocks in (partial, full)]
            return partial[0] if 4 * ages[0] >= ages[1] else full[0]
        return (partial or full)[0]

    def apply(self) -> None:
        """Blocks without content go first, then the least recently released, never one in use."""
        while len(self.blocks) < self.target:
            self.blocks.append(NaiveBlock())
            self.unused.append(self.blocks[-1])
        while len(self.blocks) > self.target and self.unused:
            block = self.take(None)
            self.stats["allocated"] -= 1
            self.blocks.remove(block)

    def free(self, seq_id: int, num_computed: int | None = None, *, token_ids=None) -> None:
        sequence = self.sequences.pop(seq_id)
        computed = sequence.room if num_computed is None else num_computed
        for i, block in enumerate(sequence.blocks):
            if (i + 1) * self.size > computed:
                block.content = None
        if token_ids is not None and computed % self.size:
            self.unfilled.append((sequence.salt, tuple(token_ids[:computed])))
            block = sequence.blocks[computed // self.size]
            if self.reuse and block.users == [seq_id]:
                self.leave_partial(block, *self.unfilled[-1])
        for block in reversed(sequence.blocks):
            block.users.remove(seq_id)
            if not block.users:
                self.left(block)

    def forget(self, line: list[int], kept: list[int], salt: bytes) -> int:
        """How many cached blocks of the line were given up that are none of the kept one."""
        dropped = [b for b in self.blocks_of(line, salt) if b not in self.blocks_of(kept, salt)]
        unused = [block for block in dropped if not block.users]
        for block in unused:
            if len(block.content[1]) % self.size == 0:
                self.ever_evicted.add(block.content)
            block.content = None
        return len(unused)

    def blocks_of(self, line: list[int], salt: bytes) -> list[NaiveBlock]:
        """Full blocks of the line, and the partial block that it goes on with."""
        whole = len(line) // self.size
        found = [self.holder(self.key(salt, line, i)) for i in range(whole)] if self.caching else []
        partial, common = self.partial_after(line, salt, whole * self.size, len(line))
        is_its = partial is not None and common == len(partial.content[1]) - whole * self.size
        return [block for block in [*found, partial if is_its else None] if block is not None]

    def leave_partial(self, block: NaiveBlock, salt: bytes, tokens: tuple[int, ...]) -> None:
        """Of two partial blocks one of which begins the other, the longer stays."""
        start = len(tokens) // self.size * self.size
        other, common = self.partial_after(list(tokens), salt, start, len(tokens))
        if other is not None and common == len(tokens) - start:
            self.used_last(other)
            return
        if other is not None and common == len(other.content[1]) - start:
            other.content = None
            self.used_last(other)
        block.content = (salt, tokens)


class ComparedCache:
    """A manager and the naive cache, given the same calls; any difference is an AssertionError."""

    def __init__(self, manager) -> None:
        self.manager = manager
        self.naive = NaiveCache(
            manager.num_blocks,
            manager.block_size,
            manager.enable_prefix_caching,
            manager.reuse_partial_blocks,
        )
        self.carried: dict[int, TokenList] = {}
        self.lost: dict[int, dict[int, str]] = {}  # of the sequences that hold blocks
        self.hits: dict[int, int] = {}  # of their last admission

    def __getattr__(self, name):  # sizes, counts and statistics are the manager's
        return getattr(self.manager, name)

    def own(self, seq_id, tokens):
        """Every second sequence carries its hashes, of its whole length; the others are lists."""
        if seq_id % 2:
            return list(tokens)
        carried = self.carried.setdefault(seq_id, TokenList([]))
        carried += tokens[len(carried) :]
        return carried if len(carried) == len(tokens) else list(tokens)

    def match(self, tokens, **options):
        answer = self.manager.match(tokens, **options)
        assert answer == self.naive.match(tokens, **options)
        return answer

    def allocate(self, seq_id, tokens, num_tokens=None, **options):
        self.carried.pop(seq_id, None)
        own = self.own(seq_id, tokens)
        answer = self.manager.allocate(seq_id, own, num_tokens, **options)
        expected = self.naive.allocate(seq_id, tokens, num_tokens, **options)
        self.compare()
        assert (answer is None) == (expected is None)
        if answer is not None:
            cached, num_blocks, self.lost[seq_id] = expected
            self.hits[seq_id] = cached
            assert (answer.num_cached_tokens, len(answer.block_ids)) == (cached, num_blocks)
            spans = [(r, "evicted") for r in answer.lost.evicted]
            spans += [(r, "partial") for r in answer.lost.partial]
            lost = {position: reason for span, reason in spans for position in span}
            assert lost == self.lost[seq_id]
            assert answer.block_ids == self.manager.block_table(seq_id)
        return answer

    def extend(self, seq_id, tokens):
        before = self.manager.block_table(seq_id)
        answer = self.manager.extend(seq_id, self.own(seq_id, tokens))
        expected = self.naive.extend(seq_id, tokens)
        self.compare()
        assert (None if answer is None else len(answer)) == expected
        assert self.manager.block_table(seq_id) == before + (answer or [])
        return answer

    def free(self, seq_id, num_computed=None, **options):
        self.manager.free(seq_id, num_computed, **options)
        self.naive.free(seq_id, num_computed, **options)
        self.lost.pop(seq_id)
        self.compare()

    def forget(self, line, kept, salt) -> None:
        answer = self.manager.forget([line], [kept], salt=salt)
        assert answer == self.naive.forget(line, kept, salt)
        self.compare()

    def apply(self) -> None:
        assert not self.manager.apply(), "no block is moved in a cache of its own"
        self.naive.target = self.manager.target
        self.naive.apply()
        self.compare()

    def compare(self) -> None:
        manager, naive = self.manager, self.naive
        manager.check()
        counts = (manager.num_active, manager.num_cached, manager.num_free)
        assert counts == naive.counts()
        assert sum(counts) == manager.num_blocks
        assert {name: getattr(manager.stats, name) for name in naive.stats} == naive.stats
