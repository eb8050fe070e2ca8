"""One sequence's block table, with the hashes of its full blocks. The manager changes it."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.kvcache.pool import Block


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks in position order; room was made for num_tokens tokens.

    root: the parent of block 0. chain: hashes of the full blocks known so far, which may be more
    than there is room for; the first num_published were offered to the index.
    """

    root: bytes
    blocks: list[Block]
    chain: list[bytes]
    num_published: int
    num_tokens: int

    def parent_of(self, block: int) -> bytes:
        """The hash of the block before this one."""
        return self.chain[block - 1] if block else self.root

    def check(self, name: str, block_size: int) -> None:
        """Raise unless the table has room for its tokens and only full blocks can be hit."""
        ids = {block.id for block in self.blocks}
        assert len(ids) == len(self.blocks), f"{name}: a block is twice in its table"
        room = len(self.blocks) * block_size
        assert room - block_size < self.num_tokens <= room, f"{name}: room and table differ"
        assert self.num_published * block_size <= self.num_tokens, f"{name}: published too much"
        for i, block in enumerate(self.blocks):
            if block.digest is not None:
                assert i < self.num_published, f"{name}: block {i} can be hit but is not full"
                assert block.digest == self.chain[i], f"{name}: block {i} holds another prefix"
