"""The order in which one engine gets a round's requests: it decides what lies in its cache when.

    slot     as the strategy lists its beams: refilled ones alternate between the survivors
    path     by depth, then path: siblings lie side by side and meet their parent's blocks together
    prefix   path, and the problems whose prefixes this engine used last go first: from round to
             round a cyclic order is the worst that a least-recently-used cache can be asked for

No token depends on it, no clock is read. What it does not do: reorder what an engine has queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.search.active import ActiveSearch
from workbench.search.requests import Beam


class RequestOrder:
    """One engine's order (see SearchSwitches.request_order); it remembers who was served when."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._served: dict[str, int] = {}  # problem -> a number that grows with every request

    def searches(self, searches: Iterable[ActiveSearch]) -> list[ActiveSearch]:
        """These searches, all of which are now served, in order of their turns."""
        turns = list(searches)
        if self._kind == "prefix":
            turns.sort(key=lambda search: -self._served.get(search.problem.id, 0))
            first = max(self._served.values(), default=0) + 1
            self._served |= {s.problem.id: turn for turn, s in enumerate(turns, first)}
        return turns

    def beams(self, beams: Sequence[Beam]) -> list[tuple[int, Beam]]:
        """Slots and beams of one search in order of their requests."""
        slots = list(enumerate(beams))
        if self._kind != "slot":
            slots.sort(key=lambda item: (len(item[1].path), item[1].path))
        return slots
