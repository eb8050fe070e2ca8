"""What `import workbench` loads, and what it does not."""

import pytest

import workbench
from tests.conftest import printed

SLOW = {"torch", "numba", "numpy", "pandas", "pyarrow", "plotly", "rich", "transformers"}
SLOW |= {"huggingface_hub", "tokenizers", "safetensors", "ipywidgets", "IPython"}
TORCH, TABLES = {"numpy", "torch", "tokenizers", "safetensors"}, {"numpy", "pandas", "pyarrow"}
LISTING = TABLES | {"rich", "tokenizers"}
REPLAY = """
from workbench.replay.devices import PRESETS
from workbench.replay.simulator import replay
from workbench.search.recording import read_recording
replay(read_recording("workbench/replay/data/tiny-16-n4.parquet"), PRESETS["h100"])"""


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
        ("from workbench import Engine, SamplingParams", TORCH),
        (REPLAY, TABLES),
        ("import workbench.widgets.what_if_replay", TABLES | {"plotly", "tokenizers"}),
        ("from workbench.cli import main; main(['sweep', '--help'])", set()),
        ("from workbench.cli import main; main('runs list --runs no'.split())", LISTING),
    ],
)
def test_no_more_is_loaded_than_what_is_needed(statement: str, needed: set[str]) -> None:
    """Bookkeeping starts without torch, an engine without tables, a help page without either."""
    code = f"{statement}\nimport sys; print('loaded', *{SLOW} & set(sys.modules))"
    assert set(printed(code).splitlines()[-1].split()[1:]) <= needed
