#!/usr/bin/env python3
"""Put the source patches of patches/ into an engine, or take them out.

    python scripts/apply_patches.py vllm                   # the engine that this Python has
    python scripts/apply_patches.py sglang --target DIR    # a checkout, package folder or venv
    python scripts/apply_patches.py vllm --status
    python scripts/apply_patches.py vllm --revert

All files are changed or none; doing it twice changes nothing. The version and the SHA-256 of every
file are checked first: an engine that somebody else has changed is refused. Only the standard
library is used. What each patch is for: patches/README.md.

exit status:
  0  done, or nothing to do; --check: it would work; --status: applied
  1  refused, and nothing was changed; --status: not applied
  2  wrong usage
  3  failed halfway and could not be taken back; the message says how to go on
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import file_swap
import patch_sets
from file_swap import SwapBroken, SwapError
from patch_sets import PatchSet, PatchSetError, State
from unified_diff import DiffError

ENGINES: Final = ("vllm", "sglang")
PATCHES: Final = Path(__file__).resolve().parents[1] / "patches"
_VERSION: Final = re.compile(r"^__version__\b[^\n]*=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)
_NUMBERS: Final = re.compile(r"\d+")


class Refused(Exception):
    """Nothing was changed; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine's source.

    Attributes:
        name: of the engine and its package.
        package: the package's folder.
        version: that it says it has, without a build label; None where a checkout says none.
    """

    name: str
    package: Path
    version: str | None

    @property
    def root(self) -> Path:
        return self.package.parent

    def __str__(self) -> str:
        return f"{self.name} {self.version or '(no version recorded)'} in {self.root}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The patch set for an engine.

    Attributes:
        patches: the set.
        by_hash: it is the engine's own; otherwise one of another version, that has to fit.
        states: of every file.
    """

    patches: PatchSet
    by_hash: bool
    states: dict[str, State]

    @property
    def state(self) -> State:
        return patch_sets.overall(list(self.states.values()))


def find(name: str, target: Path | None) -> Engine:
    """The engine that this Python has, or the one in a folder.

    Raises:
        Refused: there is none.
    """
    if target is None:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise Refused(
                f"{sys.executable} has no {name}. Run this with the Python that has it, or name "
                "its folder with --target"
            )
        places = [Path(next(iter(spec.submodule_search_locations)))]
    else:
        inside = [target / name, target / "python" / name]
        inside += sorted(target.glob(f"lib/python3*/site-packages/{name}"))
        places = [target, *inside] if target.name == name else inside
    for package in places:
        if (package / "__init__.py").is_file():
            return Engine(name, package.resolve(), _version(package))
    looked = ", ".join(str(place) for place in places)
    raise Refused(f"no {name} package there (looked for {looked})")


def _version(package: Path) -> str | None:
    for name in ("_version.py", "version.py"):
        file = package / name
        match = _VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        if match and _NUMBERS.match(match[1]):
            return match[1].partition("+")[0]
    return None


def read_sets(engine: str) -> list[PatchSet]:
    """Every patch set of an engine."""
    return [patch_sets.read(file.parent) for file in sorted(PATCHES.glob(f"{engine}/*/*.json"))]


def choose(engine: Engine, use: str | None) -> Choice:
    """The patch set of the engine's version; without one, the nearest that fits.

    Args:
        engine: the source.
        use: the version whose patches the user wants.

    Raises:
        Refused: there is none; says which there are.
    """
    sets = read_sets(engine.name)
    have = ", ".join(found.version for found in sets) or "none"
    if use is not None:
        sets = [found for found in sets if found.version == use]
        if not sets:
            raise Refused(f"no patches for {engine.name} {use}; there are patches for: {have}")
    for found in sets:
        own = Choice(found, True, found.states(engine.root, by_hash=True))
        # A checkout may not say its version; the hashes of its files do.
        recognised = engine.version is None and own.state is not State.FOREIGN
        if recognised or found.version == engine.version:
            return own
    others = [
        Choice(found, False, found.states(engine.root, by_hash=False))
        for found in sorted(sets, key=lambda found: _distance(found.version, engine.version))
    ]
    for other in others:
        if other.state is not State.FOREIGN:
            return other
    misfits = [
        f"  {path}: those for {other.patches.version} do not fit"
        for other in others[:1]
        for path, state in other.states.items()
        if state is State.FOREIGN
    ]
    raise Refused(
        "\n".join([f"no patches for this version; there are patches for: {have}", *misfits])
        + "\npatches/README.md says how to port them"
    )


def _distance(version: str, other: str | None) -> list[int]:
    """How far two versions are apart; the major number counts most."""
    mine, theirs = ([int(n) for n in _NUMBERS.findall(v)[:3]] for v in (version, other or ""))
    return [abs(a - b) for a, b in zip(mine, theirs, strict=False)]


