"""Every kernel compiles for Ampere, Ada and Hopper GPUs, keeps nothing that belongs into registers
in memory, and leaves a multiprocessor room for as many warps at once as it needs: the compiler
needs no GPU, so this runs anywhere.

With the tiles that are used, for heads of 64 and 128, in bfloat16 and once in the others. In
processes of their own, since here kernels are interpreted. `pytest -rP` prints the table.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")
USAGE = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

COMPILE = """
import re, subprocess, sys, tempfile, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workbench.kernels.triton import attention, products, rows
from workbench.kernels.triton.attention import Shape, Tiles
from workbench.kernels.triton.products import FixedTiles

X, LIST, FLOAT, DOUBLE, STRIDE, COUNT = "*bf16", "*i64", "*fp32", "*fp64", "i32 ", "i32"
MATRIX = X, STRIDE  # a stride is a multiple of 16, as addresses are
CAPABILITY, USAGE = int(sys.argv[1]), sys.argv[2]
REGISTERS, MOST_WARPS = 65536, {80: 64, 89: 48, 90: 64}[CAPABILITY]  # of a multiprocessor
SHARED = {80: 164, 89: 100, 90: 228}[CAPABILITY] << 10  # bytes; a program has 1,024 less at most
# Bytes of a thread that attention may keep in memory: with tiles that keep none it prefilled at 129
# TFLOP/s on an H100, with those that are used at 225.
STACK = 352
# Warps at once that a kernel needs to hide what it waits for. Tiles for tensor cores are loaded
# ahead; of rows to be sampled or scored there is hardly one for a multiprocessor, each in registers
# for the most part; all others only read and write, and need many.
LEAST = {"attention": 2, "product": 4, "token_of": 8, "selected_logits": 12, "weights_of": 16,
         "find_cuts": 16, "fill_bins": 12}

