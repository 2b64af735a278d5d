"""Measure how many bytes one version takes in a delta log, and in other ways to keep it.

    python -m scripts.bench.log_size             # 50M elements; about 1 GB of memory
    python -m scripts.bench.log_size --json      # the last line is JSON

The weights are bfloat16 and synthetic, see scripts/bench/synthetic_weights.py. Every version is
written as files, and all of its files count.

rows:
  log, differences   the sender's ``log_differences=True`` with ``gap8_ulp``
  log, values        what it writes otherwise for ``gap8_ulp``: ``gap8_exp``
  log, deltas_zstd   the default encoding
  folder, xor        a version folder as other trainers write it (docs/wire-format.md): per tensor
                     one zstd frame (level 1) of the exclusive or of all of its bytes
  checkpoint         all weights, uncompressed
columns:
  bytes, per change  of the version; over the number of changed elements
  x differences      over those of the first row
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import zstandard

from engine_ext.format import DIFFERENCES, Digest, ParamDelta, change_digest, encode_part
from engine_ext.log import open_log
from engine_ext.resources import usable_cores
from scripts import command_line
from scripts.bench import frame
from scripts.bench.synthetic_weights import (
    Bits,
    as_differences,
    change,
    deltas_of,
    make_weights,
    params,
)

_DENSITIES: Final = (0.006, 0.02, 0.03)
_EPILOG: Final = "exit status: 0 measured; 2 bad usage; 130 interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = frame.make_parser("log_size", __doc__, _EPILOG)
    positive = command_line.at_least(1)
    parser.add_argument("--elements", type=positive, metavar="N", default=50_000_000)
    options = parser.parse_args(arguments)
    return frame.run(options, lambda _: run(options.elements))


def run(elements: int) -> list[dict[str, Any]]:
    """Measure and print every density; return the rows."""
    rng = np.random.default_rng(0)
    old = make_weights(elements, rng)
    rows: list[dict[str, Any]] = []
    for density in _DENSITIES:
        new = change(old, density, rng)
        found = sizes(old, new)
        changed = int(np.count_nonzero(old != new))
        least = found["log, differences"]
        frame.show(
            f"{changed / elements:.2%} changed",
            ("kept as", "bytes", "per change", "x differences"),
            (
                (name, f"{size:,}", f"{size / changed:.2f}", f"{size / least:.2f}")
                for name, size in found.items()
            ),
        )
        rows += [
            {"density": density, "kept": name, "bytes": size, "changed": changed}
            for name, size in found.items()
        ]
    return rows


def sizes(old: Bits, new: Bits) -> dict[str, int]:
    """Write one version in every way; return the bytes of its files."""
    deltas = deltas_of(old, new, usable_cores())
    differences = as_differences(deltas, old)
    proof = Digest.total(_change(delta, old[param]) for delta, param in _pairs(deltas, old))
    proven = proof.hex()
    return {
        "log, differences": _logged(differences, DIFFERENCES, proven),
        "log, values": _logged(deltas, "gap8_exp", proven),
        "log, deltas_zstd": _logged(deltas, "deltas_zstd", proven),
        "folder, xor": sum(
            len(zstandard.compress((old[param] ^ new[param]).tobytes(), 1)) for param in params(old)
        ),
        "checkpoint": new.nbytes,
    }


def _pairs(deltas: Sequence[ParamDelta], old: Bits) -> Any:
    return zip(deltas, params(old), strict=True)


def _change(delta: ParamDelta, old: Bits) -> Digest:
    assert delta.indices is not None
    indices = delta.indices.astype(np.int64)
    return change_digest(delta.name, indices, old[indices], delta.values)


def _logged(deltas: Sequence[ParamDelta], encoding: str, digest_part: str) -> int:
    """Write one version of a log; return the bytes of its folder."""
    part = encode_part(
        deltas,
        encoding=encoding,
        current_version=1,
        base_version=0,
        sync_id="0" * 32,
        part=0,
        num_parts=1,
        digest_part=digest_part,
    )
    with tempfile.TemporaryDirectory(prefix="log-size-") as folder:
        draft = open_log(folder).writer().begin(1)
        draft.add(part)
        return sum(path.stat().st_size for path in draft.finish().iterdir())


if __name__ == "__main__":
    raise SystemExit(main())
