"""Compare the ratios of a short benchmark with those of the last release.

    python -m scripts.bench.gate            # exit status 1 if one has become worse
    python -m scripts.bench.gate --store    # at a release: write what is measured now

Runs `scripts.bench.codec` a few times with 16 million weights and one thread, for about a minute.
The bytes per changed element hardly vary: 1 % more fails. Times are divided by others of the same
run, so that they can be compared between machines, and the median of the runs counts: 1.5 times as
much fails. Nothing else should run on the machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from scripts import command_line
from scripts.bench import codec

STORED: Final = Path(__file__).with_name("ratios.json")

_ARGUMENTS: Final = ("--elements", "16000000", "--real-steps", "0", "--threads", "1")
_DENSITY: Final = "0.02"
_MORE_BYTES: Final = 1.01
_MORE_TIME: Final = 1.5

Ratios = Mapping[str, float]


def measure(runs: int) -> Iterator[dict[str, Any]]:
    """Yield what `scripts.bench.codec` has measured, once for each run."""
    options = codec.parse_arguments(_ARGUMENTS)
    for _ in range(runs):
        with contextlib.redirect_stdout(io.StringIO()):
            found = codec.run(options)
        yield found


def ratios(measured: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of each ratio over some runs; less is better."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in measured:
        for encoding, by_density in one["bytes_per_element"].items():
            found[f"{encoding}: bytes per changed element"].append(by_density[_DENSITY])
        for encoding, by_density in one["decode_and_scatter_vs_scatter"].items():
            found[f"{encoding}: time to decode and write / to write"].append(by_density[_DENSITY])
        found["time to compare and encode / in plain torch"].append(
            1 / one["encode_vs_plain_torch"]
        )
    return {name: round(median(values), 4) for name, values in found.items()}


def worse(stored: Ratios, now: Ratios) -> Iterator[str]:
    """Yield a line for each stored ratio that has become worse, or is not measured any more."""
    for name, before in stored.items():
        limit = before * (_MORE_BYTES if "bytes" in name else _MORE_TIME)
        if name not in now:
            yield f"{name}: not measured; it was {before:g}"
        elif now[name] > limit:
            yield f"{name}: {now[name]:g}, above {limit:.3g}; it was {before:g}"


def main(
    argv: Sequence[str] | None = None,
    stored: Path = STORED,
    measure: Callable[[int], Iterable[Mapping[str, Any]]] = measure,
) -> int:
    """Run the command line; return the exit status."""
    parser = command_line.make_parser("scripts.bench.gate", __doc__)
    parser.add_argument("--store", action="store_true", help="write the ratios, compare nothing")
    runs_help = "of the benchmark (default: %(default)s)"
    parser.add_argument("--runs", type=command_line.at_least(1), default=5, help=runs_help)
    options = parser.parse_args(argv)
    now = ratios(measure(options.runs))
    if options.store:
        stored.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    found = list(worse(json.loads(stored.read_text()), now))
    for line in found:
        print(f"bench: {line}", file=sys.stderr)
    print(f"bench: {len(now)} ratios, {len(found)} worse than at the last release")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
