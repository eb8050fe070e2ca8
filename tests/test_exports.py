"""What `import workbench` loads, and what it does not."""

import subprocess
import sys

import pytest

import workbench

SLOW = {"torch", "numba", "numpy", "pandas", "pyarrow", "plotly", "rich", "transformers"}
SLOW |= {"huggingface_hub"}


def test_every_exported_name_exists() -> None:
    """A name is exported once its module exists, never as a stub; another is no attribute."""
    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
        assert name in dir(workbench)
    with pytest.raises(AttributeError, match="KVCacheManger"):
        workbench.KVCacheManger  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "needed"),
    [
        ("from workbench import KVCacheManager", {"numpy"}),
        ("from workbench import Engine, SamplingParams", {"numpy", "torch"}),
        ("from workbench.cli import main; main(['sweep', '--help'])", set()),
        (
            "from workbench.cli import main; main(['runs', 'list', '--runs', 'none'])",
            {"numpy", "pandas", "pyarrow", "rich"},
        ),
    ],
)
def test_no_more_is_loaded_than_what_is_needed(statement: str, needed: set[str]) -> None:
    """Bookkeeping starts without torch, an engine without tables, a help page without either."""
    code = f"{statement}\nimport sys; print('loaded', *{SLOW} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()[1:]) <= needed
