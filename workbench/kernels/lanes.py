"""Sixteen float32 side by side as one value in numba code: a kernel says what is a vector.

numba leaves vectors to LLVM's guess, which keeps sums in memory and checks at run time whether
arrays overlap. Here `Lanes` is LLVM's <16 x float>: one AVX-512 register, or several smaller ones
elsewhere. No fast-math flag is set, so LLVM may neither reorder nor fuse: each lane's result is
exactly what the source says, on every machine. An index counts elements of a flat C-contiguous
float32 array; nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

WIDTH = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INT_VECTOR = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)
_ARRAY = types.float32[::1]

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


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


Lanes = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * WIDTH)


def _fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c]
    )


def _largest(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _spread(builder: ir.IRBuilder, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(_INT_VECTOR, [0] * WIDTH))


def _exponential(builder: ir.IRBuilder, x: Any) -> Any:
    """exp of each lane, within 2 units in the last place; 0 below -87, exp(88) above 88."""
    bounded = _largest(builder, x, _constant(_SMALLEST))
    bounded = builder.select(
        builder.fcmp_ordered("<", bounded, _constant(_LARGEST)), bounded, _constant(_LARGEST)
    )
    n = builder.fsub(
        _fma(builder, bounded, _constant(_LOG2_E), _constant(_ROUND)), _constant(_ROUND)
    )
    r = _fma(builder, n, _constant(-_LN2_HIGH), bounded)
    r = _fma(builder, n, _constant(-_LN2_LOW), r)
    p = _constant(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = _fma(builder, p, r, _constant(coefficient))
    mantissa = builder.fadd(_fma(builder, p, builder.fmul(r, r), r), _constant(1.0))
    exponent = builder.add(builder.fptosi(n, _INT_VECTOR), ir.Constant(_INT_VECTOR, [127] * WIDTH))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_INT_VECTOR, [23] * WIDTH)), _VECTOR)
    seen = builder.fcmp_ordered(">=", x, _constant(_SMALLEST))
    return builder.select(seen, builder.fmul(mantissa, power), _constant(0.0))


def _pointer(
    context: Any, builder: ir.IRBuilder, kind: Any, array: Any, index: Any, target: Any
) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


@intrinsic
def load(_: Any, array: Any, index: Any) -> Any:
    """array[index : index + 16] as lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index = args
        start = _pointer(context, builder, signature.args[0], array, index, _VECTOR)
        return builder.load(start, align=4)

    return Lanes(array, types.int64), generate


@intrinsic
def store(_: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index : index + 16] = value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, value = args
        start = _pointer(context, builder, signature.args[0], array, index, _VECTOR)
        builder.store(value, start, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, Lanes), generate


@intrinsic
def spread(_: Any, array: Any, index: Any) -> Any:
    """array[index] in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index = args
        place = _pointer(context, builder, signature.args[0], array, index, _FLOAT)
        return _spread(builder, builder.load(place))

    return Lanes(array, types.int64), generate


@intrinsic
def same(_: Any, value: Any) -> Any:
    """A float32 in every lane."""
    return Lanes(types.float32), lambda context, builder, signature, args: _spread(builder, args[0])


@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding (IEEE 754 fusedMultiplyAdd)."""
    kind = Lanes(Lanes, Lanes, Lanes)
    return kind, lambda context, builder, signature, args: _fma(builder, *args)


@intrinsic
def add(_: Any, a: Any, b: Any) -> Any:
    """a + b, lane by lane."""
    return Lanes(Lanes, Lanes), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def sub(_: Any, a: Any, b: Any) -> Any:
    """a - b, lane by lane."""
    return Lanes(Lanes, Lanes), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def mul(_: Any, a: Any, b: Any) -> Any:
    """a * b, lane by lane."""
    return Lanes(Lanes, Lanes), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def div(_: Any, a: Any, b: Any) -> Any:
    """a / b, lane by lane."""
    return Lanes(Lanes, Lanes), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def largest(_: Any, a: Any, b: Any) -> Any:
    """The larger of a and b, lane by lane."""
    return Lanes(Lanes, Lanes), lambda context, builder, signature, args: _largest(builder, *args)


@intrinsic
def exponential(_: Any, x: Any) -> Any:
    """exp(x) lane by lane; see `_exponential`."""
    return Lanes(Lanes), lambda context, builder, signature, args: _exponential(builder, *args)


@intrinsic
def where_at_most(_: Any, a: Any, b: Any, then: Any, other: Any) -> Any:
    """then where a <= b, else other, lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<=", *args[:2]), *args[2:])

    return Lanes(Lanes, Lanes, Lanes, Lanes), generate


@intrinsic
def total(_: Any, x: Any) -> Any:
    """The 16 lanes added in order: a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        answer = builder.extract_element(args[0], _INT(0))
        for lane in range(1, WIDTH):
            answer = builder.fadd(answer, builder.extract_element(args[0], _INT(lane)))
        return answer

    return types.float32(Lanes), generate


@intrinsic
def first(_: Any, x: Any) -> Any:
    """Lane 0: a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], _INT(0))

    return types.float32(Lanes), generate
