"""What `import workbench` loads, and what it does not."""

import subprocess
import sys
from pathlib import Path

import pytest

import workbench

ROOT = Path(__file__).parent.parent


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
