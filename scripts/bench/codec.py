"""Measure the size and speed of every encoding, against the least possible size.

    python -m scripts.bench.codec            # 200M elements; about 2 GB of memory
    python -m scripts.bench.codec --json     # the last line is JSON
    python -m scripts.bench.codec --plot docs/bytes_per_element.png      # needs matplotlib
    python -m scripts.bench.codec --real-steps 0     # needs no transformers

See scripts/bench/synthetic_weights.py for the synthetic weights and their changes. The real deltas
come from a few steps of REINFORCE on the demo's policy (3M bf16 weights with fp32 masters, AdamW),
at learning rates that change more or fewer of the weights.

columns:
  density    changed elements / elements
  bytes      of the whole part with its framing, per changed element
  floor      entropy of the same changes in bytes per changed element: of positions, drawn
             independently (real deltas: with each tensor's own density), plus that of the new
             values, or of the differences for gap8_ulp
  ratio      bytes / floor
  encode ms  encoding the part from the found changes. The gap8 encodings' gaps are written
             while the snapshots are compared, so their time is not included.
  decode ms  decoding the part; see engine_ext/format/part.py for the threads
  / read     the time left of it, over that of reading both copies of the weights once, in the same
             run; "-" for the real model, which is too small to time
  apply      time of decoding and scattering over that of scattering, which uses one thread
line below the tables:
  diff and encode     from two snapshots to the part of gap8_exp, compared with deltas_zstd in plain
                      torch (!=, nonzero, indexing, numpy's differences, zstd) and with reading both
                      snapshots once; all with the same number of threads
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from msgspec.structs import replace

from delta_sender.diff.compare import compare
from engine_ext.format import (
    ENCODINGS,
    DecodedPart,
    FrameReader,
    ParamDelta,
    decode_part,
    encode_part,
)
from engine_ext.kernels import gather_scatter
from engine_ext.resources import usable_cores
from scripts.bench import frame
from scripts.bench.memory_read import fastest, read_time
from scripts.bench.synthetic_weights import (
    DENSITIES,
    PARAM,
    Bits,
    as_differences,
    as_tensor,
    change,
    counts_of,
    deltas_of,
    floors,
    make_weights,
)

LEARNING_RATES = (3e-7, 1e-6, 3e-6)
TIMED_AT = 0.02
_COLOURS = {
    "indices": "#8c8c8c",
    "deltas": "#c58a1b",
    "deltas_zstd": "#2a9d6f",
    "gap8_exp": "#1f6fb4",
    "gap8_ulp": "#b5338a",
}
_FLOORS = {"gap8_exp": "--", "gap8_ulp": ":"}


@dataclass(frozen=True)
class Size:
    """Size and speed of one encoding at one density.

    Attributes:
        encoding: its name.
        density: changed elements / elements.
        nbytes: bytes of the whole part per changed element.
        floor: the least possible bytes per changed element.
        encode_ms, decode_ms: milliseconds of encoding and decoding the part.
        scatter_ms: milliseconds of writing the decoded elements into weights, without checks.
        read_ms: milliseconds of reading both copies of all weights once; NaN if the weights are
            too few to time it.
    """

    encoding: str
    density: float
    nbytes: float
    floor: float
    encode_ms: float
    decode_ms: float
    scatter_ms: float
    read_ms: float

    @property
    def apply_ratio(self) -> float:
        """Return the time of decoding and scattering over that of scattering."""
        return (self.decode_ms + self.scatter_ms) / self.scatter_ms


def plain_torch(old: torch.Tensor, new: torch.Tensor) -> bytes:
    """Encode `deltas_zstd` without this package, and without the header of some kilobytes."""
    pieces: list[Any] = []
    for start in range(0, old.numel(), PARAM):
        before, after = old[start : start + PARAM], new[start : start + PARAM]
        indices = (before != after).nonzero().squeeze(1)
        values = after[indices]
        gaps = np.diff(indices.numpy(), prepend=-1) - 1
        wide = gaps.size and gaps.max() > 65535
        pieces += [gaps.astype("<u4" if wide else "<u2"), values.view(torch.int16).numpy()]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(pieces))


def scatter_time(deltas: Sequence[ParamDelta], repeats: int) -> float:
    """Return the seconds of writing decoded values into weights with one thread."""
    live = [
        (np.zeros(delta.numel, np.uint16), np.asarray(delta.indices, np.int64), delta.values)
        for delta in deltas
    ]

    def scatter() -> None:
        for weights, indices, values in live:
            gather_scatter.write(weights, indices, values)

    scatter()
    return fastest(scatter, repeats)


def decode(body: bytes) -> DecodedPart:
    """Decode a body, which can be a zstd frame."""
    wrapped = body.startswith(b"\x28\xb5\x2f\xfd")
    return decode_part(b"".join(FrameReader(1 << 32).feed(body)) if wrapped else body)


def measure(
    values: Sequence[ParamDelta],
    differences: Sequence[ParamDelta],
    floor: dict[bool, float],
    density: float,
    repeats: int,
    read_ms: float = float("nan"),
) -> list[Size]:
    """Measure all encodings of some changes; see `floors` for `floor`."""
    nnz = sum(delta.nnz for delta in values)
    sizes = []
    for encoding in ENCODINGS:
        ulp = encoding == "gap8_ulp"
        deltas = differences if ulp else values
        encode = partial(encode_part, encoding=encoding, current_version=1, digest_part="0" * 32)
        body = encode(deltas)
        for sent, got in zip(deltas, decode(body).deltas, strict=True):
            same = np.array_equal(np.asarray(sent.indices), np.asarray(got.indices))
            if not (same and np.array_equal(sent.values, got.values)):
                raise AssertionError(f"{encoding} does not decode to what was encoded")
        calls = (partial(encode, deltas), partial(decode, body))
        encode_ms, decode_ms = (1e3 * fastest(call, repeats) for call in calls)
        scatter_ms = 1e3 * scatter_time(values, repeats)
        nbytes = len(body) / nnz
        row = (encoding, density, nbytes, floor[ulp], encode_ms, decode_ms, scatter_ms, read_ms)
        sizes.append(Size(*row))
    return sizes


def measure_synthetic(
    old: Bits, new: Bits, density: float, threads: int, repeats: int
) -> list[Size]:
    """Measure all encodings of a synthetic change."""
    values = deltas_of(old, new, threads)
    differences = as_differences(values, old)
    floor = floors(values, differences, counts_of(new))
    with ThreadPoolExecutor(threads) as pool:
        read_ms = 1e3 * read_time(old, new, pool, repeats)
    return measure(values, differences, floor, density, repeats, read_ms)


def measure_real(learning_rate: float, steps: int, repeats: int) -> list[Size]:
    """Measure all encodings of a training run's last step."""
    from scripts.bench.real_steps import train

    training = train(learning_rate, steps)
    values, differences = [], []
    for name, old in training.old.items():
        found = compare(old, training.new[name], streams=True)
        if found.indices.size:
            shape, stream = old.shape, found.stream
            delta = ParamDelta(name, "bfloat16", shape, found.indices, found.new, stream=stream)
            values.append(delta)
            differences.append(replace(delta, values=found.new - found.old, differences=True))
    floor = floors(values, differences, None)
    return measure(values, differences, floor, training.density, repeats)


