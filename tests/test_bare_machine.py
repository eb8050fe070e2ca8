"""torch, triton, transformers, pandas, pyarrow run an engine, its benchmarks and re-enactment."""

import re

import pytest

from tests.conftest import printed

ABSENT = (
    "anywidget", "duckdb", "fastapi", "gguf", "huggingface_hub.inference", "ipywidgets", "IPython",
    "kaleido", "llvmlite", "math_verify", "nbconvert", "nbformat", "numba", "papermill",
    "plotly", "psutil", "reasoning_gym", "rich", "scipy", "typer", "uvicorn",
)  # fmt: skip

REFUSE = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r} or name in {absent!r}:
            raise ModuleNotFoundError(f"no {{name}} on a bare machine", name=name)

sys.meta_path.insert(0, Absent())
"""

RUN = """
import workbench.bench.kernels
from workbench import Engine, SamplingParams
from workbench.bench import engine, mode_of
from workbench.bench.record import Row, record
ours = Engine("dummy:tiny-solver", dtype="bfloat16", batch_invariant=False, num_blocks=32,
              max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
assert len(ours.generate([[5, 6, 7]], params)[0].token_ids) == 3
assert ours.score([5, 6, 7], [2], [1]).logits.shape == (1, 1)
found = record("engine", [Row("one", 1.0, "x")], mode_of(engine, {"device": "cuda"}))
print(found["rows"][0]["name"], found["mode"]["dtype"])
"""

REENACT = """
from workbench.bench import reenact
from workbench.replay.what_if import what_if
answers, total, _ = reenact.searched("dummy:tiny-solver", "quick")
found = what_if(answers, device="h200", total_memory=total, llm_share=0.3)
assert found.throughput.tokens_per_s > 0
print(reenact.mode_of({"llm": "dummy:tiny-solver", "profile": "quick"})["problems"])
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [(RUN, r"one bfloat16"), (REENACT, r"[1-9]\d*")],
    ids=["engine and benchmarks", "re-enactment"],
)
def test_no_other_package_is_needed(code: str, expected: str) -> None:
    """To sample, score and write a record; to load the recording and to foretell a share."""
    assert re.fullmatch(expected, printed(REFUSE.format(absent=ABSENT) + code))
