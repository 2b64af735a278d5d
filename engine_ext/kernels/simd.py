"""Operations that numba lacks: prefetch, vector compare, bit counts, memory by address.

The functions here do nothing in Python. They work in loops compiled after `register_intrinsics`.
"""

from __future__ import annotations

from typing import Any

from engine_ext.kernels.jit import made_once

LINE = 64  # bytes of a cache line


def differing_mask(old: Any, new: Any, first: Any) -> Any:
    """Compare one cache line of elements; return a uint64 with one bit per element that differs.

    The arrays are contiguous unsigned ints of one width, at any alignment, and have the whole line.
    """


def trailing_zeros(mask: Any) -> Any:
    """Return the number of the lowest bit that is set, int64; 64 if none is."""


def popcount(mask: Any) -> Any:
    """Return how many bits are set, int64."""


def prefetch(array: Any, offset: Any) -> None:
    """Prefetch the cache line of an element, which can be beyond the array's end."""


def memory_at(address: Any, size: Any, like: Any) -> Any:
    """Return the memory at an address, uint64, as an array of the dtype of `like`, [size].

    It is aligned for the dtype, and stays alive as long as the array is used.
    """


@made_once
def register_intrinsics() -> None:
    """Register the functions with numba; ImportError if it is not installed."""
    from numba import carray, types
    from numba.core import cgutils
    from numba.extending import intrinsic, overload
    from numba.np.numpy_support import as_dtype

    ir = cgutils.ir

    @intrinsic  # type: ignore[untyped-decorator]
    def compare_line(typing: Any, old: Any, new: Any, first: Any) -> Any:
        width = old.dtype.bitwidth
        lanes = 8 * LINE // width
        line, bits = ir.VectorType(ir.IntType(width), lanes), ir.IntType(lanes)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            loaded = []
            for kind, value in zip(signature.args[:2], arguments[:2], strict=True):
                memory = context.make_array(kind)(context, builder, value)
                address = builder.gep(memory.data, [arguments[2]])
                address = builder.bitcast(address, line.as_pointer())
                loaded.append(builder.load(address, align=1))
            mask = builder.bitcast(builder.icmp_unsigned("!=", *loaded), bits)
            return mask if lanes == 64 else builder.zext(mask, ir.IntType(64))

        return types.uint64(old, new, first), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def cttz(typing: Any, mask: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

        return types.int64(types.uint64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def ctpop(typing: Any, mask: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.ctpop(arguments[0])

        return types.int64(types.uint64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch_line(typing: Any, array: Any, offset: Any) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
        # To read, into the second-level cache. A core has few misses of the first level in flight,
        # and a prefetch into that level, or one to write, waits for them: measured on a Zen 4, a
        # loop over single elements gains nothing from these, and takes half the time with this one.
        flags = [word(0), word(2), word(1)]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            memory = context.make_array(signature.args[0])(context, builder, arguments[0])
            address = builder.gep(memory.data, [arguments[1]])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
            builder.call(function, [builder.bitcast(address, byte.as_pointer()), *flags])
            return context.get_dummy_value()

        return types.void(array, offset), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def as_pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(types.uint64), generate

    @overload(memory_at, strict=False)  # type: ignore[untyped-decorator]
    def _memory_at(address: Any, size: Any, like: Any) -> Any:
        dtype = as_dtype(like.dtype)

        def implementation(address: Any, size: Any, like: Any) -> Any:
            return carray(as_pointer(address), (size,), dtype)

        return implementation

    @overload(prefetch, strict=False)  # type: ignore[untyped-decorator]
    def _prefetch(array: Any, offset: Any) -> Any:
        def implementation(array: Any, offset: Any) -> None:
            prefetch_line(array, offset)

        return implementation

    @overload(differing_mask, strict=False)  # type: ignore[untyped-decorator]
    def _differing_mask(old: Any, new: Any, first: Any) -> Any:
        def implementation(old: Any, new: Any, first: Any) -> Any:
            return compare_line(old, new, first)

        return implementation

    @overload(trailing_zeros, strict=False)  # type: ignore[untyped-decorator]
    def _trailing_zeros(mask: Any) -> Any:
        def implementation(mask: Any) -> Any:
            return cttz(mask)

        return implementation

    @overload(popcount, strict=False)  # type: ignore[untyped-decorator]
    def _popcount(mask: Any) -> Any:
        def implementation(mask: Any) -> Any:
            return ctpop(mask)

        return implementation