def check_warps(kernel, name, what):  # at once on a multiprocessor, by registers and shared memory
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([USAGE, "-res-usage", file.name], capture_output=True, text=True)
    names = "REG", "STACK", "LOCAL"
    registers, *spilled = (int(re.search(rf"{n}:(\\d+)", told.stdout)[1]) for n in names)
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    program = -(-registers // 8) * 8 * 32 * warps  # a thread has a multiple of 8
    programs = min(REGISTERS // program, SHARED // (shared + 1024), MOST_WARPS // warps)
    print(f"sm_{CAPABILITY} {what:44} {registers:4} registers {shared:7,} B shared "
          f"{warps} warps x {programs} at once, spilled {spilled}")
    most = STACK if name == "attention" else 0
    assert spilled[0] <= most and not spilled[1], f"{what} keeps registers in memory"
    assert warps * programs >= LEAST.get(name, 32), f"{what}: too few warps at once"

def ptx(kernel, kinds, constants, warps=4, element="bf16", stages=3, fusion=True):
    leaves, first = {}, len(kinds)
    left_out = {(at,): None for at, kind in enumerate(kinds) if kind is None}
    for at, kind in enumerate(kinds):
        if kind is None:
            continue
        parts = [kind] if isinstance(kind, str) else kind
        leaves |= {(at,) if kind is parts[0] else (at, k): part for k, part in enumerate(parts)}
    def stripped(kind):
        if kind is None:
            return "constexpr"
        if not isinstance(kind, str):
            return tuple(map(stripped, kind))
        return kind.strip().replace("bf16", element)
    source = ASTSource(
        kernel,
        dict(zip(kernel.arg_names, [*map(stripped, kinds), *["constexpr"] * len(constants)])),
        left_out | {(first + k,): value for k, value in enumerate(constants)},
        {at: [["tt.divisibility", 16]] for at, kind in leaves.items() if kind[0] == "*" or
         kind == STRIDE},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion}
    kernel = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    flat = [c for c in constants if isinstance(c, int)] + [c.head_dim for c in constants
                                                           if isinstance(c, Shape)]
    name = source.fn.__name__
    check_warps(kernel, name, f"{name} {element} {flat}")
    return kernel.asm["ptx"]

def attended(head_dim, element="bf16", tiles=Tiles()):  # prefilled and decoded
    shape, parts = Shape(8, 4, head_dim, 16, True), (FLOAT,) * 3
    tiles = tiles.fitting(shape)
    how = dict(element=element, fusion=False)
    ptx(attention.join, [LIST, LIST, parts, COUNT, MATRIX], [shape, tiles.span], **how)
    kinds = [(LIST,) * 5, COUNT, COUNT, MATRIX, (X, "fp32")]
    return [
        ptx(attention.attention, [*kinds, out], [shape, tiles, decoded],
            warps=tiles.warps[decoded], stages=tiles.stages[decoded], **how)
        for out, decoded in ((MATRIX, False), (parts, True))
    ]

prefill, decode = attended(128)
for text in (prefill, decode):  # by tensor cores
    assert ("wgmma" if CAPABILITY == 90 and text is prefill else "mma.sync") in text
    assert len(re.findall(r"cp\\.async\\.cg[^;]*0x10", text)) >= 16  # 16 bytes each, ahead of use
attended(64)
if CAPABILITY == 90:
    attended(64, "fp16")
    attended(128, "bf16", attention.INVARIANT)  # older GPUs keep more than STACK in memory
attended(128, "fp32", attention.FULL_PRECISION)
ptx(rows.rms_norm, [X, STRIDE, X, X, STRIDE, "fp32"], [2048])
ptx(rows.gate, [X, X, STRIDE], [8192])
ptx(rows.layer_norm, [X, STRIDE, X, X, STRIDE, "fp32"], [1600])
ptx(rows.gelu, [X, X, STRIDE], [6400])
ptx(rows.rotate_and_store, [X, STRIDE, (X, X), (LIST,) * 3, COUNT, X], [Shape(8, 4, 128, 16, True)])
for count, columns in ((2, 2), (40, 16)):
    ptx(rows.selected_logits, [X, STRIDE, LIST, X, LIST, X], [2048, count, columns])
for vocabulary in (128256, 300)[: 2 if CAPABILITY == 90 else 1]:
    source, sizes = (X, STRIDE), (vocabulary, 2.0 ** (62 - vocabulary.bit_length()))
    bounds, cut = (DOUBLE, FLOAT), (DOUBLE, FLOAT, LIST)
    for left_out in (False, True):
        what, of = (bounds, cut) if left_out else (None, None)
        ptx(rows.largest_of, [*source, FLOAT, LIST, what], [vocabulary])
        ptx(rows.weights_of, [*source, DOUBLE, FLOAT, DOUBLE, of], [vocabulary])
        ptx(rows.token_of, [*source, DOUBLE, DOUBLE, FLOAT, LIST, DOUBLE, LIST, of], [vocabulary])
    text = ptx(rows.fill_bins, [*source, DOUBLE, bounds, FLOAT, LIST], sizes)
    assert "relaxed" in text and "acq" not in text  # no program waits for what it adds
    ptx(rows.find_cuts, [*source, DOUBLE, bounds, FLOAT, LIST, "*i32", cut], sizes, warps=16)
    ptx(rows.total_of, [FLOAT, DOUBLE, DOUBLE], [vocabulary])
how = dict(stages=4, fusion=False)
for mode in (0, 1, 2):
    for outputs in {FixedTiles().outputs, FixedTiles().wide if mode < 2 else FixedTiles().outputs}:
        cut = FixedTiles(outputs=outputs)
        text = ptx(products.product, [MATRIX, X, MATRIX, COUNT], [2048, 8192, 4, mode, cut], **how)
        assert "mma" in text  # by tensor cores
    ptx(products.add_parts, [FLOAT, X, STRIDE, COUNT], [4, 2048, 256, mode], fusion=False)
parts, small = [MATRIX, X, (FLOAT, STRIDE), COUNT], products.FULL_PRECISION
sizes = [2048, 2048, 1, 0]
ptx(products.product, parts, [*sizes, FixedTiles()], **how)
ptx(products.product, parts, [*sizes, small], element="fp32", stages=2, fusion=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_kernels_compile_for_a_gpu(capability: int, tmp_path: Path) -> None:
    """Wide loads ahead of use, tensor cores, nothing spilled, warps at once as each needs."""
    if not USAGE.exists():
        pytest.skip(f"this triton brings no {USAGE.name} to read compiled kernels with")
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(script), str(capability), str(USAGE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr
