"""How many pages of an arena each model may hold: policies, and splits in whole pages.

A policy is asked between steps. It sees counts, never a clock, so that a replay decides alike, and
every grant leaves each other model its floor, so that none starves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from workbench.errors import ConfigError

KVShare = float | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model as a policy sees it. All from misses on counts from the arena's creation.

    floor: pages for one request. running: it steps now or has blocks in use. misses: watched blocks
    asked for again soon after their eviction. gain: work a page more would have saved; loss: that a
    page less would have cost. preemptions: of requests, for want of pages.
    """

    name: str
    floor: int
    running: bool
    misses: int
    gain: float
    loss: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages of one model. Invariant: floor <= keep <= limit.

    keep: no other model takes it below that. limit: it takes none above it, and gives back what is.
    target: what it should come to. lends: its pages above `keep` go before any model's own.
    """

    keep: int
    limit: int
    target: int
    lends: bool = False


class Policy(ABC):
    """Grants pages to each model; starts from a split asked for, if it keeps one."""

    keeps_split = True

    def __init__(self) -> None:
        self._pages: list[int] = []

    def split(self, pages: Sequence[int]) -> None:
        """Pages asked for by a person, one number a model."""
        self._pages = list(pages)

    @abstractmethod
    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """Asked between steps, when a state has changed; the grants hold until the next time."""


def _most_pages(models: Sequence[ModelState], num_pages: int) -> list[int]:
    """Of each model: all but the other models' floors."""
    floors = sum(model.floor for model in models)
    return [num_pages - floors + model.floor for model in models]


class StaticSplit(Policy):
    """Each model has its pages and no others: what the thesis measured."""

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """The split."""
        return [Grant(pages, pages, pages) for pages in self._pages]


class FirstCome(Policy):
    """A page goes to the model that takes it first; with none left, the least recently used one."""

    keeps_split = False

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """Everything but the others' floors, to each."""
        limits = _most_pages(models, num_pages)
        return [Grant(model.floor, limit, limit) for model, limit in zip(models, limits)]


class PhaseAware(Policy):
    """A model that does not run lends its pages, down to its floor, to those that do."""

    def grants(self, models: Sequence[ModelState], num_pages: int) -> list[Grant]:
        """Those that run keep their split."""
        keeps = [pages if m.running else m.floor for m, pages in zip(models, self._pages)]
        limits = _most_pages(models, num_pages)
        return [
            Grant(keep, limit, keep, lends=not model.running)
            for model, keep, limit in zip(models, keeps, limits)
        ]


class MarginalValue(Policy):
    """The next page goes where it saves most work: where evicted blocks are asked for again.

    Once every model has had a turn and enough was missed, the split moves by a step, from the model
    that loses least to the one that gains clearly more; first of all to one that had to preempt,
    whose pages then stay for a while: what work in smaller batches costs no list of misses tells.
    A step is the larger the more the gain outweighs the loss. Until the first miss, unused pages
    are lent freely; then the split holds, since what is lent is taken back page by page, which
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
        """The split of now; unused pages are lent until something is missed."""
        if len(self._seen) != len(models):
            self._start_over(models)
        ended = (i for i, was in enumerate(self._running) if was and not models[i].running)
        self._had_turn.update(ended)
        self._running = [model.running for model in models]
        since = list(zip(models, self._seen))
        misses = sum(now.misses - seen.misses for now, seen in since)
        preempted = any(now.preemptions > seen.preemptions for now, seen in since)
        enough = len(self._had_turn) == len(models) and (misses >= self.ENOUGH or preempted)
        if enough or misses >= self.PLENTY:
            self._decide(models, num_pages)
            self._start_over(models)
        missed = any(model.misses or model.preemptions for model in models)
        limits = self._pages if missed else _most_pages(models, num_pages)
        return [Grant(pages, limit, pages) for pages, limit in zip(self._pages, limits)]

    def _start_over(self, models: Sequence[ModelState]) -> None:
        self._seen, self._running = list(models), [model.running for model in models]
        self._had_turn = set()

    def _decide(self, models: Sequence[ModelState], num_pages: int) -> None:
        """One step from the model that loses least to the one that needs pages most."""
        since = list(zip(models, self._seen))
        gains = [m.gain - s.gain for m, s in since]
        losses = [max(gain, m.loss - s.loss) for gain, (m, s) in zip(gains, since)]
        preempted = [m.preemptions > s.preemptions for m, s in since]
        self._resting = {i: left - 1 for i, left in self._resting.items() if left > 1}
        self._resting |= {i: self.REST for i, did in enumerate(preempted) if did}
        to = max(range(len(models)), key=lambda i: (preempted[i], gains[i]))
        spare = [pages - model.floor for pages, model in zip(self._pages, models)]
        givers = [i for i, s in enumerate(spare) if i != to and i not in self._resting and s > 0]
        giver = min(givers, key=losses.__getitem__, default=None)
        if giver is None:
            return
        clearly = gains[to] / (self.CLEARLY * max(losses[giver], 1e-9))  # 1e-9: nothing is lost
        if preempted[to] or clearly > 1:
            steps = self.LARGEST if preempted[to] else min(int(clearly), self.LARGEST)
            moved = min(max(1, num_pages * steps // self.STEPS), spare[giver])
            taken = {giver: -moved, to: moved}  # at once: an interrupt loses no page
            self._pages = [pages + taken.get(i, 0) for i, pages in enumerate(self._pages)]


# -- splits --


def pages_of(kv_share: KVShare, names: Sequence[str], num_pages: int) -> list[int]:
    """Pages of each model. One number is the first model's share; the rest is divided evenly.

    Raises ConfigError unless each share is in (0, 1) and all add up to 1.
    """
    if isinstance(kv_share, Mapping):
        by_name = dict(kv_share)
    elif isinstance(kv_share, Real):
        rest = (1 - kv_share) / max(1, len(names) - 1)
        by_name = dict.fromkeys(names, rest) | {names[0]: kv_share}
    else:
        by_name = {}
    shares = [by_name.get(name, 0.0) for name in names]
    inside = all(isinstance(share, Real) and 0 < share < 1 for share in shares)
    if by_name.keys() != set(names) or not inside or not math.isclose(sum(shares), 1):
        raise ConfigError(
            f"kv_share is {kv_share!r}; allowed: the first model's share, in (0, 1), or one for "
            f"each of {list(names)}, which add up to 1."
        )
    return _rounded(shares, num_pages)


def pages_above_floors(floors: Sequence[int], num_pages: int) -> list[int]:
    """Each model's floor; of the rest one half evenly, the other in proportion to the floors.

    Models that work on the same requests need pages in proportion; where that is not known, an even
    split hurts least.
    """
    shares = [(1 / len(floors) + floor / sum(floors)) / 2 for floor in floors]
    rest = _rounded(shares, num_pages - sum(floors))
    return [floor + more for floor, more in zip(floors, rest)]


def pages_with_one(pages: Sequence[int], index: int, count: int) -> list[int]:
    """The split with `count` pages for one model, the others in proportion to what they had."""
    others = sum(pages) - pages[index]
    shares = [0.0 if i == index else n / max(1, others) for i, n in enumerate(pages)]
    rest = _rounded(shares, sum(pages) - count)
    return [count if i == index else n for i, n in enumerate(rest)]


def _rounded(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to `total`."""
    ends = [round(sum(shares[: i + 1]) * total) for i in range(len(shares))]
    return [end - begin for begin, end in zip([0, *ends], ends)]
