"""One memory for the KV caches of several models: pages flow to the model that needs them, live.

Each model has an ordinary KVCacheManager whose blocks lie in pages leased from here; a policy says
how many each may hold, and they can be re-split while engines run. Pure bookkeeping, so a replay
runs it; the bytes are storage.py's.

A slab per layer of the deepest model; page p is the same stripe of bytes in every slab, and one
page holds blocks of one model only. A shallower model lays several of its layers side by side in
a stripe, so that its layers live in fewer slabs and several groups of blocks share a page:

    slab 0:  | page 0 | page 1 | page 2 | ...       stripe: | layer 0: cells | layer 1: cells | ...
    slab 1:  | page 0 | page 1 | page 2 | ...       group:  as many slabs as a block's layers need
    address of a block in a layer = layer_base[layer] + offsets[block], in the model's elements
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from sys import maxsize
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.config import format_size, parse_size
from workbench.errors import ConfigError, OutOfMemory
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.policies import (
    Grant,
    KVShare,
    MarginalValue,
    ModelState,
    Policy,
    pages_above_floors,
    pages_of,
    pages_with_one,
)
from workbench.kvcache.pool import Block, BlockPool, ResizeAnswer

ALIGNMENT = 64  # bytes; a stripe is a multiple, so that vector loads of any page are aligned alike
MOST_WASTE = 0.05  # of a page; a page that wastes more is taken only if none wastes less
MOST_CELLS = 128  # blocks side by side in one stripe, looked at when a page is chosen
GHOST_SHARE = 8  # a model's ghost list covers one page in so many
SAMPLE = 4  # one hash in so many is watched by a ghost list
_UNKNOWN = object()  # wrote to a page


# -- where blocks lie --


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What the arena must know of one model. Invariant: all numbers positive, cells of elements.

    cell_bytes: one block in one layer. floor_blocks: of one request of the longest length.
    block_cost: the work of computing its tokens again, in a unit that the arena's models share.
    """

    name: str
    layers: int
    cell_bytes: int
    element_bytes: int = 4
    floor_blocks: int = 1
    block_cost: float = 1.0

    def __post_init__(self) -> None:
        sizes = (self.layers, self.cell_bytes, self.element_bytes, self.floor_blocks)
        if min(sizes) < 1 or self.cell_bytes % self.element_bytes or self.block_cost <= 0:
            raise ConfigError(
                f"{self}: layers, bytes, blocks and block_cost must be positive, and cell_bytes a "
                "multiple of element_bytes."
            )

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self.layers * self.cell_bytes


@dataclass(frozen=True, slots=True)
class PageShape:
    """How a page is cut: `slabs` stripes of `stripe` bytes, a multiple of 64."""

    slabs: int
    stripe: int

    def __post_init__(self) -> None:
        if min(self.slabs, self.stripe) < 1 or self.stripe % ALIGNMENT:
            raise ConfigError(
                f"{self}: slabs must be positive, and stripe a positive multiple of {ALIGNMENT}."
            )

    @property
    def page_bytes(self) -> int:
        """In all slabs together."""
        return self.slabs * self.stripe


