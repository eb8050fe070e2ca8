"""The innermost loops of a matrix product: some rows times some columns, in LLVM's own terms.

    out[r, c] (+)= x[r, 0] w[0, c] + x[r, 1] w[1, c] + ...      r < MOST_ROWS, c < COLUMNS

Each product is fused with its addition, inputs in ascending order, one sum for each element that
stays in a register: an element's value does not depend on how many rows there are, nor on where a
sum is interrupted and taken up again. `isa` says how many rows and columns fill the registers.
Quantised weights: `widening`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workbench.kernels.isa import ISA
from workbench.kernels.lanes import WIDTH

PANEL = 2 * WIDTH  # columns of packed weights side by side
MOST_ROWS, _VECTORS = ISA.tile
COLUMNS = _VECTORS * WIDTH
_LONG = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_FLOAT_BYTES, _VECTOR_BYTES = 4, 4 * WIDTH


Sums = list[list[Any]]  # vectors of each row


class Tile:
    """Emits the code of rows x columns vectors. Rows are addresses; numbers are LLVM values."""

    def __init__(self, builder: ir.IRBuilder, rows: int, columns: int) -> None:
        self.builder, self.rows, self.columns = builder, rows, columns

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        called = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.fma.v16f32")
        return self.builder.call(called, [a, b, c])

    def addresses(self, base: Any, stride: Any) -> list[Any]:
        """Of the rows, `stride` bytes apart."""
        b = self.builder
        return [b.add(base, b.mul(_LONG(row), stride)) for row in range(self.rows)]

    def vectors(self, address: Any, kind: ir.Type = _VECTOR, align: int = 4) -> list[Any]:
        """The vectors side by side from an address; align: bytes of one element."""
        return [
            self.builder.load(self.at(address, c * WIDTH * align, kind), align=align)
            for c in range(self.columns)
        ]

    def store(self, rows: list[Any], sums: Sums) -> None:
        """Writes the sums back."""
        for row, line in zip(rows, sums):
            for c, value in enumerate(line):
                self.builder.store(value, self.at(row, c * _VECTOR_BYTES, _VECTOR), align=4)

    def zeros(self) -> Sums:
        """Sums of nothing."""
        zero = ir.Constant(_VECTOR, [0.0] * WIDTH)
        return [[zero] * self.columns for _ in range(self.rows)]

    def scaled(self, rows: list[Any], factors: Sums) -> Sums:
        """What is in `rows`, times factors."""
        return [
            [self.builder.fmul(value, factor) for value, factor in zip(self.vectors(row), line)]
            for row, line in zip(rows, factors)
        ]

    def start(self, rows: list[Any], fresh: Any) -> Sums:
        """Zeros if fresh, else what is in `rows`."""
        b, zero = self.builder, ir.Constant(_VECTOR, [0.0] * WIDTH)
        with b.if_else(b.icmp_signed("!=", fresh, _LONG(0))) as (then, otherwise):
            with then:
                new = b.block
            with otherwise:
                loaded, old = [self.vectors(row) for row in rows], b.block
        sums = [[b.phi(_VECTOR) for _ in line] for line in loaded]
        for line, values in zip(sums, loaded):
            for phi, value in zip(line, values):
                phi.add_incoming(zero, new)
                phi.add_incoming(value, old)
        return sums

    def loop(self, sums: Sums, count: Any, body: Callable[[Any, Sums], Sums]) -> Sums:
        """sums = body(i, sums) for i = 0 .. count - 1; count is at least 1."""
        b = self.builder
        before, inside, behind = b.block, b.append_basic_block("loop"), b.append_basic_block("end")
        b.branch(inside)
        b.position_at_end(inside)
        i = b.phi(_LONG)
        running = [[b.phi(_VECTOR) for _ in line] for line in sums]
        new = body(i, running)
        following, last = b.add(i, _LONG(1)), b.block
        i.add_incoming(_LONG(0), before)
        i.add_incoming(following, last)
        for line, values, later in zip(running, sums, new):
            for phi, value, other in zip(line, values, later):
                phi.add_incoming(value, before)
                phi.add_incoming(other, last)
        b.cbranch(b.icmp_signed("<", following, count), inside, behind)
        b.position_at_end(behind)
        return new

    def add_input(self, sums: Sums, x: list[Any], k: Any, weights: list[Any]) -> Sums:
        """Each row's input k, times this input's weights, added to its sums."""
        return self.add_numbers(sums, x, self.builder.mul(k, _LONG(_FLOAT_BYTES)), weights)

    def add_numbers(self, sums: Sums, x: list[Any], offset: Any, weights: list[Any]) -> Sums:
        """Each row's number, so many bytes behind its address, times weights, added to its sums."""
        b, new = self.builder, []
        for row, line in zip(x, sums):
            scalar = b.load(b.inttoptr(b.add(row, offset), _FLOAT.as_pointer()))
            spread = self._spread(scalar)
            new.append([self.fma(spread, w, s) for w, s in zip(weights, line)])
        return new

    def at(self, address: Any, offset: int, kind: ir.Type) -> Any:
        """A pointer to a `kind`, so many bytes behind an address."""
        return self.builder.inttoptr(self.builder.add(address, _LONG(offset)), kind.as_pointer())

    def integer(self, table: Any, number: Any) -> Any:
        """An int64 of a table."""
        b = self.builder
        return b.load(self.at(b.add(table, b.mul(number, _LONG(8))), 0, _LONG))

    def _spread(self, scalar: Any) -> Any:
        b = self.builder
        first = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
        return b.shuffle_vector(first, first, zeros)


@contextmanager
def each_case(builder: ir.IRBuilder, value: Any, values: range) -> Iterator[Iterator[int]]:
    """Code for each value that an LLVM value may have; nothing else may it be."""
    done, none = builder.append_basic_block("done"), builder.append_basic_block("none")
    choice = builder.switch(value, none)

    def cases() -> Iterator[int]:
        for number in values:
            block = builder.append_basic_block(f"case_{number}")
            choice.add_case(_LONG(number), block)
            builder.position_at_end(block)
            yield number
            builder.branch(done)

    yield cases()
    builder.position_at_end(none)
    builder.unreachable()
    builder.position_at_end(done)


@intrinsic
def tile(
    _: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    out: Any,
    out_stride: Any,
    depth: Any,
    fresh: Any,
) -> Any:
    """out [rows, COLUMNS] = x [rows, depth] @ panel, or += it if `fresh` is 0; float32.

    panel: COLUMNS of PANEL columns, [depth, PANEL]; rows: 1 to MOST_ROWS; depth: at least 1;
    addresses and the strides of rows are in bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, x, x_stride, panel, out, out_stride, depth, fresh = args
        with each_case(builder, rows, range(1, MOST_ROWS + 1)) as counts:
            for count in counts:
                code = Tile(builder, count, _VECTORS)
                emit_tile(code, x, x_stride, panel, out, out_stride, depth, fresh)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


def emit_tile(
    code: Tile,
    x: Any,
    x_stride: Any,
    panel: Any,
    out: Any,
    out_stride: Any,
    depth: Any,
    fresh: Any,
) -> None:
    """`tile` of as many rows and columns as the tile has."""
    b, target = code.builder, code.addresses(out, out_stride)
    sources = code.addresses(x, x_stride)

    def one_input(k: Any, sums: Sums) -> Sums:
        weights = code.vectors(b.add(panel, b.mul(k, _LONG(PANEL * _FLOAT_BYTES))))
        return code.add_input(sums, sources, k, weights)

    code.store(target, code.loop(code.start(target, fresh), depth, one_input))
