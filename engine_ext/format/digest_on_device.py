"""The digest of elements on an accelerator, computed there; see `engine_ext.format.digest`.

Dense elements are summed by a Triton kernel where there is one; otherwise, and for single elements,
PyTorch's operators do it. These have no unsigned 64-bit integers: sums and products have the same
bits signed, and what a right shift of a signed one fills in is masked.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from engine_ext.format import digest
from engine_ext.format.digest import Digest
from engine_ext.kernels import made_once
from engine_ext.kernels.triton import runs_kernels

_CHUNK: Final = 1 << 20  # elements whose temporaries of 8 bytes each are alive at once
_MUL1, _MUL2, _GAMMA = (
    int(np.uint64(number).view(np.int64))
    for number in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)
)


def device_digest(
    name: str, values: torch.Tensor, places: torch.Tensor | None = None, start: int = 0
) -> Digest:
    """Return the digest of elements of one tensor; it waits for the device.

    Args: see `device_sums`.
    """
    return Digest(*device_sums(name, values, places, start).tolist())


def device_sums(
    name: str, values: torch.Tensor, places: torch.Tensor | None = None, start: int = 0
) -> torch.Tensor:
    """Return the lanes of the digest of elements of one tensor, int64 [2] on their device.

    Args:
        values: bit patterns, integers as wide as the checkpoint dtype, [n].
        places: their flat indices, int64 [n] on the same device; None if they are dense, at
            `start`, `start` + 1, ...
        start: flat index of the first of dense values.
    """
    device = values.device
    seeds = _seeds_of(name, device) if name else _seeds_of_boxes(device)
    table = device_factors(device)
    if places is None and runs_kernels(device):
        from engine_ext.kernels.triton import block_sums

        return block_sums.dense(values.contiguous(), start, seeds, table)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for first in range(0, values.numel(), _CHUNK):
        chunk = slice(first, min(first + _CHUNK, values.numel()))
        where = (
            torch.arange(start + chunk.start, start + chunk.stop, device=device)
            if places is None
            else places[chunk]
        )
        sums += _sums(values[chunk], where, seeds, table)
    return sums


def _on(device: torch.device, numbers: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> torch.Tensor:
    return torch.from_numpy(numbers.view(np.int64)).to(device)


def _seeds_of(name: str, device: torch.device) -> torch.Tensor:
    return _on(device, np.array(digest._seeds(name), np.uint64))


@made_once
def _seeds_of_boxes(device: torch.device) -> torch.Tensor:
    """Return the seeds of what is digested without a name, often and in pauses."""
    return _seeds_of("", device)


@made_once
def device_factors(device: torch.device) -> torch.Tensor:
    """Return the digest's factors a(k, j), lane after lane, as int64 [2048] on a device."""
    return _on(device, digest._TABLE.copy())


def _sums(
    values: torch.Tensor, places: torch.Tensor, seeds: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    return _terms(_curve(values), places, seeds, table).sum(1)


def _terms(
    curve: torch.Tensor, places: torch.Tensor, seeds: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Return the terms of elements in both lanes, int64 [2, n]; `seeds` is [2] or [2, n]."""
    blocks, within = places // digest._BLOCK_SIZE, places % digest._BLOCK_SIZE
    lanes = [
        (_mix(seeds[lane] + blocks) | 1) * table[lane * digest._BLOCK_SIZE + within] * curve
        for lane in (0, 1)
    ]
    return torch.stack(lanes)


def _curve(values: torch.Tensor) -> torch.Tensor:
    width = values.itemsize
    wide = values.to(torch.int64)
    if width < 8:
        wide &= (1 << 8 * width) - 1
    return (wide * (wide + 1) >> 1) + 1 if width <= 2 else _mix(wide + _GAMMA)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _MUL1
    x = (x ^ _shifted(x, 27)) * _MUL2
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << 64 - by) - 1)
