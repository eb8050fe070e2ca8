"""Instruction sets: inner loops keep their sums in registers, and every set gives the same bits."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding, ir

from tests.conftest import printed
from workbench.errors import ConfigError
from workbench.kernels.cpu import tiles
from workbench.kernels.cpu.tiles import Tile, emit_add_values, emit_score, emit_score_turned
from workbench.kernels.isa import ISA, SETS, InstructionSet, environment, host_sets

LONG = ir.IntType(64)
TRIPLES = {"neon": "aarch64-unknown-linux-gnu"}
Emit = Callable[[ir.IRBuilder, list[Any]], None]
binding.initialize_all_targets()
binding.initialize_all_asmprinters()


def loops(kind: InstructionSet) -> dict[str, tuple[Emit, int]]:
    """Each inner loop of a set: what emits it, and how many int64 it takes."""
    loops: dict[str, tuple[Emit, int]] = {
        "tile": (lambda b, a: tiles.emit_tile(Tile(b, *kind.tile), kind.at_once, *a), 7)
    }
    for form in tiles.FORMS:
        loops[f"widening of {form}"] = (
            (lambda b, a, form=form: tiles.emit_widen(Tile(b, 1, kind.few[1]), form, *a)),
            5,
        )
        loops[f"few rows of {form}"] = (
            (lambda b, a, form=form: tiles.emit_few_rows(Tile(b, *kind.few), form, *a)),
            9,
        )
    largest = [(rows, vectors) for vectors, rows in enumerate(kind.attention, 1)]
    for shape in (*largest, (1, len(kind.attention))):
        loops[f"score of {shape}"] = lambda b, a, s=shape: emit_score(Tile(b, *s), *a), 8
        loops[f"turned {shape}"] = lambda b, a, s=shape: emit_score_turned(Tile(b, *s), *a), 7
        loops[f"values of {shape}"] = lambda b, a, s=shape: emit_add_values(Tile(b, *s), *a), 9
    return loops


def assembly(kind: InstructionSet, emit: Emit, arguments: int) -> str:
    """What a loop compiles to for a set, on whatever host."""
    module = ir.Module()
    module.triple = TRIPLES.get(kind.name, "x86_64-unknown-linux-gnu")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * arguments), "loop")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, list(function.args))
    builder.ret_void()
    target = binding.Target.from_triple(module.triple)
    features = "+neon" if kind.name == "neon" else ""
    machine = target.create_target_machine(cpu=kind.processor, features=features, opt=3)
    parsed = binding.parse_assembly(str(module))
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def innermost(text: str) -> list[list[str]]:
    """The loops of an assembly that hold no other: from a label to the jump back to it."""
    lines, labels, found = text.splitlines(), {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.LBB\d+_\d+):", line):
            labels[label[1]] = number
        jump = re.search(r"\b(?:j\w+|b\.?\w*|cbn?z)\s+(?:\w+, )?(\.LBB\d+_\d+)", line)
        if jump and jump[1] in labels:
            found.append((labels[jump[1]], number))
    inner = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [lines[first : last + 1] for first, last in inner]


STACK = re.compile(r"mov\w*\s+%\w+, -?\d*\(%r[sb]p\)|\bst[rp]\s.*\[sp")
PARKED = {("avx2", f"few rows of {(4, half)}"): 4 for half in (False, True)}
"""Words of codes that four sums a row leave no register for: two sums alone, without a store, wait
for one another and take a third longer (NOTES)."""


@pytest.mark.parametrize("name", list(SETS))
def test_sums_stay_in_registers(name: str) -> None:
    """No inner loop stores to the stack, in any set and form: cross-compiled, so on any host."""
    for what, (emit, arguments) in loops(SETS[name]).items():
        body = innermost(assembly(SETS[name], emit, arguments))
        assert any(re.search("fm|mulps", line) for lines in body for line in lines), what
        stores = max(sum(bool(STACK.search(line)) for line in lines) for lines in body)
        assert stores <= PARKED.get((name, what), 0), f"{what}: {stores} stores to the stack"


DIGEST = """
import hashlib, numpy as np, torch
from tests.kernels.test_products import random_blocks
from workbench.kernels import load_kernels
from workbench.kernels.isa import ISA
from workbench.models.loading import load_model
kernels, digest = load_kernels(torch.device("cpu"), torch.float32, threads=2), hashlib.sha256()
draw = np.random.default_rng(0)
def floats(*shape):
    return torch.from_numpy(draw.integers(-999, 999, shape).astype(np.float32) / 512)
for parts in ([floats(70, 96)], [random_blocks("Q4_1", 70, 96)], [random_blocks("Q8_0", 70, 96)]):
    for gated in (False, True):
        matrix = kernels.pack(parts * 2 if gated else parts, gated)
        for rows in (1, 3, 40):
            out = torch.zeros(rows, 70)
            x = floats(rows, 96)
            (kernels.multiply_gated if gated else kernels.multiply)(x, matrix, out)
            digest.update(out.numpy().tobytes())
out = torch.empty(5, 100)
kernels.rms_norm(floats(5, 100), floats(100), 1e-5, out)
digest.update(out.numpy().tobytes())
noise = torch.from_numpy(draw.random(9))
tokens = kernels.choose(floats(9, 1000), torch.full((9,), 0.8, dtype=torch.float64), noise)[0]
digest.update(tokens.numpy().tobytes())
from tests.kernels.synthetic import random_step
for shape in ((6, 2, 64), (6, 2, 16)):
    step = random_step(shape, [(0, 40), (33, 1), (70, 1)], 16, kernels.keys_by_position)
    out = step.room()
    kernels.attend(step.qkv, out, step.cache, step.context)
    digest.update(out.numpy().tobytes())
