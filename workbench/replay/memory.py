"""The caches that a replay runs over: each model has its own, or both lease pages of one arena.

What it does not do: know shares of a device's memory (what_if.py), or run anything (engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import ConfigError, RecordingError, nearest
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, Policy, StaticSplit
from workbench.replay.calls import LoggedCache
from workbench.replay.engine import CacheSettings
from workbench.replay.lines import ChainedCache
from workbench.replay.work import block_size_of, spec_of
from workbench.search.record import RecordedEngine

POLICIES: dict[str, type[Policy]] = {
    kind.__name__: kind for kind in (StaticSplit, FirstCome, PhaseAware, MarginalValue)
}
Model = tuple[RecordedEngine, CacheSettings]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """One arena for both models, as KVArena takes it. policy: a name in POLICIES."""

    memory: int | str
    policy: str = MarginalValue.__name__
    kv_share: float | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"policy is {self.policy!r}; allowed: {', '.join(POLICIES)}."
                f"{nearest(self.policy, list(POLICIES))}"
            )

    @property
    def keeps_split(self) -> bool:
        """Whether a share means anything to the policy."""
        return POLICIES[self.policy]().keeps_split


def make_caches(
    models: Sequence[Model], shared: SharedMemory | None, log_calls: bool = False
) -> list[ChainedCache]:
    """A cache for each model. log_calls: they keep their calls (calls.logged_calls).

    Raises ConfigError and OutOfMemory as caches and arenas do.
    """
    if shared is None:
        return [_own_cache(*model, log_calls) for model in models]
    shapes = [_block_shape(*model) for model in models]
    if shapes[0].name == shapes[1].name:
        raise ConfigError(f"Both models are named {shapes[0].name!r}; an arena tells them by name.")
    share = shared.kv_share if shared.keeps_split else None
    arena = KVArena(shared.memory, shapes, POLICIES[shared.policy](), share)
    kind = LoggedCache if log_calls else ChainedCache
    return [
        kind(
            len(pool.blocks),
            settings.block_size,
            settings.enable_prefix_caching,
            namespace=namespace_of(recorded),
            reuse_partial_blocks=settings.reuse_partial_blocks,
            pool=pool,
        )
        for pool, (recorded, settings) in zip(arena.pools, models, strict=True)
    ]


def namespace_of(recorded: RecordedEngine) -> bytes:
    """What the engine's hashes start from, so that a replay's are the same ones."""
    weights, *_ = recorded.fingerprint.rsplit("/", 2)  # then tokenizer and mode
    return weights.encode()


def _own_cache(recorded: RecordedEngine, settings: CacheSettings, log_calls: bool) -> ChainedCache:
    if settings.num_blocks is None:
        raise ConfigError(
            f"The recording does not say how many blocks {recorded.name} had, or they changed in "
            "the search; give num_blocks, or a memory that both models share."
        )
    kind = LoggedCache if log_calls else ChainedCache
    return kind(
        settings.num_blocks,
        settings.block_size,
        settings.enable_prefix_caching,
        namespace=namespace_of(recorded),
        reuse_partial_blocks=settings.reuse_partial_blocks,
    )


def _block_shape(recorded: RecordedEngine, settings: CacheSettings) -> BlockShape:
    """As engine.shared.block_shape; RecordingError when the engine did not tell its shapes."""
    if recorded.spec is None or recorded.block_bytes is None:
        raise RecordingError(
            f"The recording does not hold the shapes of {recorded.name}; record the search on an "
            "Engine of this workbench, or replay it without a shared memory."
        )
    spec, size = spec_of(recorded), settings.block_size
    element = recorded.block_bytes // spec.block_bytes(block_size_of(recorded), 1)
    return BlockShape(
        name=recorded.name,
        layers=spec.layers,
        cell_bytes=spec.block_bytes(size, element) // spec.layers,
        element_bytes=element,
        floor_blocks=-(-recorded.max_model_len // size),
        block_cost=float(spec.flops(size, 0)),
    )