def compare_speed(old: Bits, new: Bits, threads: int, repeats: int) -> tuple[float, float, float]:
    """Return seconds from two snapshots to a part, ours and in plain torch; and of reading them."""
    torch.set_num_threads(threads)
    before, after = (as_tensor(one) for one in (old, new))

    def ours() -> bytes:
        deltas = deltas_of(old, new, threads)
        return encode_part(deltas, encoding="gap8_exp", current_version=1)

    ours()
    with ThreadPoolExecutor(threads) as pool:
        reading = read_time(old, new, pool, repeats)
    return fastest(ours, repeats), fastest(lambda: plain_torch(before, after), repeats), reading


def show(title: str, sizes: Sequence[Size]) -> None:
    """Print a table of sizes and speeds."""
    columns = ["density", "encoding", "bytes", "floor", "ratio"]
    columns += ["encode ms", "/ read", "decode ms", "/ read", "apply"]
    rows = (
        (
            f"{size.density:.2%}",
            size.encoding,
            *(f"{value:.3f}" for value in (size.nbytes, size.floor, size.nbytes / size.floor)),
            f"{size.encode_ms:.0f}",
            f"{size.encode_ms / size.read_ms:.2f}".replace("nan", "-"),
            f"{size.decode_ms:.0f}",
            f"{size.decode_ms / size.read_ms:.2f}".replace("nan", "-"),
            f"{size.apply_ratio:.2f}",
        )
        for size in sizes
    )
    frame.show(title, columns, rows)


