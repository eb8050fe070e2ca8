"""What `import workbench` loads, and what it does not."""

import subprocess
import sys
from pathlib import Path

import pytest

import workbench

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "workbench"
TORCH_FREE = (
    "core.py",
    "config.py",
    "errors.py",
    "host.py",
    "tokenizer.py",
    "trace.py",
    "engine/scheduler.py",
    "kvcache",
    "models/spec.py",
    "models/gguf.py",
    "models/registry.py",
    "search",
    "replay",
    "plots",
)
OWNS_TENSORS = {"workbench.kvcache.storage"}


def modules(place: str) -> list[str]:
    """The dotted names of the modules at a path of the package."""
    path = PACKAGE / place
    assert path.exists(), path
    files = path.rglob("*.py") if path.is_dir() else [path] if path.is_file() else []
    names = (".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files)
    return sorted(name.removesuffix(".__init__") for name in names)


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after running `statement`."""
    code = f"{statement}\nimport sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_exported_name_exists() -> None:
    """A name is exported once its module exists, never as a stub."""
    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
        assert name in dir(workbench)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="KVCacheManger"):
        workbench.KVCacheManger  # noqa: B018


def test_an_engine_loads_no_tables() -> None:
    """pandas takes half a second, and a user who never asks for a table need not wait for it."""
    loaded = loaded_by("from workbench import Engine, SamplingParams")
    assert "torch" in loaded
    assert not loaded & {"pandas", "pyarrow", "numba", "transformers", "huggingface_hub"}


def test_the_cache_manager_loads_no_torch() -> None:
    """`from workbench import KVCacheManager` is bookkeeping: it starts fast, without torch."""
    assert "torch" not in loaded_by("from workbench import KVCacheManager")


def test_plain_data_modules_load_no_torch() -> None:
    """All of DESIGN's torch-free modules, imported one after the other in one interpreter."""
    names = [name for place in TORCH_FREE for name in modules(place) if name not in OWNS_TENSORS]
    statement = "\n".join(f"import {name}" for name in names)
    loaded = loaded_by(statement)
    assert not loaded & {"torch", "transformers"}


def test_the_core_imports_without_extras() -> None:
    """L0 to L5 need nothing of Jupyter, plotly, reasoning-gym or math-verify to be imported."""
    layers = ("core.py", "config.py", "errors.py", "tokenizer.py", "kernels", "kvcache", "trace.py")
    layers += ("models", "engine", "search", "replay")
    statement = "\n".join(f"import {name}" for place in layers for name in modules(place))
    extras = {"IPython", "ipywidgets", "plotly", "reasoning_gym", "math_verify", "transformers"}
    assert not loaded_by(statement) & extras