def apply(engine: Engine, choice: Choice, *, revert: bool, check: bool, use: str | None) -> str:
    """Apply or revert, or only see whether it would work; what was done.

    Raises:
        Refused: a file is not what it should be. Nothing was changed.
        SwapError: a file could not be written. Nothing was changed.
        SwapBroken: it went wrong halfway and could not be taken back.
    """
    wanted = State.ORIGINAL if revert else State.PATCHED
    foreign = [path for path, state in choice.states.items() if state is State.FOREIGN]
    if foreign:
        raise Refused(
            "\n".join([f"these files are {State.FOREIGN.value}:", *(f"  {p}" for p in foreign)])
            + f"\nReinstall {engine.name} {choice.patches.version}, or port the patches to your "
            "changes (patches/README.md)"
        )
    if choice.state is wanted:
        return "nothing to do: " + ("the patches are not in" if revert else "already applied")
    if not choice.by_hash and choice.state is State.MIXED:
        raise Refused("the patches are in some files and not in others; reinstall the engine")
    changes = {
        path: choice.patches.change(engine.root, path, revert=revert, by_hash=choice.by_hash)
        for path, state in choice.states.items()
        if state is not wanted
    }
    done = "reverted" if revert else "applied"
    count = f"{len(changes)} of {len(choice.states)} files"
    if check:
        how = "" if choice.by_hash or revert else f" (with --use {choice.patches.version})"
        return f"can be {done}{how}: {count} would change"
    if not (choice.by_hash or revert or use):
        raise Refused(
            f"there are no patches for this version. Those for {choice.patches.version} fit its "
            f"source, but nobody has tested that: --use {choice.patches.version} applies them"
        )
    file_swap.swap(engine.root, changes)
    return f"{done}: {count} changed"


def status(engine: Engine, choice: Choice) -> str:
    """What is in the engine, file by file."""
    lines = [f"{choice.state.value}:"]
    for name, diffs in choice.patches.patches.items():
        lines += [f"  {name:<26} {diff.path}: {choice.states[diff.path].value}" for diff in diffs]
    if file_swap.is_pending(engine.root):
        lines.append("a run was killed halfway; apply or revert finishes it first")
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="a source checkout, the package's folder, the folder it lies in, or a virtual "
        "environment (default: the engine that this Python would import)",
    )
    parser.add_argument(
        "--use",
        metavar="VERSION",
        help="apply the patches of another version, where they fit line for line; the hashes of "
        "the files cannot be checked then",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check",
        action="store_true",
        help="change nothing, say whether the patches can be applied, and for a version without "
        "patches which others fit",
    )
    action.add_argument("--revert", action="store_true", help="take the patches out")
    action.add_argument(
        "--status", action="store_true", help="change nothing, say what is applied to which file"
    )
    action.add_argument(
        "--write-manifest",
        metavar="VERSION",
        help="for porting: write the manifest of patches/ENGINE/VERSION from an unpatched source",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """What the command line asks for; the exit status."""
    engine = find(args.engine, args.target and args.target.resolve())
    print(engine)
    if args.write_manifest:
        folder = PATCHES / engine.name / args.write_manifest
        print(f"wrote {patch_sets.write_manifest(folder, engine.root)}")
        return 0
    if args.check or args.status:
        choice = choose(engine, args.use)
        _say_which(choice)
        if args.status:
            print(status(engine, choice))
            return 0 if choice.state is State.PATCHED else 1
        if file_swap.is_pending(engine.root):
            raise Refused("a run was killed halfway; apply or revert finishes it first")
        print(apply(engine, choice, revert=False, check=True, use=args.use))
        return 0
    with file_swap.exclusive(engine.root):
        finished = file_swap.finish(engine.root)
        if finished:
            print(f"finished a run that was killed halfway: {len(finished)} files")
        choice = choose(engine, args.use)
        _say_which(choice)
        print(apply(engine, choice, revert=args.revert, check=False, use=args.use))
    if not args.revert and args.target is None and importlib.util.find_spec("engine_ext") is None:
        print(f"note: a patched {engine.name} imports engine_ext; install it into this Python too")
    return 0


def _say_which(choice: Choice) -> None:
    how = "" if choice.by_hash else ", of another version: no hashes to check"
    print(f"patches: {choice.patches.folder}{how}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return run(args)
    except SwapBroken as error:
        print(f"failed halfway: {error}", file=sys.stderr)
        return 3
    except (Refused, SwapError, PatchSetError, DiffError, OSError) as error:
        print(f"refused, nothing was changed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
