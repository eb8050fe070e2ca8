"""What numba code here is written in: vectors of sixteen float32, and raw addresses.

numba leaves vectors to LLVM's guess, which keeps sums in memory and checks at run time whether
arrays overlap. Here `Vector` is LLVM's <16 x float>: one AVX-512 register, or several smaller ones
elsewhere. No fast-math flag is set, so LLVM may neither reorder nor fuse: each element is exactly
what the source says, on every machine. What threads share and what a kernel gets is an int64
address in bytes; nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

WIDTH = 16
FLOAT_BYTES, VECTOR_BYTES, ADDRESS_BYTES = 4, 4 * WIDTH, 8
FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, INT_VECTOR = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)
inlined = njit(error_model="numpy", inline="always")
called = njit(error_model="numpy")  # once in the code, however many call it

# exp: minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Cephes expf, S. Moshier).
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds a float32 to an integer
_SMALLEST, _LARGEST = -87.0, 88.0


class _VectorType(types.Type):
    """numba's type of a VECTOR."""


Vector = _VectorType(name="Vector")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def pointer(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    """To a `kind` at an address."""
    return builder.inttoptr(address, kind.as_pointer())


def emit_fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(fma, [a, b, c])


def emit_spread(builder: ir.IRBuilder, scalar: Any) -> Any:
    """A float32 in every element."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(INT_VECTOR, [0] * WIDTH))


def _constant(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * WIDTH)


def _largest(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _exponential(b: ir.IRBuilder, x: Any) -> Any:
    """exp, within 2 units in the last place; 0 below -87, exp(88) above 88."""
    bounded, top = _largest(b, x, _constant(_SMALLEST)), _constant(_LARGEST)
    bounded = b.select(b.fcmp_ordered("<", bounded, top), bounded, top)
    n = b.fsub(emit_fma(b, bounded, _constant(_LOG2_E), _constant(_ROUND)), _constant(_ROUND))
    r = emit_fma(b, n, _constant(-_LN2_HIGH), bounded)
    r = emit_fma(b, n, _constant(-_LN2_LOW), r)
    p = _constant(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = emit_fma(b, p, r, _constant(coefficient))
    mantissa = b.fadd(emit_fma(b, p, b.fmul(r, r), r), _constant(1.0))
    exponent = b.add(b.fptosi(n, INT_VECTOR), ir.Constant(INT_VECTOR, [127] * WIDTH))
    power = b.bitcast(b.shl(exponent, ir.Constant(INT_VECTOR, [23] * WIDTH)), VECTOR)
    return b.select(
        b.fcmp_ordered(">=", x, _constant(_SMALLEST)), b.fmul(mantissa, power), _constant(0.0)
    )


def _greatest(builder: ir.IRBuilder, x: Any) -> Any:
    for half in (8, 4, 2, 1):
        low, high = (
            builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(INT, half), list(which)))
            for which in (range(half), range(half, 2 * half))
        )
        x = _largest(builder, low, high)
    return builder.extract_element(x, INT(0))


def _total(builder: ir.IRBuilder, x: Any) -> Any:
    sum_so_far = builder.extract_element(x, INT(0))
    for i in range(1, WIDTH):
        sum_so_far = builder.fadd(sum_so_far, builder.extract_element(x, INT(i)))
    return sum_so_far


def instruction(signature: Any, emit: Callable[..., Any]) -> Any:
    """A numba function of this signature; emit: its code, of a builder and the arguments."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = emit(builder, *args)
        return context.get_dummy_value() if signature.return_type is types.void else value

    def types_of(*_: Any) -> Any:
        return signature, generate

    names = ["context", *(f"argument_{number}" for number in range(len(signature.args)))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    function: Any = types_of
    function.__signature__ = Signature(parameters)  # numba counts them
    return intrinsic(function)


def _store(builder: ir.IRBuilder, address: Any, vector: Any) -> None:
    builder.store(vector, pointer(builder, address, VECTOR), align=FLOAT_BYTES)


def _ascending(builder: ir.IRBuilder, start: Any) -> Any:
    steps = ir.Constant(VECTOR, [float(i) for i in range(WIDTH)])
    return builder.fadd(emit_spread(builder, start), steps)


def _where_at_most(b: ir.IRBuilder, x: Any, y: Any, then: Any, other: Any) -> Any:
    return b.select(b.fcmp_ordered("<=", x, y), then, other)


def _pause(b: ir.IRBuilder) -> None:
    if b.module.triple.startswith(("x86_64", "i686")):
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])


