"""Probe how post-load processing moves the elements of one parameter.

The parameter is filled with one digit of each element's index at a time. The digits that come out
at a place name the element that is there now. `infer` runs the processing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.model import extent
from engine_ext.placement import CHUNK, Repack, flat_bits, smallest_block, unmoved

# The largest digit up to which the dtype holds every integer exactly. 0 stands for padding.
_BASE: Final[dict[torch.dtype, int]] = {
    torch.float64: 65536,
    torch.float32: 65536,
    torch.float16: 2048,
    torch.bfloat16: 256,
    torch.float8_e4m3fn: 16,
    torch.float8_e5m2: 8,
    torch.int64: 65536,
    torch.int32: 65536,
    torch.int16: 32767,
    torch.int8: 127,
    torch.uint8: 255,
}

# Bytes of a map that is never too large.
_SMALL_MAP: Final = 1 << 24


class IndexProbe:
    """The probe of one parameter, and what it has found.

    The flat index is split into (row, column), where a row is a block of the leading dimension.
    As long as elements stay in their rows and all rows are permuted alike, one row's map is kept.

    Args:
        tensor: the parameter; its elements are not read.
        seed: of its random payload.

    Attributes:
        digits: (axis, place value) of each digit: rows (axis 0) before columns (axis 1).
        reason: what the processing does that cannot be followed; empty if nothing.
        repack: the permutation, once concluded; None if nothing moves.
    """

    def __init__(self, tensor: torch.Tensor, seed: int) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._numel = tensor.numel()
        self._seed = seed
        rows = tensor.shape[0] if tensor.dim() > 1 and self._numel else 1
        self._sizes = (rows, self._numel // rows)
        self._base = _BASE.get(tensor.dtype, 0)
        # int32 [rows, columns]: the index of the element at each place, as far as it is known; with
        # one row only, the column, for every row.
        self._sources: torch.Tensor | None = None
        self.digits: list[tuple[int, int]] = []
        for axis, size in enumerate(self._sizes):
            value = 1
            while self._base and value < size:
                self.digits.append((axis, value))
                value *= self._base
        self.reason = ""
        self.repack: Repack | None = None
        if not tensor.is_contiguous():
            self.refuse("starts from elements that are not contiguous")

    @property
    def pending(self) -> bool:
        """Whether there is a permutation to find or to verify."""
        return not self.reason and (self._sources is not None or self.repack is not None)

    def refuse(self, reason: str) -> None:
        """Note why the processing cannot be followed; the first reason is kept."""
        self.reason = self.reason or reason
        self._sources = None

    def payload(self, flip: bool) -> torch.Tensor:
        """Return random bits, the same every time, or their complement, as the parameter."""
        size = self._numel * self._dtype.itemsize
        generator = np.random.default_rng(self._seed)
        words = generator.integers(0, 1 << 64, -(-size // 8), dtype=np.uint64)
        if flip:
            np.invert(words, out=words)
        raw = torch.from_numpy(words.view(np.uint8)[:size])
        if self._dtype == torch.bool:
            raw.bitwise_and_(1)
        return raw.view(self._dtype).view(self._shape).to(self._device)

    def compare(self, output: torch.Tensor | None, flip: bool) -> None:
        """Compare the payload with what the processing made of it; None if it is gone."""
        if output is None:
            self.refuse("removes it")
        elif output.dtype != self._dtype:
            self.refuse(f"makes it {output.dtype}")
        elif output.numel() != self._numel:
            self.refuse(f"makes {output.numel()} elements of its {self._numel}")
        elif extent(output) != self._numel:
            self.refuse("leaves gaps between its elements, or makes them overlap")
        elif not torch.equal(flat_bits(output), flat_bits(self.payload(flip))):
            if not self._base:
                self.refuse(f"changes it, and {self._dtype} holds no digits to probe it with")
            elif self._sources is None:
                self._sources = self._new_map(1)

    def digit(self, number: int) -> torch.Tensor:
        """Return one digit of every element's index, plus 1, as the parameter."""
        if not self.pending or not self.digits:
            return self.payload(flip=False)
        digits = self._digits(*self.digits[min(number, len(self.digits) - 1)])
        return digits.expand(self._sizes).contiguous().view(self._shape).to(self._device)

    def read_digit(self, number: int, output: torch.Tensor) -> None:
        """Add one digit to the map, from what the processing made of it."""
        if self._sources is None or number >= len(self.digits):
            return
        axis, value = self.digits[number]
        columns = self._sizes[1]
        moved = flat_bits(output).cpu().view(self._dtype).view(self._sizes)
        if len(self._sources) == 1 and not self._rows_are_alike(axis, value, moved):
            row, self._sources = self._sources, self._new_map(self._sizes[0])
            if self._sources is None:
                return
            rows = torch.arange(self._sizes[0], dtype=torch.int32)[:, None]
            torch.add(row, (rows % value if axis == 0 else rows) * columns, out=self._sources)
        if len(self._sources) == 1 and axis == 0:
            return
        for tile in _tiles(*self._sources.shape):
            digits = moved[tile].to(torch.float64)
            whole = digits.to(torch.int32)
            if bool((digits == 0).any()):
                return self.refuse("pads it")
            if bool(((whole != digits) | (whole < 1) | (whole > self._base)).any()):
                return self.refuse("computes: it writes other values than it reads")
            self._sources[tile] += (whole - 1) * (value * columns if axis == 0 else value)

    def conclude(self) -> None:
        """Turn the complete map into a repack, or refuse if it is no permutation."""
        if self._sources is None:
            return
        found = self._sources.view(-1)
        places = torch.full_like(found, -1)
        for start in range(0, len(found), CHUNK):
            part = found[start : start + CHUNK].long()
            if bool(((part < 0) | (part >= len(found))).any()):
                return self.refuse("computes: it writes other values than it reads")
            places[part] = torch.arange(start, start + len(part), dtype=torch.int32)
        if bool((places < 0).any()):
            return self.refuse("does not keep every element exactly once")
        self._sources = None
        del found
        self.repack = Repack(smallest_block(places.numpy()))

    def verify(self, output: torch.Tensor, flip: bool) -> None:
        """Verify that the processing moves the payload as the repack does, bit for bit."""
        if self.repack is None:
            return
        moved, sent = flat_bits(output).cpu(), flat_bits(self.payload(flip)).cpu()
        start = 0
        for piece in unmoved(moved, self.repack, 0, self._numel):
            if not _same(piece, sent[start : start + len(piece)]):
                return self.refuse("does not move all values alike")
            start += len(piece)

    def _new_map(self, rows: int) -> torch.Tensor | None:
        """Return an empty map of so many rows, or refuse the parameter if it is too large."""
        numel = rows * self._sizes[1]
        if numel >= 1 << 31 or 4 * numel > max(2 * self._numel * self._dtype.itemsize, _SMALL_MAP):
            self.refuse(f"moves it in a way that needs a map of {numel} elements")
            return None
        return torch.zeros(rows, self._sizes[1], dtype=torch.int32)

    def _digits(self, axis: int, value: int) -> torch.Tensor:
        """Return digit + 1 of every row or column, [rows, 1] or [1, columns], in the dtype."""
        size = self._sizes[axis]
        digits = torch.empty(size, dtype=self._dtype)
        for start in range(0, size, CHUNK):
            index = torch.arange(start, min(start + CHUNK, size))
            digits[start : start + CHUNK] = (index // value % self._base + 1).to(torch.float32)
        return digits.view((-1, 1) if axis == 0 else (1, -1))

    def _rows_are_alike(self, axis: int, value: int, moved: torch.Tensor) -> bool:
        """Return whether, by this digit, elements stay in their rows and all rows move alike."""
        expected = self._digits(axis, value) if axis == 0 else moved[:1]
        bits = torch_bits_dtype(self._dtype)
        there, wanted = moved.view(bits), expected.view(bits).expand(self._sizes)
        return all(_same(there[tile], wanted[tile]) for tile in _tiles(*self._sizes))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare integers on the CPU; `torch.equal` is ten times slower on strided ones."""
    return bool((one.numpy() == other.numpy()).all())


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield the tiles of a matrix, of about `CHUNK` elements each."""
    width = max(1, min(columns, CHUNK))
    height = max(1, CHUNK // width)
    for left in range(0, columns, width):
        for top in range(0, rows, height):
            yield slice(top, min(top + height, rows)), slice(left, left + width)
