"""How a cache gets more or fewer blocks while it is used: first a target, the change between steps.

A target may be set from any thread. Whoever steps the model calls `apply` before it schedules, and
carries out `take_moves` before anything is stored; nothing live is ever dropped. What it does not
do: choose the blocks (pool.py, leases.py), or copy bytes (storage.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ResizeAnswer:
    """What becomes of a target. outcome: "reached" with the next step; "later", as running
    sequences release their blocks; or "refused", and nothing changes. reason: why not at once.
    """

    outcome: str
    target: int
    reason: str = ""

    @property
    def refused(self) -> bool:
        """Whether the target was not taken."""
        return self.outcome == "refused"


def answer_resize(target: int, floor: int, active: int) -> ResizeAnswer:
    """The answer to so many blocks wanted, when so many must stay and so many are in use."""
    if target < floor:
        reason = f"{target} blocks; one request of the longest length needs {floor}"
        return ResizeAnswer("refused", target, reason)
    if target < active:
        return ResizeAnswer("later", target, f"{active} blocks are in use")
    return ResizeAnswer("reached", target)


class Copies:
    """Contents of blocks still to be copied: all sources are read before anything is written."""

    def __init__(self) -> None:
        self._source: dict[int, int] = {}  # destination -> source

    def add(self, source: int, destination: int) -> None:
        """The destination shall hold what the source holds once all earlier copies are done."""
        self._set(destination, self._source.get(source, source))

    def move(self, source: int, destination: int) -> None:
        """As `add`, and what the source holds afterwards does not matter."""
        self._set(destination, self._source.pop(source, source))

    def _set(self, destination: int, origin: int) -> None:
        if origin == destination:  # there and back again
            self._source.pop(destination, None)
        else:
            self._source[destination] = origin

    def forget(self, pages: Iterable[int], per_page: int) -> None:
        """The blocks of these pages lost their content, some before it came."""
        if self._source:
            lost = set(pages)
            for destination in [d for d in self._source if d // per_page in lost]:
                del self._source[destination]

    def take(self) -> list[tuple[int, int]]:
        """(source, destination) of each; they count as carried out."""
        taken = [(source, destination) for destination, source in self._source.items()]
        self._source.clear()
        return taken


class Pool(Protocol):
    """What resizing asks of whoever hands out blocks."""

    copies: Copies
    target: int
    floor: int

    @property
    def num_blocks(self) -> int:
        """Blocks that can be used now."""
        ...

    @property
    def room(self) -> int:
        """Blocks to count on for long."""
        ...

    def resize(self, num_blocks: int) -> ResizeAnswer:
        """Set the target."""
        ...

    def settle(self) -> bool:
        """Come nearer to it; whether a live block was moved."""
        ...


class Resizable:
    """The resizing half of a KVCacheManager.

    lock: to be held while a step is planned or taken in, where threads share the memory.
    """

    _pool: Pool
    lock: AbstractContextManager[object] = nullcontext()

    @property
    def num_blocks(self) -> int:
        """Blocks that can be used now: active + cached + free."""
        return self._pool.num_blocks

    @property
    def actual(self) -> int:
        """num_blocks, beside `target`: they differ until blocks in use are released."""
        return self._pool.num_blocks

    @property
    def target(self) -> int:
        """Blocks asked for last."""
        return self._pool.target

    @property
    def room(self) -> int:
        """Blocks to count on for long: the target, in an arena the part of the split."""
        return self._pool.room

    def require(self, num_blocks: int) -> None:
        """From now on, refuse targets below so many blocks: what one request needs."""
        self._pool.floor = max(self._pool.floor, num_blocks)

    @property
    def floor(self) -> int:
        """Blocks of one request of the longest length; a smaller target is refused."""
        return self._pool.floor

    def resize(self, num_blocks: int) -> ResizeAnswer:
        """Ask for so many blocks, from any thread; the answer says whether and when."""
        return self._pool.resize(num_blocks)

    def apply(self) -> bool:
        """Between steps, before scheduling: come as near to the target as can be.

        True when a block in use has another id now: block tables must be read anew.
        """
        return self._pool.settle()

    def take_moves(self) -> list[tuple[int, int]]:
        """(source, destination) of blocks to be copied before the next store, each once.

        All sources are read before any destination is written.
        """
        return self._pool.copies.take()
