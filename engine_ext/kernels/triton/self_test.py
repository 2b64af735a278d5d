"""Test the Triton kernels on the device that they are to run on.

At start-up each kernel runs on small inputs, for every width it is used for, and the results are
compared with known ones. This also compiles the kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_ext.kernels.triton import block_sums, compact, gather_scatter

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
        if not (_digests(old.to(device), 1000) and _digests(old.to(device), 1024)):
            found.append(f"digest of {dtype}")
    return found


def _compares(old: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> bool:
    found = compact.write(old, new, compact.count(old, new), places.numel(), 7, places.dtype)
    at = places.long()
    expected = places + 7, old.cpu()[at], new.cpu()[at]
    return all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def _exchanges(live: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> bool:
    """Keep and overwrite the elements of two halves, compare them, and put the old ones back."""
    before, at, device = live.cpu().clone(), places.long(), live.device
    wide, sent = places.dtype == torch.int64, new[at].to(device)
    half = live.numel() // 2
    pieces = [(live[:half], places[places < half]), (live[half:], places[places >= half] - half)]
    offsets = [where.to(device) for _, where in pieces]
    counts = [one.numel() for one in offsets]
    table = gather_scatter.rows(
        [piece.data_ptr() for piece, _ in pieces],
        [one.data_ptr() for one in offsets],
        [sent.data_ptr(), sent[counts[0] :].data_ptr()],
        counts,
        width=live.itemsize,
        wide=wide,
    )
    old = torch.empty_like(sent)
    gather_scatter.visit(table, old, wide=wide, keep=True, write=True)
    after = live.cpu().clone()
    others = gather_scatter.visit(table, old, wide=wide, compare=True).sum()
    found = old.cpu()
    sent.copy_(old)
    gather_scatter.visit(table, live, wide=wide, write=True)
    same = gather_scatter.visit(table, old, wide=wide, compare=True).sum()
    exchanged = all(map(torch.equal, (after, found, live.cpu()), (new, before[at], before)))
    return exchanged and (int(others), int(same)) == (sum(counts), 0)


def _digests(values: torch.Tensor, start: int) -> bool:
    """Compare with Python's own numbers; factors and seeds use all of their bits."""
    device = values.device
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