@dataclass(frozen=True, slots=True)
class Packing:
    """How one model's blocks lie in a page: groups of slabs, each with blocks side by side.

    layers_per_stripe: layers of a block that share a slab. 0 blocks: the page is too small.
    """

    shape: BlockShape
    page: PageShape
    layers_per_stripe: int

    @property
    def _slabs_per_block(self) -> int:
        return -(-self.shape.layers // self.layers_per_stripe)

    @property
    def _side_by_side(self) -> int:
        """Blocks whose cells of one layer share a stripe."""
        return self.page.stripe // (self.layers_per_stripe * self.shape.cell_bytes)

    @property
    def blocks(self) -> int:
        """Blocks of this model in one page."""
        return self.page.slabs // self._slabs_per_block * self._side_by_side

    @property
    def waste(self) -> int:
        """Bytes of a page that this model cannot use."""
        return self.page.page_bytes - self.blocks * self.shape.block_bytes

    def layer_base(self, num_pages: int) -> NDArray[np.int64]:
        """[layers] elements from the arena's first byte."""
        layers = np.arange(self.shape.layers, dtype=np.int64)
        slab, section = np.divmod(layers, self.layers_per_stripe)
        section_bytes = self._side_by_side * self.shape.cell_bytes
        at = slab * (num_pages * self.page.stripe) + section * section_bytes
        return at // self.shape.element_bytes

    def offsets(self, num_pages: int) -> NDArray[np.int64]:
        """[pages * blocks] elements; block b is the b % blocks-th of page b // blocks."""
        page, slot = np.divmod(np.arange(num_pages * self.blocks, dtype=np.int64), self.blocks)
        group, place = np.divmod(slot, self._side_by_side)
        at = group * (self._slabs_per_block * num_pages * self.page.stripe)
        at += page * self.page.stripe + place * self.shape.cell_bytes
        return at // self.shape.element_bytes


def pack(shape: BlockShape, page: PageShape) -> Packing:
    """Most blocks a page; of equal ways the one with fewest layers side by side (locality)."""
    most = max(1, min(shape.layers, page.stripe // shape.cell_bytes))
    ways = (Packing(shape, page, layers) for layers in range(1, most + 1))
    return max(ways, key=lambda way: (way.blocks, -way.layers_per_stripe))


def choose_page(shapes: Sequence[BlockShape]) -> PageShape:
    """The smallest page of which no model wastes more than 5 %, else the one that wastes least."""
    unit = math.lcm(ALIGNMENT, *(shape.element_bytes for shape in shapes))
    stripes = {
        -(-cells * shape.cell_bytes // unit) * unit
        for shape in shapes
        for cells in range(1, MOST_CELLS + 1)
    }
    slabs, best, least = max(shape.layers for shape in shapes), None, math.inf
    for stripe in sorted(stripes):
        page = PageShape(slabs, stripe)
        waste = max(pack(shape, page).waste for shape in shapes) / page.page_bytes
        if waste < least:
            best, least = page, waste
        if waste <= MOST_WASTE:
            return page
    assert best is not None
    return best


# -- what other sizes would have saved or cost --


class GhostList:
    """The sampled hashes among the last `num_blocks` evicted ones (Megiddo and Modha 2003).

    A block asked for again soon after its eviction would have been a hit with as many more pages as
    the list covers: its hits are the slope of the miss-ratio curve (Waldspurger et al. 2015).
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = max(1, num_blocks // SAMPLE)
        self._digests: OrderedDict[bytes, None] = OrderedDict()
        self.hits = 0  # watched hashes that were asked for again
        self.cold_hits = 0  # in the pages that it would give up first: what losing those would cost
        self.cold_until: int | None = 0  # the last use of those pages, a tick; None: not looked up

    def evicted(self, digests: Iterable[bytes]) -> None:
        """These contents were evicted, in this order."""
        watched = [digest for digest in digests if digest[0] % SAMPLE == 0]
        for digest in watched[-self._capacity :]:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._capacity:
            self._digests.popitem(last=False)

    def forget(self) -> None:
        """Nothing was ever evicted; what was counted stays."""
        self._digests.clear()

    def missed(self, digests: Iterable[bytes]) -> None:
        """An admission missed these contents."""
        for digest in digests:
            if digest in self._digests:
                del self._digests[digest]
                self.hits += 1


# -- one model's pages --


class LeasedPool(BlockPool):
    """The block pool of one model in an arena: its blocks come and go with the pages they lie in.

    Block b lies in page b // per_page. Blocks are taken from the fullest page, and pages are given
    up whole, the one used least recently first: victims and pages are chosen together, so that few
    pages are held half empty. A held page has content, a live (referenced) or a cached block; one
    without goes back at once. A vacant block has neither reference nor content.
    """

    memory: KVArena

    def __init__(self, shape: BlockShape, per_page: int, source: KVArena) -> None:
        num_pages = source.num_pages
        super().__init__(num_pages * per_page)
        self._free.clear()
        self.shape, self.per_page, self.memory = shape, per_page, source
        self.floor = shape.floor_blocks
        self.floor_pages = -(-shape.floor_blocks // per_page)
        self.grant = Grant(self.floor_pages, num_pages, num_pages)
        self.wanted = 0  # pages it would hold had its last admission not been refused
        self.preemptions = 0
        self.ghost_pages = max(1, num_pages // GHOST_SHARE)
        self.ghosts = GhostList(self.ghost_pages * per_page)
        # pages without a live block, least recently used first, with the tick of their last use
        self.idle: OrderedDict[int, int] = OrderedDict()
        self._last_used = [0] * num_pages  # when a block of theirs was released, or copied
        self._live = [0] * num_pages  # referenced blocks
        self._num_live = 0
        self._vacant: dict[int, list[Block]] = {}  # held page -> its vacant blocks
        self.held = 0  # pages
        self._num_vacant = 0  # in pages that are filed in _by_vacant
        self._by_vacant: list[dict[int, None]] = [{} for _ in range(per_page + 1)]

    def clear(self) -> None:
        super().clear()
        self.ghosts.forget()

    # -- state --

    @property
    def pages(self) -> Iterator[int]:
        """The pages that it holds."""
        return iter(self._vacant)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pages that it holds or could have now."""
        return (self.held + self.memory.leasable(self)) * self.per_page

    @property
    def room(self) -> int:
        """Blocks of its part of the split, whatever is lent or taken meanwhile."""
        return self.memory.asked_for[self.memory.pools.index(self)] * self.per_page

    @property
    def num_free(self) -> int:
        """Blocks without content, those of pages it could have included."""
        return self._num_vacant + self.memory.leasable(self) * self.per_page

    @property
    def num_active(self) -> int:
        """Blocks that a running sequence uses."""
        return self._num_live

    def evicts_older_than(self, tick: int) -> bool:
        """Whether the block it would evict next lies in a page last used before this tick."""
        block = self.next_evicted
        return block is not None and self._last_used[block.id // self.per_page] < tick

    # -- blocks --

    def take(self) -> Block:
        """A private block with one reference: of a held page, a new one, or an evicted one."""
        if self._num_vacant:
            block = self._pick()
            self._occupy(block.id // self.per_page)
        elif (page := self.memory.lease(self)) is None:
            block = self._evict()
            self._occupy(block.id // self.per_page)
        else:  # without content: its other blocks are vacant
            first = page * self.per_page
            block, vacant = self.blocks[first], self.blocks[first + self.per_page - 1 : first : -1]
            self.held += 1
            self._vacant[page], self._live[page] = vacant, 1
            if vacant:
                self._by_vacant[len(vacant)][page] = None
                self._num_vacant += len(vacant)
        self.stats.allocated += 1
        block.ref_count = 1
        self._num_live += 1
        return block

    def touch(self, block: Block) -> None:
        """A cached partial block was used where it is; its page was used, too."""
        super().touch(block)
        page = block.id // self.per_page
        self._last_used[page] = tick = self.memory.tick()
        if page in self.idle:
            self.idle[page] = tick
            self.idle.move_to_end(page)

    def _reused(self, block: Block) -> None:
        page = block.id // self.per_page
        cold_until = self.ghosts.cold_until
        if cold_until is None:
            cold_until = self.ghosts.cold_until = self._coldest()
        self.ghosts.cold_hits += self._last_used[page] <= cold_until
        super()._reused(block)
        self._occupy(page)
        self._num_live += 1

    def _unused(self, block: Block) -> None:
        page = block.id // self.per_page
        self._num_live -= 1
        self._live[page] -= 1
        self._last_used[page] = tick = self.memory.tick()
        if not self._live[page]:  # it becomes idle, or goes back
            self.idle[page] = tick
        super()._unused(block)

    def _occupy(self, page: int) -> None:
        """One live block more."""
        self._live[page] += 1
        if self._live[page] == 1:
            self.idle.pop(page, None)

    def _pick(self) -> Block:
        """A vacant block, which it is no more, of the fullest open page that has one."""
        pages = next(filter(None, self._by_vacant))
        page = next(iter(pages))
        del pages[page]
        vacant = self._vacant[page]
        block = vacant.pop()
        if vacant:
            self._by_vacant[len(vacant)][page] = None
        self._num_vacant -= 1
        return block

    def _vacated(self, block: Block) -> None:
        """A block lost its content; a page that lost all goes back."""
        page = block.id // self.per_page
        vacant = self._vacant[page]
        if len(vacant) + 1 == self.per_page:
            self._hand_back([page])
            return
        self._by_vacant[len(vacant)].pop(page, None)
        self._by_vacant[len(vacant) + 1][page] = None
        self._num_vacant += 1
        vacant.append(block)

    def _lose(self, blocks: list[Block]) -> None:
        self.ghosts.evicted([block.digest for block in blocks if block.digest])
        super()._lose(blocks)

    # -- pages --

    def give_up_idle(self, num_pages: int = 1) -> None:
        """Hand back the idle pages used least recently; their cached blocks are evicted."""
        pages = list(islice(self.idle, num_pages))
        self._lose([block for block in self._blocks_in(pages) if block.digest])
        self._hand_back(pages)

    def _hand_back(self, pages: list[int]) -> None:
        """These pages have no live block and are held no more."""
        for page in pages:
            assert self._live[page] == 0, f"page {page} is dropped with live blocks"
            self._close(page)
            del self._vacant[page]
            self.idle.pop(page, None)
        self.held -= len(pages)
        if self.copies:
            self.copies.forget({block.id for block in self._blocks_in(pages)})
        # the last to come goes first: its bytes are nearest
        self.memory.free_pages.extendleft(reversed(pages))

    def _blocks_in(self, pages: Iterable[int]) -> Iterator[Block]:
        size = self.per_page
        return (b for page in pages for b in self.blocks[page * size : (page + 1) * size])

    def empty_pages(self, num_pages: int) -> bool:
        """Hand back up to so many pages by moving what is live out of the emptiest.

        Between steps only. Whether a live block was moved, and so has another id.
        """
        room = (self.held * self.per_page - self._num_live) // self.per_page  # for what is moved
        pages = sorted(self._vacant, key=self._live.__getitem__)[: min(num_pages, room)]
        idle = [page for page in pages if not self._live[page]]
        victims = pages[len(idle) :]
        live, cached = [], []
        for block in self._blocks_in(pages):
            if block.ref_count:
                live.append(block)
            elif block.digest:
                cached.append(block)
        self._lose(cached)
        self._hand_back(idle)
        for page in victims:
            self._close(page)
        vacant = [self._pick() for _ in range(min(len(live), self._num_vacant))]
        evicted = [self._evict() for _ in range(len(live) - len(vacant))]
        for block, other in zip(live, vacant + evicted):  # they change places, and ids
            source, destination = block.id, other.id
            self.blocks[source], self.blocks[destination] = other, block
            block.id, other.id = destination, source
            self._occupy(destination // self.per_page)
            self._live[source // self.per_page] -= 1
            self.copies.add(source, destination, moved=True)
            self.stats.copied += 1
        self._hand_back(victims)
        return bool(victims)

    def _close(self, page: int) -> None:
        """Nothing more is taken from this page, which is to be handed back."""
        vacant = len(self._vacant[page])
        if page in self._by_vacant[vacant]:
            del self._by_vacant[vacant][page]
            self._num_vacant -= vacant

    # -- what the arena learns --

    def admitted(self, missed: list[bytes]) -> None:
        """Counted for the policy."""
        self.ghosts.missed(missed)

    def preempted(self) -> None:
        """Counted for the policy."""
        self.preemptions += 1

    def refused(self, num_blocks: int) -> None:
        """Remembered until the model's next step."""
        self.wanted = -(-num_blocks // self.per_page)

    def _coldest(self) -> int:
        """The last tick at which one of the idle pages that it would lose first was used."""
        cold = self.ghost_pages - max(0, self.grant.keep - self.held)
        ticks = islice(self.idle.values(), max(cold, 1) - 1, None)
        return next(ticks, maxsize) if cold > 0 else 0

    def state(self, running: bool) -> ModelState:
        """The model as a policy sees it."""
        a_page = self.shape.block_cost / self.ghost_pages  # of the work that so many pages save
        missed = self.ghosts.hits * SAMPLE  # blocks, estimated, that so much more would have kept
        seen = self.shape.name, self.floor_pages, running, self.ghosts.hits
        return ModelState(*seen, missed * a_page, self.ghosts.cold_hits * a_page, self.preemptions)

    # -- size --

    def resize(self, num_blocks: int) -> ResizeAnswer:
        """Ask the arena for so many blocks."""
        return self.memory.resize(self, num_blocks)

    def settle(self) -> bool:
        """Between steps: the arena moves pages towards what is granted."""
        return self.memory.apply(self)

    def rebuild(self, tables: Iterable[Sequence[Block]]) -> None:
        """The pages of these blocks are held, and no others."""
        super().rebuild(tables)
        self._free.clear()
        self.idle.clear()
        self._vacant.clear()
        self._live = [0] * len(self._live)
        for block in self.blocks:
            self._live[block.id // self.per_page] += block.ref_count > 0
        self._num_live, self._num_vacant = sum(self._live), 0
        self._by_vacant = [{} for _ in range(self.per_page + 1)]
        for page in np.flatnonzero(self._live).tolist():
            vacant = [block for block in self._blocks_in([page]) if not block.ref_count]
            self._vacant[page] = vacant
            self._num_vacant += len(vacant)
            if vacant:
                self._by_vacant[len(vacant)][page] = None
        self.held = len(self._vacant)

    def check(self, references: dict[int, int], vacant: Sequence[Block] | None = None) -> None:
        """Raise unless blocks, pages and counts agree."""
        vacant = [block for each in self._vacant.values() for block in each]
        not_held = (page for page in range(self.memory.num_pages) if page not in self._vacant)
        super().check(references, [*vacant, *self._blocks_in(not_held)])
        live = [0] * len(self._live)
        for block in self.blocks:
            live[block.id // self.per_page] += block.ref_count > 0
        assert live == self._live, "live blocks of a page are counted wrongly"
        assert self._num_live == sum(live), "live blocks are counted wrongly"
        assert all(p in self._vacant for p, n in enumerate(live) if n), "live, but not held"
        assert set(self.idle) == {p for p in self._vacant if not live[p]}, "wrongly (not) idle"
        assert list(self.idle.values()) == sorted(self.idle.values()), "idle pages out of order"
        for page, blocks in self._vacant.items():
            assert len(blocks) < self.per_page, f"page {page} is held without content"
            assert all(b.id // self.per_page == page for b in blocks), "vacant in another page"
            sizes = [n for n, pages in enumerate(self._by_vacant) if page in pages]
            assert sizes == [len(blocks)] * bool(blocks), f"page {page} is filed wrongly"
        assert self._num_vacant == len(vacant), "vacant blocks miscounted"
        assert set().union(*self._by_vacant) <= set(self._vacant), "a page is open but not held"


# -- all models' pages --


class KVArena:
    """Pages for the blocks of `models`; memory: bytes or text. kv_share: the first model's.

    page: default, the smallest that wastes at most 5 %. A page is free or held by one model; every
    model can come to its floor at any time: so many free pages are never lent to another. Above
    that, `keep` protects a model's pages and `limit` bounds them (policies.Grant).

    Hold `lock` from scheduling to the plan, and while a step is taken in, where engines run in
    several threads. Raises ConfigError for two models of one name, a share outside (0, 1) or with a
    policy that keeps none, a block that no page fits; OutOfMemory when the memory does not hold one
    request of each model.
    """

    def __init__(
        self,
        memory: int | str,
        models: Sequence[BlockShape],
        policy: Policy | None = None,
        kv_share: KVShare | None = None,
        *,
        page: PageShape | None = None,
    ) -> None:
        if not models:
            raise ConfigError("KVArena got no models; give the BlockShape of at least one.")
        self.page = choose_page(models) if page is None else page
        self.memory = parse_size(memory)
        self.num_pages = self.memory // self.page.page_bytes
        self.policy: Policy = MarginalValue() if policy is None else policy
        self.lock = RLock()
        self.storage: Any = None  # the ArenaStorage that owns the bytes, once there are any
        self.pools: list[LeasedPool] = []
        self.tick = count(1).__next__  # a number larger than all before
        self._packings: dict[str, Packing] = {}
        self._caches: dict[str, tuple[dict[str, Any], KVCacheManager]] = {}  # with its settings
        self.free_pages = deque(range(self.num_pages))  # that no model holds
        self._wrote: list[object] = [None] * self.num_pages  # whose bytes lie in it
        self._retyped: dict[int, None] = {}
        self._wanted: list[int] | None = None  # a split asked for, until the next step
        self._seen: list[tuple[bool, int, int]] = []  # by the policy, when it was asked last
        self.changing: KVCacheManager | None = None
        for shape in models:
            packing = pack(shape, self.page)
            if shape.name in self._packings:
                raise ConfigError(
                    f"The arena got two models {shape.name!r}; give each a name of its own: "
                    "block_shape(..., name=...), or what_if(..., prm_name=...)."
                )
            if not packing.blocks:
                raise ConfigError(
                    f"{shape.name!r} has blocks of {shape.layers} layers of {shape.cell_bytes:,} "
                    f"bytes; pages of {self.page.slabs} stripes of {self.page.stripe:,} bytes fit "
                    "none. Give a larger page, or leave it out."
                )
            self._packings[shape.name] = packing
            self.pools.append(LeasedPool(shape, packing.blocks, self))
        floors = [pool.floor_pages for pool in self.pools]
        if sum(floors) > self.num_pages:
            raise OutOfMemory(
                f"The arena of {format_size(self.memory)} has {self.num_pages} pages of "
                f"{format_size(self.page.page_bytes)}; one request of each model needs "
                f"{sum(floors)} ({dict(zip(self.models, floors))}). Give more memory, or a smaller "
                "max_model_len."
            )
        # what is to be zeroed or copied before the next store
        self.unsettled: list[object] = [self._retyped, *(pool.copies for pool in self.pools)]
        self._split = pages_above_floors(floors, self.num_pages)
        if kv_share is not None:
            answer = self.resplit(kv_share)
            if answer.refused:
                kind = OutOfMemory if self.policy.keeps_split else ConfigError
                raise kind(
                    f"The arena got kv_share={kv_share}: {answer.reason}. Choose another kv_share, "
                    "or leave it out; give more memory, or a smaller max_model_len."
                )
            self._split, self._wanted = self.asked_for, None
        self.policy.split(self._split)
        self._grant(None)

    # -- state --

    @property
    def models(self) -> list[str]:
        """Names, in the order they were given."""
        return list(self._packings)

    @property
    def target(self) -> dict[str, int]:
        """Pages each model should come to."""
        return {pool.shape.name: pool.grant.target for pool in self.pools}

    @property
    def actual(self) -> dict[str, int]:
        """Pages each model holds or could have now."""
        return {p.shape.name: p.held + self.leasable(p) for p in self.pools}

    def cache(
        self,
        model: str,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        namespace: bytes = b"",
        reuse_partial_blocks: bool = False,
    ) -> KVCacheManager:
        """The KV cache of a model of the arena; the same one whenever it is asked for.

        Raises ConfigError for settings other than the first time's.
        """
        pool = self.pools[self.models.index(self.packing(model).shape.name)]
        settings: dict[str, Any] = {
            "block_size": block_size,
            "enable_prefix_caching": enable_prefix_caching,
            "namespace": namespace,
            "reuse_partial_blocks": reuse_partial_blocks,
        }
        if model not in self._caches:
            made = KVCacheManager(len(pool.blocks), **settings, pool=pool)
            self._caches[model] = settings, made
        made_with, cache = self._caches[model]
        if made_with != settings:
            raise ConfigError(
                f"{model!r} has a cache already, of blocks of {cache.block_size} tokens, for other "
                "weights or other settings; give the second model a name of its own in the arena."
            )
        return cache

    def has_cache(self, model: str) -> bool:
        """Whether this model's cache was asked for."""
        return model in self._caches

    def drop(self, model: str) -> None:
        """Forget the cache of a model whose engine could not be built."""
        self._caches.pop(model, None)

    # -- where blocks lie --

    def packing(self, model: str) -> Packing:
        """How this model's blocks lie in a page. ConfigError if it is no model of the arena."""
        if model not in self._packings:
            raise ConfigError(f"The arena has no model {model!r}; it has {self.models}.")
        return self._packings[model]

    def require_cells(self, model: str, cell_bytes: int, element_bytes: int) -> None:
        """ConfigError unless the arena was made for blocks of so many bytes a layer."""
        shape = self.packing(model).shape
        if (cell_bytes, element_bytes) != (shape.cell_bytes, shape.element_bytes):
            raise ConfigError(
                f"{model!r} has {cell_bytes:,} bytes a block and layer, {element_bytes} an element;"
                f" the arena was made for {shape.cell_bytes:,} and {shape.element_bytes}. Make it "
                "with this model's BlockShape."
            )

    def waste(self, models: Iterable[BlockShape] | None = None) -> dict[str, int]:
        """Bytes of a page that each model (default: those of the arena) cannot use."""
        shapes = [p.shape for p in self._packings.values()] if models is None else models
        return {shape.name: pack(shape, self.page).waste for shape in shapes}

    def take_moves(self) -> dict[str, list[tuple[int, int]]]:
        """What `take_moves` of each model's cache returns, of those that have moves."""
        moves = {pool.shape.name: pool.copies.take() for pool in self.pools}
        return {name: pairs for name, pairs in moves.items() if pairs}

    def take_retyped(self) -> list[int]:
        """Pages that hold another model's bytes, each once: to be zeroed before the next store.

        After what is moved was read, before it is written; so no bytes are ever read that were
        written as another type, which could be no number.
        """
        taken = list(self._retyped)
        self._retyped.clear()
        return taken

    # -- how many pages each holds --

    def resplit(self, kv_share: KVShare) -> ResizeAnswer:
        """Split the pages anew, from any thread: the first model's share, or each one's by name.

        Takes effect between steps, and drops nothing in use. A policy that lends leaves a model
        above its target for as long as no other needs the pages. The answer's target is the first
        model's, in pages.
        """
        with self.lock:
            return self._want(pages_of(kv_share, self.models, self.num_pages))

    def resize(self, pool: LeasedPool, num_blocks: int) -> ResizeAnswer:
        """This model's pages are enough for num_blocks; the others share the rest as before."""
        with self.lock:
            pages = -(-num_blocks // pool.per_page)
            if pages > self.num_pages:
                raise ConfigError(
                    f"resize to {num_blocks} blocks; the arena has pages for at most "
                    f"{self.num_pages * pool.per_page} of {pool.shape.name!r}."
                )
            wanted = pages_with_one(self.asked_for, self.pools.index(pool), pages)
            return replace(self._want(wanted), target=num_blocks)

    def apply(self, pool: LeasedPool) -> bool:
        """Between this model's steps: grant anew, take back what is above limits.

        Idle pages go first, the least recently used of each model first; then live blocks of the
        asking model, whose step is not in flight, are moved. Whether any was.
        """
        with self.lock:
            if self._wanted is not None:
                self._split, self._seen = self._wanted, []
                self.policy.split(self._split)
            self._grant(pool)
            self._wanted = None  # last: what is cut short is done again
            pool.wanted = 0
            if len(self.pools) > 1:  # else there is no model to give to
                pool.ghosts.cold_until = None  # the step's first hit looks up which pages are cold
            for each in self.pools:
                if each.held > each.grant.limit:
                    each.give_up_idle(each.held - each.grant.limit)
            if pool.held <= pool.grant.keep:
                return False
            lacking = 0  # pages that others were refused, below their keep
            for other in self.pools:
                wanted = min(other.wanted, other.grant.keep) - other.held
                if other is not pool and wanted > 0:
                    lacking += max(0, wanted - self.leasable(other))
            owed = lacking + len(pool.idle) if lacking else 0  # idle ones, which go first, are had
            owed = min(pool.held - pool.grant.keep, owed)
            excess = max(pool.held - pool.grant.limit, owed)
            return excess > 0 and pool.empty_pages(excess)

    def recover(self) -> None:
        """After a call that was cut short: what sequences have in use stays, all else is free."""
        with self.lock:
            tables = {id(cache.pool): cache.tables() for _, cache in self._caches.values()}
            for pool in self.pools:
                pool.rebuild(tables.get(id(pool), []))
            held = {page for pool in self.pools for page in pool.pages}
            self.free_pages = deque(page for page in range(self.num_pages) if page not in held)
            for page in self.free_pages:
                self._wrote[page] = _UNKNOWN
                self._retyped.pop(page, None)
            self._seen = []
            self._wanted = self.asked_for  # the policy may not have been told
            self.changing = None

    @property
    def asked_for(self) -> list[int]:
        """The split to be applied, else the targets if they use all pages, else the last split."""
        if (wanted := self._wanted) is not None:  # read once: `room` asks without the lock
            return list(wanted)
        targets = [pool.grant.target for pool in self.pools]
        return targets if sum(targets) == self.num_pages else list(self._split)

    def _want(self, pages: list[int]) -> ResizeAnswer:
        """Take the split as the next target, if every model keeps its floor."""
        if not self.policy.keeps_split:
            name = type(self.policy).__name__
            return ResizeAnswer("refused", pages[0], f"the policy {name} keeps no split")
        for pool, pages_left in zip(self.pools, pages):
            if pages_left < pool.floor_pages:
                had = f"{pool.shape.name!r} would have {pages_left} pages"
                reason = f"{had}; one request needs {pool.floor_pages}"
                return ResizeAnswer("refused", pages[0], reason)
        self._wanted = pages
        for pool, pages_left in zip(self.pools, pages):
            live = -(-pool.num_active // pool.per_page)
            if live > pages_left:
                reason = f"{pool.shape.name!r} has {live} pages of blocks in use"
                return ResizeAnswer("later", pages[0], reason)
        return ResizeAnswer("reached", pages[0])

    def _grant(self, stepping: LeasedPool | None) -> None:
        """Ask the policy, if what it sees has changed. stepping: the model whose turn it is."""
        seen = []
        for pool in self.pools:
            running = pool is stepping or pool.num_active > 0
            seen.append((running, pool.ghosts.hits, pool.preemptions))
        if seen == self._seen:
            return
        self._seen = seen
        states = [pool.state(running) for pool, (running, *_) in zip(self.pools, seen)]
        grants = self.policy.grants(states, self.num_pages)
        for pool, grant in zip(self.pools, grants, strict=True):
            if not pool.floor_pages <= grant.keep <= grant.limit <= self.num_pages:
                raise ConfigError(
                    f"The policy {type(self.policy).__name__} grants {pool.shape.name!r} {grant}; "
                    f"allowed: {pool.floor_pages} pages (one request) <= keep <= limit <= "
                    f"{self.num_pages}."
                )
            pool.grant, pool.target = grant, grant.target * pool.per_page

    # -- which page goes to which model --

    def leasable(self, pool: LeasedPool) -> int:
        """Pages a model could have now: free ones, and what others hold idle above their keep."""
        supply = len(self.free_pages)
        for other in self.pools:
            if other is not pool and other.held > other.grant.keep:
                supply += min(other.held - other.grant.keep, len(other.idle))
        floors, claims = self._due(pool)
        below = min(max(0, pool.grant.keep - pool.held), supply - floors)
        return max(0, min(pool.grant.limit - pool.held, max(below, supply - claims)))

    def _due(self, pool: LeasedPool) -> tuple[int, int]:
        """Pages that are left to the others, by a model below its keep: what their floors lack; by
        one above it: also what they were refused below theirs.
        """
        floors = claims = 0
        for other in self.pools:
            if other is not pool:
                floors += max(0, other.floor_pages - other.held)
                claim = max(other.floor_pages, min(other.wanted, other.grant.keep))
                claims += max(0, claim - other.held)
        return floors, claims

    def lease(self, pool: LeasedPool) -> int | None:
        """A free page, or the oldest idle one of another model, of one that lends first.

        None where the model is to evict a block of its own, which was used longer ago.
        """
        if pool.held >= pool.grant.limit:
            return None
        floors, claims = self._due(pool)
        if len(self.free_pages) <= (floors if pool.held < pool.grant.keep else claims):
            donors = [p for p in self.pools if p is not pool and p.idle and p.held > p.grant.keep]
            if not donors:
                return None
            donor = min(donors, key=lambda p: (not p.grant.lends, _oldest(p)))
            entitled = pool.held < pool.grant.keep or donor.grant.lends
            if not entitled and pool.evicts_older_than(_oldest(donor)):
                return None
            donor.give_up_idle()
        page = self.free_pages.popleft()
        if self._wrote[page] is not pool:
            if self._wrote[page] is not None:
                self._retyped[page] = None
            self._wrote[page] = pool
        return page

    def check(self) -> None:
        """Raise AssertionError if a law of the arena or of one of its caches is broken."""
        with self.lock:
            held = [page for pool in self.pools for page in pool.pages]
            assert sorted([*self.free_pages, *held]) == [*range(self.num_pages)], (
                "a page is lost, held twice, or free and held"
            )
            for pool in self.pools:
                fair = pool.floor_pages <= pool.grant.keep <= pool.grant.limit
                assert fair, f"{pool.shape.name}: an unfair grant"
            lacking = sum(max(0, p.floor_pages - p.held) for p in self.pools)
            assert lacking <= len(self.free_pages), "a floor is not covered"
            for _, cache in self._caches.values():
                cache.check()


def _oldest(pool: LeasedPool) -> int:
    """When its least recently used idle page was used."""
    return next(iter(pool.idle.values()))
