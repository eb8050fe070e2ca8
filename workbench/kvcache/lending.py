"""Which model holds which page of an arena, and whose page goes next: the rules between models.

A page is free or held by one model. Every model can come to its floor at any time: so many free
pages are never lent to another. Above that, `keep` protects a model's pages and `limit` bounds
them (policies.Grant). What it does not do: decide grants, or know blocks (leases.py).
"""

from __future__ import annotations

from collections import deque
from itertools import count

from workbench.kvcache.leases import LeasedPool


class Lender:
    """The pages and their holders. Invariant: free pages cover what models lack of their floors."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.pools: list[LeasedPool] = []
        self._free = deque(range(num_pages))
        self._holder: list[LeasedPool | None] = [None] * num_pages
        self._wrote: list[LeasedPool | None] = [None] * num_pages  # whose bytes lie in it
        self._retyped: dict[int, None] = {}
        self.tick = count(1).__next__  # a number larger than all before

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def leasable(self, pool: LeasedPool) -> int:
        """Pages a model could have now: free ones, and what others hold idle above their keep."""
        supply = len(self._free)
        for other in self.pools:
            if other is not pool:
                held = other.held
                if held < other.floor_pages:
                    supply -= other.floor_pages - held
                elif held > other.grant.keep:
                    supply += min(held - other.grant.keep, len(other.idle))
        return max(0, min(pool.grant.limit - pool.held, supply))

    def lease(self, pool: LeasedPool) -> int | None:
        """A free page, or one that another model has used least recently; None: evict your own."""
        if pool.held >= pool.grant.limit:
            return None
        reserved = 0  # free pages that are the other models' floors
        for other in self.pools:
            if other.held < other.floor_pages and other is not pool:
                reserved += other.floor_pages - other.held
        if len(self._free) <= reserved:
            donor = self._donor(pool)
            if donor is None:
                return None
            donor.give_up_idle()
        page = self._free.popleft()
        self._holder[page] = pool
        if self._wrote[page] is not pool:
            if self._wrote[page] is not None:
                self._retyped[page] = None
            self._wrote[page] = pool
        return page

    @property
    def num_spare(self) -> int:
        """Idle pages that models hold above their floors."""
        return sum(max(0, min(p.held - p.floor_pages, len(p.idle))) for p in self.pools)

    def free_up(self, num_pages: int) -> None:
        """Make so many pages free, of spare ones the least recently used first; there must be."""
        while len(self._free) < num_pages:
            donors = (p for p in self.pools if p.idle and p.held > p.floor_pages)
            min(donors, key=_oldest).give_up_idle()

    def take_back(self, pool: LeasedPool, pages: list[int]) -> None:
        """Pages without content are free; the last to come goes first: its bytes are nearest."""
        for page in pages:
            assert self._holder[page] is pool, f"page {page} is handed back by another model"
            self._holder[page] = None
        self._free.extendleft(reversed(pages))

    def take_retyped(self) -> list[int]:
        """Pages that hold another model's bytes, each once: to be zeroed before the next store.

        After what is moved was read, before it is written. So nobody ever reads bytes that were
        written as another type, which could be no number.
        """
        taken = list(self._retyped)
        self._retyped.clear()
        return taken

    def _donor(self, pool: LeasedPool) -> LeasedPool | None:
        """Whose oldest idle page goes: a lender's first; None if the asker's own is older."""
        donors = [p for p in self.pools if p is not pool and p.idle and p.held > p.grant.keep]
        if not donors:
            return None
        donor = min(donors, key=lambda p: (not p.grant.lends, _oldest(p)))
        entitled = pool.held < pool.grant.keep or donor.grant.lends
        own = pool.next_evicted_used
        return None if not entitled and own is not None and own < _oldest(donor) else donor

    def check(self) -> None:
        """Raise unless every page has one holder, and floors are kept."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        held = [page for page in range(self.num_pages) if self._holder[page] is not None]
        assert free.isdisjoint(held), "a page is free and held"
        assert len(free) + len(held) == self.num_pages, "a page is lost"
        for pool in self.pools:
            mine = {page for page in held if self._holder[page] is pool}
            assert mine == set(pool.pages), f"{pool.shape.name}: another's page, or one lost"
        lacking = sum(max(0, p.floor_pages - p.held) for p in self.pools)
        assert lacking <= len(free), "a floor is not covered"


def _oldest(pool: LeasedPool) -> int:
    """When its least recently used idle page was used."""
    return next(iter(pool.idle.values()))
