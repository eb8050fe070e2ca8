"""What the Triton kernels do not take is refused by name; without triton plain torch serves."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.kernels.synthetic import random_step
from workbench import Engine
from workbench.errors import ConfigError
from workbench.kernels import load_kernels
from workbench.kernels.triton import INTERPRETED, TritonKernels
from workbench.kernels.triton.attention import Tuning, chosen

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@interpreted
def test_bfloat16_is_refused_under_the_interpreter() -> None:
    """There its products are wrong without a word."""
    with pytest.raises(ConfigError, match=r"interpreter multiplies torch\.bfloat16 wrongly"):
        TritonKernels(CPU, torch.bfloat16)


def test_other_types_are_refused() -> None:
    """The message lists what is taken."""
    with pytest.raises(ConfigError, match=r"of torch\.float64; they take torch\.float32"):
        TritonKernels(CPU, torch.float64)


@interpreted
@pytest.mark.parametrize("head_dim", [8, 20, 136])
def test_head_sizes_are_refused(head_dim: int) -> None:
    """Too narrow for a tensor core, no multiple of 8, too wide for a tile."""
    step = random_step((1, 1, head_dim), [(0, 1)], 4)
    with pytest.raises(ConfigError, match=f"head_dim={head_dim}; .* from 16 to 128"):
        TritonKernels(CPU, torch.float32).attend(step.qkv, step.room(), step.cache, step.context)


@interpreted
@pytest.mark.parametrize("block_size", [24, 512])
def test_block_sizes_are_refused(block_size: int) -> None:
    """Neither a power of two, nor one that a span does not hold."""
    step = random_step((1, 1, 16), [(0, 1)], block_size)
    with pytest.raises(ConfigError, match=f"block_size={block_size}; .* powers of two up to 256"):
        TritonKernels(CPU, torch.float32).attend(step.qkv, step.room(), step.cache, step.context)


@interpreted
def test_a_cache_of_another_type_is_refused() -> None:
    """Kernels and cache are of one type."""
    step = random_step((1, 1, 16), [(0, 1)], 4)
    cache = replace(step.cache, data=step.cache.data.half())
    with pytest.raises(ConfigError, match=r"float32 over a cache of torch\.float16"):
        TritonKernels(CPU, torch.float32).attend(step.qkv, step.room(), cache, step.context)


def test_tiles_are_powers_of_two_and_spans_hold_them() -> None:
    """Else a kernel would not compile, or a span would end within a tile."""
    with pytest.raises(ConfigError, match="powers of two from 16 on"):
        Tuning(tile=48)
    with pytest.raises(ConfigError, match="A span of 64 positions is shorter than a tile of 128"):
        Tuning(tile=128, span=64)


@interpreted
def test_unequal_tiles_are_refused_where_bits_must_be_equal() -> None:
    """A row decoded by other tiles than it is prefilled by would have other bits."""
    with pytest.raises(ConfigError, match=r"batch_invariant=True with .* joined=True"):
        TritonKernels(CPU, torch.float32, Tuning(), batch_invariant=True)


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_the_table_holds_tiles_for_every_head_size(head_dim: int, element_bytes: int) -> None:
    """Same bits everywhere where asked for; the others can be built too."""
    assert chosen(head_dim, element_bytes, batch_invariant=True).same_bits
    assert not chosen(head_dim, element_bytes, batch_invariant=False).same_bits


def alone(code: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_triton_missing_is_said() -> None:
    """The package's own import fails by name, and says what to install."""
    said = alone(
        "import sys; sys.modules['triton'] = None\n"
        "from workbench.errors import ConfigError\n"
        "try: import workbench.kernels.triton\n"
        "except ConfigError as error: print(error)"
    )
    assert "pip install 'workbench[gpu]'" in said


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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.warns(RuntimeWarning, match=r"head_dim=160; .*Plain torch computes instead"):
        found = load_kernels(torch.device("cuda"), torch.float16, head_dim=160)
    assert found.name == "reference"
    with pytest.warns(RuntimeWarning, match=r"block_size=24; .*Plain torch computes instead"):
        found = load_kernels(torch.device("cuda"), torch.float16, head_dim=64, block_size=24)
    assert found.name == "reference"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.warns(RuntimeWarning, match=r"compute capability 7\.5; they need 8\.0"):
        load_kernels(torch.device("cuda"), torch.float16, head_dim=64)
