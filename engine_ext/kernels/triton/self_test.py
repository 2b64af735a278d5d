"""Test the Triton kernels on the device that they are to run on.

At start-up each kernel runs on small inputs, for every width it is used for, and the results are
compared with known ones. This also compiles the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.kernels.triton import block_sums, compact, gap_symbols, gather_scatter

_SIZE = 3000  # elements; crosses two block borders
_BITS = torch.uint8, torch.int16, torch.int32, torch.int64


def wrong_elements(device: torch.device) -> list[str]:
    """Return the kernels for elements and digests, and dtypes, that give wrong results.

    Usually none.

    Raises:
        Exception: a kernel could not be compiled or run.
    """
    random = np.random.default_rng(0)
    found = []
    for dtype in _BITS:
        old = _bits(dtype, random)
        for where in (torch.int32, torch.int64):
            places = torch.from_numpy(np.flatnonzero(random.random(_SIZE) < 0.5)).to(where)
            new = old.clone()
            new[places.long()] ^= 1
            if not _exchanges(old.to(device), new, places):
                found.append(f"exchange of {dtype}, {where}")
        if not (_digests(old.to(device), 1000) and _digests(old.to(device), 1024)):
            found.append(f"digest of {dtype}")
    return found


def wrong_changes(device: torch.device) -> list[str]:
    """Return the same for the kernels that find and encode changes."""
    random = np.random.default_rng(0)
    found = []
    for dtype in _BITS:
        old = _bits(dtype, random)
        chosen = random.random(_SIZE) < 0.5
        chosen[2 * _SIZE // 5 : 4 * _SIZE // 5] = False  # gaps that take several symbols
        places = torch.from_numpy(np.flatnonzero(chosen))
        new = old.clone()
        new[places] ^= 1
        here, there = old.to(device), new.to(device)
        if not _compares(here, there, places):
            found.append(f"compare of {dtype}")
        places = places[places > 0] - 1
        if not _compares(here[1:], there[1:], places):
            found.append(f"compare of {dtype}, not aligned")
    return found


TESTS: Final = {"elements": wrong_elements, "changes": wrong_changes}


def _bits(dtype: torch.dtype, random: np.random.Generator) -> torch.Tensor:
    raw = torch.from_numpy(random.integers(0, 256, _SIZE * dtype.itemsize, np.uint8))
    return raw.view(dtype)


def _compares(old: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> bool:
    """List what differs in two pieces of a tensor, and encode where it is."""
    device, half, start = old.device, old.numel() // 32 * 16, 7

    def send(arrays: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(device) for array in arrays]

    before, after = ([one[:half], one[half:]] for one in (old, new))
    pairs = compact.Pairs(before, after, [start, start + half], send)
    ends = [0, *pairs.ends.tolist()]
    if ends[-1] != places.numel():
        return False
    found = pairs.write(range(2), 0, ends[-1])
    expected = places + start, old.cpu()[places], new.cpu()[places]
    if not all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True)):
        return False

    factors, seeds = _numbers()
    table, programs = gap_symbols.rows(np.diff(ends), [start, start + half])
    rows_there, last, seeds_there = send(
        [table, programs - 1, np.tile(seeds, (2, 1)).view(np.int64)]
    )
    factors_there = torch.from_numpy(factors.view(np.int64).reshape(-1)).to(device)
    symbols, totals = gap_symbols.write(
        rows_there, found, last, seeds_there, factors_there, 2 * _SIZE
    )
    stream: list[int] = []
    sums, rows = [0, 0], []
    for piece, following in enumerate((0, half)):
        for place in places.tolist()[ends[piece] : ends[piece + 1]]:
            gap, following = place - following, place + 1
            stream += [gap_symbols.SKIP] * (gap // gap_symbols.SKIP) + [gap % gap_symbols.SKIP]
        own = slice(ends[piece], ends[piece + 1])
        signs = ((1, expected[2][own]), (-1, expected[1][own]))
        for sign, bits in signs:
            terms = _terms(bits, expected[0][own].tolist(), factors, seeds)
            sums = [total + sign * term for total, term in zip(sums, terms, strict=True)]
        rows.append([len(stream), *(one % (1 << 64) for one in sums)])
    modulo = [[one % (1 << 64) for one in row] for row in totals.tolist()]
    return modulo == rows and symbols[: len(stream)].tolist() == stream


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
    factors, seeds = _numbers()
    given = (
        torch.from_numpy(numbers.view(np.int64).reshape(-1)).to(values.device)
        for numbers in (seeds, factors)
    )
    found = block_sums.dense(values, start, *given)
    expected = _terms(values, range(start, start + values.numel()), factors, seeds)
    return [one % (1 << 64) for one in found.tolist()] == [one % (1 << 64) for one in expected]


def _numbers() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return factors [2, 1024] and seeds [2] that use all of their bits."""
    numbers = np.random.default_rng(1).integers(0, 1 << 63, 2 * block_sums.BLOCK + 2, np.uint64)
    numbers = numbers * 2 + 1
    return numbers[:-2].reshape(2, -1), numbers[-2:]


def _terms(
    values: torch.Tensor,
    places: Iterable[int],
    factors: NDArray[np.uint64],
    seeds: NDArray[np.uint64],
) -> list[int]:
    """Return the digest's sums by Python's own numbers, before the modulus."""
    bits = values.cpu().numpy().view(f"u{values.itemsize}").tolist()
    known, sums = factors.tolist(), [0, 0]
    for place, element in zip(places, bits, strict=True):
        block, within = divmod(place, block_sums.BLOCK)
        narrow = values.itemsize <= 2
        curve = element * (element + 1) // 2 + 1 if narrow else _mix(element + 0x9E3779B97F4A7C15)
        for lane in (0, 1):
            sums[lane] += known[lane][within] * (_mix(int(seeds[lane]) + block) | 1) * curve
    return sums


def _mix(x: int) -> int:
    x %= 1 << 64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31
