"""A trial of the Triton kernels on the device that they are to run on.

Nobody has seen them run on this one. So at start-up each does a little, for every width it is used
for, and what comes out is compared with what is known to be right; that compiles them too.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_ext.kernels.triton import compact, gap_decode, gather_scatter

_SIZE = 3000  # elements; over the borders of two blocks


def wrong(device: torch.device) -> list[str]:
    """The kernels that did not do on this device what they are to do.

    Raises:
        Exception: one could not be compiled or run.
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
    """Gaps of several skips now and then; with 4 bytes nothing skips, and the first one is long."""
    skip = -1 if width == 4 else (1 << 8 * width) - 1
    start = 3 << 30 if width == 4 else 4  # what is taken for a signed integer goes wrong
    symbols = np.tile(np.array([0, 3, max(skip, 9), max(skip, 9), 5], f"u{width}"), _SIZE // 5)
    symbols[0] = start
    ends = symbols.astype(np.int64) != skip
    indices = (np.cumsum(symbols + ends.astype(np.int64)) - 1)[ends]
    chosen = slice(2, indices.size - 3)
    found = gap_decode.decode(symbols, skip, chosen, start, dtype, device)
    return bool(np.array_equal(found.cpu().numpy(), indices[chosen] - start))
