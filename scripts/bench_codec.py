"""Bytes on the wire and speed of every encoding, beside the least that is possible.

    python scripts/bench_codec.py            # 200M elements; about 2 GB of memory
    python scripts/bench_codec.py --json     # the last line is JSON
    python scripts/bench_codec.py --real-steps 0     # needs no transformers

The weights are bfloat16, N(0, 0.02). Each changes with the same probability, by one unit in the
last place (89 %), two (5 %) or 2 + k with probability 2**-k, up or down; the seed is fixed. Sizes
are of whole parts, so with all framing. The floors are entropies of the same data: of positions
that are drawn independently, plus of the new values, or of the differences to the old ones. "apply"
is the time of decoding and scattering, in times of scattering alone, both in one thread.

Real deltas come from a few steps of REINFORCE on the demo's policy (3M bf16 weights with fp32
masters, AdamW), at learning rates that change more or less of them; the floor of their positions is
per tensor, since tensors differ much in density.

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
from rich import box
from rich.console import Console
from rich.table import Table

from engine_ext import kernels
from engine_ext.compare import compare
from engine_ext.wire import ENCODINGS, FrameReader, ParamDelta, decode_part, encode_part

DENSITIES = (0.001, 0.006, 0.02, 0.03, 0.1)
LEARNING_RATES = (3e-7, 1e-6, 3e-6)
TIMED_AT = 0.02
SIGMA = 0.02
PARAM = 1 << 24  # elements of one param
_Bits = NDArray[np.uint16]


@dataclass(frozen=True)
class Size:
    """One encoding at one density: bytes per changed element, and milliseconds.

    `scatter_ms` is for writing the decoded elements into flat weights, without a single check.
    """

    encoding: str
    density: float
    nbytes: float
    floor: float
    encode_ms: float
    decode_ms: float
    scatter_ms: float

    @property
    def apply_ratio(self) -> float:
        """Decoding and scattering in times of scattering."""
        return (self.decode_ms + self.scatter_ms) / self.scatter_ms


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
        name, indices = f"model.layers.{number}.weight", difference.indices.astype(np.int64)
        found.append(ParamDelta(name, "bfloat16", (after.size,), indices, difference.new))
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


def floors(
    values: Sequence[ParamDelta], differences: Sequence[ParamDelta], model: NDArray[Any] | None
) -> dict[bool, float]:
    """Least bytes per changed element; the key says whether values travel as differences.

    Args:
        values, differences: the same changes.
        model: how often each pattern comes in the whole model, where the values are drawn from it
            and positions with one density everywhere; None: the values' own counts, and each
            tensor's own density.
    """
    nnz = sum(delta.nnz for delta in values)
    if model is not None:
        numel = sum(delta.numel for delta in values)
        positions = entropy(np.array([nnz, numel - nnz])) * numel / nnz
    else:
        own = ([delta.nnz, delta.numel - delta.nnz] for delta in values)
        positions = sum(entropy(np.array(counts)) * sum(counts) for counts in own) / nnz
        model = sum((counts_of(delta.values) for delta in values), np.zeros(1 << 16, np.int64))
    moved = sum((counts_of(d.values) for d in differences), np.zeros(1 << 16, np.int64))
    return {
        False: (positions + entropy(model)) / 8,
        True: (positions + entropy(moved)) / 8,
    }


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def scatter_time(deltas: Sequence[ParamDelta], repeats: int) -> float:
    """Seconds of writing the new values into weights, in one thread."""
    live = [np.zeros(delta.numel, np.uint16) for delta in deltas]

    def scatter() -> None:
        for delta, weights in zip(deltas, live, strict=True):
            kernels.write(weights, np.asarray(delta.indices), delta.values)

    scatter()
    return fastest(scatter, repeats)


def unwrap(body: bytes) -> bytes:
    reader = FrameReader(1 << 32)
    return b"".join(reader.feed(body)) if body.startswith(b"\x28\xb5\x2f\xfd") else body


def measure(
    values: Sequence[ParamDelta],
    differences: Sequence[ParamDelta],
    floor: dict[bool, float],
    density: float,
    repeats: int,
) -> list[Size]:
    """All encodings of some changes; `floor` is of `floors`."""
    nnz = sum(delta.nnz for delta in values)
    scatter_ms = 1e3 * scatter_time(values, repeats)
    sizes = []
    for encoding in ENCODINGS:
        ulp = encoding == "gap8_ulp"
        deltas = differences if ulp else values

        def encode(encoding: str = encoding, deltas: Sequence[ParamDelta] = deltas) -> bytes:
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
                scatter_ms,
            )
        )
    return sizes


def measure_synthetic(
    old: _Bits, new: _Bits, density: float, threads: int, repeats: int
) -> list[Size]:
    """All encodings of a synthetic change."""
    values = deltas_of(old, new, threads)
    differences = as_differences(values, old)
    return measure(
        values, differences, floors(values, differences, counts_of(new)), density, repeats
    )


def measure_real(learning_rate: float, steps: int, repeats: int) -> list[Size]:
    """All encodings of the last step of a training run."""
    from bench_training import train

    training = train(learning_rate, steps)
    values, differences = [], []
    for name, old in training.old.items():
        found = compare(old, training.new[name])
        if found.indices.size:
            indices = found.indices.astype(np.int64)
            sparse = ParamDelta(name, "bfloat16", old.shape, indices, found.new)
            values.append(sparse)
            differences.append(replace(sparse, values=found.new - found.old, differences=True))
    floor = floors(values, differences, None)
    return measure(values, differences, floor, training.density, repeats)


def compare_speed(old: _Bits, new: _Bits, threads: int, repeats: int) -> tuple[float, float]:
    """Seconds from two snapshots to a part: ours, and the plain way."""
    torch.set_num_threads(threads)
    before, after = (torch.from_numpy(w.view(np.int16)).view(torch.bfloat16) for w in (old, new))

    def ours() -> bytes:
        deltas = deltas_of(old, new, threads)
        return encode_part(deltas, encoding="gap8_exp", current_version=1)

    ours()
    return fastest(ours, repeats), fastest(lambda: plain_torch(before, after), repeats)


def show(title: str, sizes: Sequence[Size], console: Console) -> None:
    columns = "density", "encoding", "bytes", "floor", "ratio", "encode ms", "decode ms", "apply"
    console.print(f"\n{title}\n")
    table = Table(*columns, box=box.MARKDOWN)
    for size in sizes:
        table.add_row(
            f"{size.density:.2%}",
            size.encoding,
            f"{size.nbytes:.3f}",
            f"{size.floor:.3f}",
            f"{size.nbytes / size.floor:.3f}",
            f"{size.encode_ms:.0f}",
            f"{size.decode_ms:.0f}",
            f"{size.apply_ratio:.2f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--elements", type=int, default=200_000_000, help="weights (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="threads (default: all cores)")
    add("--repeats", type=int, default=3, help="the fastest of so many is taken (%(default)s)")
    steps_help = "steps of the real training runs, 0 for none (default: %(default)s)"
    add("--real-steps", type=int, default=5, help=steps_help)
    add("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)

    weights = make_weights(options.elements, np.random.default_rng(0))
    sizes: list[Size] = []
    ours = plain = 0.0
    for number, density in enumerate(DENSITIES):
        new = change(weights, density, np.random.default_rng([0, number]))
        sizes += measure_synthetic(weights, new, density, options.threads, options.repeats)
        if density == TIMED_AT:
            ours, plain = compare_speed(weights, new, options.threads, options.repeats)

    console = Console(width=100)
    show(f"synthetic, {options.elements:,} elements", sizes, console)
    real: list[Size] = []
    for learning_rate in LEARNING_RATES if options.real_steps else ():
        real += measure_real(learning_rate, options.real_steps, options.repeats)
    if real:
        show("real, by learning rate", real, console)
    rate = 2 * weights.nbytes / 1e9
    console.print(
        f"{options.elements:,} elements, {options.threads} thread(s), {TIMED_AT:.0%} changed: diff "
        f"and encode of gap8_exp {ours * 1e3:.0f} ms ({rate / ours:.1f} GB/s read), deltas_zstd "
        f"the plain torch way {plain * 1e3:.0f} ms: {plain / ours:.2f} times as fast"
    )
    if options.json:
        found: dict[str, Any] = {}
        for prefix, some in (("", sizes), ("real_", real)):
            for size in some:
                columns = {
                    "bytes_per_element": size.nbytes,
                    "floor": size.floor,
                    "decode_and_scatter_vs_scatter": size.apply_ratio,
                }
                for key, value in columns.items():
                    row = found.setdefault(prefix + key, {}).setdefault(size.encoding, {})
                    row[f"{size.density:.4g}"] = round(value, 4)
        print(json.dumps({**found, "encode_vs_plain_torch": round(plain / ours, 3)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
