"""What numba code here is written in: vectors of sixteen float32, and raw addresses.

numba leaves vectors to LLVM's guess, which keeps sums in memory and checks at run time whether
arrays overlap. Here `Vector` is LLVM's <16 x float>: one AVX-512 register, or several smaller ones
elsewhere. What threads share and what a kernel gets is an int64 address in bytes; nothing is
checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from workbench.kernels import isa  # noqa: F401 - before numba compiles anything

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


def emit_prefetch(builder: ir.IRBuilder, address: Any, level: int = 1) -> None:
    """Asks for the cache line at an address, which need not be memory; waits for nothing.

    level: of the cache that it shall come to.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    reading, near, data = INT(0), INT(4 - level), INT(1)
    builder.call(prefetch, [builder.inttoptr(address, byte), reading, near, data])


def instruction(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a numba function of what emits its code, of a builder and the arguments."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if signature.return_type is types.void else value

        @intrinsic
        @wraps(emit)  # numba counts its parameters
        def function(*_: Any) -> Any:
            return signature, generate

        return function

    return wrap


def _constant(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * WIDTH)


def _largest(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


# Of vectors, element by element; fma: a * b + c with one rounding (IEEE 754 fusedMultiplyAdd).
_OF_TWO = instruction(Vector(Vector, Vector))
add, sub = _OF_TWO(lambda b, x, y: b.fadd(x, y)), _OF_TWO(lambda b, x, y: b.fsub(x, y))
mul, div = _OF_TWO(lambda b, x, y: b.fmul(x, y)), _OF_TWO(lambda b, x, y: b.fdiv(x, y))
largest, fma = _OF_TWO(_largest), instruction(Vector(Vector, Vector, Vector))(emit_fma)


@instruction(Vector(Vector, Vector, Vector, Vector))
def where_at_most(b: ir.IRBuilder, x: Any, y: Any, then: Any, other: Any) -> Any:
    """then where x <= y, else other, element by element."""
    return b.select(b.fcmp_ordered("<=", x, y), then, other)


@instruction(Vector(Vector))
def exponential(b: ir.IRBuilder, x: Any) -> Any:
    """exp, within 2 units in the last place; 0 below -87, exp(88) above 88; NaN of NaN."""
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
    at_least_smallest = b.fcmp_ordered(">=", x, _constant(_SMALLEST))
    found = b.select(at_least_smallest, b.fmul(mantissa, power), _constant(0.0))
    return b.select(b.fcmp_unordered("uno", x, x), x, found)


@instruction(types.int64(Vector, Vector))
def at_least(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """Bit i is set where element i of x is at least that of y."""
    return b.zext(b.bitcast(b.fcmp_ordered(">=", x, y), ir.IntType(WIDTH)), LONG)


@instruction(types.int64(types.int64))
def lowest_bit(b: ir.IRBuilder, bits: Any) -> Any:
    """The number of the lowest bit that is set; 64 if none is."""
    return b.cttz(bits, ir.Constant(ir.IntType(1), 0))


@instruction(types.float32(Vector))
def greatest(builder: ir.IRBuilder, x: Any) -> Any:
    """The largest element."""
    for half in (8, 4, 2, 1):
        low, high = (
            builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(INT, half), list(which)))
            for which in (range(half), range(half, 2 * half))
        )
        x = _largest(builder, low, high)
    return builder.extract_element(x, INT(0))


@instruction(types.float32(Vector))
def total(builder: ir.IRBuilder, x: Any) -> Any:
    """The elements added in order."""
    sum_so_far = builder.extract_element(x, INT(0))
    for i in range(1, WIDTH):
        sum_so_far = builder.fadd(sum_so_far, builder.extract_element(x, INT(i)))
    return sum_so_far


same = instruction(Vector(types.float32))(emit_spread)  # a float32 in every element


@instruction(Vector(types.float32))
def ascending(builder: ir.IRBuilder, start: Any) -> Any:
    """start, start + 1, ..."""
    steps = ir.Constant(VECTOR, [float(i) for i in range(WIDTH)])
    return builder.fadd(emit_spread(builder, start), steps)


@instruction(Vector(types.int64))
def load(b: ir.IRBuilder, address: Any) -> Any:
    """Sixteen float32 from an address."""
    return b.load(pointer(b, address, VECTOR), align=FLOAT_BYTES)


@instruction(types.void(types.int64, Vector))
def store(b: ir.IRBuilder, address: Any, vector: Any) -> None:
    """Writes sixteen float32 to an address."""
    b.store(vector, pointer(b, address, VECTOR), align=FLOAT_BYTES)


@instruction(types.int64(types.int64))
def read(b: ir.IRBuilder, address: Any) -> Any:
    """An int64 that another thread may have written before (acquire)."""
    return b.load_atomic(pointer(b, address, LONG), "seq_cst", 8)


@instruction(types.void(types.int64, types.int64))
def write(b: ir.IRBuilder, address: Any, value: Any) -> None:
    """Writes an int64; a thread that reads it sees all that was written before (release)."""
    b.store_atomic(value, pointer(b, address, LONG), "seq_cst", 8)


@instruction(types.int64(types.int64, types.int64))
def fetch_add(b: ir.IRBuilder, address: Any, value: Any) -> Any:
    """Adds to an int64 at once; returns what it was before."""
    return b.atomic_rmw("add", pointer(b, address, LONG), value, "seq_cst")


@instruction(types.int64(types.int64, types.int64))
def exchange(b: ir.IRBuilder, address: Any, value: Any) -> Any:
    """Replaces an int64 at once; returns what it was before."""
    return b.atomic_rmw("xchg", pointer(b, address, LONG), value, "seq_cst")


@instruction(types.void())
def pause(b: ir.IRBuilder) -> None:
    """Tells an x86 processor that a loop only looks and waits."""
    if b.module.triple.startswith(("x86_64", "i686")):
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])


@instruction(types.void(types.int64, types.int64, types.int64))
def call(b: ir.IRBuilder, address: Any, arguments: Any, counter: Any) -> None:
    """Calls the kernel (see `thread_pool`) at an address."""
    kind = ir.FunctionType(ir.VoidType(), [LONG, LONG])
    b.call(pointer(b, address, kind), [arguments, counter])


@instruction(types.voidptr(types.int64))
def _pointer(b: ir.IRBuilder, address: Any) -> Any:
    return pointer(b, address, ir.IntType(8))


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
def address_of(numbers: Any) -> Any:
    """An array's address, signed as sums of addresses are. numba's own is unsigned: what is called
    with both is compiled twice, and what returns either returns a float64.
    """
    return np.int64(numbers.ctypes.data)


@called
def aligned(count: int) -> Any:
    """A new float32 array of so many elements, no vector of which lies in two cache lines."""
    whole = np.empty(count + WIDTH, np.float32)
    start = -whole.ctypes.data % VECTOR_BYTES // FLOAT_BYTES
    return whole[start : start + count]


@inlined
def matrix(address: int, rows: int, columns: int) -> Any:
    """The float32 array [rows, columns] at an address."""
    return carray(_pointer(address), (rows, columns), np.float32)
