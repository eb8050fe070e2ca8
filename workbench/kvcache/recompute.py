"""Why tokens are computed again: their block was evicted, or never full and so never a hit.

Kept for the trace alone: no decision depends on it. Tails of partial blocks are remembered when a
sequence is freed, under the hash of the block before them, in bounded memory (the oldest are
forgotten first).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from workbench.kvcache.prefix import HashedTokens, PrefixIndex
from workbench.kvcache.tails import Tokens, common_prefix

TAILS_PER_PARENT = 64


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Tokens in one computed span that had been computed before, by why they were lost."""

    evicted: int = 0
    preempted: int = 0
    partial: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """Positions of an admitted sequence that were computed before: ascending, disjoint.

    preempted_end: positions below it were computed by this very request before it was preempted;
    they count as that.
    """

    evicted: tuple[range, ...] = ()
    partial: tuple[range, ...] = ()
    preempted_end: int = 0

    def count(self, start: int, end: int) -> Recomputed:
        """How many positions in [start, end) are recomputed, by reason; each is counted once."""
        rest = min(max(start, self.preempted_end), end)
        return Recomputed(
            _overlap(self.evicted, rest, end), rest - start, _overlap(self.partial, rest, end)
        )


NOTHING_LOST = Lost()


def _overlap(spans: tuple[range, ...], start: int, end: int) -> int:
    return sum(max(0, min(span.stop, end) - max(span.start, start)) for span in spans)


class PartialTails:
    """Computed tokens of blocks that never filled, by the hash of the block before them."""

    def __init__(self, max_parents: int) -> None:
        self._max_parents = max_parents
        self._tails: OrderedDict[bytes, dict[Tokens, None]] = OrderedDict()

    def remember(self, parent: bytes, tail: Tokens) -> None:
        """A sequence is freed whose last block held only these tokens."""
        if not tail:
            return
        tails = self._tails.setdefault(parent, {})
        self._tails.move_to_end(parent)
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > TAILS_PER_PARENT:
            del tails[next(iter(tails))]
        if len(self._tails) > self._max_parents:
            self._tails.popitem(last=False)

    def longest(self, parent: bytes, tokens: Tokens) -> int:
        """How many of the tokens that follow `parent` some remembered tail starts with."""
        return max((common_prefix(t, tokens) for t in self._tails.get(parent, ())), default=0)

    def __contains__(self, parent: bytes) -> bool:
        return parent in self._tails

    def clear(self) -> None:
        """Forget all."""
        self._tails.clear()


def find_lost(
    index: PrefixIndex,
    tails: PartialTails,
    tokens: HashedTokens,
    root: bytes,
    chain: list[bytes],
    missed: range,
    block_size: int,
) -> Lost:
    """What an admission computes again. missed: full blocks a hit could have covered.

    A full block counts as evicted if its content was, else a block counts as partial as far as some
    remembered tail reaches into it.
    """
    evicted, partial = [], []
    for i in range(missed.start, -(-len(tokens) // block_size)):
        start = i * block_size
        is_full = bool(chain) and start + block_size <= len(tokens)
        held_once = is_full and index.was_held(chain[i])
        if held_once and i in missed and index.was_evicted(chain[i]):
            evicted.append(range(start, start + block_size))
        parent = chain[i - 1] if i else root
        if not held_once and parent in tails:
            common = tails.longest(parent, tuple(tokens[start : start + block_size]))
            partial.append(range(start, start + common))
    return Lost(tuple(evicted), tuple(partial))
