"""Every kernel compiles for a Hopper GPU: the compiler needs none, so this runs anywhere.

With the tiles of both modes, for heads of 64 and 128, in bfloat16 and once in float32. In processes
of their own, since here kernels are interpreted.
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
from workbench.kernels.triton import attention, products, rows
from workbench.kernels.triton.attention import chosen

def ptx(kernel, constants, warps=4, element="bf16", stages=3, fusion=True):
    lists = {"items", "members", "slots", "positions", "tables", "sequence",
             "numbers", "places", "found"}
    kinds = dict.fromkeys(kernel.arg_names, "*" + element) | dict.fromkeys(lists, "*i64")
    kinds |= dict.fromkeys(("width", "spans"), "i32")
    kinds |= {n: "i32" for n in kernel.arg_names if n.endswith("_stride")}
    kinds |= {"scale": "fp32", "epsilon": "fp32"}
    kinds |= dict.fromkeys(("sums", "sums_out", "totals", "tops", "parts"), "*fp32")
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
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

shape = dict(KV_HEADS=8, GROUP=4, HEAD_DIM=128, DIMENSIONS=128, BLOCK_SIZE=16, ALIGNED=True,
             TILE=64, SPAN=256, JOINED=False)

def as_launched(head_dim, batch_invariant, element="bf16"):  # with the tiles that are chosen
    tiles = chosen(head_dim, 4 if element == "fp32" else 2, batch_invariant)
    cut = shape | dict(HEAD_DIM=head_dim, DIMENSIONS=head_dim, TILE=tiles.tile, SPAN=tiles.span,
                       JOINED=tiles.joined)
    how = dict(element=element, stages=tiles.stages, fusion=not tiles.joined)
    return [ptx(attention.attention, cut | dict(DECODED=decoded, QUERIES=queries), warps, **how)
            for decoded, queries, warps in ((False, tiles.prefill_queries, tiles.prefill_warps),
                                            (True, tiles.span_queries, tiles.span_warps))]
"""
KERNELS = {
    "attention": """
prefilled, decoded = as_launched(128, False)
assert "wgmma" in prefilled and "mma.sync" in decoded  # by tensor cores
for text in (prefilled, decoded):
    assert len(re.findall(r"cp\\.async\\.cg[^;]*0x10", text)) >= 16  # 16 bytes each, ahead of use
ptx(attention.join, dict(QUERY_HEADS=32, HEAD_DIM=128, DIMENSIONS=128, SPAN=256))
ptx(attention.attention, shape | dict(QUERIES=64, DECODED=True), element="fp16")
""",
    "invariant attention": 'assert all("wgmma" in text for text in as_launched(128, True))',
    "attention otherwise": """
for batch_invariant in (False, True):
    as_launched(64, batch_invariant)
as_launched(128, True, "fp32")
""",
    "rows": """
ptx(rows.rms_norm, dict(SIZE=2048, PADDED=2048))
ptx(rows.gate, dict(SIZE=8192, TAKEN=1024))
ptx(rows.rotate_and_store, dict(HEADS=32, KV_HEADS=8, HALF=64, PADDED=64, BLOCK_SIZE=16, TAKEN=8))
ptx(rows.selected_logits, dict(SIZE=2048, COUNT=2, COLUMNS=2, TAKEN=512))
ptx(rows.selected_logits, dict(SIZE=2048, COUNT=40, COLUMNS=16, TAKEN=512))
for count, vocabulary in ((32, 128256), (1, 300)):
    pieces = dict(VOCAB=vocabulary, PIECES=count, TAKEN=4096)
    ptx(rows.largest_of, pieces)
    ptx(rows.weights_of, pieces | dict(PADDED=count))
    ptx(rows.token_of, pieces | dict(PADDED=count))
""",
    "products": """
tiles = dict(SIZE=2048, ROWS=64, OUTPUTS=64, STEP=64, CHUNK=512)
for mode in (0, 1, 2):
    text = ptx(products.product, tiles | dict(COUNT=8192, MODE=mode), stages=4, fusion=False)
    assert "mma" in text  # by tensor cores
    ptx(products.add_parts, dict(CHUNKS=4, COUNT=2048, TAKEN=256, MODE=mode), fusion=False)
ptx(products.parts_of, tiles | dict(COUNT=2048), stages=4, fusion=False)
small = dict(SIZE=2048, ROWS=32, OUTPUTS=32, STEP=32, CHUNK=512, COUNT=2048)
ptx(products.parts_of, small, element="fp32", stages=2, fusion=False)
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
