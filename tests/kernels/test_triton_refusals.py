"""What the Triton kernels do not take is refused by name; without triton plain torch serves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from workbench import Engine
from workbench.errors import ConfigError
from workbench.kernels import load_kernels
from workbench.kernels.triton import INTERPRETED, TritonKernels

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@interpreted
@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.bfloat16, r"interpreter multiplies torch\.bfloat16 wrongly"),
        (torch.float64, r"of torch\.float64; they take torch\.float32"),
    ],
    ids=str,
)
def test_types_are_refused(dtype: torch.dtype, said: str) -> None:
    """Those whose products are wrong without a word under the interpreter, and all others."""
    with pytest.raises(ConfigError, match=said):
        TritonKernels(CPU, dtype)


@interpreted
@pytest.mark.parametrize(
    ("block_size", "head_dim", "said"),
    [
        (16, 8, "head_dim=8; .* from 16 to 128"),
        (16, 20, "head_dim=20; .* from 16 to 128"),
        (16, 136, "head_dim=136; .* from 16 to 128"),
        (24, 64, "block_size=24; .* powers of two up to 256"),
        (512, 64, "block_size=512; .* powers of two up to 256"),
    ],
)
def test_heads_and_blocks_are_refused(block_size: int, head_dim: int, said: str) -> None:
    """Too narrow for a tensor core, no multiple of 8, too wide; what no span is made of."""
    with pytest.raises(ConfigError, match=said):
        TritonKernels(CPU, torch.float32).require_takes(block_size, head_dim)


def alone(code: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_triton_a_gpu_takes_plain_torch() -> None:
    """`load_kernels` says so and goes on."""
    said = alone(
        "import sys, warnings; sys.modules['triton'] = None\n"
        "import torch, workbench.kernels as k\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    name = k.load_kernels(torch.device('cuda'), torch.float16).name\n"
        "print(name, *[w.message for w in seen])"
    )
    assert said.startswith("reference The Triton kernels need the package triton")
    assert "pip install 'workbench[gpu]'" in said
    assert said.endswith("Plain torch computes instead.")


EARLY = """
import sys, torch
{before}
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda _: (9, 0)
from workbench import Engine
from workbench.engine import engine
from workbench.errors import ConfigError

def load(*_, **settings):
    raise SystemExit("loads")

engine.load_model = load
try:
    Engine({model!r}, device="cuda", dtype="float16", **{settings})
except ConfigError as error:
    print(error)
except SystemExit as loads:
    print(loads)
"""
INVARIANCE = "with batch_invariant=False plain torch computes instead."


@interpreted
@pytest.mark.parametrize(
    ("before", "head_dim", "settings", "said"),
    [
        ("sys.modules['triton'] = None", 16, {}, ("need the package triton", INVARIANCE)),
        ("", 160, {}, ("head_dim=160; the Triton kernels take", INVARIANCE)),
        ("", 16, {"block_size": 24}, ("block_size=24; the Triton kernels take", INVARIANCE)),
        ("", 16, {}, ("loads",)),
        ("", 160, {"batch_invariant": False}, ("loads",)),
        ("", 16, {"batch_invariant": False, "block_size": 24}, ("loads",)),
    ],
    ids=["no triton", "head_dim", "block_size", "served", "plain torch", "its blocks"],
)
def test_what_nobody_serves_is_refused_before_weights_are_loaded(
    before: str, head_dim: int, settings: dict[str, object], said: tuple[str, ...], tmp_path: Path
) -> None:
    """With the cause, and what to do; not as plain torch first and then not at all."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 300,
             "intermediate_size": 48, "head_dim": head_dim, "max_position_embeddings": 64,
             "architectures": ["LlamaForCausalLM"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    told = alone(EARLY.format(before=before, model=f"dummy:{tmp_path}", settings=settings))
    assert all(words in told for words in said), told


def test_types_of_a_cpu_that_plain_torch_computes_are_refused_early() -> None:
    """Before weights are loaded, here of a model that has none."""
    with pytest.raises(ConfigError, match=r"Plain torch computes torch\.bfloat16 on a CPU, and.*"):
        Engine("llama-3.2-1b", dtype="bfloat16")


@interpreted
def test_heads_and_blocks_that_triton_has_no_tiles_for_take_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a GPU too old does; the warning says why, and the model runs on."""
    cases = (
        ((9, 0), {"head_dim": 160}, r"head_dim=160; "),
        ((9, 0), {"head_dim": 64, "block_size": 24}, r"block_size=24; "),
        ((7, 5), {"head_dim": 64}, r"compute capability 7\.5; they need 8\.0"),
    )
    for capability, sizes, said in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with pytest.warns(RuntimeWarning, match=f"{said}.*Plain torch computes instead"):
            found = load_kernels(torch.device("cuda"), torch.float16, **sizes)
        assert found.name == "reference"
