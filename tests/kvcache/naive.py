"""The laws of the KV cache, as plainly as possible: lists, scans, prefixes instead of hashes.

Slow on purpose; the real manager is compared with it call by call.
"""

from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

from workbench.kvcache.manager import TokenList

Key = tuple[bytes, tuple[int, ...]]  # salt, all tokens up to the block's end


@dataclass(eq=False)
class NaiveBlock:
    content: Key | None = None  # under which it can be hit, whole, or from its start if not full
    users: list[int | None] = field(default_factory=list)
    used: int = 0  # when it was last released, or copied: counted in such events


@dataclass
class NaiveSequence:
    salt: bytes
    tokens: list[int]
    blocks: list[NaiveBlock]
    offered: int  # full blocks that were offered for hits
    room: int = 0


class NaiveCache:
    """One answer, the same statistics and the same three counts for each call of the manager."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool, reuse: bool) -> None:
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

    def holder(self, salt: bytes, tokens: list[int], block: int) -> NaiveBlock | None:
        key = salt, tuple(tokens[: (block + 1) * self.size])
        return next((b for b in self.blocks if b.content == key), None)

    def is_partial(self, block: NaiveBlock) -> bool:
        return len(block.content[1]) % self.size > 0

    def needed(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    def most(self, tokens: list[int], max_hit: int | None) -> int:
        return len(tokens) - 1 if max_hit is None else min(len(tokens) - 1, max_hit)

    def found(self, tokens: list[int], salt: bytes, max_hit: int | None):
        """(full blocks that are hit, block that goes on after them, tokens in all)."""
        hit, most = [], self.most(tokens, max_hit)
        for i in range(most // self.size):
            if (block := self.holder(salt, tokens, i)) is None:
                break
            hit.append(block)
        start = len(hit) * self.size
        partial, more = self.partial_after(tokens, salt, start, most)
        return hit, partial, start + more

    def partial_after(self, tokens: list[int], salt: bytes, start: int, most: int):
        """(block that is not full and goes on at `start`, how many of tokens[start:most] it has).

        Of equally good ones the first in order that is not before the tokens, else the last.
        """
        asked, held = tuple(tokens[start : min(most, start + self.size - 1)]), []
        for block in self.blocks if self.reuse else ():
            if block.content is not None and not block.users and self.is_partial(block):
                own_salt, whole = block.content
                if (own_salt, whole[:start]) == (salt, tuple(tokens[:start])):
                    if start < len(whole) < start + self.size:
                        common = sum(takewhile(bool, map(eq, whole[start:], asked)))
                        held.append((common, whole[start:], id(block), block))
        best = max((common for common, *_ in held), default=0)
        alike = sorted(entry for entry in held if entry[0] == best > 0)
        after = [entry for entry in alike if entry[1] >= asked]
        return ((after or alike[-1:])[0][3] if alike else None), best

    def match(self, tokens: list[int], salt: bytes = b"", max_hit: int | None = None) -> int:
        return self.found(tokens, salt, max_hit)[2]

    def allocate(
        self, seq_id, tokens, num_tokens=None, *, salt=b"", max_hit=None, keep_free=0,
        readmission=False,
    ) -> tuple[int, int, dict[int, str]] | None:  # fmt: skip
        """(cached tokens, blocks in the table, position -> why it is computed again)."""
        hit, partial, cached = self.found(tokens, salt, max_hit)
        spare = [b for b in self.blocks if not b.users and b not in hit]
        if self.needed(len(tokens)) - len(hit) + keep_free > len(spare):
            return None
        lost = self.lost(tokens, salt, len(hit), self.most(tokens, max_hit) // self.size)
        thrashed = list(lost.values()).count("evicted") // self.size
        kind = "readmit_" if readmission else ""
        self.stats[kind + "query_tokens"] += len(tokens)
        self.stats[kind + "hit_tokens"] += cached
        self.stats["thrashed"] += thrashed
        self.stats["thrashed_readmit"] += thrashed if readmission else 0
        self.stats["thrash_events"] += thrashed > 0
        for block in hit:
            block.users.append(seq_id)
            if block in self.unused:
                self.unused.remove(block)
        blocks = list(hit)
        self.sequences[seq_id] = NaiveSequence(salt, list(tokens), blocks, len(hit))
        if partial is not None:  # copied: it counts as used last; the last there is is taken over
            self.use(partial)
            blocks.append(self.take(seq_id))
            self.stats["copied"] += blocks[-1] is not partial
        self.grow(seq_id, max(len(tokens) if num_tokens is None else num_tokens, cached))
        return cached, len(blocks), lost

    def use(self, block: NaiveBlock) -> None:
        """An unused block is the one used last."""
        if block in self.unused:
            self.unused.remove(block)
        self.unused.append(block)
        if block.content is not None:
            self.now = block.used = self.now + 1

    def lost(self, tokens, salt, num_hit, coverable) -> dict[int, str]:
        reasons: dict[int, str] = {}
        for i in range(num_hit, self.needed(len(tokens))) if self.caching else ():
            start, end = i * self.size, (i + 1) * self.size
            full = end <= len(tokens)
            if full and self.holder(salt, tokens, i) is not None:
                continue
            if full and (salt, tuple(tokens[:end])) in self.ever_evicted:
                if i < coverable:
                    reasons |= dict.fromkeys(range(start, end), "evicted")
                continue
            for position in range(start, min(end, len(tokens))):
                known = salt, tuple(tokens[: position + 1])
                if any(
                    (len(t) - 1) // self.size == i and (s, t[: position + 1]) == known
                    for s, t in self.unfilled
                ):
                    reasons[position] = "partial"
        return reasons

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
            if self.holder(sequence.salt, sequence.tokens, sequence.offered) is None:
                tokens = tuple(sequence.tokens[: (sequence.offered + 1) * self.size])
                sequence.blocks[sequence.offered].content = sequence.salt, tokens
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
        oldest = [next((b for b in self.unused if self.is_partial(b) == k), None) for k in (1, 0)]
        if None in oldest:
            return oldest[0] or oldest[1]
        ages = [self.now - block.used for block in oldest]
        return oldest[0] if 4 * ages[0] >= ages[1] else oldest[1]

    def apply(self) -> None:
        """Blocks without content go first, then the least recently released, never one in use."""
        while len(self.blocks) < self.target:
            self.blocks.append(NaiveBlock())
            self.unused.append(self.blocks[-1])
        while len(self.blocks) > self.target and self.unused:
            self.blocks.remove(self.take(None))
            self.stats["allocated"] -= 1

    def free(self, seq_id: int, num_computed: int | None = None, *, token_ids=None) -> None:
        sequence = self.sequences.pop(seq_id)
        computed = sequence.room if num_computed is None else num_computed
        for block in sequence.blocks[computed // self.size :]:
            block.content = None
        if token_ids is not None and computed % self.size:
            self.unfilled.append((sequence.salt, tuple(token_ids[:computed])))
            block = sequence.blocks[computed // self.size]
            if self.reuse and block.users == [seq_id]:
                self.leave_partial(block, *self.unfilled[-1])
        for block in reversed(sequence.blocks):
            block.users.remove(seq_id)
            if not block.users:
                self.use(block)

    def leave_partial(self, block: NaiveBlock, salt: bytes, tokens: tuple[int, ...]) -> None:
        """Of two partial blocks one of which begins the other, the longer stays."""
        start = len(tokens) // self.size * self.size
        other, common = self.partial_after(list(tokens), salt, start, len(tokens))
        if other is not None and common == len(tokens) - start:
            self.use(other)
            return
        if other is not None and common == len(other.content[1]) - start:
            other.content = None
            self.use(other)
        block.content = (salt, tokens)

    def forget(self, line: list[int], kept: list[int], salt: bytes) -> int:
        """How many cached blocks of the line were given up that are none of the kept one."""
        needed = self.blocks_of(kept, salt)
        unused = [b for b in self.blocks_of(line, salt) if b not in needed and not b.users]
        for block in unused:
            if not self.is_partial(block):
                self.ever_evicted.add(block.content)
            block.content = None
        return len(unused)

    def blocks_of(self, line: list[int], salt: bytes) -> list[NaiveBlock]:
        """Full blocks of the line, and the partial block that it goes on with."""
        whole = len(line) // self.size
        found = [self.holder(salt, line, i) for i in range(whole)] if self.caching else []
        partial, common = self.partial_after(line, salt, whole * self.size, len(line))
        if partial is not None and common == len(partial.content[1]) - whole * self.size:
            found.append(partial)
        return [block for block in found if block is not None]


class ComparedCache:
    """A manager and the naive cache, given the same calls; any difference is an AssertionError."""

    def __init__(self, manager) -> None:
        self.manager = manager
        kind = manager.block_size, manager.enable_prefix_caching, manager.reuse_partial_blocks
        self.naive = NaiveCache(manager.num_blocks, *kind)
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
        answer = self.manager.allocate(seq_id, self.own(seq_id, tokens), num_tokens, **options)
        expected = self.naive.allocate(seq_id, tokens, num_tokens, **options)
        self.compare()
        assert (answer is None) == (expected is None)
        if answer is not None:
            self.hits[seq_id], num_blocks, self.lost[seq_id] = expected
            assert (answer.num_cached_tokens, len(answer.block_ids)) == (expected[0], num_blocks)
            spans = {"evicted": answer.lost.evicted, "partial": answer.lost.partial}
            lost = {p: why for why, found in spans.items() for span in found for p in span}
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
        self.manager.check()
        counts = (self.manager.num_active, self.manager.num_cached, self.manager.num_free)
        assert counts == self.naive.counts()
        assert sum(counts) == self.manager.num_blocks
        stats = {name: getattr(self.manager.stats, name) for name in self.naive.stats}
        assert stats == self.naive.stats
