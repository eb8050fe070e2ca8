"""The pages one model holds: which of their blocks are vacant, which pages have no live block.

A vacant block has neither reference nor content; a live one is referenced. What it does not do:
know hashes or evict (leases.py), or say who may hold a page (lending.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from workbench.kvcache.pool import Block


class HeldPages:
    """Pages of `per_page` blocks. Block b lies in page b // per_page.

    idle: pages without a live block, least recently used first, with the tick of their last use.
    last_used: [pages] when a block of theirs was last released, or hit where it is. num_vacant:
    blocks, those of closed pages not counted.
    """

    def __init__(self, per_page: int, num_pages: int) -> None:
        self.per_page = per_page
        self.idle: OrderedDict[int, int] = OrderedDict()
        self.last_used = [0] * num_pages
        self.num_vacant = 0
        self._vacant: dict[int, list[Block]] = {}  # page -> its vacant blocks
        self._by_vacant: list[dict[int, None]] = [{} for _ in range(per_page + 1)]
        self._live = [0] * num_pages
        self._closed: set[int] = set()

    def __len__(self) -> int:
        return len(self._vacant)

    def __contains__(self, page: int) -> bool:
        return page in self._vacant

    def __iter__(self) -> Iterator[int]:
        return iter(self._vacant)

    def live(self, page: int) -> int:
        """Referenced blocks in a page."""
        return self._live[page]

    def emptiest(self, count: int) -> list[int]:
        """So many pages, those with fewest live blocks first."""
        return sorted(self._vacant, key=self._live.__getitem__)[:count]

    def receive(self, page: int, blocks: list[Block]) -> Block:
        """A page more, without content; answers its first block, the others are vacant."""
        vacant = blocks[:0:-1]
        self._vacant[page] = vacant
        if vacant:
            self._by_vacant[len(vacant)][page] = None
            self.num_vacant += len(vacant)
        return blocks[0]

    def pick(self) -> Block:
        """A block of the fullest open page that has a vacant one, which it is no more.

        There must be one: `num_vacant` counts them.
        """
        pages = next(filter(None, self._by_vacant))
        page = next(iter(pages))
        del pages[page]
        vacant = self._vacant[page]
        block = vacant.pop()
        if vacant:
            self._by_vacant[len(vacant)][page] = None
        self.num_vacant -= 1
        return block

    def put(self, block: Block) -> bool:
        """A block became vacant. True if it was its page's last: then the page is to be dropped."""
        page = block.id // self.per_page
        vacant = self._vacant[page]
        if len(vacant) + 1 == self.per_page:
            return True
        if page not in self._closed:
            self._by_vacant[len(vacant)].pop(page, None)
            self._by_vacant[len(vacant) + 1][page] = None
            self.num_vacant += 1
        vacant.append(block)
        return False

    def close(self, pages: Collection[int]) -> None:
        """Nothing is picked from these pages until they are dropped."""
        self._closed.update(pages)
        for page in pages:
            if vacant := len(self._vacant[page]):
                del self._by_vacant[vacant][page]
                self.num_vacant -= vacant

    def occupy(self, page: int) -> None:
        """One live block more."""
        self._live[page] += 1
        if self._live[page] == 1:
            self.idle.pop(page, None)

    def leave(self, page: int) -> None:
        """One live block less, which goes elsewhere."""
        self._live[page] -= 1

    def release(self, page: int, tick: int) -> None:
        """One live block less, used until now; the last leaves the page idle."""
        self._live[page] -= 1
        self.last_used[page] = tick
        if self._live[page] == 0:
            self.idle[page] = tick

    def touch(self, page: int, tick: int) -> None:
        """What is cached in this page was used."""
        self.last_used[page] = tick
        if page in self.idle:
            self.idle[page] = tick
            self.idle.move_to_end(page)

    def drop(self, pages: Collection[int]) -> None:
        """These pages are held no more; nothing in them is live."""
        for page in pages:
            assert self._live[page] == 0, f"page {page} is dropped with live blocks"
            vacant = self._vacant.pop(page)
            if vacant and page not in self._closed:
                del self._by_vacant[len(vacant)][page]
                self.num_vacant -= len(vacant)
            self.idle.pop(page, None)
        self._closed.difference_update(pages)

    def check(self, blocks: list[Block]) -> None:
        """Raise unless the lists say what the blocks say. blocks: of all pages."""
        assert not self._closed, "a page was closed and not dropped"
        live = [0] * len(self._live)
        for block in blocks:
            live[block.id // self.per_page] += block.ref_count > 0
        assert live == self._live, "live blocks of a page are counted wrongly"
        assert all(page in self for page, count in enumerate(live) if count), "live, but not held"
        assert set(self.idle) == {page for page in self if not live[page]}, "wrongly (not) idle"
        assert list(self.idle.values()) == sorted(self.idle.values()), "idle pages out of order"
        for page, vacant in self._vacant.items():
            assert len(vacant) < self.per_page, f"page {page} is held without content"
            assert all(b.id // self.per_page == page for b in vacant), "vacant in another page"
            sizes = [n for n, pages in enumerate(self._by_vacant) if page in pages]
            assert sizes == [len(vacant)] * bool(vacant), f"page {page} is filed wrongly"
        assert self.num_vacant == sum(map(len, self._vacant.values())), "vacant blocks miscounted"
        assert set().union(*self._by_vacant) <= set(self._vacant), "a page is open but not held"

    def vacant_ids(self) -> set[int]:
        """Ids of all vacant blocks."""
        return {block.id for vacant in self._vacant.values() for block in vacant}
