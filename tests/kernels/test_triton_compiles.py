"""Every kernel compiles for a Hopper GPU: the compiler needs none, so this runs anywhere.

With the tiles of both modes, for heads of 64 (there prefill and decode in one launch, which is made
of the same pieces) and 128, in bfloat16 and once in float32. In processes of their own, since here
kernels are interpreted.
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
from workbench.kernels.triton import choosing, columns, decode, fused, prefill, products, rows
from workbench.kernels.triton.tuning import chosen

def ptx(kernel, constants, warps=4, element="bf16", stages=3, fusion=True):
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
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

shape = dict(KV_HEADS=8, GROUP=4, HEAD_DIM=128, DIMENSIONS=128, BLOCK_SIZE=16, BY_POSITION=True,
             ALIGNED=True, TILE=64, SPAN=256)

def as_launched(head_dim, batch_invariant, element="bf16"):  # with the table's tiles
    tiles = chosen(head_dim, 4 if element == "fp32" else 2, batch_invariant)
    cut = shape | dict(HEAD_DIM=head_dim, DIMENSIONS=head_dim, TILE=tiles.tile, SPAN=tiles.span)
    how = dict(element=element, stages=tiles.stages, fusion=not tiles.joined)
    if head_dim == 128 and element == "bf16":
        ptx(prefill.prefill, cut | dict(LANES=tiles.prefill_lanes, JOINED=tiles.joined),
            warps=tiles.prefill_warps, **how)
        ptx(decode.spans_of, cut | dict(LANES=tiles.span_lanes), warps=tiles.span_warps, **how)
    mixed = dict(PREFILL_LANES=tiles.prefill_lanes, LANES=tiles.span_lanes, JOINED=tiles.joined)
    return ptx(fused.both, cut | mixed, warps=tiles.prefill_warps, **how)
"""
KERNELS = {
    "attention": """
text = as_launched(128, False)
assert "wgmma" in text and "mma.sync" in text  # prefill and decode by tensor cores
assert len(re.findall(r"cp\\.async\\.cg[^;]*0x10", text)) >= 32  # 16 bytes each, ahead of use
ptx(decode.join, dict(QUERY_HEADS=32, HEAD_DIM=128, DIMENSIONS=128, SPAN=256))
ptx(decode.spans_of, shape | dict(LANES=64), element="fp16")
""",
    "invariant attention": 'assert "wgmma" in as_launched(128, True)',
    "attention otherwise": """
for batch_invariant in (False, True):
    as_launched(64, batch_invariant)
as_launched(128, True, "fp32")
""",
    "rows": """
ptx(rows.rms_norm, dict(SIZE=2048, PADDED=2048))
ptx(rows.gate, dict(SIZE=8192, TAKEN=1024))
ptx(rows.rotate_and_store, dict(HEADS=32, KV_HEADS=8, HALF=64, PADDED=64, BLOCK_SIZE=16, TAKEN=8,
                                BY_POSITION=True))
ptx(columns.selected_logits, dict(SIZE=2048, COUNT=2, COLUMNS=2, TAKEN=512))
ptx(columns.selected_logits, dict(SIZE=2048, COUNT=40, COLUMNS=16, TAKEN=512))
for count, vocabulary in ((32, 128256), (1, 300)):
    pieces = dict(VOCAB=vocabulary, PIECES=count, TAKEN=4096)
    ptx(choosing.largest_of, pieces)
    ptx(choosing.weights_of, pieces | dict(PADDED=count))
    ptx(choosing.token_of, pieces | dict(PADDED=count))
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
