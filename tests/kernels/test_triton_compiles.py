"""Every kernel compiles for a Hopper GPU: the compiler needs none, so this runs anywhere.

With the tiles that are used, for heads of 64 and 128, in bfloat16 and once in the others. In
processes of their own, since here kernels are interpreted.
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
from workbench.kernels.triton.attention import Shape, Tiles
from workbench.kernels.triton.products import FixedTiles

def ptx(kernel, constants, warps=4, element="bf16", stages=3, fusion=True):
    matrix, floats = ("*" + element, "i32"), ("*fp32",) * 3
    kinds = dict.fromkeys(kernel.arg_names, "*" + element)
    kinds |= {n: "i32" for n in kernel.arg_names if n.endswith("_stride")}
    kinds |= dict.fromkeys(("items", "members", "slots", "positions", "numbers", "places", "found"),
                           "*i64")
    kinds |= dict.fromkeys(("width", "spans", "rows"), "i32") | {"epsilon": "fp32"}
    kinds |= dict.fromkeys(("temperature", "noise", "weights"), "*fp64")
    if kernel in (attention.attention, attention.join):
        kinds |= dict(lists=("*i64",) * 5, qkv=matrix,
                      layer=("*" + element, "fp32"), parts=floats,
                      out=floats if constants.get("DECODED") else matrix)
    elif kernel is rows.rotate_and_store:
        kinds |= dict(angles=("*" + element,) * 2, context=("*i64",) * 3)
    elif kernel is rows.selected_logits:
        kinds["rows"] = "*i64"
    elif kernel is products.product:
        kinds |= dict(x=matrix, out=("*fp32", "i32") if constants["CHUNKS"] == 1 else matrix)
    elif kernel is products.add_parts:
        kinds["parts"] = "*fp32"
    else:
        kinds["tops"] = "*fp32"
    kinds |= dict.fromkeys(constants, "constexpr")
    index = {n: (i,) for i, n in enumerate(kernel.arg_names)}
    leaves = {index[n] + rest: kind for n in kernel.arg_names for rest, kind in
              ([((i,), k) for i, k in enumerate(kinds[n])] if isinstance(kinds[n], tuple)
               else [((), kinds[n])]) if n not in constants}
    wide = [at for at, kind in leaves.items() if kind.startswith("*") or kernel.arg_names[at[0]]
            in ("qkv", "out", "x") or kernel.arg_names[at[0]].endswith("_stride")]
    source = ASTSource(
        kernel,
        {n: kinds[n] for n in kernel.arg_names},
        {index[n]: value for n, value in constants.items()},
        {at: [["tt.divisibility", 16]] for at in wide},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

def attended(head_dim, element="bf16"):  # prefilled and decoded, with the tiles that are used
    tiles = attention.FULL_PRECISION if element == "fp32" else Tiles()
    shape = dict(SHAPE=Shape(8, 4, head_dim, 16, True))
    how = dict(warps=tiles.warps, element=element, fusion=False)
    ptx(attention.join, shape | dict(SPAN=tiles.span), **how)
    return [ptx(attention.attention, shape | dict(TILES=tiles, DECODED=decoded), **how,
                stages=tiles.stages) for decoded in (False, True)]
"""
KERNELS = {
    "attention": """
for text in attended(128):
    assert "wgmma" in text  # by tensor cores
    assert len(re.findall(r"cp\\.async\\.cg[^;]*0x10", text)) >= 16  # 16 bytes each, ahead of use
""",
    "attention otherwise": """
attended(64)
attended(64, "fp16")
attended(128, "fp32")
""",
    "rows": """
ptx(rows.rms_norm, dict(SIZE=2048))
ptx(rows.gate, dict(SIZE=8192))
ptx(rows.rotate_and_store, dict(SHAPE=Shape(8, 4, 128, 16, True)))
ptx(rows.selected_logits, dict(SIZE=2048, COUNT=2, COLUMNS=2))
ptx(rows.selected_logits, dict(SIZE=2048, COUNT=40, COLUMNS=16))
for kernel in (rows.largest_of, rows.weights_of, rows.token_of):
    ptx(kernel, dict(VOCAB=128256))
    ptx(kernel, dict(VOCAB=300))
""",
    "products": """
tiles = dict(SIZE=2048, TILES=FixedTiles())
for mode in (0, 1, 2):
    text = ptx(products.product, tiles | dict(COUNT=8192, CHUNKS=4, MODE=mode), stages=4,
               fusion=False)
    assert "mma" in text  # by tensor cores
    ptx(products.add_parts, dict(CHUNKS=4, COUNT=2048, TAKEN=256, MODE=mode), fusion=False)
part = dict(SIZE=2048, COUNT=2048, CHUNKS=1, MODE=0)
ptx(products.product, part | dict(TILES=FixedTiles()), stages=4, fusion=False)
ptx(products.product, part | dict(TILES=products.FULL_PRECISION), element="fp32", stages=2,
    fusion=False)
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
