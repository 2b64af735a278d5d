"""One parameter of a module whose post-load processing is being learned (`engine_ext.repacks.infer`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.model.storage_index import extent
from engine_ext.placement.repacked import CHUNK, flat_bits, smallest_block, unmoved
from engine_ext.placement.segments import Repack

# The largest digit that the dtype holds, with all smaller ones, exactly. 0 stands for padding.
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

# A map of so many bytes is never too large.
_SMALL: Final = 1 << 24


class IndexProbe:
    """What is found out about one parameter.

    Its flat index is seen as (row, column): rows are the blocks of the leading dimension. While
    every row is moved within itself and all are moved alike, only one row's map is kept.

    Attributes:
        places: (axis, value) of each digit: rows (axis 0) before columns (axis 1).
        reason: what the processing does that cannot be followed; empty if nothing.
        repack: the move, once concluded; None where nothing moves.
    """

    def __init__(self, tensor: torch.Tensor, seed: int) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._numel = tensor.numel()
        self._seed = seed
        rows = tensor.shape[0] if tensor.dim() > 1 and self._numel else 1
        self._sizes = (rows, self._numel // rows)
        self._base = _BASE.get(tensor.dtype, 0)
        # int32 [1 or rows, columns]: which element lies at this place (so far; in its row if 1).
        self._found: torch.Tensor | None = None
        self.places: list[tuple[int, int]] = []
        for axis, size in enumerate(self._sizes):
            value = 1
            while self._base and value < size:
                self.places.append((axis, value))
                value *= self._base
        self.reason = ""
        self.repack: Repack | None = None
        if not tensor.is_contiguous():
            self.refuse("starts from elements that are not contiguous")

    @property
    def open(self) -> bool:
        """Whether there is a move to be found or proved."""
        return not self.reason and (self._found is not None or self.repack is not None)

    def refuse(self, reason: str) -> None:
        """The first reason stands."""
        self.reason = self.reason or reason
        self._found = None

    def payload(self, flip: bool) -> torch.Tensor:
        """Random bits, the same every time, or their complement; the parameter's shape."""
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
        """Look at what became of the payload."""
        if output is None:
            self.refuse("takes it away")
        elif output.dtype != self._dtype:
            self.refuse(f"makes it {output.dtype}")
        elif output.numel() != self._numel:
            self.refuse(f"makes {output.numel()} elements of its {self._numel}")
        elif extent(output) != self._numel:
            self.refuse("leaves gaps between its elements, or lets them overlap")
        elif not torch.equal(flat_bits(output), flat_bits(self.payload(flip))):
            if not self._base:
                self.refuse(f"changes it, and {self._dtype} has no digits to learn how")
            elif self._found is None:
                self._found = self._room(1)

    def probe(self, number: int) -> torch.Tensor:
        """One digit of every element's index, plus 1; the parameter's shape."""
        if not self.open or not self.places:
            return self.payload(flip=False)
        digits = self._digits(*self.places[min(number, len(self.places) - 1)])
        return digits.expand(self._sizes).contiguous().view(self._shape).to(self._device)

    def take(self, number: int, output: torch.Tensor) -> None:
        """Look at what became of one digit."""
        if self._found is None or number >= len(self.places):
            return
        axis, value = self.places[number]
        columns = self._sizes[1]
        came = flat_bits(output).cpu().view(self._dtype).view(self._sizes)
        if len(self._found) == 1 and not self._alike(axis, value, came):
            row, self._found = self._found, self._room(self._sizes[0])
            if self._found is None:
                return
            rows = torch.arange(self._sizes[0], dtype=torch.int32)[:, None]
            torch.add(row, (rows % value if axis == 0 else rows) * columns, out=self._found)
        if len(self._found) == 1 and axis == 0:
            return
        for tile in _tiles(*self._found.shape):
            digits = came[tile].to(torch.float64)
            whole = digits.to(torch.int32)
            if bool((digits == 0).any()):
                return self.refuse("pads it")
            if bool(((whole != digits) | (whole < 1) | (whole > self._base)).any()):
                return self.refuse("computes: it writes other values than it reads")
            self._found[tile] += (whole - 1) * (value * columns if axis == 0 else value)

    def conclude(self) -> None:
        """Make the move of what came at every place."""
        if self._found is None:
            return
        found = self._found.view(-1)
        places = torch.full_like(found, -1)
        for start in range(0, len(found), CHUNK):
            part = found[start : start + CHUNK].long()
            if bool(((part < 0) | (part >= len(found))).any()):
                return self.refuse("computes: it writes other values than it reads")
            places[part] = torch.arange(start, start + len(part), dtype=torch.int32)
        if bool((places < 0).any()):
            return self.refuse("does not keep every element exactly once")
        self._found = None
        del found
        self.repack = Repack(smallest_block(places.numpy()))

    def verify(self, output: torch.Tensor, flip: bool) -> None:
        """Compare the payload as the processing moved it with the payload as the map moves it."""
        if self.repack is None:
            return
        came, sent = flat_bits(output).cpu(), flat_bits(self.payload(flip)).cpu()
        start = 0
        for piece in unmoved(came, self.repack, 0, self._numel):
            if not _same(piece, sent[start : start + len(piece)]):
                return self.refuse("does not move all values alike")
            start += len(piece)

    def _room(self, rows: int) -> torch.Tensor | None:
        """An empty map of so many rows, if it is not too large."""
        numel = rows * self._sizes[1]
        if numel >= 1 << 31 or 4 * numel > max(2 * self._numel * self._dtype.itemsize, _SMALL):
            self.refuse(f"moves it in a way that takes a map of {numel} elements")
            return None
        return torch.zeros(rows, self._sizes[1], dtype=torch.int32)

    def _digits(self, axis: int, value: int) -> torch.Tensor:
        """Digit + 1 of every row or column; [rows, 1] or [1, columns], the parameter's dtype."""
        size = self._sizes[axis]
        digits = torch.empty(size, dtype=self._dtype)
        for start in range(0, size, CHUNK):
            index = torch.arange(start, min(start + CHUNK, size))
            digits[start : start + CHUNK] = (index // value % self._base + 1).to(torch.float32)
        return digits.view((-1, 1) if axis == 0 else (1, -1))

    def _alike(self, axis: int, value: int, came: torch.Tensor) -> bool:
        """Whether, by this digit, all rows stay in their places and are moved alike."""
        expected = self._digits(axis, value) if axis == 0 else came[:1]
        bits = torch_bits_dtype(self._dtype)
        there, wanted = came.view(bits), expected.view(bits).expand(self._sizes)
        return all(_same(there[tile], wanted[tile]) for tile in _tiles(*self._sizes))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality of integers on the CPU; `torch.equal` is ten times slower on strided ones."""
    return bool((one.numpy() == other.numpy()).all())


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """A matrix in pieces of about `CHUNK` elements."""
    width = max(1, min(columns, CHUNK))
    height = max(1, CHUNK // width)
    for left in range(0, columns, width):
        for top in range(0, rows, height):
            yield slice(top, min(top + height, rows)), slice(left, left + width)
