"""A share of the memory for each model, and the whole pages it comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from workbench.errors import ConfigError
from workbench.kvcache.policies import Policy

KVShare = float | Mapping[str, float]


def pages_of(kv_share: KVShare, names: Sequence[str], num_pages: int) -> list[int]:
    """Pages of each model. One number is the first model's share; the rest is divided evenly.

    Raises ConfigError unless each share is in (0, 1) and all add up to 1.
    """
    if isinstance(kv_share, Mapping):
        given = dict(kv_share)
    else:
        rest = (1 - kv_share) / max(1, len(names) - 1)
        given = dict.fromkeys(names, rest) | {names[0]: kv_share}
    shares = [given.get(name, 0.0) for name in names]
    inside = all(0 < share < 1 for share in shares)
    if given.keys() != set(names) or not inside or not math.isclose(sum(shares), 1):
        raise ConfigError(
            f"kv_share is {kv_share}; allowed: the first model's share, in (0, 1), or one for each "
            f"of {list(names)}, which add up to 1."
        )
    return _rounded(shares, num_pages)


def starting_pages(
    policy: Policy,
    kv_share: KVShare | None,
    names: Sequence[str],
    floors: Sequence[int],
    num_pages: int,
) -> list[int]:
    """Pages of each model as asked for, else by their floors.

    Raises ConfigError as pages_of does, and for a share that the policy would not keep.
    """
    if kv_share is None:
        return pages_above_floors(floors, num_pages)
    if not policy.keeps_split:
        raise ConfigError(
            f"An arena got kv_share={kv_share} and the policy {type(policy).__name__}, which keeps "
            "no split; leave kv_share out, or choose a policy that keeps one."
        )
    return pages_of(kv_share, names, num_pages)


def pages_above_floors(floors: Sequence[int], num_pages: int) -> list[int]:
    """Each model's floor; of the rest one half evenly, the other in proportion to the floors.

    Models that work on the same requests need pages in proportion; what is not known to be so,
    an even split hurts least.
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


def pages_with_another(pages: Sequence[int], floors: Sequence[int]) -> list[int]:
    """The split with one model more, at the last of `floors`; who is most above its own gives."""
    *others, floor = floors
    given = list(pages)
    for _ in range(floor):
        above = [count - least for count, least in zip(given, others)]
        given[above.index(max(above))] -= 1
    return [*given, floor]


def _rounded(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to `total`."""
    ends = [round(sum(shares[: i + 1]) * total) for i in range(len(shares))]
    return [end - begin for begin, end in zip([0, *ends], ends)]
