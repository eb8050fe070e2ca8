"""One memory for the KV caches of several models: pages flow to whoever needs them, live.

Each model has an ordinary KVCacheManager whose blocks lie in pages leased from here; a policy says
how many each may hold, a person may re-split them while engines run. Pure bookkeeping, so a replay
runs it; the bytes are storage.py's. What it does not do: preempt, or know a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any

from workbench.config import format_size, parse_size
from workbench.errors import ConfigError, OutOfMemory
from workbench.kvcache.arena_cache import ArenaCache
from workbench.kvcache.layout import ArenaLayout
from workbench.kvcache.leases import LeasedPool
from workbench.kvcache.lending import Lender
from workbench.kvcache.pages import BlockShape, PageShape, choose_page, pack
from workbench.kvcache.policies import MarginalValue, ModelState, Policy, require_fair
from workbench.kvcache.resizing import ResizeAnswer
from workbench.kvcache.shares import (
    KVShare,
    pages_of,
    pages_with_another,
    pages_with_one,
    starting_pages,
)

SHADOW_SHARE = 8  # the shadow list of a model covers one page in so many


class KVArena(Lender, ArenaLayout):
    """Pages for the blocks of `models`; memory: bytes or text. kv_share: the first model's.

    page: default, the smallest that wastes at most 5 %. Hold `lock` from scheduling to the plan,
    and while a step is taken in, where engines run in several threads. Raises ConfigError for two
    models of one name, a share outside (0, 1) or with a policy that keeps none, a block that no
    page fits; OutOfMemory when the memory does not hold one request of each model.
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
        page = choose_page(models) if page is None else page
        self.memory = parse_size(memory)
        num_pages = self.memory // page.page_bytes
        ArenaLayout.__init__(self, page, num_pages)
        Lender.__init__(self, num_pages)
        self.policy: Policy = MarginalValue() if policy is None else policy
        self.lock = RLock()
        self.storage: Any = None  # who owns the bytes, once there are any: an ArenaStorage
        self._caches: dict[str, ArenaCache] = {}
        for shape in models:
            self._admit(shape)
        self._wanted: list[int] | None = None
        self._seen: list[tuple[bool, int, int]] = []  # by the policy, when it was asked last
        floors = [pool.floor_pages for pool in self.pools]
        self._split = starting_pages(self.policy, kv_share, self.models, floors, num_pages)
        self._refuse_below_floor(self._split)
        self.policy.split(self._split)
        self._grant(None)

    def add(self, shape: BlockShape) -> None:
        """One model more, at its floor until the policy says otherwise; blocks in use stay.

        Pages of its floor that are not free are taken of what lies idle, least recently used first.
        The others give it of the split asked for last, or that the policy has come to. Raises
        ConfigError if no page fits its block, OutOfMemory if running requests hold its floor.
        """
        with self.lock:
            pages = self._asked_for
            self._admit(shape)
            floors = [pool.floor_pages for pool in self.pools]
            self._split, self._wanted = pages_with_another(pages, floors), None
            self.policy.split(self._split)
            self._grant(None)

    # -- state --

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
    ) -> ArenaCache:
        """The KV cache of a model of the arena; the same one whenever it is asked for.

        Raises ConfigError for settings other than the first time's.
        """
        packing = self.packing(model)
        if model not in self._caches:
            pool = self.pools[self.models.index(packing.shape.name)]
            self._caches[model] = ArenaCache(
                pool,
                block_size,
                enable_prefix_caching,
                namespace=namespace,
                reuse_partial_blocks=reuse_partial_blocks,
                lock=self.lock,
            )
        cache = self._caches[model]
        if not cache.is_as(block_size, enable_prefix_caching, namespace, reuse_partial_blocks):
            raise ConfigError(
                f"{model!r} has a cache already, of blocks of {cache.block_size} tokens, for other "
                "weights or other settings; give the second model a name of its own in the arena."
            )
        return cache

    # -- who holds how much --

    def resplit(self, kv_share: KVShare) -> ResizeAnswer:
        """Split the pages anew, from any thread: the first model's share, or each one's by name.

        Takes effect between steps, and drops nothing in use. A policy that lends leaves a model
        above its target for as long as nobody wants the pages. The answer's target is the first
        model's, in pages.
        """
        with self.lock:
            return self._want(pages_of(kv_share, self.models, self.num_pages))

    def resize(self, pool: LeasedPool, num_blocks: int) -> ResizeAnswer:
        """This model's pages are enough for num_blocks; the others share the rest as before."""
        with self.lock:
            index = self.pools.index(pool)
            pages = -(-num_blocks // pool.per_page)
            if pages > self.num_pages:
                raise ConfigError(
                    f"resize to {num_blocks} blocks; the arena has pages for at most "
                    f"{self.num_pages * pool.per_page} of {pool.shape.name!r}."
                )
            return self._want(pages_with_one(self._asked_for, index, pages))

    def apply(self, pool: LeasedPool) -> bool:
        """Between this model's steps: grant anew, take back what is above limits.

        Idle pages go first, the least recently used of each model first; then live blocks of the
        asking model, whose step is not in flight, are moved. Whether any was.
        """
        with self.lock:
            if self._wanted is not None:
                self._split, self._wanted = self._wanted, None
                self.policy.split(self._split)
                self._seen = []
            self._grant(pool)
            pool.wanted = 0
            if len(self.pools) > 1:  # else there is nobody to give to
                pool.mark_tail()
            for each in self.pools:
                if each.held > each.grant.limit:
                    each.give_up_idle(each.held - each.grant.limit)
            excess = max(pool.held - pool.grant.limit, self._owed_by(pool))
            return excess > 0 and pool.empty_pages(excess)

    def take_moves(self) -> dict[str, list[tuple[int, int]]]:
        """What `take_moves` would answer, of each model that has moves; for who owns the bytes."""
        moves = {pool.shape.name: pool.copies.take() for pool in self.pools}
        return {name: pairs for name, pairs in moves.items() if pairs}

    def check(self) -> None:
        """Raise AssertionError if a law of the arena or of one of its caches is broken."""
        with self.lock:
            super().check()
            fair = (p.floor_pages <= p.grant.keep <= p.grant.limit for p in self.pools)
            assert all(fair), "a grant is unfair"
            for cache in self._caches.values():
                cache.check()

    # -- how --

    def _admit(self, shape: BlockShape) -> None:
        packing = pack(shape, self.page)
        if shape.name in self._packings:
            raise ConfigError(
                f"The arena has a model {shape.name!r} already, beside {self.models}; give each a "
                "name of its own: block_shape(..., name=...)."
            )
        if not packing.blocks:
            raise ConfigError(
                f"{shape.name!r} has blocks of {shape.layers} layers of {shape.cell_bytes:,} "
                f"bytes; the arena's pages of {self.page.slabs} stripes of {self.page.stripe:,} "
                "bytes fit none. Name the model with the largest blocks when the arena is made."
            )
        shadow = max(1, self.num_pages // SHADOW_SHARE)
        pool = LeasedPool(shape, packing.blocks, self.num_pages, shadow, self)
        needed = pool.floor_pages + sum(p.floor_pages for p in self.pools)
        lacking = sum(max(0, p.floor_pages - p.held) for p in (*self.pools, pool))
        if needed > self.num_pages or lacking > self.num_free + self.num_spare:
            raise self._too_small(needed)
        self.free_up(lacking)
        self.pools.append(pool)
        self._packings[shape.name] = packing

    def _too_small(self, needed: int) -> OutOfMemory:
        floors = {p.shape.name: p.floor_pages for p in self.pools}
        return OutOfMemory(
            f"The arena of {format_size(self.memory)} has {self.num_pages} pages of "
            f"{format_size(self.page.page_bytes)}, {self.num_free} of them free; one request of "
            f"each model needs {needed} (floors so far: {floors}). Give more memory, a smaller "
            "max_model_len, or add models when fewer requests run."
        )

    def _refuse_below_floor(self, pages: list[int]) -> None:
        for pool, count in zip(self.pools, pages):
            if count < pool.floor_pages:
                raise OutOfMemory(
                    f"A split of {pages} pages leaves {pool.shape.name!r} below the "
                    f"{pool.floor_pages} that one request of the longest length needs. Choose "
                    "another kv_share, give more memory, or a smaller max_model_len."
                )

    def part_of(self, pool: LeasedPool) -> int:
        """Pages of the split that are this model's own; a fair part, where none is kept."""
        return self._asked_for[self.pools.index(pool)]

    @property
    def _asked_for(self) -> list[int]:
        """The split not yet taken over, else what the policy has made of it (a lender: nothing)."""
        if (wanted := self._wanted) is not None:  # read once: `room` asks without the lock
            return list(wanted)
        targets = [pool.grant.target for pool in self.pools]
        return targets if sum(targets) == self.num_pages else list(self._split)

    def _want(self, pages: list[int]) -> ResizeAnswer:
        """Take the split as the next target, if every model keeps its floor."""
        for pool, count in zip(self.pools, pages):
            if count < pool.floor_pages:
                name = pool.shape.name
                reason = f"{name!r} would have {count} pages; one request needs {pool.floor_pages}"
                return ResizeAnswer("refused", pages[0], reason)
        if not self.policy.keeps_split:
            name = type(self.policy).__name__
            return ResizeAnswer("refused", pages[0], f"the policy {name} keeps no split")
        self._wanted = pages
        for pool, count in zip(self.pools, pages):
            live = -(-pool.num_active // pool.per_page)
            if live > count:
                reason = f"{pool.shape.name!r} has {live} pages of blocks in use"
                return ResizeAnswer("later", pages[0], reason)
        return ResizeAnswer("reached", pages[0])

    def _grant(self, stepping: LeasedPool | None) -> None:
        """Ask the policy, if what it sees has changed. stepping: the model whose turn it is."""
        seen = [
            (pool is stepping or pool.num_active > 0, pool.shadow.hits, pool.readmissions)
            for pool in self.pools
        ]
        if seen == self._seen:
            return
        self._seen = seen
        states = [_state(pool, running) for pool, (running, *_) in zip(self.pools, seen)]
        grants = self.policy.grants(states, self.num_pages)
        for pool, grant in zip(self.pools, grants, strict=True):
            require_fair(self.policy, grant, pool.shape.name, pool.floor_pages, self.num_pages)
            pool.accept(grant)

    def _owed_by(self, pool: LeasedPool) -> int:
        """Pages it holds above its keep and that others were refused, below theirs."""
        lacking = 0
        for other in self.pools:
            wanted = min(other.wanted, other.grant.keep) - other.held
            if other is not pool and wanted > 0:
                lacking += max(0, wanted - self.leasable(other))
        return min(pool.held - pool.grant.keep, lacking)


def _state(pool: LeasedPool, running: bool) -> ModelState:
    shadow = pool.shadow
    a_page = pool.shape.block_cost / pool.shadow_pages  # of the work that so many pages save
    return ModelState(
        name=pool.shape.name,
        floor=pool.floor_pages,
        running=running,
        misses=shadow.hits,
        gain=shadow.missed_blocks * a_page,
        loss=pool.tail.blocks * a_page,
        readmissions=pool.readmissions,
    )
