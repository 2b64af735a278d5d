"""Bytes on the wire and speed of every encoding, beside the least that is possible.

    python scripts/bench_codec.py            # 200M elements; about 2 GB of memory
    python scripts/bench_codec.py --json     # the last line is JSON

The weights are bfloat16, N(0, 0.02). Each changes with the same probability, by one unit in the
last place (89 %), two (5 %) or 2 + k with probability 2**-k, up or down; the seed is fixed. Sizes
are of whole parts, so with all framing. The floors are entropies of the same data: of positions
that are drawn independently, plus of the new values, or of the differences to the old ones.

The speed of `gap8_exp`, from two snapshots to the part, is compared with `deltas_zstd` made the
plain way: torch's `!=`, `nonzero` and indexing, numpy's differences, zstd. Both may use as many
threads.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from engine_ext.compare import compare
from engine_ext.wire import ENCODINGS, FrameReader, ParamDelta, decode_part, encode_part

DENSITIES = (0.001, 0.006, 0.02, 0.03, 0.1)
TIMED_AT = 0.02
SIGMA = 0.02
PARAM = 1 << 24  # elements of one param
_Bits = NDArray[np.uint16]


@dataclass(frozen=True)
class Size:
    """One encoding at one density: bytes per changed element, and milliseconds."""

    encoding: str
    density: float
    nbytes: float
    floor: float
    encode_ms: float
    decode_ms: float


def params(weights: _Bits) -> Iterator[slice]:
    """Where the params lie in the weights."""
    return (slice(start, start + PARAM) for start in range(0, weights.size, PARAM))


def make_weights(elements: int, rng: np.random.Generator) -> _Bits:
    """bfloat16 patterns [elements]."""
    weights = np.empty(elements, np.uint16)
    for where in params(weights):
        normal = rng.standard_normal(weights[where].size, np.float32) * np.float32(SIGMA)
        bits = torch.from_numpy(normal).bfloat16().view(torch.int16)
        weights[where] = bits.numpy().view(np.uint16)
    return weights


def change(weights: _Bits, density: float, rng: np.random.Generator) -> _Bits:
    """A copy of the weights with some changed."""
    changed = weights.copy()
    for where in params(weights):
        chosen = np.flatnonzero(rng.random(weights[where].size, np.float32) < density)
        kind = rng.random(chosen.size)
        steps = np.where(
            kind < 0.94, np.where(kind < 0.89, 1, 2), 2 + rng.geometric(0.5, kind.size)
        )
        steps = np.where(rng.random(kind.size) < 0.5, steps, -steps)
        changed[where][chosen] += steps.astype(np.int16).view(np.uint16)
    return changed


def deltas_of(old: _Bits, new: _Bits, threads: int) -> list[ParamDelta]:
    """What a sender finds in two snapshots."""
    found = []
    for number, where in enumerate(params(old)):
        after = new[where]
        difference = compare(old[where], after, threads=threads)
        name, shape = f"model.layers.{number}.weight", (after.size,)
        found.append(ParamDelta(name, "bfloat16", shape, difference.indices, difference.new))
    return found


def as_differences(deltas: Sequence[ParamDelta], old: _Bits) -> list[ParamDelta]:
    """The same deltas with new less old patterns."""
    return [
        replace(delta, values=delta.values - old[where][delta.indices], differences=True)
        for delta, where in zip(deltas, params(old), strict=True)
    ]


def plain_torch(old: torch.Tensor, new: torch.Tensor) -> bytes:
    """`deltas_zstd` without this package, less the header of some kilobytes."""
    pieces: list[Any] = []
    for start in range(0, old.numel(), PARAM):
        before, after = old[start : start + PARAM], new[start : start + PARAM]
        indices = (before != after).nonzero().squeeze(1)
        values = after[indices]
        gaps = np.diff(indices.numpy(), prepend=-1) - 1
        wide = gaps.size and gaps.max() > 65535
        pieces += [gaps.astype("<u4" if wide else "<u2"), values.view(torch.int16).numpy()]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(pieces))


def entropy(counts: NDArray[Any]) -> float:
    """Bits per symbol of symbols that come so often."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def counts_of(bits: _Bits) -> NDArray[Any]:
    """How often each pattern comes."""
    return sum(
        (np.bincount(bits[where], minlength=1 << 16) for where in params(bits)),
        np.zeros(1 << 16, np.int64),
    )


