"""The innermost loop of a matrix product: some rows times 32 columns, written in LLVM's own terms.

    out[r, c] (+)= x[r, 0] w[0, c] + x[r, 1] w[1, c] + ...      r < rows, c < 32

Each product is fused with its addition, inputs in ascending order, one sum for each element that
stays in a register: an element's value does not depend on how many rows there are, nor on where a
sum is interrupted and taken up again. 14 rows of 32 columns are 28 registers of 16 numbers, as many
as AVX-512 has room for; other machines split them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workbench.kernels.lanes import WIDTH

PANEL = 2 * WIDTH  # columns side by side
MOST_ROWS = 14
_LONG = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_FLOAT_BYTES, _VECTOR_BYTES = 4, 4 * WIDTH


class _Tile:
    """Emits one tile's code. Sums and rows are Python lists of LLVM values."""

    columns = PANEL // WIDTH  # vectors side by side

    def __init__(self, builder: ir.IRBuilder, rows: int) -> None:
        self.builder, self.rows = builder, rows

    def _vector(self, address: Any, index: int) -> Any:
        b = self.builder
        place = b.add(address, _LONG(index * _VECTOR_BYTES))
        return b.inttoptr(place, _VECTOR.as_pointer())

    def addresses(self, base: Any, stride: Any) -> list[Any]:
        """Of the rows, `stride` bytes apart."""
        b = self.builder
        return [b.add(base, b.mul(_LONG(row), stride)) for row in range(self.rows)]

    def load(self, rows: list[Any]) -> list[list[Any]]:
        """The sums so far."""
        load, vector = self.builder.load, self._vector
        return [[load(vector(row, c), align=4) for c in range(self.columns)] for row in rows]

    def store(self, rows: list[Any], sums: list[list[Any]]) -> None:
        """Writes the sums back."""
        for row, line in zip(rows, sums):
            for c, value in enumerate(line):
                self.builder.store(value, self._vector(row, c), align=4)

    def start(self, rows: list[Any], fresh: Any) -> list[list[Any]]:
        """Zeros if fresh, else what is in `rows`."""
        b, zero = self.builder, ir.Constant(_VECTOR, [0.0] * WIDTH)
        with b.if_else(b.icmp_signed("!=", fresh, _LONG(0))) as (then, otherwise):
            with then:
                new = b.block
            with otherwise:
                loaded, old = self.load(rows), b.block
        sums = [[b.phi(_VECTOR) for _ in line] for line in loaded]
        for line, values in zip(sums, loaded):
            for phi, value in zip(line, values):
                phi.add_incoming(zero, new)
                phi.add_incoming(value, old)
        return sums

    def multiply(self, sums: list[list[Any]], x: list[Any], panel: Any, depth: Any) -> Any:
        """The loop over inputs; answers the sums behind it."""
        b = self.builder
        before, loop, behind = b.block, b.append_basic_block("inputs"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(_LONG)
        k.add_incoming(_LONG(0), before)
        running = [[b.phi(_VECTOR) for _ in line] for line in sums]
        new = self._one_input(running, x, panel, k)
        following = b.add(k, _LONG(1))
        k.add_incoming(following, loop)
        for line, first, last in zip(running, sums, new):
            for phi, value, later in zip(line, first, last):
                phi.add_incoming(value, before)
                phi.add_incoming(later, loop)
        b.cbranch(b.icmp_signed("<", following, depth), loop, behind)
        b.position_at_end(behind)
        return new

    def _one_input(self, sums: list[list[Any]], x: list[Any], panel: Any, k: Any) -> Any:
        b = self.builder
        fma = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), "llvm.fma.v16f32"
        )
        step = b.mul(k, _LONG(PANEL * _FLOAT_BYTES))
        place = b.add(panel, step)
        weights = [b.load(self._vector(place, c), align=4) for c in range(self.columns)]
        offset = b.mul(k, _LONG(_FLOAT_BYTES))
        new = []
        for row, line in zip(x, sums):
            scalar = b.load(b.inttoptr(b.add(row, offset), _FLOAT.as_pointer()))
            first = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
            spread = b.shuffle_vector(first, first, zeros)
            new.append([b.call(fma, [spread, w, total]) for w, total in zip(weights, line)])
        return new


def _emit(builder: ir.IRBuilder, rows: int, args: Any) -> None:
    x, x_stride, panel, out, out_stride, depth, fresh = args
    code = _Tile(builder, rows)
    target = code.addresses(out, out_stride)
    sums = code.multiply(code.start(target, fresh), code.addresses(x, x_stride), panel, depth)
    code.store(target, sums)


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
    """out [rows, 32] = x [rows, depth] @ panel [depth, 32], or += it if `fresh` is 0; float32.

    rows: 1 to 14; depth: at least 1; addresses and the strides of rows are in bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        done = builder.append_basic_block("tile_done")
        none = builder.append_basic_block("tile_none")
        choice = builder.switch(args[0], none)
        for count in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block(f"tile_{count}")
            choice.add_case(_LONG(count), block)
            builder.position_at_end(block)
            _emit(builder, count, args[1:])
            builder.branch(done)
        builder.position_at_end(none)
        builder.unreachable()
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate
