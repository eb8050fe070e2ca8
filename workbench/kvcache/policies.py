"""Who may hold how many pages of an arena: one small class for each answer.

A policy is asked between steps. It sees counts, never a clock, so that a replay decides alike, and
every grant leaves each other model its floor, so that none starves. What it does not do: find
pages or victims (lending.py, leases.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model as a policy sees it. gain and misses count from the arena's creation.

    floor: pages for one request. running: it steps now or has blocks in use. misses: watched blocks
    asked for again soon after their eviction. gain: work a page more would have saved.
    """

    name: str
    floor: int
    running: bool
    misses: int
    gain: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages of one model. Invariant: floor <= keep <= limit.

    keep: nobody takes it below that. limit: it takes none above it, and gives back what is.
    target: what it should come to. lends: its pages above `keep` go before anyone's own.
    """

    keep: int
    limit: int
    target: int
    lends: bool = False


class Policy(Protocol):
    """Grants, one for each model."""

    @property
    def keeps_split(self) -> bool:
        """Whether pages asked for by a person mean anything to it."""
        ...

    def split(self, pages: Sequence[int]) -> None:
        """Pages asked for by a person, one number a model."""
        ...

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """Asked between steps, when a state has changed; the grants hold until the next time."""
        ...


def most_pages(models: Sequence[ModelState], index: int, num_pages: int) -> int:
    """All but the other models' floors."""
    return num_pages - sum(m.floor for i, m in enumerate(models) if i != index)


class _Split:
    """A policy that starts from pages asked for."""

    keeps_split = True

    def __init__(self) -> None:
        self._pages: list[int] = []

    def split(self, pages: Sequence[int]) -> None:
        """These are kept."""
        self._pages = list(pages)


class StaticSplit(_Split):
    """Each model has its pages and no others: what the thesis measured."""

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """The split."""
        return [Grant(pages, pages, pages) for pages in self._pages]


class FirstCome:
    """A page is whose takes it first; with none left, the least recently used one is taken."""

    keeps_split = False

    def split(self, pages: Sequence[int]) -> None:
        """No split is kept."""

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """Everything but the others' floors, to everyone."""
        most = [most_pages(models, i, num_pages) for i in range(len(models))]
        return [Grant(m.floor, limit, limit) for m, limit in zip(models, most)]


class PhaseAware(_Split):
    """A model that does not run lends its pages, down to its floor, to those that do."""

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """Those that run keep their split."""
        granted = []
        for i, (model, pages) in enumerate(zip(models, self._pages)):
            limit = most_pages(models, i, num_pages)
            keep = pages if model.running else model.floor
            granted.append(Grant(keep, limit, keep, lends=not model.running))
        return granted


class MarginalValue(_Split):
    """The next page goes where it saves most work: where evicted blocks are asked for again.

    The split moves by a step as soon as enough misses were seen since the last, of every model that
    has a turn; pages that a model does not use are anybody's until it wants them back.
    """

    ENOUGH = 8  # misses before anything is decided
    PLENTY = 64  # misses after which a model without a turn is waited for no longer
    CLEARLY = 1.25  # ratio of two gains below which they count as equal
    STEPS = 32  # so many steps would move all pages

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[ModelState] = []  # when the last decision was made
        self._had_turn: set[str] = set()

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """The split of now is kept, the rest is anybody's."""
        self._had_turn |= {m.name for m in models if m.running}
        if len(self._seen) != len(models):
            self._start_over(models)
        misses = sum(m.misses - s.misses for m, s in zip(models, self._seen))
        everyone = len(self._had_turn) == len(models)
        if misses >= (self.ENOUGH if everyone else self.PLENTY):
            self._move(models, max(1, num_pages // self.STEPS))
            self._start_over(models)
        limits = (most_pages(models, i, num_pages) for i in range(len(models)))
        return [Grant(pages, limit, pages) for pages, limit in zip(self._pages, limits)]

    def _start_over(self, models: Sequence[ModelState]) -> None:
        self._seen = list(models)
        self._had_turn = set()

    def _move(self, models: Sequence[ModelState], step: int) -> None:
        """From the model that gains least, of those above their floor, to the one that most."""
        gains = [m.gain - s.gain for m, s in zip(models, self._seen)]
        order = sorted(range(len(models)), key=gains.__getitem__)
        to = order[-1]
        givers = [i for i in order[:-1] if self._pages[i] > models[i].floor]
        if givers and gains[to] > self.CLEARLY * gains[givers[0]]:
            given = min(step, self._pages[givers[0]] - models[givers[0]].floor)
            self._pages[givers[0]] -= given
            self._pages[to] += given
