"""Test the Triton kernels on the device that they are to run on.

At start-up each kernel runs on small inputs, for every width it is used for, and the results are
compared with known ones. This also compiles the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.kernels.triton import (
    block_sums,
    compact,
    encode_changes,
    gap_expand,
    gather_scatter,
)

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
            if not _stages(old.to(device), where):
                found.append(f"staging of {dtype}, {where}")
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
        new[places[::3]] ^= 0x70  # differences that are escaped
        here, there = old.to(device), new.to(device)
        if not _compares(here, there, places):
            found.append(f"compare of {dtype}")
        places = places[places > 0] - 1
        if not _compares(here[1:], there[1:], places):
            found.append(f"compare of {dtype}, not aligned")
    return found


TESTS: Final = {"elements": wrong_elements, "changes": wrong_changes}


def _bits(dtype: torch.dtype, random: np.random.Generator, size: int = _SIZE) -> torch.Tensor:
    raw = torch.from_numpy(random.integers(0, 256, size * dtype.itemsize, np.uint8))
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
    mask = {1: 0x7C, 2: 0x7F80, 4: 0x7F80_0000, 8: 0x7FF0 << 48}[old.itemsize]
    counts = np.diff(ends)
    table, programs = encode_changes.rows(counts, [start, start + half], np.array([mask, 0]))
    rows_there, last, seeds_there = send(
        [table, programs - 1, np.tile(seeds, (2, 1)).view(np.int64)]
    )
    factors_there = torch.from_numpy(factors.view(np.int64).reshape(-1)).to(device)
    halves = int(((counts + 1) // 2).sum())
    symbols, nibbles, escaped, totals = encode_changes.write(
        rows_there, found, last, seeds_there, factors_there, 2 * _SIZE, halves
    )
    stream: list[int] = []
    pairs_of: list[int] = []
    large: list[int] = []
    sums, whole, rows = [0, 0], 0, []
    modulo, skip, escape = 1 << 8 * old.itemsize, encode_changes.SKIP, encode_changes.ESCAPE
    for piece, following in enumerate((0, half)):
        for place in places.tolist()[ends[piece] : ends[piece + 1]]:
            gap, following = place - following, place + 1
            stream += [skip] * (gap // skip) + [gap % skip]
        own = slice(ends[piece], ends[piece + 1])
        was, now = ([bit % modulo for bit in side[own].tolist()] for side in expected[1:])
        apart = [(after - before) % modulo for before, after in zip(was, now, strict=True)]
        zigzag = [2 * one if 2 * one < modulo else 2 * (modulo - one) - 1 for one in apart]
        small = [min(one, escape) for one in zigzag] + [0] * (len(zigzag) % 2)
        pairs_of += [low + 16 * high for low, high in zip(small[::2], small[1::2], strict=True)]
        large += [one for one in zigzag if one >= escape]
        whole += sum(piece == 0 and one & mask == mask for one in now)
        signs = ((1, expected[2][own]), (-1, expected[1][own]))
        for sign, bits in signs:
            terms = _terms(bits, expected[0][own].tolist(), factors, seeds)
            sums = [total + sign * term for total, term in zip(sums, terms, strict=True)]
        rows.append([len(stream), *(one % (1 << 64) for one in sums), len(large), whole])
    if [[one % (1 << 64) for one in row] for row in totals.tolist()] != rows:
        return False
    sent = symbols[: len(stream)].tolist(), nibbles.tolist()
    return (
        sent == (stream, pairs_of)
        and [one % modulo for one in escaped[: len(large)].tolist()] == large
    )


def _exchanges(live: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> bool:
    """Digest, keep and overwrite the elements of two halves, and put the old ones back."""
    before, at, device = live.cpu().clone(), places.long(), live.device
    wide, sent = places.dtype == torch.int64, new[at].to(device)
    half = live.numel() // 2
    pieces = [(live[:half], places[places < half]), (live[half:], places[places >= half] - half)]
    offsets = [where.to(device) for _, where in pieces]
    counts = [one.numel() for one in offsets]
    rows = gather_scatter.rows(
        [piece.data_ptr() for piece, _ in pieces],
        [one.data_ptr() for one in offsets],
        [sent.data_ptr(), sent[counts[0] :].data_ptr()],
        counts,
        width=live.itemsize,
        wide=wide,
    )
    factors, _ = _numbers()
    factors_there = torch.from_numpy(factors.view(np.int64).reshape(-1)).to(device)
    table, old = torch.from_numpy(rows).to(device), _host_room(len(sent), sent.dtype, device)

    def visit(**modes: Any) -> list[int]:
        sums = torch.zeros(2, dtype=torch.int64, device=device)
        gather_scatter.visit(table, live, factors_there, wide=wide, sums=sums, group=5, **modes)
        return [one % (1 << 64) for one in sums.tolist()]

    kept = visit(old=old, keep=True, write=True)
    after, found = live.cpu().clone(), old.cpu()
    expected = [0, 0]
    bits = found.numpy().view(f"u{live.itemsize}").tolist()
    for program, (*_, start, count) in enumerate(rows.tolist()):
        block = (5 << 32) + program
        for lane, seed in enumerate((block, block + 0x9E3779B97F4A7C15)):
            curves = [_curve(one, live.itemsize) for one in bits[start : start + count]]
            total = sum(a * b for a, b in zip(curves, factors[lane].tolist(), strict=False))
            expected[lane] += total * (_mix(seed) | 1)
    digested = kept == [one % (1 << 64) for one in expected] == visit(old=old, stored=True)
    digested &= visit() == visit(old=sent, stored=True) != kept
    visit(old=old, stored=True, write=True)
    exchanged = all(map(torch.equal, (after, found, live.cpu()), (new, before[at], before)))
    return digested and exchanged


def _room(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _host_room(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory of the host that kernels of the device read and write, as a sync's undo is."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def _digests(values: torch.Tensor, start: int) -> bool:
    factors, seeds = _numbers()
    given = (
        torch.from_numpy(numbers.view(np.int64).reshape(-1)).to(values.device)
        for numbers in (seeds, factors)
    )
    found = block_sums.dense(values, start, *given)
    expected = _terms(values, range(start, start + values.numel()), factors, seeds)
    return [one % (1 << 64) for one in found.tolist()] == [one % (1 << 64) for one in expected]


def _stages(live: torch.Tensor, dtype: torch.dtype) -> bool:
    """Stage a run and some columns of a matrix, whose symbols have one byte and two."""
    device, width, half = live.device, live.itemsize, live.numel() // 2
    random = np.random.default_rng(2)
    size = half // 10 * 20  # ten columns of twenty are here
    run = np.append(np.flatnonzero(random.random(half // 2) < 0.5), half - 1)
    matrix = np.append(np.flatnonzero(random.random(size // 2) < 0.5), size - 8)
    inside = (matrix % 20 >= 5) & (matrix % 20 < 15)
    low, wide = _symbols(run, 255), _symbols(matrix, 65535)
    programs: list[list[int]] = []
    spans = []
    for item, symbols in enumerate((low, wide)):
        done = range(0, len(symbols), gap_expand.BLOCK)
        spans.append([len(programs), len(programs) + len(done) - 1])
        programs += [[item, at, min(len(symbols) - at, gap_expand.BLOCK)] for at in done]
    seeds, factors = _odd_numbers(4), _odd_numbers(2 * block_sums.BLOCK)
    address, at = live.data_ptr(), len(low)
    located = gap_expand.locate(
        gap_expand.Boxes(
            torch.tensor(
                [
                    [address, 0, half, 0, 0, 1, *seeds[:2].view(np.int64)],
                    [address, 5, size - 5, half, 1, 2, *seeds[2:].view(np.int64)],
                ]
            ).to(device),
            torch.tensor([[half, 1, 1], [size // 20, 20, 10], [10, 1, 1]]).to(device),
        ),
        torch.tensor([s % 256 for s in low + wide] + [s // 256 for s in wide]).byte().to(device),
        torch.tensor(programs).to(device),
        torch.tensor(
            [
                [0, 0, -1, 0, half, 0, run.size, *spans[0], 1, -1, 255],
                [1, at, at + len(wide), 0, size, run.size, matrix.size, *spans[1], 1, -1, 65535],
            ]
        ).to(device),
    )
    found = [[run.size, half, run.size], [matrix.size, size - 7, int(inside.sum())]]
    if located.found.tolist() != found:
        return False
    count, shares = sum(row[2] for row in found), [run, matrix[inside]]
    offsets = np.append(run, half + shares[1] // 20 * 10 + shares[1] % 20 - 5)
    sent = _bits(live.dtype, random, run.size + matrix.size)
    own = sent[np.append(np.arange(run.size), run.size + np.flatnonzero(inside))]
    before = live.cpu()[offsets]
    for adds in (False, True):
        after = before + own if adds else own
        make = _host_room if adds else _room
        kinds = (make, dtype), (make, live.dtype), (_room, live.dtype)
        results = [made(count, kind, device) for made, kind in kinds]
        sums = gap_expand.stage(
            *(located, sent.to(device), torch.from_numpy(factors.view(np.int64)).to(device)),
            *results,
            adds=adds,
        ).cpu()
        expected = torch.from_numpy(offsets).to(dtype), after, before
        if not all(map(torch.equal, (one.cpu() for one in results), expected)):
            return False
        new, old = (one.numpy().view(f"u{width}").tolist() for one in (after, before))
        for item, share in enumerate(shares):
            first = run.size * item
            changes = [
                _curve(new[first + k], width) - _curve(old[first + k], width)
                for k in range(share.size)
            ]
            for lane in (0, 1):
                own_factors = factors.reshape(2, -1)[lane].tolist()
                seed = int(seeds[2 * item + lane])
                total = sum(
                    change * _factor(place, own_factors, seed)
                    for change, place in zip(changes, share.tolist(), strict=True)
                )
                if (total - int(sums[item, lane])) % (1 << 64):
                    return False
    return True


def _symbols(places: NDArray[np.int64], skip: int) -> list[int]:
    """Return the gap stream of ascending places."""
    found: list[int] = []
    for gap in (np.diff(places, prepend=-1) - 1).tolist():
        found += [skip] * (gap // skip) + [gap % skip]
    return found


def _numbers() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return factors [2, 1024] and seeds [2]."""
    numbers = _odd_numbers(2 * block_sums.BLOCK + 2)
    return numbers[:-2].reshape(2, -1), numbers[-2:]


def _odd_numbers(count: int) -> NDArray[np.uint64]:
    """Return numbers that use all of their 64 bits."""
    numbers = np.random.default_rng(1).integers(0, 1 << 63, count, np.uint64)
    return numbers * np.uint64(2) + np.uint64(1)


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
        for lane in (0, 1):
            factor = _factor(place, known[lane], int(seeds[lane]))
            sums[lane] += factor * _curve(element, values.itemsize)
    return sums


def _factor(place: int, factors: Sequence[int], seed: int) -> int:
    block, within = divmod(place, block_sums.BLOCK)
    return factors[within] * (_mix(seed + block) | 1)


def _curve(element: int, width: int) -> int:
    return element * (element + 1) // 2 + 1 if width <= 2 else _mix(element + 0x9E3779B97F4A7C15)


def _mix(x: int) -> int:
    x %= 1 << 64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31
