"""Test the Triton kernels on the device that they are to run on.

At start-up each kernel runs on small inputs, for every width it is used for, and the results are
compared with known ones. This also compiles the kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_ext.kernels.triton import compact, gap_decode, gather_scatter

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
