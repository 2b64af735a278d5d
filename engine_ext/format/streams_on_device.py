"""Gap streams and digests of changed elements on an accelerator, of many tensors at once.

They are those of `engine_ext.format.gap_streams` and `engine_ext.format.digest`, to the byte.
Triton kernels make them where there are some; otherwise PyTorch's operators do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.format import digest
from engine_ext.format.digest_on_device import _curve, _terms, device_factors
from engine_ext.format.manifest import skip_symbol
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
        numel: Elements of all pieces, changed or not, below 2**31.
    """

    places: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    counts: NDArray[np.int64]
    starts: Sequence[int]
    names: Sequence[str]
    numel: int


def device_streams(elements: ChangedElements, send: Send) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode where the elements are, and digest their change, without waiting for the device.

    The stream of a piece counts from its start, as if nothing came before.

    Args:
        send: Copies int64 arrays to the device.

    Returns:
        The streams of 1-byte symbols, one after another, uint8, and more room; and int64
        [pieces, 3]: how many symbols there are up to the end of each piece, and both lanes' sums
        over new minus old elements up to there, modulo 2**64.
    """
    most = len(elements.places) + elements.numel // _SKIP
    seeds = np.array([digest._seeds(name) for name in elements.names], np.uint64).view(np.int64)
    factors = device_factors(elements.places.device)
    if not runs_change_kernels(elements.places.device):
        (seeds_there,) = send([seeds])
        return _by_operators(elements, seeds_there, factors, most)
    from engine_ext.kernels.triton import gap_symbols

    table, ends = gap_symbols.rows(elements.counts, elements.starts)
    rows, last, seeds_there = send([table, ends - 1, seeds])
    found = elements.places, elements.old, elements.new
    return gap_symbols.write(rows, found, last, seeds_there, factors, most)


def _by_operators(
    elements: ChangedElements, seeds: torch.Tensor, factors: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    places, ends = elements.places, np.cumsum(elements.counts)
    counts, starts, last = (
        torch.from_numpy(numbers).to(places.device)
        for numbers in (elements.counts, np.array(elements.starts, np.int64), ends - 1)
    )
    first = last + 1 - counts
    following = torch.cat([starts[:1], places[:-1] + 1])
    following[first] = starts
    gaps = places - following
    skips = gaps // _SKIP
    written = (skips + 1).cumsum(0)
    symbols = torch.full((most,), _SKIP, dtype=torch.uint8, device=places.device)
    symbols[written - 1] = (gaps - skips * _SKIP).to(torch.uint8)
    number = torch.repeat_interleave(counts)
    terms = _terms(_curve(elements.new) - _curve(elements.old), places, seeds[number].T, factors)
    return symbols, torch.cat([written[None], terms.cumsum(1)])[:, last].T.contiguous()
