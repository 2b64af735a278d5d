"""Gather and scatter single elements of live tensors, as integers.

In host memory the loops are compiled by numba if it is installed and run without the GIL; otherwise
numpy's indexing does the same. On other devices PyTorch's index operators are used, and
`engine_ext.kernels.triton` for many tensors at once. Every element is a cache line of its own, so
the compiled loops prefetch the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.kernels.jit import array, compile_loop, made_once, made_with_numba
from engine_ext.kernels.simd import memory_at, prefetch, register_intrinsics

Bits = NDArray[Any]  # unsigned integers [n]
Offsets = NDArray[Any]  # int32 or int64 [n]

AHEAD = 256  # elements to prefetch; shorter distances are slower where few elements change


Swap = Callable[[Bits, Bits, Bits], None]


class _Loops(NamedTuple):
    gather: Callable[[Any, Any, Any], None]
    scatter: Callable[[Any, Any, Any], None]
    swap: Callable[[Any, Any, Any, Any], None]
    swap_checked: Callable[[Any, Any, Any, Any], bool]
    differs: Callable[[Any, Any, Any, Any], int]


def _gather(live: Any, offsets: Any, out: Any) -> None:
    last = offsets.size - 1
    for k in range(offsets.size):
        prefetch(live, offsets[min(k + AHEAD, last)])
        out[k] = live[offsets[k]]


def _scatter(live: Any, offsets: Any, bits: Any) -> None:
    last = offsets.size - 1
    for k in range(offsets.size):
        prefetch(live, offsets[min(k + AHEAD, last)])
        live[offsets[k]] = bits[k]


def _add(live: Any, offsets: Any, bits: Any) -> None:
    last = offsets.size - 1
    for k in range(offsets.size):
        prefetch(live, offsets[min(k + AHEAD, last)])
        live[offsets[k]] += bits[k]


def _swap(live: Any, offsets: Any, bits: Any, out: Any) -> None:
    last = offsets.size - 1
    for k in range(offsets.size):
        prefetch(live, offsets[min(k + AHEAD, last)])
        where = offsets[k]
        out[k] = live[where]
        live[where] = bits[k]


def _swap_checked(live: Any, offsets: Any, bits: Any, old: Any) -> Any:
    last = offsets.size - 1
    changed = False
    for k in range(offsets.size):
        prefetch(live, offsets[min(k + AHEAD, last)])
        where = offsets[k]
        before = live[where]
        if before != old[k]:
            old[k] = before
            changed = True
        live[where] = bits[k]
    return changed


def _differs(live: Any, offsets: Any, bits: Any, step: Any) -> Any:
    last = offsets.size - 1
    found = bits.dtype.type(0)
    for k in range(0, offsets.size, step):
        prefetch(live, offsets[min(k + AHEAD, last)])
        found |= live[offsets[k]] ^ bits[k]
    return found


def _swap_all(live: Any, bits: Any, old: Any) -> None:
    for k in range(live.size):
        before = live[k]
        live[k] = bits[k]
        old[k] = before


@made_with_numba
def _loop_of_all(types: Any) -> Swap:
    """Compile the loop that replaces all bytes of an array; None without numba."""
    live = array(types, "uint8", readonly=False)
    return compile_loop(_swap_all, types.void(live, array(types, "uint8"), live))


@made_with_numba
def _loops(types: Any, width: int, index: int) -> _Loops:
    """Compile the loops for elements and offsets of so many bytes; None without numba."""
    register_intrinsics()
    bits, offsets = array(types, f"uint{8 * width}"), array(types, f"int{8 * index}")
    live = array(types, f"uint{8 * width}", readonly=False)
    return _Loops(
        compile_loop(_gather, types.void(live, offsets, live)),
        compile_loop(_scatter, types.void(live, offsets, bits)),
        compile_loop(_swap, types.void(live, offsets, bits, live)),
        compile_loop(_swap_checked, types.boolean(live, offsets, bits, live)),
        compile_loop(_differs, live.dtype(live, offsets, bits, types.int64)),
    )


def read(live: Bits, offsets: Offsets) -> Bits:
    """Read elements of live host memory: [k], dtype of `live`, a copy.

    Args:
        live: unsigned integers [n].
        offsets: int32 or int64 [k], each in [0, n).
    """
    loops = _loops(live.itemsize, offsets.itemsize)
    out: Bits = np.empty(offsets.shape, live.dtype)
    if loops is None:
        out[:] = live[offsets]
    else:
        loops.gather(live, offsets, out)
    return out


def write(live: Bits, offsets: Offsets, bits: Bits) -> None:
    """Overwrite elements of live host memory with `bits`, [k], dtype of `live`; see `read`.

    No element comes twice.
    """
    loops = _loops(live.itemsize, offsets.itemsize)
    if loops is None:
        live[offsets] = bits
    else:
        loops.scatter(live, offsets, bits)


def write_many(
    live: Sequence[torch.Tensor], offsets: Sequence[Offsets], bits: Sequence[Bits]
) -> None:
    """Overwrite elements of some tensors in host memory, in one compiled call for all; see `write`.

    Args:
        live: One or more tensors, contiguous, all of one element size.
        offsets, bits: One array of each per tensor.
    """
    addresses = [tensor.data_ptr() for tensor in live]
    sizes = [(tensor.numel(), own.size) for tensor, own in zip(live, offsets, strict=True)]
    if not _visit_many(addresses, sizes, np.concatenate(offsets), np.concatenate(bits), _WRITE):
        for tensor, own, new in zip(live, offsets, bits, strict=True):
            write(host_bits(bits_of(tensor.view(-1))), own, new)


def read_many(live: Sequence[Bits], counts: Sequence[int], offsets: Offsets) -> Bits:
    """Read elements of some arrays in host memory, in one compiled call for all; see `read`.

    Args:
        live: One or more arrays, contiguous, all of one dtype.
        counts: How many elements of each there are.
        offsets: Those of all, one array's after another's.
    """
    addresses = [one.__array_interface__["data"][0] for one in live]
    sizes = [(one.size, count) for one, count in zip(live, counts, strict=True)]
    bits: Bits = np.empty(offsets.size, live[0].dtype)
    if not _visit_many(addresses, sizes, offsets, bits, _READ):
        for one, own in _shares(live, counts):
            bits[own] = read(one, offsets[own])
    return bits


def add_many(live: Sequence[Bits], counts: Sequence[int], offsets: Offsets, bits: Bits) -> None:
    """Add `bits` to elements of some arrays, modulo 2**width; see `read_many`.

    No element comes twice.
    """
    addresses = [one.__array_interface__["data"][0] for one in live]
    sizes = [(one.size, count) for one, count in zip(live, counts, strict=True)]
    if not _visit_many(addresses, sizes, offsets, bits, _ADD):
        for one, own in _shares(live, counts):
            one[offsets[own]] += bits[own]


def _shares(live: Sequence[Bits], counts: Sequence[int]) -> Iterator[tuple[Bits, slice]]:
    start = 0
    for one, count in zip(live, counts, strict=True):
        yield one, slice(start, start + count)
        start += count


def _visit_many(
    addresses: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    offsets: Offsets,
    bits: Bits,
    mode: int,
) -> bool:
    """Visit elements of memory at addresses, of these sizes; return False if there is no loop."""
    loop, live = _loop_of_table(bits.itemsize, offsets.itemsize), np.array(addresses, np.int64)
    # The loop gets addresses alone.
    fits = all(one.flags.aligned and one.flags.c_contiguous for one in (offsets, bits))
    if loop is None or not fits or (live % bits.itemsize).any():
        return False
    extents, counts = np.array(sizes, np.int64).T
    before = np.cumsum(counts) - counts
    where, new = (
        one.__array_interface__["data"][0] + before * one.itemsize for one in (offsets, bits)
    )
    rows = np.stack([live, extents, where, new, new, counts], 1)
    loop(rows, offsets[:0], bits[:0], mode, 1)
    return True


# Ways of visiting elements.
_WRITE, _WRITE_OLD, _READ, _ADD, _SWAP_CHECKED, _COMPARE = range(6)


# Columns of a table of elements: addresses of live memory, offsets, new and old bits; sizes.
_LIVE, _EXTENT, _OFFSETS, _NEW, _OLD, _COUNT = range(6)


class ElementTable:
    """Elements of several tensors in host memory, visited in one compiled call.

    A call for each tensor takes longer than the elements of a small one. The table has addresses;
    its owner keeps the arrays. See `table_of`.
    """

    __slots__ = ("_kinds", "_loop", "_rows")

    def __init__(self, rows: NDArray[np.int64], loop: Any, offset: Any, bits: Any) -> None:
        self._rows, self._loop, self._kinds = rows, loop, (offset, bits)

    def write(self) -> None:
        """Overwrite all elements by their new bits."""
        self._loop(self._rows, *self._kinds, _WRITE, 1)

    def write_old(self) -> None:
        """Overwrite all elements by their old bits; the new ones need not be there any more."""
        self._loop(self._rows, *self._kinds, _WRITE_OLD, 1)

    def swap_checked(self) -> bool:
        """Do as the function of that name does for each tensor; return whether all had `old`."""
        return not self._loop(self._rows, *self._kinds, _SWAP_CHECKED, 1)

    def holds_old(self, step: int = 1) -> bool:
        """Return whether the elements have the bits `old`; `step` as of `holds`."""
        return not self._loop(self._rows, *self._kinds, _COMPARE, step)


def table_of(elements: Sequence[tuple[Bits, Offsets, Bits, Bits]]) -> ElementTable | None:
    """Return a table of some tensors' elements; None without numba, or if any is not aligned.

    Args:
        elements: of one or more tensors `live`, `offsets`, new and old bits, as of `swap_checked`,
            each contiguous. All have one dtype, and the offsets another one.
    """
    live, offsets, *_ = elements[0]
    loop = _loop_of_table(live.itemsize, offsets.itemsize)
    if loop is None or not all(one.flags.aligned for found in elements for one in found):
        return None
    rows = np.empty((len(elements), 6), np.int64)
    columns = zip(*elements, strict=True)
    for column, arrays in zip((_LIVE, _OFFSETS, _NEW, _OLD), columns, strict=True):
        rows[:, column] = [one.__array_interface__["data"][0] for one in arrays]
    rows[:, _EXTENT] = [found[0].size for found in elements]
    rows[:, _COUNT] = [found[1].size for found in elements]
    return ElementTable(rows, loop, np.empty(0, offsets.dtype), np.empty(0, live.dtype))


def _visit_table(rows: Any, offset: Any, bits: Any, mode: Any, step: Any) -> Any:
    found = False
    for k in range(rows.shape[0]):
        count = rows[k, _COUNT]
        live = memory_at(np.uint64(rows[k, _LIVE]), rows[k, _EXTENT], bits)
        where = memory_at(np.uint64(rows[k, _OFFSETS]), count, offset)
        old = memory_at(np.uint64(rows[k, _OLD]), count, bits)
        if mode == _COMPARE:
            if _differs(live, where, old, step) != 0:
                found = True
            continue
        if mode == _WRITE_OLD:
            _scatter(live, where, old)
            continue
        new = memory_at(np.uint64(rows[k, _NEW]), count, bits)
        if mode == _WRITE:
            _scatter(live, where, new)
        elif mode == _READ:
            _gather(live, where, new)
        elif mode == _ADD:
            _add(live, where, new)
        elif _swap_checked(live, where, new, old):
            found = True
    return found


@made_once
def _register_loops() -> None:
    """Register the loops that others call with numba; ImportError if it is not installed."""
    from numba.extending import register_jitable

    register_intrinsics()
    for function in (_gather, _scatter, _add, _swap_checked, _differs):
        register_jitable(function)


@made_with_numba
def _loop_of_table(types: Any, width: int, index: int) -> Callable[..., bool]:
    """Compile the loop for elements and offsets of so many bytes; None without numba."""
    _register_loops()
    rows, word = types.Array(types.int64, 2, "C"), types.int64
    kinds = array(types, f"int{8 * index}"), array(types, f"uint{8 * width}")
    return compile_loop(_visit_table, types.boolean(rows, *kinds, word, word))


def swap(live: Bits, offsets: Offsets, bits: Bits) -> Bits:
    """Write elements and return the old ones, [k], in one pass; see `read` and `write`."""
    loops = _loops(live.itemsize, offsets.itemsize)
    if loops is None:
        out = read(live, offsets)
        write(live, offsets, bits)
        return out
    out = np.empty(offsets.shape, live.dtype)
    loops.swap(live, offsets, bits, out)
    return out


def swap_checked(live: Bits, offsets: Offsets, bits: Bits, old: Bits) -> bool:
    """Write elements, and return whether they had the bits `old`, in one pass; see `swap`.

    If they had not, `old` gets the bits found, so that writing it restores them.
    """
    loops = _loops(live.itemsize, offsets.itemsize)
    if loops is None:
        before = read(live, offsets)
        unchanged = bool(np.array_equal(before, old))
        old[:] = before
        write(live, offsets, bits)
        return unchanged
    return not loops.swap_checked(live, offsets, bits, old)


def swap_all(live: torch.Tensor, bits: torch.Tensor, old: torch.Tensor) -> None:
    """Copy contiguous host memory to `old` and overwrite it, in one pass; see `swap`.

    The three are integer tensors of one shape and dtype, contiguous, and do not overlap.
    """
    loop = _loop_of_all()
    if loop is None:
        old.copy_(live)
        live.copy_(bits)
    else:
        loop(*(host_bits(tensor.view(-1)).view(np.uint8) for tensor in (live, bits, old)))


def holds(live: Bits, offsets: Offsets, bits: Bits, step: int = 1) -> bool:
    """Return whether elements of live host memory equal `bits`; arguments as for `write`.

    With a `step`, only the first of every so many elements is compared.
    """
    loops = _loops(live.itemsize, offsets.itemsize)
    if loops is None:
        return bool(np.array_equal(live[offsets[::step]], bits[::step]))
    return not loops.differs(live, offsets, bits, step)


def bits_of(live: torch.Tensor) -> torch.Tensor:
    """Return a live tensor as a view of integers of the same width."""
    return live.view(torch_bits_dtype(live.dtype))


def host_bits(flat: torch.Tensor) -> Bits:
    """Return a 1-D integer tensor in host memory as a view of unsigned integers."""
    found: Bits = flat.numpy()
    return found.view(f"u{found.itemsize}")


def signed(bits: Bits) -> torch.Tensor:
    """Return unsigned integers in host memory as a view of integers that torch supports."""
    return torch.from_numpy(bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits)


def typed(bits: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return bit patterns in host memory as a tensor of `dtype`, [n].

    A copy if the memory is read-only, which torch does not support, or not aligned for `dtype`.
    """
    bits = bits.view(f"i{dtype.itemsize}")
    if not (bits.flags.writeable and bits.flags.aligned):
        bits = bits.copy()
    return torch.from_numpy(bits).view(dtype)


def gather(flat: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Read elements of a 1-D integer tensor [n]: [k], a copy on the same device.

    `offsets` are int32 or int64 [k] on that device, each below n.
    """
    if flat.device.type != "cpu":
        return flat.index_select(0, offsets)
    return signed(read(host_bits(flat), offsets.numpy()))


def scatter(flat: torch.Tensor, offsets: torch.Tensor, bits: torch.Tensor) -> None:
    """Overwrite elements of a 1-D integer tensor on a device other than the CPU; see `gather`.

    The offsets are unique; `bits` is [k], of the dtype and device of `flat`.
    """
    flat.index_copy_(0, offsets.to(torch.int64), bits)


def exchange(flat: torch.Tensor, offsets: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Write elements like `scatter`, and return the old ones: [k], a copy in host memory."""
    # Allocated before anything is written: after that only the device itself can fail.
    kept = torch.empty(bits.shape, dtype=bits.dtype, device="cpu")
    old = flat.index_select(0, offsets)
    scatter(flat, offsets, bits)
    return kept.copy_(old)


def warm_up(width: int, index: int) -> None:
    """Compile the loops for elements and offsets of so many bytes in host memory now."""
    _loop_of_all()
    _loops(width, index)
    _loop_of_table(width, index)