def _change(operation: str) -> Callable[..., Any]:
    return lambda b, at, x: b.atomic_rmw(operation, pointer(b, at, LONG), x, "seq_cst")


_KERNEL = ir.FunctionType(ir.VoidType(), [LONG, LONG])
_OF_TWO, _OF_FLOAT = Vector(Vector, Vector), Vector(types.float32)
_TO_FLOAT, _OF_CELL = types.float32(Vector), types.int64(types.int64, types.int64)

# Of vectors, element by element; fma: a * b + c with one rounding (IEEE 754 fusedMultiplyAdd).
add, sub = instruction(_OF_TWO, ir.IRBuilder.fadd), instruction(_OF_TWO, ir.IRBuilder.fsub)
mul, div = instruction(_OF_TWO, ir.IRBuilder.fmul), instruction(_OF_TWO, ir.IRBuilder.fdiv)
largest = instruction(_OF_TWO, _largest)
fma = instruction(Vector(Vector, Vector, Vector), emit_fma)
exponential = instruction(Vector(Vector), _exponential)  # within 2 units in the last place
where_at_most = instruction(Vector(Vector, Vector, Vector, Vector), _where_at_most)  # a <= b

load = instruction(Vector(types.int64), lambda b, at: b.load(pointer(b, at, VECTOR), align=4))
store = instruction(types.void(types.int64, Vector), _store)
same = instruction(_OF_FLOAT, emit_spread)  # a float32 in every element
ascending = instruction(_OF_FLOAT, _ascending)  # start, start + 1, ...
total = instruction(_TO_FLOAT, _total)  # the elements added in order
greatest = instruction(_TO_FLOAT, _greatest)  # the largest element

# Of int64 that threads share: who reads one sees all that was written before it (acquire, release).
read = instruction(
    types.int64(types.int64), lambda b, at: b.load_atomic(pointer(b, at, LONG), "seq_cst", 8)
)
write = instruction(
    types.void(types.int64, types.int64),
    lambda b, at, x: b.store_atomic(x, pointer(b, at, LONG), "seq_cst", 8),
)
fetch_add = instruction(_OF_CELL, _change("add"))  # at once; returns what it was before
exchange = instruction(_OF_CELL, _change("xchg"))  # so does this
pause = instruction(types.void(), _pause)  # tells an x86 processor that a loop only looks and waits
call = instruction(  # the kernel (see `thread_pool`) at an address
    types.void(types.int64, types.int64, types.int64),
    lambda b, at, *arguments: b.call(pointer(b, at, _KERNEL), arguments),
)
_pointer = instruction(types.voidptr(types.int64), lambda b, at: pointer(b, at, ir.IntType(8)))


@inlined
def integers(address: int, count: int) -> Any:
    """The int64 array of so many elements at an address."""
    return carray(_pointer(address), (count,), np.int64)


@inlined
def floats(address: int, count: int) -> Any:
    """The float32 array of so many elements at an address."""
    return carray(_pointer(address), (count,), np.float32)


@inlined
def doubles(address: int, count: int) -> Any:
    """The float64 array of so many elements at an address."""
    return carray(_pointer(address), (count,), np.float64)


@inlined
def matrix(address: int, rows: int, columns: int) -> Any:
    """The float32 array [rows, columns] at an address."""
    return carray(_pointer(address), (rows, columns), np.float32)
