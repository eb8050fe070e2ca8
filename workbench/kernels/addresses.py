"""Numba code on raw addresses: sixteen numbers at a time, atomic integers, calls through a pointer.

What threads share and what a kernel is handed is an int64 address in bytes; `lanes` has the same
sixteen float32 over arrays. Nothing is checked: who makes an address answers for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from workbench.kernels.lanes import WIDTH, Lanes

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
_LANES = ir.VectorType(ir.FloatType(), WIDTH)
Generate = Callable[[Any, Any, Any, Any], Any]


def _at(builder: ir.IRBuilder, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def floats(_: Any, address: Any) -> Any:
    """Sixteen float32 as lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, args[0], _LANES), align=4)

    return Lanes(types.int64), generate


@intrinsic
def put(_: Any, address: Any, value: Any) -> Any:
    """Writes lanes as sixteen float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _at(builder, args[0], _LANES), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, Lanes), generate


@intrinsic
def read(_: Any, address: Any) -> Any:
    """An int64 that another thread may have written before (acquire)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_at(builder, args[0], _LONG), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def write(_: Any, address: Any, value: Any) -> Any:
    """Writes an int64; who reads it sees all that was written before (release)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _at(builder, args[0], _LONG), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fetch_add(_: Any, address: Any, value: Any) -> Any:
    """Adds to an int64 at once; answers what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _at(builder, args[0], _LONG), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def exchange(_: Any, address: Any, value: Any) -> Any:
    """Replaces an int64 at once; answers what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _at(builder, args[0], _LONG), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def pause(_: Any) -> Any:
    """Tells the processor that a loop only looks and waits, where it has a word for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if builder.module.triple.startswith(("x86_64", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call(_: Any, function: Any, arguments: Any, counter: Any) -> Any:
    """Calls the kernel (see `team`) at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_LONG, _LONG])
        builder.call(_at(builder, args[0], kind), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _pointer(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _BYTE.as_pointer())

    return types.voidptr(types.int64), generate


@njit(error_model="numpy", inline="always")
def integers(address: int, count: int) -> Any:
    """The int64 array of so many elements at an address."""
    return carray(_pointer(address), (count,), np.int64)


@njit(error_model="numpy", inline="always")
def numbers(address: int, count: int) -> Any:
    """The float32 array of so many elements at an address."""
    return carray(_pointer(address), (count,), np.float32)


@njit(error_model="numpy", inline="always")
def doubles(address: int, count: int) -> Any:
    """The float64 array of so many elements at an address."""
    return carray(_pointer(address), (count,), np.float64)


@njit(error_model="numpy", inline="always")
def matrix(address: int, rows: int, columns: int) -> Any:
    """The float32 array [rows, columns] at an address."""
    return carray(_pointer(address), (rows, columns), np.float32)
