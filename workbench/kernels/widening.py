"""Quantised panels in LLVM's own terms: widened in registers, for a product or into a cache.

A weight is scale * code + offset in float32, rounded once; `panels` says where each lies. For few
rows a product that widens on the way costs less than putting weights down in between (`few_rows`);
for many, `widen` puts them down once and `tile` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from workbench.kernels.lanes import WIDTH
from workbench.kernels.tiles import PANEL, Sums, Tile, each_case

FEW_ROWS = 4
_FORMS = ((4, False), (8, False), (4, True), (8, True))  # bits of a code; whether scales are halves
_LONG, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR, _HALVES = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(ir.HalfType(), WIDTH)
_BYTES, _INTS = ir.VectorType(ir.IntType(8), WIDTH), ir.VectorType(ir.IntType(32), WIDTH)


def _whole(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * WIDTH)


class _Quantised:
    """Emits the widening of one form: bits of a code, scales as halves, inputs to a scale."""

    def __init__(self, code: Tile, bits: int, half: bool, group: Any) -> None:
        self.code, self.builder, self.bits, self.half, self.group = (
            code,
            code.builder,
            bits,
            half,
            group,
        )
        self.scale_bytes = PANEL * (2 if half else 4)
        self.input_bytes = PANEL * bits // 8

    def open(self, panel: Any, number: Any) -> Callable[[Any], list[Any]]:
        """A group's weights by input: its scales are loaded here, its codes where asked for."""
        b, arrays = self.builder, 2 if self.bits == 4 else 1
        before = _LONG(arrays * self.scale_bytes)
        size = b.add(before, b.mul(self.group, _LONG(self.input_bytes)))
        at = b.add(panel, b.mul(number, size))
        codes, scales = b.add(at, before), self._scales(at)
        offsets = self._scales(b.add(at, _LONG(self.scale_bytes))) if arrays == 2 else None

        def weights(k: Any) -> list[Any]:
            place = b.add(codes, b.mul(k, _LONG(self.input_bytes)))
            if offsets is None:
                return [b.fmul(s, c) for s, c in zip(scales, self._signed_bytes(place))]
            three = zip(scales, self._nibbles(place), offsets)
            return [self.code.fma(*values) for values in three]

        return weights

    def _scales(self, address: Any) -> list[Any]:
        if not self.half:
            return self.code.vectors(address)
        stored = self.code.vectors(address, _HALVES, 2)
        return [self.builder.fpext(vector, _VECTOR) for vector in stored]

    def _nibbles(self, address: Any) -> list[Any]:
        """Lower halves of 16 bytes, then upper ones."""
        b = self.builder
        wide = b.zext(b.load(self.code.at(address, 0, _BYTES), align=1), _INTS)
        halves = b.and_(wide, _whole(15)), b.lshr(wide, _whole(4))
        return [b.sitofp(half, _VECTOR) for half in halves]

    def _signed_bytes(self, address: Any) -> list[Any]:
        b = self.builder
        return [
            b.sitofp(b.sext(vector, _INTS), _VECTOR)
            for vector in self.code.vectors(address, _BYTES, 1)
        ]


def _form_number(builder: ir.IRBuilder, bits: Any, half: Any) -> Any:
    """Where (bits, half) stands in _FORMS."""
    return builder.add(builder.mul(half, _LONG(2)), builder.lshr(bits, _LONG(3)))


@intrinsic
def few_rows(
    _: Any,
    rows: Any,
    bits: Any,
    half: Any,
    group: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    out: Any,
    out_stride: Any,
    groups: Any,
    fresh: Any,
) -> Any:
    """`tile` for 1 to 4 rows and a quantised panel of so many groups of inputs.

    bits: of a code, 4 (with offsets) or 8; half: 1 if scales are float16, else 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, bits, half, *rest = args
        form = builder.mul(_form_number(builder, bits, half), _LONG(FEW_ROWS))
        with each_case(builder, builder.add(form, rows), range(1, 4 * FEW_ROWS + 1)) as cases:
            for case in cases:
                number, few = divmod(case - 1, FEW_ROWS)
                _emit_few_rows(Tile(builder, few + 1), _FORMS[number], *rest)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


def _emit_few_rows(
    code: Tile,
    form: tuple[int, bool],
    group: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    out: Any,
    out_stride: Any,
    groups: Any,
    fresh: Any,
) -> None:
    b, target = code.builder, code.addresses(out, out_stride)
    sources, quantised = code.addresses(x, x_stride), _Quantised(code, *form, group)

    def one_group(number: Any, sums: Sums) -> Sums:
        weights, first = quantised.open(panel, number), b.mul(number, group)

        def one_input(k: Any, sums: Sums) -> Sums:
            return code.add_input(sums, sources, b.add(first, k), weights(k))

        return code.loop(sums, group, one_input)

    code.store(target, code.loop(code.start(target, fresh), groups, one_group))


@intrinsic
def widen(
    _: Any, bits: Any, half: Any, group: Any, panel: Any, first: Any, groups: Any, out: Any
) -> Any:
    """Groups first, first + 1, ... of a panel: float32 [groups * group, 32] at `out`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, half, *rest = args
        with each_case(builder, _form_number(builder, bits, half), range(len(_FORMS))) as cases:
            for case in cases:
                _emit_widen(Tile(builder, 1), _FORMS[case], *rest)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _emit_widen(
    code: Tile, form: tuple[int, bool], group: Any, panel: Any, first: Any, groups: Any, out: Any
) -> None:
    b, quantised = code.builder, _Quantised(code, *form, group)

    def one_group(number: Any, _: Sums) -> Sums:
        weights, before = quantised.open(panel, b.add(first, number)), b.mul(number, group)

        def one_input(k: Any, _: Sums) -> Sums:
            place = b.mul(b.add(before, k), _LONG(PANEL * 4))
            code.store([b.add(out, place)], [weights(k)])
            return []

        return code.loop([], group, one_input)

    code.loop([], groups, one_group)
