"""Test the Triton kernels on the device that they are to run on.

At start-up each kernel runs on small inputs, for every width it is used for, and the results are
compared with known ones. This also compiles the kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_ext.kernels.triton import block_sums, compact, gap_decode, gather_scatter

_SIZE = 3000  # elements; crosses two block borders


def wrong(device: torch.device) -> list[str]:
    """Return the kernels and dtypes that give wrong results on this device; usually empty.

    Raises:
        Exception: a kernel could not be compiled or run.
    """
    random = np.random.default_rng(0)
    found = []
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        raw = torch.from_numpy(random.integers(0, 256, _SIZE * dtype.itemsize, np.uint8))
        old = raw.view(dtype)
        for where in (torch.int32, torch.int64):
            places = torch.from_numpy(np.flatnonzero(random.random(_SIZE) < 0.5)).to(where)
            new = old.clone()
            new[places.long()] ^= 1
            case = f"{dtype}, {where}"
            if not _compares(old.to(device), new.to(device), places):
                found.append(f"compare of {case}")
            if not _exchanges(old.to(device), new, places):
                found.append(f"exchange of {case}")
        if not _digests(old.to(device)):
            found.append(f"digest of {dtype}")
    for where in (torch.int32, torch.int64):
        found += [
            f"decode of {w} byte(s) to {where}" for w in (1, 2, 4) if not _decodes(w, where, device)
        ]
    return found


def _compares(old: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> bool:
    found = compact.write(old, new, compact.count(old, new), places.numel(), 7, places.dtype)
    at = places.long()
    expected = places + 7, old.cpu()[at], new.cpu()[at]
    return all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def _exchanges(live: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> bool:
    before, at, device = live.cpu().clone(), places.long(), live.device
    old = gather_scatter.swap(live, places.to(device), new[at].to(device))
    after = live.cpu().clone()
    gather_scatter.put(live, places.to(device), old)
    found = after, old.cpu(), live.cpu()
    return all(map(torch.equal, found, (new, before[at], before)))


def _digests(values: torch.Tensor) -> bool:
    """Compare with Python's own numbers; with factors and seeds of which all bits are used."""
    device, start = values.device, 1000  # in the middle of a block
    numbers = np.random.default_rng(1).integers(0, 1 << 63, 2 * block_sums.BLOCK + 2, np.uint64)
    numbers = numbers * 2 + 1
    given = torch.from_numpy(numbers.view(np.int64)).to(device)
    found = block_sums.dense(values, start, given[-2:], given[:-2])
    factors, seeds = numbers[:-2].reshape(2, -1).tolist(), numbers[-2:].tolist()
    bits = values.cpu().numpy().view(f"u{values.itemsize}").tolist()
    expected = [0, 0]
    for place, element in enumerate(bits, start):
        block, within = divmod(place, block_sums.BLOCK)
        narrow = values.itemsize <= 2
        curve = element * (element + 1) // 2 + 1 if narrow else _mix(element + 0x9E3779B97F4A7C15)
        for lane in (0, 1):
            factor = factors[lane][within] * (_mix(seeds[lane] + block) | 1)
            expected[lane] += factor * curve
    return [one % (1 << 64) for one in found.tolist()] == [one % (1 << 64) for one in expected]


def _mix(x: int) -> int:
    x %= 1 << 64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


def _decodes(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Decode gaps some of which skip several times; with 4 bytes none skips, and one is long."""
    skip = -1 if width == 4 else (1 << 8 * width) - 1
    start = 3 << 30 if width == 4 else 4  # wrong if read as a signed integer
    symbols = np.tile(np.array([0, 3, max(skip, 9), max(skip, 9), 5], f"u{width}"), _SIZE // 5)
    symbols[0] = start
    ends = symbols.astype(np.int64) != skip
    indices = (np.cumsum(symbols + ends.astype(np.int64)) - 1)[ends]
    chosen = slice(2, indices.size - 3)
    found = gap_decode.decode(symbols, skip, chosen, start, dtype, device)
    return bool(np.array_equal(found.cpu().numpy(), indices[chosen] - start))
