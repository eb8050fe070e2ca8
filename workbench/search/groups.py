"""The problems in flight: one group on both engines, or two that swap engines after every round.

With two, each round has a group that samples and another that scores, so that both engines have
work at the same time. Places are counted, no clock is read: without a pace a search forms the same
groups every time. What it does not do: advance searches, or run engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from workbench.search.active import ActiveSearch
from workbench.search.pace import Pace


class Groups:
    """places: problems in flight, at most, of all groups together.

    swap: two groups. whole_batches: a group takes problems in only when it has none. pace: says how
    many are sampled, those that were taken in first; None: all that ask.
    """

    def __init__(
        self, places: int, *, swap: bool, whole_batches: bool, pace: Pace | None = None
    ) -> None:
        self._places = [places - places // 2, places // 2] if swap else [places]
        self._groups: list[list[ActiveSearch]] = [[] for _ in self._places]
        self._whole_batches, self._pace = whole_batches, pace
        self._turn = 0  # whose searches are sampled

    @property
    def sampling(self) -> list[ActiveSearch]:
        """The searches whose nodes may be sampled in this round."""
        group = self._groups[self._turn]
        if self._pace is None:
            return group
        return self._pace.chosen(group, len(self._groups))

    @property
    def scoring(self) -> list[ActiveSearch]:
        """The searches whose beams may be scored in this round."""
        return self._groups[self._turn - 1]

    def swap(self) -> None:
        """The next round: who sampled scores, if there are two groups."""
        self._turn = (self._turn + 1) % len(self._groups)

    def admit(self, queue: deque[ActiveSearch], now_s: float) -> None:
        """Take searches in, in the queue's order; all begin with sampling."""
        group, places = self._groups[self._turn], self._places[self._turn]
        if self._whole_batches and group:
            return
        while queue and len(group) < places:
            search = queue.popleft()
            search.admitted_s = now_s
            group.append(search)

    def take_answered(self) -> list[ActiveSearch]:
        """The searches that have their outcome; they are in flight no longer."""
        answered = [search for search in self if search.outcome is not None]
        self._groups = [[s for s in group if s.outcome is None] for group in self._groups]
        return answered

    def __iter__(self) -> Iterator[ActiveSearch]:
        return (search for group in self._groups for search in group)

    def __len__(self) -> int:
        return sum(map(len, self._groups))
