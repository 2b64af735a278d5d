"""Cache lines fetched early, and compared in vector registers: what numba has no words for.

The functions here mean something in compiled loops only, after `teach`.
"""

from __future__ import annotations

from typing import Any

from engine_ext.kernels.jit import made_once

LINE = 64  # bytes of a cache line


def differing(old: Any, new: Any, first: Any) -> Any:
    """Which of the elements of a line differ: a bit for each, uint64.

    Args:
        old, new: unsigned ints of one width, contiguous; any alignment.
        first: of the line's elements; all of them are in the arrays.
    """


def lowest(mask: Any) -> Any:
    """The number of the lowest bit that is set, int64; 64 where there is none."""


def ones(mask: Any) -> Any:
    """How many bits are set, int64."""


def fetch_to_read(array: Any, offset: Any) -> None:
    """Ask for the cache line of an element; it may lie beyond the array's end."""


def fetch_to_write(array: Any, offset: Any) -> None:
    """Ask for the cache line of an element, to read and write it; it may lie beyond the end."""


@made_once
def teach() -> None:
    """Tell numba what the functions are; ImportError without numba."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic, overload

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
    def trailing_zeros(typing: Any, mask: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

        return types.int64(types.uint64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def population(typing: Any, mask: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.ctpop(arguments[0])

        return types.int64(types.uint64), generate

    def prefetching(to_write: int) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
        flags = [word(to_write), word(3), word(1)]  # into all caches; data

        @intrinsic  # type: ignore[untyped-decorator]
        def prefetch(typing: Any, array: Any, offset: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                memory = context.make_array(signature.args[0])(context, builder, arguments[0])
                address = builder.gep(memory.data, [arguments[1]])
                function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
                builder.call(function, [builder.bitcast(address, byte.as_pointer()), *flags])
                return context.get_dummy_value()

            return types.void(array, offset), generate

        return prefetch

    prefetch_to_read, prefetch_to_write = prefetching(0), prefetching(1)

    @overload(fetch_to_read, strict=False)  # type: ignore[untyped-decorator]
    def _fetch_to_read(array: Any, offset: Any) -> Any:
        def implementation(array: Any, offset: Any) -> None:
            prefetch_to_read(array, offset)

        return implementation

    @overload(fetch_to_write, strict=False)  # type: ignore[untyped-decorator]
    def _fetch_to_write(array: Any, offset: Any) -> Any:
        def implementation(array: Any, offset: Any) -> None:
            prefetch_to_write(array, offset)

        return implementation

    @overload(differing, strict=False)  # type: ignore[untyped-decorator]
    def _differing(old: Any, new: Any, first: Any) -> Any:
        def implementation(old: Any, new: Any, first: Any) -> Any:
            return compare_line(old, new, first)

        return implementation

    @overload(lowest, strict=False)  # type: ignore[untyped-decorator]
    def _lowest(mask: Any) -> Any:
        def implementation(mask: Any) -> Any:
            return trailing_zeros(mask)

        return implementation

    @overload(ones, strict=False)  # type: ignore[untyped-decorator]
    def _ones(mask: Any) -> Any:
        def implementation(mask: Any) -> Any:
            return population(mask)

        return implementation
