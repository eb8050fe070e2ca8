"""Who may hold how many pages of an arena: one small class for each answer.

A policy is asked between steps. It sees counts, never a clock, so that a replay decides alike, and
every grant leaves each other model its floor, so that none starves. What it does not do: find
pages or victims (lending.py, leases.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model as a policy sees it. All from misses on counts from the arena's creation.

    floor: pages for one request. running: it steps now or has blocks in use. misses: watched blocks
    asked for again soon after their eviction. gain: work a page more would have saved; loss: that a
    page less would have cost. readmissions: of requests that were preempted for want of pages.
    """

    name: str
    floor: int
    running: bool
    misses: int
    gain: float
    loss: float = 0.0
    readmissions: int = 0


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


def require_fair(policy: Policy, grant: Grant, name: str, floor: int, num_pages: int) -> None:
    """ConfigError for a grant that would starve a model, or is more than there is."""
    if not floor <= grant.keep <= grant.limit <= num_pages:
        raise ConfigError(
            f"The policy {type(policy).__name__} grants {name!r} {grant}; allowed: {floor} pages "
            f"(one request) <= keep <= limit <= {num_pages}."
        )


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

    Once every model has had a turn and enough was missed, the split moves by a step, from the model
    that loses least to the one that gains clearly more; first of all to one that had to preempt,
    whose pages then stay for a while: what work in smaller batches costs no list of misses tells.
    A step is the larger the more the gain outweighs the loss. Until the first miss unused
    pages are anybody's; then the split holds, since what is lent is taken back page by page, which
    evicts the beginnings of what stays.
    """

    ENOUGH = 8  # misses before anything is decided
    PLENTY = 256  # misses after which a model without a turn is waited for no longer
    CLEARLY = 1.5  # ratio of gain to loss below which they count as equal
    STEPS = 64  # of the smallest size would move all pages
    LARGEST = 4  # smallest steps in one
    REST = 4  # decisions for which a model that preempted gives nothing

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[ModelState] = []  # when the last decision was made
        self._running: list[bool] = []
        self._had_turn: set[int] = set()  # turns that have ended since
        self._resting: dict[int, int] = {}  # decisions for which a model still gives nothing

    def split(self, pages: Sequence[int]) -> None:
        """These are kept until what is missed from now on says otherwise."""
        super().split(pages)
        self._seen, self._resting = [], {}

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """The split of now; what is unused is anybody's until something is missed."""
        if len(self._seen) != len(models):
            self._start_over(models)
        ended = (i for i, was in enumerate(self._running) if was and not models[i].running)
        self._had_turn.update(ended)
        self._running = [model.running for model in models]
        if self._is_time(models):
            self._decide(models, num_pages)
            self._start_over(models)
        if any(model.misses or model.readmissions for model in models):
            return [Grant(pages, pages, pages) for pages in self._pages]
        limits = (most_pages(models, i, num_pages) for i in range(len(models)))
        return [Grant(pages, limit, pages) for pages, limit in zip(self._pages, limits)]

    def _is_time(self, models: Sequence[ModelState]) -> bool:
        misses = sum(m.misses - s.misses for m, s in zip(models, self._seen))
        preempted = any(m.readmissions > s.readmissions for m, s in zip(models, self._seen))
        everyone = len(self._had_turn) == len(models)
        return misses >= self.PLENTY or (everyone and (misses >= self.ENOUGH or preempted))

    def _start_over(self, models: Sequence[ModelState]) -> None:
        self._seen, self._running = list(models), [model.running for model in models]
        self._had_turn = set()

    def _decide(self, models: Sequence[ModelState], num_pages: int) -> None:
        """One step from the model that loses least to the one that needs pages most."""
        since = list(zip(models, self._seen))
        gains = [m.gain - s.gain for m, s in since]
        losses = [max(gain, m.loss - s.loss) for gain, (m, s) in zip(gains, since)]
        preempted = [m.readmissions > s.readmissions for m, s in since]
        self._rest(preempted)
        to = max(range(len(models)), key=lambda i: (preempted[i], gains[i]))
        givers = [
            i
            for i, model in enumerate(models)
            if i != to and i not in self._resting and self._pages[i] > model.floor
        ]
        giver = min(givers, key=losses.__getitem__, default=None)
        if giver is None:
            return
        clearly = gains[to] / (self.CLEARLY * max(losses[giver], 1e-9))  # 1e-9: nothing is lost
        if preempted[to] or clearly > 1:
            steps = self.LARGEST if preempted[to] else min(int(clearly), self.LARGEST)
            pages = max(1, num_pages * steps // self.STEPS)
            self._move(giver, to, min(pages, self._pages[giver] - models[giver].floor))

    def _rest(self, preempted: Sequence[bool]) -> None:
        """Count down the rests, and begin those of models that preempted."""
        self._resting = {i: left - 1 for i, left in self._resting.items() if left > 1}
        self._resting |= {i: self.REST for i, did in enumerate(preempted) if did}

    def _move(self, giver: int, to: int, pages: int) -> None:
        self._pages[giver] -= pages
        self._pages[to] += pages
