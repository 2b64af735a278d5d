"""Compare the ratios of a short benchmark with those of an earlier commit, in one run.

    python -m scripts.bench.gate                        # exit status 1 if one has become worse
    python -m scripts.bench.gate --against origin/main  # what a branch changes

Runs `scripts.bench.codec` of both trees in turn, with 16 million weights and one thread, for about
two minutes. The bytes per changed element hardly vary: 1 % more fails. Times are divided by others
of the same run, and the median of the runs counts: 1.5 times as much fails. Both trees are measured
here because these ratios differ between processors, some by a factor of two. Nothing else should
run on the machine.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from scripts import command_line

_ROOT: Final = Path(__file__).parents[2]
_TREE: Final = ("engine_ext", "server", "trainer", "scripts")
_ARGUMENTS: Final = ("--elements", "16000000", "--real-steps", "0", "--threads", "1", "--json")
_DENSITY: Final = "0.02"
_MORE_BYTES: Final = 1.01
_MORE_TIME: Final = 1.5

Ratios = Mapping[str, float]
Measure = Callable[[Path, Path], Mapping[str, Any]]


def unpack(commit: str, folder: Path) -> None:
    """Write what the benchmark needs of a commit of this checkout into a folder.

    Raises:
        ValueError: git does not know the commit.
    """
    packed = _git("archive", "--format=tar", commit, *_TREE)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tree:
        tree.extractall(folder, filter="data")


def earlier_commit() -> str:
    """Return the newest release that this commit is based on; before the first, its parent.

    Raises:
        ValueError: git knows neither, as in a shallow clone.
    """
    try:
        return _git("describe", "--tags", "--abbrev=0", "--match", "v*").decode().strip()
    except ValueError:
        return _git("rev-parse", "--verify", "--short", "HEAD^").decode().strip()


def measure(tree: Path, cache: Path) -> Mapping[str, Any]:
    """Return what one run of a tree's `scripts.bench.codec` measures.

    Args:
        cache: the folder of numba's compiled loops; another tree's loops are not used.

    Raises:
        subprocess.CalledProcessError: the benchmark failed.
    """
    paths = os.pathsep.join(map(str, (tree, tree / "server", tree / "trainer")))
    printed = subprocess.run(
        [sys.executable, "-m", "scripts.bench.codec", *_ARGUMENTS],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(cache)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    found: Mapping[str, Any] = json.loads(printed.splitlines()[-1])
    return found


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


def worse(before: Ratios, now: Ratios) -> Iterator[str]:
    """Yield a line for each earlier ratio that has become worse, or is not measured any more."""
    for name, was in before.items():
        limit = was * (_MORE_BYTES if "bytes" in name else _MORE_TIME)
        if name not in now:
            yield f"{name}: not measured; it was {was:g}"
        elif now[name] > limit:
            yield f"{name}: {now[name]:g}, above {limit:.3g}; it was {was:g}"


def main(argv: Sequence[str] | None = None, measure: Measure = measure) -> int:
    """Run the command line; return the exit status."""
    parser = command_line.make_parser("scripts.bench.gate", __doc__)
    against_help = "default: the newest release (tag v*), or before the first HEAD^"
    parser.add_argument("--against", metavar="COMMIT", help=against_help)
    runs_help = "of the benchmark in each tree (default: %(default)s)"
    parser.add_argument("--runs", type=command_line.at_least(1), default=5, help=runs_help)
    options = parser.parse_args(argv)

    def program() -> int:
        commit = options.against or earlier_commit()
        with tempfile.TemporaryDirectory(prefix="delta-gate-") as name:
            folder = Path(name)
            unpack(commit, folder / "tree")
            before, now = [], []
            for number in range(options.runs):
                print(f"bench: run {number + 1} of {options.runs}", file=sys.stderr)
                before.append(measure(folder / "tree", folder / "before"))
                now.append(measure(_ROOT, folder / "now"))
        found = list(worse(ratios(before), after := ratios(now)))
        for line in found:
            print(f"bench: {line}", file=sys.stderr)
        print(f"bench: {len(after)} ratios, {len(found)} worse than in {commit}")
        return bool(found)

    failures = (ValueError, OSError, subprocess.CalledProcessError)
    return command_line.run(program, failures, "bench: interrupted")


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(_ROOT), *arguments], check=False, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise ValueError(f"{said}; name a commit with --against, and fetch it first")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