out = torch.empty(5, 100)
kernels.layer_norm(floats(5, 100), torch.stack([floats(100), floats(100)]), 1e-5, out)
kernels.gelu(floats(100), out)
digest.update(out.numpy().tobytes())
for part in (floats(70, 301), floats(70, 1536), random_blocks("Q4_1", 70, 1536)):  # in parts
    matrix = kernels.pack([part])
    for rows in (16, 65, 130):
        out = torch.ones(rows, 70)
        kernels.multiply_add(floats(rows, matrix.inputs), matrix, out)
        digest.update(out.numpy().tobytes())
out = torch.empty(2, 1536)
kernels.columns(matrix, torch.tensor([69, 3]), out)
kernels.add_row(floats(1536), out)
digest.update(out.numpy().tobytes())
siblings = [(0, 40), (70, 1), (70, 1)]
step = random_step((9, 3, 64), siblings, 16, kernels.keys_by_position, shared=64)
out, angles = step.room(), (floats(128, 32), floats(128, 32))
kernels.store_kv(step.qkv, angles, step.cache, step.context)
kernels.attend(step.qkv, out, step.cache, step.context)
turned = load_model("tiny-solver").angles
for made in (out, step.qkv, step.cache.data.nan_to_num(), *turned):
    digest.update(made.numpy().tobytes())
print(ISA.name, digest.hexdigest())
"""
BITS = "7e13ed38dffe0015c78dc1e76c1038e3284f4e8df97895b07b16dd4a015451a8"
SEARCH = """
import hashlib
from workbench import PRM, BeamSearch, Engine, load_problems, run_search
llm, prm = Engine("tiny-solver", kv_memory="8MiB"), PRM(Engine("tiny-prm", kv_memory="16MiB"))
strategy = BeamSearch(n=8, beam_width=4)
problems = load_problems("tiny", limit=2)
tree = run_search(problems, llm=llm, prm=prm, strategy=strategy, seed=0).tree
rows = [(p, list(t), s) for p, t, s in zip(tree["path"], tree["token_ids"], tree["score"])]
print(hashlib.sha256(repr(rows).encode()).hexdigest())
"""


@pytest.mark.parametrize("name", host_sets())
def test_every_set_gives_the_same_bits(name: str) -> None:
    """Products, norms, attention and draws have the bits that are written down here."""
    assert printed(DIGEST, **environment(name)) == f"{name} {BITS}"


@pytest.mark.slow
@pytest.mark.parametrize("name", host_sets()[1:])
def test_kernels_pass_their_tests_in_lesser_sets(name: str) -> None:
    """Against the reference and row by row, as this process tests them in the host's best set."""
    files = [f"tests/kernels/test_{what}.py" for what in ("kernels", "products", "siblings")]
    program = f"import pytest; raise SystemExit(pytest.main(['-q', '-x', *{files}]))"
    assert " passed" in printed(program, **environment(name))


REGISTERS = """
from workbench.kernels.cpu.vectors import called, fma, load, store
@called
def doubled(address):
    vector = load(address)
    store(address, fma(vector, vector, vector))
doubled.compile("void(int64)")
print(*(name for name in ("zmm", "ymm") if name in next(iter(doubled.inspect_asm().values()))))
"""


@pytest.mark.parametrize("name", [name for name in host_sets() if name != "neon"])
def test_numba_compiles_for_the_set(name: str) -> None:
    """A kernel's vectors are the set's registers, also where kernels are all that is imported."""
    assert printed(REGISTERS, **environment(name)) == ("zmm" if name == "avx512" else "ymm")


KEPT = """
from numba import types
from workbench.kernels.cpu.thread_pool import compiled
@compiled(types.int64)
def doubled(number):
    number + number
"""


@pytest.mark.slow
def test_kept_kernels_are_of_their_set(tmp_path: Path) -> None:
    """A set does not find what another one has kept, and then finds its own."""
    (tmp_path / "kept.py").write_text(KEPT)
    hits, path = "import kept; print(sum(kept.doubled.stats.cache_hits.values()))", str(tmp_path)
    found = [printed(hits, **environment(name), PYTHONPATH=path) for name in host_sets() * 2]
    assert found == ["0"] * len(host_sets()) + ["1"] * len(host_sets())


def test_a_set_is_not_taken_after_numba_has_compiled() -> None:
    """Its code generator would keep the host's features under the lesser set's name."""
    late = "import numba; numba.njit(lambda: 1); import workbench.kernels.isa"
    for name in host_sets()[1:]:
        with pytest.raises(AssertionError, match="WORKBENCH_ISA came too late"):
            printed(late, **environment(name))


@pytest.mark.slow
def test_a_search_does_not_depend_on_the_host() -> None:
    """Where torch, numpy and kernels take a lesser set; each by itself: bench/test_identity.py."""
    lesser = {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": "X86_V3"}
    assert printed(SEARCH, **environment(host_sets()[-1]) | lesser) == printed(SEARCH)


def test_a_set_that_is_not_there_is_refused() -> None:
    """The error names what was asked and what the host has."""
    with pytest.raises(ConfigError, match=f"'sse9' on this host: it has .*{ISA.name}"):
        environment("sse9")
