"""Every kernel compiles for a Hopper GPU: the compiler needs none, so this runs anywhere.

In processes of their own, since here kernels are interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workbench.kernels.triton import choosing, columns, decode, fused, products, rows

def ptx(kernel, constants, warps=4, element="bf16", stages=3):
    lists = {"items", "prefill_items", "members", "slots", "positions", "tables", "sequence",
             "numbers", "places", "found"}
    kinds = dict.fromkeys(kernel.arg_names, "*" + element) | dict.fromkeys(lists, "*i64")
    kinds |= dict.fromkeys(("width", "spans", "prefills", "programs"), "i32")
    kinds |= {n: "i32" for n in kernel.arg_names if n.endswith("_stride")}
    kinds |= {"scale": "fp32", "epsilon": "fp32"}
    kinds |= dict.fromkeys(("sums", "totals", "tops", "parts"), "*fp32")
    kinds |= dict.fromkeys(("temperature", "noise", "weights"), "*fp64")
    if "rows" in kinds:  # a list of them, or how many
        kinds["rows"] = "*i64" if "hidden" in kinds else "i32"
    kinds |= dict.fromkeys(constants, "constexpr")
    index = {n: (i,) for i, n in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {n: kinds[n] for n in kernel.arg_names},
        {index[n]: value for n, value in constants.items()},
        {index[n]: [["tt.divisibility", 16]] for n in kernel.arg_names
         if kinds[n].startswith("*") or n.endswith("_stride")},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

shape = dict(KV_HEADS=8, GROUP=4, HEAD_DIM=128, DIMENSIONS=128, BLOCK_SIZE=16, BY_POSITION=True,
             ALIGNED=True, TILE=64, SPAN=256)
"""
KERNELS = {
    "attention": """
text = ptx(fused.both, shape | dict(PREFILL_LANES=128, LANES=16, JOINED=False), warps=8)
assert "wgmma" in text and "mma.sync" in text  # prefill and decode by tensor cores
assert len(re.findall(r"cp\\.async\\.cg[^;]*0x10", text)) >= 32  # 16 bytes each, ahead of use
ptx(decode.join, dict(QUERY_HEADS=32, HEAD_DIM=128, DIMENSIONS=128, SPAN=256))
ptx(decode.spans_of, shape | dict(LANES=64), element="fp16")
""",
    "rows": """
ptx(rows.rms_norm, dict(SIZE=2048, PADDED=2048))
ptx(rows.gate, dict(SIZE=8192, TAKEN=1024))
ptx(rows.rotate_and_store, dict(HEADS=32, KV_HEADS=8, HALF=64, PADDED=64, BLOCK_SIZE=16, TAKEN=8,
                                BY_POSITION=True))
ptx(columns.selected_logits, dict(SIZE=2048, COUNT=2, COLUMNS=2, TAKEN=512))
pieces = dict(VOCAB=128256, PIECES=32, TAKEN=4096)
ptx(choosing.largest_of, pieces)
ptx(choosing.weights_of, pieces | dict(PADDED=32))
ptx(choosing.token_of, pieces | dict(PADDED=32))
""",
    "products": """
tiles = dict(SIZE=2048, ROWS=64, OUTPUTS=64, STEP=64, CHUNK=512)
text = ptx(products.product, tiles | dict(COUNT=8192, MODE=2), stages=4)
assert "mma" in text  # by tensor cores
ptx(products.add_parts, dict(CHUNKS=4, COUNT=2048, TAKEN=256, MODE=1))
""",
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_a_gpu(name: str, tmp_path: Path) -> None:
    """To PTX and machine code, with wide loads ahead of use and products by tensor cores."""
    script = tmp_path / "compile.py"
    script.write_text(COMPILE + KERNELS[name])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