def positions_floor(density: Any) -> Any:
    """Return the entropy of a changed element's position in bytes, if all change independently."""
    rest = 1 - density
    return -(np.log2(density) + rest / density * np.log2(rest)) / 8


def plot(synthetic: Sequence[Size], real: Sequence[Size], file: Path) -> None:
    """Draw the plot.

    Args:
        synthetic: of all encodings; drawn as lines. The floor of their positions is
            `positions_floor`.
        real: drawn as points.
        file: overwritten; its suffix decides the format.
    """
    from matplotlib import ticker
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for encoding, colour in _COLOURS.items():
        sizes = [size for size in synthetic if size.encoding == encoding]
        points = [size for size in real if size.encoding == encoding]
        densities = np.array([size.density for size in sizes])
        axes.plot(densities, [s.nbytes for s in sizes], "o-", c=colour, ms=4, label=encoding)
        axes.plot(
            [s.density for s in points], [s.nbytes for s in points], "D", c=colour, mfc="none"
        )
        if encoding in _FLOORS:
            values = np.mean([size.floor for size in sizes] - positions_floor(densities))
            grid = np.geomspace(densities.min(), densities.max(), 100)
            floor = values + positions_floor(grid)
            axes.plot(grid, floor, _FLOORS[encoding], c="black", lw=1, zorder=3)
    axes.plot([], [], "--", c="black", lw=1, label="entropy, new values")
    axes.plot([], [], ":", c="black", lw=1, label="entropy, differences")
    if real:
        axes.plot([], [], "D", c="black", mfc="none", label="real training steps, small model")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=1))
    axes.set(xlabel="changed elements", ylabel="bytes per changed element", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", ncols=3, loc="outside upper center")
    figure.savefig(file, dpi=120)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = frame.make_parser("codec", __doc__)
    add = parser.add_argument
    add("--elements", type=int, default=200_000_000, help="weights (default: %(default)s)")
    add("--threads", type=int, default=usable_cores(), help="threads (default: all cores)")
    repeats_help = "runs of each measurement; the fastest counts (%(default)s)"
    add("--repeats", type=int, default=3, help=repeats_help)
    steps_help = "steps of the real training runs, 0 for none (default: %(default)s)"
    add("--real-steps", type=int, default=5, help=steps_help)
    add("--plot", type=Path, metavar="FILE", help="draw the sizes, as PNG or SVG")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    return frame.run(options, lambda _: run(options))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print; return what the JSON has."""
    threads, repeats = options.threads, options.repeats
    weights = make_weights(options.elements, np.random.default_rng(0))
    sizes: list[Size] = []
    ours = plain = reading = 0.0
    for number, density in enumerate(DENSITIES):
        new = change(weights, density, np.random.default_rng([0, number]))
        sizes += measure_synthetic(weights, new, density, threads, repeats)
        if density == TIMED_AT:
            ours, plain, reading = compare_speed(weights, new, threads, repeats)

    show(f"synthetic, {options.elements:,} elements of bfloat16", sizes)
    real: list[Size] = []
    for learning_rate in LEARNING_RATES if options.real_steps else ():
        real += measure_real(learning_rate, options.real_steps, repeats)
    if real:
        show("real, by learning rate", real)
    if options.plot:
        plot(sizes, real, options.plot)
    print(
        f"{options.elements:,} elements, {threads} thread(s), {TIMED_AT:.0%} changed: diff "
        f"and encode of gap8_exp {ours * 1e3:.0f} ms, {ours / reading:.2f} times reading both "
        f"copies; deltas_zstd in plain torch {plain * 1e3:.0f} ms: {plain / ours:.2f} times "
        "as fast"
    )
    found: dict[str, Any] = {}
    for prefix, group in (("", sizes), ("real_", real)):
        for size in group:
            columns = {
                "bytes_per_element": size.nbytes,
                "floor": size.floor,
                "decode_and_scatter_vs_scatter": size.apply_ratio,
            }
            if not prefix:
                columns["encode_alone_vs_read"] = size.encode_ms / size.read_ms
                columns["decode_vs_read"] = size.decode_ms / size.read_ms
            for key, value in columns.items():
                row = found.setdefault(prefix + key, {}).setdefault(size.encoding, {})
                row[f"{size.density:.4g}"] = round(value, 4)
    found["encode_vs_read"] = round(ours / reading, 3)
    found["encode_vs_plain_torch"] = round(plain / ours, 3)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
