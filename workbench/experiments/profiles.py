"""The four sizes of the study: quick for a look, default for `make figures`, full and thesis.

STUDY §3 fixes problems, seeds and shares. A profile is a SweepConfig; any of its settings can be
overridden. What it does not do: say which figures are drawn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from workbench.config import SweepConfig
from workbench.errors import ConfigError, nearest
from workbench.experiments.plan import HOW_IT_IS_CARRIED_OUT

EVERY_SHARE = (0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)

TINY: dict[str, Any] = {
    "llm": "tiny-solver",
    "prm": "tiny-prm",
    "total_memory": "64MiB",
    "activations_in_total": False,
    "problems": "tiny",
    "n": 16,
    "beam_width": 4,
    "max_depth": 40,
    "temperature": 0.8,
    "block_size": 16,
}

PROFILES: dict[str, dict[str, Any]] = {
    "quick": TINY | {"num_problems": 8, "seeds": (0,), "shares": (0.08, 0.2, 0.3, 0.5)},
    "default": TINY
    | {
        "num_problems": 16,
        "seeds": (0, 1),
        "shares": (0.08, 0.15, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5),
    },
    "full": TINY | {"num_problems": 128, "seeds": (0, 1, 2, 3, 4), "shares": EVERY_SHARE},
    "thesis": {
        "llm": "llama-3.2-1b",
        "prm": "llama-3.1-8b-prm",
        "total_memory": "40GiB",
        "activations_in_total": True,
        "dtype": "bfloat16",
        "device": "cuda",
        "max_model_len": 4096,
        "problems": "math500",
        "num_problems": 128,
        "seeds": (0, 1, 2, 3, 4),
        "shares": EVERY_SHARE,
        "max_step_tokens": 2048,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "min_problem_batch": 16,
    },
}

SECONDS_PER_PROBLEM = {"quick": 1.5, "default": 1.5, "full": 1.5, "thesis": 60.0}
"""Rough cost of one problem on the reference machine: used until this machine has finished a run.
"""


def overridden(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that are not None, as notebooks give them; lists become tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in overrides.items()
        if value is not None
    }


def sweep_config(profile: str = "default", **overrides: Any) -> SweepConfig:
    """The sweep of a profile with settings overridden; what it does not know it refuses."""
    if profile not in PROFILES:
        known = list(PROFILES)
        raise ConfigError(
            f"There is no profile {profile!r}.{nearest(profile, known)} "
            f"Profiles: {', '.join(known)}."
        )
    return SweepConfig.from_dict(PROFILES[profile] | {"profile": profile} | overrides)


def promises_scarcity(config: SweepConfig) -> bool:
    """Whether both models must run out of blocks at their ends of the axis: 0.08 and 0.5.

    True of the default profile's models, memory and search with at least as many problems, both
    ends among the shares. Smaller sweeps fill too few blocks; other models have other sizes.
    """
    usual = sweep_config("default")
    free = {"num_problems", "seeds", "shares"} | HOW_IT_IS_CARRIED_OUT
    same = all(
        getattr(config, field.name) == getattr(usual, field.name)
        for field in fields(SweepConfig)
        if field.name not in free
    )
    ends = {min(usual.shares), max(usual.shares)} <= set(config.shares)
    return same and ends and config.num_problems >= usual.num_problems