def floors(new: _Bits, differences: Sequence[ParamDelta]) -> dict[bool, float]:
    """Least bytes per changed element; the key says whether values travel as differences."""
    nnz = sum(delta.nnz for delta in differences)
    positions = entropy(np.array([nnz, new.size - nnz])) * new.size / nnz
    moved = sum(counts_of(delta.values) for delta in differences)
    return {
        False: (positions + entropy(counts_of(new))) / 8,
        True: (positions + entropy(np.asarray(moved))) / 8,
    }


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def unwrap(body: bytes) -> bytes:
    reader = FrameReader(1 << 32)
    return b"".join(reader.feed(body)) if body.startswith(b"\x28\xb5\x2f\xfd") else body


def measure(old: _Bits, new: _Bits, density: float, threads: int, repeats: int) -> list[Size]:
    """All encodings at one density."""
    values = deltas_of(old, new, threads)
    differences = as_differences(values, old)
    floor = floors(new, differences)
    nnz = sum(delta.nnz for delta in values)
    sizes = []
    for encoding in ENCODINGS:
        ulp = encoding == "gap8_ulp"
        deltas = differences if ulp else values

        def encode(encoding: str = encoding, deltas: list[ParamDelta] = deltas) -> bytes:
            return encode_part(deltas, encoding=encoding, current_version=1, digest_part="0" * 32)

        def decode(body: bytes) -> None:
            decode_part(unwrap(body))

        body = encode()
        decoded = decode_part(unwrap(body)).deltas
        for sent, got in zip(deltas, decoded, strict=True):
            if not (
                np.array_equal(np.asarray(sent.indices), np.asarray(got.indices))
                and np.array_equal(sent.values, got.values)
            ):
                raise AssertionError(f"{encoding} does not come back")
        sizes.append(
            Size(
                encoding,
                density,
                len(body) / nnz,
                floor[ulp],
                1e3 * fastest(encode, repeats),
                1e3 * fastest(lambda body=body: decode(body), repeats),  # type: ignore[misc]
            )
        )
    return sizes


def compare_speed(old: _Bits, new: _Bits, threads: int, repeats: int) -> tuple[float, float]:
    """Seconds from two snapshots to a part: ours, and the plain way."""
    torch.set_num_threads(threads)
    before, after = (torch.from_numpy(w.view(np.int16)).view(torch.bfloat16) for w in (old, new))

    def ours() -> bytes:
        deltas = deltas_of(old, new, threads)
        return encode_part(deltas, encoding="gap8_exp", current_version=1)

    ours()
    return fastest(ours, repeats), fastest(lambda: plain_torch(before, after), repeats)


def show(sizes: Sequence[Size], console: Console) -> None:
    table = Table("density", "encoding", "bytes", "floor", "ratio", "encode ms", "decode ms")
    for size in sizes:
        table.add_row(
            f"{size.density:.1%}",
            size.encoding,
            f"{size.nbytes:.3f}",
            f"{size.floor:.3f}",
            f"{size.nbytes / size.floor:.3f}",
            f"{size.encode_ms:.0f}",
            f"{size.decode_ms:.0f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--elements", type=int, default=200_000_000, help="weights (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="threads (default: all cores)")
    add("--repeats", type=int, default=3, help="the fastest of so many is taken (%(default)s)")
    add("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)

    weights = make_weights(options.elements, np.random.default_rng(0))
    sizes: list[Size] = []
    ours = plain = 0.0
    for number, density in enumerate(DENSITIES):
        new = change(weights, density, np.random.default_rng([0, number]))
        sizes += measure(weights, new, density, options.threads, options.repeats)
        if density == TIMED_AT:
            ours, plain = compare_speed(weights, new, options.threads, options.repeats)

    console = Console(width=100)
    show(sizes, console)
    rate = 2 * weights.nbytes / 1e9
    console.print(
        f"{options.elements:,} elements, {options.threads} thread(s), {TIMED_AT:.0%} changed: diff "
        f"and encode of gap8_exp {ours * 1e3:.0f} ms ({rate / ours:.1f} GB/s read), deltas_zstd "
        f"the plain torch way {plain * 1e3:.0f} ms: {plain / ours:.2f} times as fast"
    )
    if options.json:
        found: dict[str, Any] = {"bytes_per_element": {}, "floor": {}}
        for size in sizes:
            for key, value in (("bytes_per_element", size.nbytes), ("floor", size.floor)):
                found[key].setdefault(size.encoding, {})[str(size.density)] = round(value, 4)
        print(json.dumps({**found, "encode_vs_plain_torch": round(plain / ours, 3)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
