"""What a little more memory would have saved, and a little less would have lost.

More: a sampled list of the hashes evicted last. A block asked for again soon after its eviction
would have been a hit with as many more pages as the list covers, so its hits are the slope of the
miss-ratio curve (ghost list: Megiddo and Modha 2003; sampling by hash: Waldspurger et al. 2015).
Less: hits in the pages used least recently, the other side of the same curve, which where it bends
says something else. What it does not do: decide (policies.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from sys import maxsize

SAMPLE = 4  # one hash in so many is watched


class ShadowList:
    """The sampled hashes among the last `num_blocks` evicted ones."""

    def __init__(self, num_blocks: int) -> None:
        self._capacity = max(1, num_blocks // SAMPLE)
        self._digests: OrderedDict[bytes, None] = OrderedDict()
        self.hits = 0  # watched hashes that were asked for again

    @property
    def missed_blocks(self) -> int:
        """Blocks, estimated, that so much more memory would have kept."""
        return self.hits * SAMPLE

    def note(self, digests: Iterable[bytes]) -> None:
        """These contents were evicted, in this order."""
        watched = [digest for digest in digests if digest[0] % SAMPLE == 0]
        for digest in watched[-self._capacity :]:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._capacity:
            self._digests.popitem(last=False)

    def ask(self, digests: Iterable[bytes]) -> None:
        """An admission missed these contents."""
        for digest in digests:
            if digest in self._digests:
                del self._digests[digest]
                self.hits += 1


class TailHits:
    """Hits on blocks in the pages that a model would give up first."""

    def __init__(self) -> None:
        self.blocks = 0
        self._until = 0  # a tick: pages used last up to then are the tail

    def mark(self, last_used: Iterable[int], num_pages: int) -> None:
        """The tail is the first num_pages of these ticks, least recently used first."""
        if num_pages > 0:
            self._until = next(islice(last_used, num_pages - 1, None), maxsize)
        else:
            self._until = 0

    def note(self, last_used: int) -> None:
        """A cached block of a page that was used last at this tick was hit."""
        self.blocks += last_used <= self._until
