"""Two models that search together, one memory, and a record of what each step did with it.

Names are exported lazily (PEP 562): `from workbench import KVCacheManager` loads no torch.
A name is listed here once its module exists; nothing is imported until it is asked for.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Engine": "workbench.engine.engine",
    "SamplingParams": "workbench.core",
    "KVCacheManager": "workbench.kvcache.manager",
    "KVArena": "workbench.kvcache.arena",
    "MemoryProfile": "workbench.engine.memory",
    "Trace": "workbench.trace",
    "Generate": "workbench.search.requests",
    "Score": "workbench.search.requests",
    "Step": "workbench.search.requests",
    "Beam": "workbench.search.requests",
    "Outcome": "workbench.search.requests",
    "Problem": "workbench.search.problems",
    "BeamSearch": "workbench.search.strategies",
    "BestOfN": "workbench.search.strategies",
    "PRM": "workbench.search.prm",
    "Search": "workbench.search.search",
    "run_search": "workbench.search.search",
    "load_problems": "workbench.search.problems",
    "load_runs": "workbench.experiments.runs",
    "compare": "workbench.experiments.runs",
}

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
