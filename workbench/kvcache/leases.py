"""The block pool of one model in an arena: its blocks come and go with the pages they lie in.

Free blocks are taken from the fullest page, and pages are given up whole, the one used least
recently first: victims and pages are chosen together, so that few pages are held half empty. A page
without content goes back at once. What it does not do: say which model may hold how many pages
(lending.py, policies.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from workbench.kvcache.held_pages import HeldPages
from workbench.kvcache.pages import BlockShape
from workbench.kvcache.policies import Grant
from workbench.kvcache.pool import Block, BlockPool, check_blocks
from workbench.kvcache.resizing import ResizeAnswer
from workbench.kvcache.shadow import ShadowList, TailHits


class Landlord(Protocol):
    """Whom a pool asks for pages: the arena."""

    def leasable(self, pool: LeasedPool) -> int:
        """Pages it could have now, without anybody moving a live block."""
        ...

    def part_of(self, pool: LeasedPool) -> int:
        """Pages of the split that are its own."""
        ...

    def lease(self, pool: LeasedPool) -> int | None:
        """A page, or None: then the pool gives up a block of its own."""
        ...

    def take_back(self, pool: LeasedPool, pages: list[int]) -> None:
        """Pages without content."""
        ...

    def tick(self) -> int:
        """A number larger than all before: the order in which pages were used last."""
        ...

    def resize(self, pool: LeasedPool, num_blocks: int) -> ResizeAnswer:
        """See KVCacheManager.resize."""
        ...

    def apply(self, pool: LeasedPool) -> bool:
        """See KVCacheManager.apply."""
        ...


class LeasedPool(BlockPool):
    """Blocks page * per_page ... of every page; those of the pages it holds can be used.

    A held page has content: a live (referenced) or a cached block.
    """

    def __init__(
        self, shape: BlockShape, per_page: int, num_pages: int, shadow_pages: int, arena: Landlord
    ) -> None:
        super().__init__(num_pages * per_page)
        self._free.clear()
        self.shape, self.per_page, self._arena = shape, per_page, arena
        self.floor = shape.floor_blocks
        self.floor_pages = -(-shape.floor_blocks // per_page)
        self.shadow, self.shadow_pages = ShadowList(shadow_pages * per_page), shadow_pages
        self.tail = TailHits()
        self.readmissions = 0  # of requests that had been preempted
        self.grant = Grant(self.floor_pages, num_pages, num_pages)
        self.held = 0  # pages
        self.wanted = 0  # pages it would hold had its last admission not been refused
        self._pages = HeldPages(per_page, num_pages)
        self._num_live = 0

    # -- state --

    @property
    def pages(self) -> Iterator[int]:
        """The pages that it holds."""
        return iter(self._pages)

    @property
    def idle(self) -> OrderedDict[int, int]:
        """Held pages without a live block, least recently used first, with their last tick."""
        return self._pages.idle

    @property
    def next_evicted_used(self) -> int | None:
        """When the page was used last whose cached block it would evict next."""
        block = self.index.next_evicted
        return None if block is None else self._pages.last_used[block // self.per_page]

    @property
    def num_blocks(self) -> int:
        """Blocks of the pages that it holds or could have now."""
        return (self.held + self._arena.leasable(self)) * self.per_page

    @property
    def room(self) -> int:
        """Blocks of its part of the split, whatever is lent or taken meanwhile."""
        return self._arena.part_of(self) * self.per_page

    @property
    def num_free(self) -> int:
        """Blocks without content, those of pages it could have included."""
        return self._pages.num_vacant + self._arena.leasable(self) * self.per_page

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free and cached ones."""
        return self.num_free + self.index.num_parked

    @property
    def num_active(self) -> int:
        """Blocks that a running sequence uses."""
        return self._num_live

    # -- blocks --

    def take(self) -> Block:
        """A private block with one reference: of a held page, a new one, or an evicted one."""
        block = self._pages.pick() if self._pages.num_vacant else self._of_new_page()
        self.stats.allocated += 1
        block.ref_count = 1
        self._pages.occupy(block.id // self.per_page)
        self._num_live += 1
        return block

    def share(self, block: Block) -> None:
        """One more reference to a block that was hit."""
        if block.ref_count == 0:
            page = block.id // self.per_page
            self.tail.note(self._pages.last_used[page])
            self.index.unpark(block.id)
            self._pages.occupy(page)
            self._num_live += 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One reference less; the last one may leave the page idle, or without content."""
        assert block.ref_count > 0, f"block {block.id} is released more often than taken"
        block.ref_count -= 1
        if block.ref_count:
            return
        self._num_live -= 1
        self._pages.release(block.id // self.per_page, self._arena.tick())
        if block.digest is None:
            self._vacated(block)
        else:
            self.index.park(block.digest, block.id)

    def touch(self, block: Block) -> None:
        """A cached block was hit where it is; its page was used, too."""
        super().touch(block)
        self._pages.touch(block.id // self.per_page, self._arena.tick())

    def _of_new_page(self) -> Block:
        """The first block of a page more, or an evicted one."""
        page = self._arena.lease(self)
        if page is None:
            return self._evict()
        self.held += 1
        return self._pages.receive(page, self._blocks_of(page))

    def _vacated(self, block: Block) -> None:
        """A block lost its content; a page that lost all goes back."""
        if self._pages.put(block):
            self._hand_back([block.id // self.per_page])

    def _hand_back(self, pages: list[int]) -> None:
        self._pages.drop(pages)
        self.held -= len(pages)
        self.copies.forget(pages, self.per_page)
        self._arena.take_back(self, pages)

    def _evict(self) -> Block:
        block = self.blocks[self.index.evict()]
        self._forget([block])
        return block

    def _forget(self, blocks: list[Block]) -> None:
        """Their contents were given up."""
        digests = [block.digest for block in blocks if block.digest]
        assert len(digests) == len(blocks), "a block without content is evicted"
        self.shadow.note(digests)
        for block in blocks:
            block.digest = None
        self.stats.evicted += len(blocks)

    # -- pages --

    def give_up_idle(self, count: int = 1) -> None:
        """Hand back the idle pages used least recently; their cached blocks are evicted."""
        pages = list(islice(self.idle, count))
        self._evict_all([block for block in self._blocks_in(pages) if block.digest])
        self._hand_back(pages)

    def _evict_all(self, cached: list[Block]) -> None:
        """Many at once: a re-split evicts thousands. They are in no list then."""
        self.index.give_up([block.id for block in cached])
        self._forget(cached)

    def _blocks_of(self, page: int) -> list[Block]:
        return self.blocks[page * self.per_page : (page + 1) * self.per_page]

    def _blocks_in(self, pages: Iterable[int]) -> Iterator[Block]:
        size = self.per_page
        return (b for page in pages for b in self.blocks[page * size : (page + 1) * size])

    def empty_pages(self, count: int) -> bool:
        """Hand back up to `count` pages by moving what is live out of the emptiest.

        Between steps only. Whether a live block was moved, and so has another id.
        """
        pages = self._emptiest(count)
        idle = [page for page in pages if not self._pages.live(page)]
        victims = pages[len(idle) :]
        live, cached = [], []
        for block in self._blocks_in(pages):
            if block.ref_count:
                live.append(block)
            elif block.digest:
                cached.append(block)
        self._evict_all(cached)
        self._hand_back(idle)
        self._pages.close(victims)
        for block, other in zip(live, self._places(len(live))):
            self._move(block, other)
        self._hand_back(victims)
        return bool(victims)

    def _emptiest(self, count: int) -> list[int]:
        """Pages with fewest live blocks, as many as the other pages have room for the blocks of."""
        room = (self.held * self.per_page - self._num_live) // self.per_page
        return self._pages.emptiest(min(count, room))

    def _places(self, count: int) -> list[Block]:
        """Blocks of open pages, without content: vacant ones, then evicted ones."""
        vacant = [self._pages.pick() for _ in range(min(count, self._pages.num_vacant))]
        evicted = [self.blocks[i] for i in self.index.evict_all(count - len(vacant))]
        self._forget(evicted)
        return vacant + evicted

    def _move(self, block: Block, other: Block) -> None:
        """A live block of a closed page changes places, and ids, with one without content."""
        source, destination = block.id, other.id
        self.blocks[source], self.blocks[destination] = other, block
        block.id, other.id = destination, source
        if block.digest is not None:
            self.index.move(block.digest, destination)
        self._pages.occupy(destination // self.per_page)
        self._pages.leave(source // self.per_page)
        self.copies.move(source, destination)
        self.stats.copied += 1

    # -- the arena's --

    def mark_tail(self) -> None:
        """As many pages fewer would cost what is hit in these, once what it lacks is gone."""
        lacking = max(0, self.grant.keep - self.held)
        self.tail.mark(self.idle.values(), self.shadow_pages - lacking)

    def accept(self, grant: Grant) -> None:
        """Pages it may hold from now on."""
        self.grant = grant
        self.target = grant.target * self.per_page

    def resize(self, num_blocks: int) -> ResizeAnswer:
        """Ask the arena for so many blocks."""
        return self._arena.resize(self, num_blocks)

    def settle(self) -> bool:
        """Between steps: the arena moves pages towards what is granted."""
        return self._arena.apply(self)

    def clear(self) -> None:
        """No block has content; nothing may be referenced."""
        assert self._num_live == 0
        self._hand_back(list(self._pages))
        self.index.clear()
        for block in self.blocks:
            block.digest = None

    def check(self, references: dict[int, int]) -> None:
        """Raise unless blocks, pages and counts agree."""
        held = {block.id for block in self._blocks_in(self._pages)}
        vacant = self._pages.vacant_ids()
        elsewhere = {block.id for block in self.blocks} - held
        check_blocks(self.blocks, self.index, references, vacant | elsewhere)
        self._pages.check(self.blocks)
        live = sum(block.ref_count > 0 for block in self.blocks)
        assert self.num_active == live, "a block leaked"
        total = self.num_active + self.num_cached + self.num_free
        assert total == self.num_blocks, "active + cached + free differs from the total"
