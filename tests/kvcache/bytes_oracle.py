"""Memory as plainly as possible: what each block of an arena holds, written and moved for real.

Every read is compared with what ought to be there, so a stale hash, a lost move, or bytes of
another model that nobody cleared are seen at once.
"""

from dataclasses import dataclass

from workbench.kvcache.arena import KVArena
from workbench.kvcache.manager import KVCacheManager

Content = tuple[bytes, tuple[int, ...]]  # salt, all tokens up to what is written in the block


@dataclass
class Running:
    salt: bytes
    tokens: list[int]
    room: int  # tokens the cache made room for
    stored: int  # tokens whose KV is in memory


class BytesOracle:
    """One arena, its caches and the bytes beneath; `store` is the forward pass of a step."""

    def __init__(self, arena: KVArena, block_size: int, reuse: bool = False) -> None:
        self.arena, self.size = arena, block_size
        self.caches: dict[str, KVCacheManager] = {}
        self.running: dict[str, dict[int, Running]] = {}
        for name in arena.models:
            self.caches[name] = arena.cache(name, block_size, reuse_partial_blocks=reuse)
            self.running[name] = {}
        # page -> model that wrote it, and block id -> content
        self.pages: dict[int, tuple[str, dict[int, Content]]] = {}
        self.copied = 0

    def read(self, model: str, block: int) -> Content | None:
        writer, held = self.pages.get(block // self.per_page(model), (model, {}))
        assert writer == model, "a block is read in a page with another model's bytes"
        return held.get(block)

    def write(self, model: str, block: int, content: Content) -> None:
        writer, held = self.pages.setdefault(block // self.per_page(model), (model, {}))
        assert writer == model, "a page was leased to another model and not cleared"
        held[block] = content

    def per_page(self, model: str) -> int:
        return self.arena.packing(model).blocks

    def store(self) -> None:
        """What is moved is read, pages are cleared, then all is written; then all is read back."""
        moves = {model: cache.take_moves() for model, cache in self.caches.items()}
        read = [(m, to, self.read(m, at)) for m, pairs in moves.items() for at, to in pairs]
        assert len({(model, to) for model, to, _ in read}) == len(read), "two moves to one block"
        for page in self.arena.take_retyped():
            self.pages.pop(page, None)
        for model, to, content in read:
            if content is not None:
                self.write(model, to, content)
        self.copied += len(read)
        for step in (self.compute, self.verify):
            for model, running in self.running.items():
                for seq_id, sequence in running.items():
                    step(model, seq_id, sequence)

    def compute(self, model: str, seq_id: int, sequence: Running) -> None:
        """The tokens that it lacks; those before them in the same block must be there."""
        table = self.caches[model].block_table(seq_id)
        for i in range(sequence.stored // self.size, -(-sequence.room // self.size)):
            if i * self.size < sequence.stored:
                before = self.content(sequence, i, sequence.stored)
                assert self.holds(model, table[i], before), "the start of a block is lost"
            self.write(model, table[i], self.content(sequence, i, sequence.room))
        sequence.stored = sequence.room

    def verify(self, model: str, seq_id: int, sequence: Running) -> None:
        for i, block in enumerate(self.caches[model].block_table(seq_id)):
            expected = self.content(sequence, i, sequence.room)
            assert self.holds(model, block, expected), "not what was written"

    def holds(self, model: str, block: int, expected: Content) -> bool:
        """Whether the block starts with it; a copied partial block may hold more."""
        salt, tokens = self.read(model, block) or (b"", ())
        return (salt, tokens[: len(expected[1])]) == expected

    def content(self, sequence: Running, block: int, num_tokens: int) -> Content:
        end = min(num_tokens, (block + 1) * self.size)
        return sequence.salt, tuple(sequence.tokens[:end])
