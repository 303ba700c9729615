"""Memory by address, for compiled functions: chunks that never move, so that growth copies nothing.

Words that one thread stores while others load them are loaded with acquire and stored with release order: who sees a
reference also sees what it refers to.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from semblend_trt.discovery.compiled import intrinsic

_WORD, _TOKEN, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)


def _pointer(builder: Any, address: Any, to: ir.Type) -> Any:
    return builder.inttoptr(address, to.as_pointer())


@intrinsic
def load_word(_context: Any, _address: Any) -> Any:
    """Loads the int64 at an address (int64), acquire."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0], _WORD), "acquire", 8, typ=_WORD)

    return types.int64(types.int64), generate


@intrinsic
def store_word(_context: Any, _address: Any, _value: Any) -> Any:
    """Stores an int64 at an address (int64), release."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0], _WORD), "release", 8)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_token(_context: Any, _address: Any) -> Any:
    """Loads the int32 at an address (int64)."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[0], _TOKEN), typ=_TOKEN, align=4)

    return types.int32(types.int64), generate


@intrinsic
def store_token(_context: Any, _address: Any, _value: Any) -> Any:
    """Stores an int32 at an address (int64), release."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0], _TOKEN), "release", 4)
        return target.get_dummy_value()

    return types.void(types.int64, types.int32), generate


@intrinsic
def prefetch(_context: Any, _address: Any) -> Any:
    """Asks for the cache line at an address (int64), so that a later load of it does not wait."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, flag = _BYTE.as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        read, keep, data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(function, [_pointer(builder, arguments[0], _BYTE), read, keep, data])
        return target.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def equal_tokens(_context: Any, _left: Any, _right: Any) -> Any:
    """Compares 32 int32 at each of two addresses (int64); bit i of the result (int64) says that the i-th are equal."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        lanes = ir.VectorType(_TOKEN, 32)
        left, right = (builder.load(_pointer(builder, each, lanes), typ=lanes, align=4) for each in arguments)
        return builder.zext(builder.bitcast(builder.icmp_unsigned("==", left, right), _TOKEN), _WORD)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def trailing_zeros(_context: Any, _word: Any) -> Any:
    """Number of the lowest bit that is set in an int64 other than 0."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate
