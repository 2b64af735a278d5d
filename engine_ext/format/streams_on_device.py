"""Encode changed elements of many tensors on an accelerator, and digest their change.

Gap streams are those of `engine_ext.format.gap_streams`, differences those of
`engine_ext.format.ulp_differences`, and digests those of `engine_ext.format.digest`, to the byte.
Triton kernels make them where there are some; otherwise PyTorch's operators do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.format import digest
from engine_ext.format.digest_on_device import _curve, _terms, device_factors
from engine_ext.format.manifest import skip_symbol
from engine_ext.format.ulp_differences import _ESCAPE
from engine_ext.kernels.triton import runs_change_kernels

Send = Callable[[Sequence[NDArray[np.int64]]], Sequence[torch.Tensor]]

_SKIP = skip_symbol(1)


@dataclass(frozen=True, slots=True)
class ChangedElements:
    """Changed elements of pieces of tensors, on their device; those of a piece ascend.

    Attributes:
        places: Their flat indices in their tensors, int64 [n], n > 0.
        old, new: Their bits, integers as wide as the checkpoint dtype, [n].
        counts: Elements of each piece, none of them empty.
        starts: The index in its tensor at which each piece begins.
        names: Of the piece's tensors, which the digest depends on.
        exponents: The bits of each piece's dtype that are all set in a NaN or an infinity, maybe
            with others; 0 if it has neither.
        numel: Elements of all pieces, changed or not, below 2**31.
    """

    places: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    counts: NDArray[np.int64]
    starts: Sequence[int]
    names: Sequence[str]
    exponents: Sequence[int]
    numel: int


class DeviceEncoded(NamedTuple):
    """The elements of all pieces, encoded, on their device.

    Attributes:
        symbols: The gap streams of 1-byte symbols, one after another, uint8, and more room; that of
            a piece counts from its start, as if nothing came before.
        nibbles: Those of each piece, uint8 [sum of ceil(count / 2)].
        escaped: The escaped differences of all, integers of the elements' width, and more room.
        totals: int64 [pieces, 6]. The first five are sums up to the end of each piece: symbols; new
            minus old elements in both lanes of the digest, modulo 2**64; escaped differences;
            new elements that are NaN or infinite. The last one is the place of its last element.
    """

    symbols: torch.Tensor
    nibbles: torch.Tensor
    escaped: torch.Tensor
    totals: torch.Tensor


def encode_on_device(elements: ChangedElements, send: Send) -> DeviceEncoded:
    """Encode where the elements are and how they differ, and digest their change.

    Kernels do not wait for the device.

    Args:
        send: Copies int64 arrays to the device.
    """
    most = len(elements.places) + elements.numel // _SKIP
    seeds = np.array([digest._seeds(name) for name in elements.names], np.uint64).view(np.int64)
    exponents = np.array(elements.exponents, np.uint64).view(np.int64)
    factors = device_factors(elements.places.device)
    ends = np.cumsum(elements.counts)
    if not runs_change_kernels(elements.places.device):
        starts = np.array(elements.starts, np.int64)
        sent = send([seeds, exponents, elements.counts, starts, ends - 1])
        return _by_operators(elements, sent, factors, most)
    from engine_ext.kernels.triton import encode_changes

    table, programs = encode_changes.rows(elements.counts, elements.starts, exponents)
    rows, last, final, seeds_there = send([table, programs - 1, ends - 1, seeds])
    found = elements.places, elements.old, elements.new
    halves = int(((elements.counts + 1) // 2).sum())
    symbols, nibbles, escaped, sums = encode_changes.write(
        rows, found, last, seeds_there, factors, most, halves
    )
    totals = torch.cat([sums, elements.places[final][:, None]], 1)
    return DeviceEncoded(symbols, nibbles, escaped, totals)


def _by_operators(
    elements: ChangedElements, sent: Sequence[torch.Tensor], factors: torch.Tensor, most: int
) -> DeviceEncoded:
    places, device = elements.places, elements.places.device
    seeds, exponents, counts, starts, last = sent
    first = last + 1 - counts
    following = torch.cat([starts[:1], places[:-1] + 1])
    following[first] = starts
    gaps = places - following
    skips = gaps // _SKIP
    written = (skips + 1).cumsum(0)
    symbols = torch.full((most,), _SKIP, dtype=torch.uint8, device=device)
    symbols[written - 1] = (gaps - skips * _SKIP).to(torch.uint8)

    number = torch.repeat_interleave(counts)
    zigzag = _zigzag(elements.old, elements.new)
    large = (zigzag < 0) | (zigzag >= _ESCAPE)
    halves = (counts + 1) // 2
    padding = 2 * (halves.cumsum(0) - halves) - first  # nibbles before each piece's own
    nibbles = torch.zeros(2 * int(halves.sum()), dtype=torch.uint8, device=device)
    at = torch.arange(len(places), device=device) + padding[number]
    nibbles[at] = torch.where(large, _ESCAPE, zigzag).to(torch.uint8)

    terms = _terms(_curve(elements.new) - _curve(elements.old), places, seeds[number].T, factors)
    masks = exponents[number]
    whole = (masks != 0) & ((elements.new.to(torch.int64) & masks) == masks)
    sums = torch.cat([written[None], terms.cumsum(1), torch.stack([large, whole]).cumsum(1)])
    totals = torch.cat([sums, places[None]])[:, last].T.contiguous()
    escaped = zigzag[large].to(elements.new.dtype)
    return DeviceEncoded(symbols, nibbles[::2] | nibbles[1::2] << 4, escaped, totals)


def _zigzag(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return new minus old bits, zigzag-encoded; int64, where negative ones are 2**63 and more."""
    apart, width = new.to(torch.int64) - old.to(torch.int64), 8 * new.itemsize
    if width < 64:
        half = 1 << (width - 1)
        apart = ((apart + half) & (2 * half - 1)) - half
    return apart << 1 ^ apart >> 63
