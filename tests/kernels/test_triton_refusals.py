"""What the Triton kernels do not take is refused by name; without triton plain torch serves."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.conftest import printed
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
        *((16, width, f"head_dim={width}; .* from 16 to 128") for width in (8, 20, 136)),
        *((size, 64, f"block_size={size}; .* powers of two up to 256") for size in (24, 512)),
    ],
)
def test_heads_and_blocks_are_refused(block_size: int, head_dim: int, said: str) -> None:
    """Too narrow for a tensor core, no multiple of 8, too wide; what no span is made of."""
    with pytest.raises(ConfigError, match=said):
        TritonKernels(CPU, torch.float32).require_takes(block_size, head_dim)


@interpreted
@pytest.mark.parametrize(
    ("capability", "sizes", "said"),
    [
        ((9, 0), {"head_dim": 160}, r"head_dim=160; "),
        ((9, 0), {"head_dim": 64, "block_size": 24}, r"block_size=24; "),
        ((7, 5), {"head_dim": 64}, r"compute capability 7\.5; they need 8\.0"),
    ],
    ids=["head_dim", "block_size", "old GPU"],
)
def test_what_triton_does_not_serve_takes_plain_torch(capability, sizes, said, monkeypatch) -> None:
    """An error with the cause where rows must have bits of their own, else a warning with it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu = torch.device("cuda")
    with pytest.raises(ConfigError, match=f"{said}.*with batch_invariant=False it computes"):
        load_kernels(gpu, torch.float16, **sizes)
    with pytest.warns(RuntimeWarning, match=f"{said}.*Plain torch computes instead"):
        found = load_kernels(gpu, torch.float16, batch_invariant=False, **sizes)
    assert found.name == "reference"


def test_without_triton_a_gpu_takes_plain_torch() -> None:
    """`load_kernels` says so and goes on."""
    code = (
        "import sys, warnings; sys.modules['triton'] = None\n"
        "import torch, workbench.kernels as k\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    gpu = torch.device('cuda')\n"
        "    name = k.load_kernels(gpu, torch.float16, batch_invariant=False).name\n"
        "print(name, *[w.message for w in seen])"
    )
    said = printed(code)
    assert said.startswith("reference The Triton kernels need the package triton")
    assert "pip install -e '.[gpu]'" in said
    assert said.endswith("Plain torch computes instead.")


def test_what_nothing_serves_is_refused_before_weights_are_fetched() -> None:
    """Here of a model that has none on this machine."""
    with pytest.raises(ConfigError, match=r"Plain torch alone computes torch\.bfloat16 on a CPU;"):
        Engine("llama-3.2-1b", dtype="bfloat16")
