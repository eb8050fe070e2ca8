"""Two models that search together, one memory, and a record of what each step did with it.

Names are exported lazily (PEP 562): `from workbench import KVCacheManager` loads no torch.
"""

from importlib import import_module, metadata
from typing import Any

__version__ = next((each.version for each in metadata.distributions(name="workbench")), "0.1.0")

_MODULES = {
    "core": ("SamplingParams",),
    "trace": ("Trace",),
    "kvcache.manager": ("KVCacheManager",),
    "kvcache.arena": ("KVArena",),
    "engine.engine": ("Engine",),
    "engine.foreign": ("TransformersEngine",),
    "engine.remote": ("RemoteEngine",),
    "engine.memory": ("MemoryProfile",),
    "search.problems": ("Problem", "load_problems"),
    "search.strategies": ("Generate", "Score", "Step", "Beam", "Outcome", "BeamSearch", "BestOfN"),
    "search.variants": (
        "SelfConsistency",
        "DVTS",
        "Lookahead",
        "REBASE",
        "ETS",
        "DORA",
        "ParticleFilter",
    ),
    "search.prm": ("PRM",),
    "search.search": ("Search", "run_search"),
    "replay.advise": ("advise",),
    "experiments.runs": ("load_runs", "compare"),
}
_EXPORTS = {name: f"workbench.{module}" for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    """The exported `name`, imported on first use and kept."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
