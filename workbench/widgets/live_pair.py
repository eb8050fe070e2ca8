"""Two engines in one arena, as a live search wants them: the LLM first, then the PRM.

What it does not do: search (live_search.py), or decide who holds what (kvcache/policies.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.engine.engine import Engine
from workbench.engine.shared import block_shape
from workbench.errors import ConfigError, nearest
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, Policy, StaticSplit

ROLES = ("llm", "prm")
POLICIES: dict[str, Callable[[], Policy]] = {
    "static": StaticSplit,
    "first-come": FirstCome,
    "phase-aware": PhaseAware,
    "marginal-value": MarginalValue,
}


@dataclass(frozen=True, slots=True)
class SharedPair:
    """An arena and the two engines whose caches lie in it. prm_format: None is the model's own."""

    arena: KVArena
    llm: Engine
    prm: Engine
    prm_format: str | None = None

    @property
    def engines(self) -> tuple[Engine, Engine]:
        """In the order of ROLES."""
        return self.llm, self.prm

    @property
    def keeps_split(self) -> bool:
        """Whether a split that a person asks for means anything to the arena's policy."""
        return self.arena.policy.keeps_split

    @property
    def policy(self) -> str:
        """The name of the arena's policy."""
        return type(self.arena.policy).__name__

    @property
    def lowest_share(self) -> float:
        """The LLM's, below which one request of it would not fit."""
        return self.arena.pools[0].floor_pages / self.arena.num_pages

    @property
    def highest_share(self) -> float:
        """The LLM's, above which one request of the PRM would not fit."""
        return 1 - self.arena.pools[1].floor_pages / self.arena.num_pages

    def levels(self) -> dict[str, float]:
        """Shares of the arena's pages: ROLE_target, ROLE_actual (held, or to be had now),
        ROLE_held. To be called with the arena's lock.
        """
        arena, levels = self.arena, {}
        target, actual = arena.target, arena.actual
        for role, name, pool in zip(ROLES, arena.models, arena.pools, strict=True):
            levels[f"{role}_target"] = target[name] / arena.num_pages
            levels[f"{role}_actual"] = actual[name] / arena.num_pages
            levels[f"{role}_held"] = pool.held / arena.num_pages
        return levels


def shared_pair(
    llm: str = "tiny-solver",
    prm: str = "tiny-prm",
    memory: int | str = "8MiB",
    kv_share: float = 0.5,
    policy: str = "static",
    *,
    max_model_len: int = 768,
    prm_format: str | None = None,
    **settings: Any,
) -> SharedPair:
    """Both engines over one arena of `memory`, which the KV caches alone take.

    kv_share: the LLM's, of the arena's pages, where the policy keeps a split. policy: one of
    POLICIES. max_model_len: what the arena guarantees each model. settings: further fields of
    EngineConfig, of both. Raises ConfigError for a policy that is unknown, and what KVArena and
    Engine raise.
    """
    if policy not in POLICIES:
        known = list(POLICIES)
        raise ConfigError(
            f"policy is {policy!r}; allowed: {', '.join(known)}.{nearest(policy, known)}"
        )
    shapes = [block_shape(name, max_model_len=max_model_len) for name in (llm, prm)]
    chosen = POLICIES[policy]()
    arena = KVArena(memory, shapes, chosen, kv_share if chosen.keeps_split else None)
    engines = [
        Engine(name, arena=arena, max_model_len=max_model_len, **settings) for name in (llm, prm)
    ]
    return SharedPair(arena, engines[0], engines[1], prm_format)
