#!/usr/bin/env python3
"""Put the source patches of patches/ into an engine, or take them out.

    python scripts/apply_patches.py vllm                   # the engine that this Python has
    python scripts/apply_patches.py sglang --target DIR    # a checkout, package folder or venv
    python scripts/apply_patches.py vllm --status
    python scripts/apply_patches.py vllm --revert

The version and the SHA-256 of every file are checked first: an engine that somebody else has
changed is refused. All files are changed or none: all new files are written next to the old ones
before they replace them one by one, and a failure puts back what was replaced. A killed run leaves
each file either as it was or patched, and perhaps temporary files (*.apply_patches.new). --status
then shows "applied to some files only"; the next run recognises each file by its hash, patches the
rest or, with --revert, takes the patches out, and removes the temporary files. A second run changes
nothing. Only the standard library is used. What each patch is for: patches/README.md.

exit status:
  0  done, or nothing to do; --check: it would work; --status: applied
  1  refused, and nothing was changed; --status: not applied
  2  wrong usage
  3  failed halfway and could not be taken back; the message says how to go on
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_FOLDER: Final = Path(__file__).resolve().parent
# An installed copy has the patches next to it; in a clone they are next to scripts/.
_INSTALLED: Final = (_FOLDER / "patches").is_dir()
PATCHES: Final = (_FOLDER if _INSTALLED else _FOLDER.parent) / "patches"
_CLONED_COMMAND: Final = "python scripts/apply_patches.py"
COMMAND: Final = f"python -m {_FOLDER.name}" if _INSTALLED else _CLONED_COMMAND
_FILE: Final = re.compile(rb"^--- a/([\w.-][\w./-]*)\n\+\+\+ b/\1\n(?=@@)", re.MULTILINE)
_HUNK: Final = re.compile(rb"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n", re.MULTILINE)
_VERSION: Final = re.compile(r"^__version__\b[^\n]*=\s*['\"](\d[^'\"+\n]*)", re.MULTILINE)


class Refused(Exception):
    """Something is not as it has to be, and nothing was changed; the message says what to do.

    Every function here may raise it, or OSError, with the same meaning.
    """


class HalfDone(Exception):
    """Some files are changed and others are not; the next run goes on from there."""


class State(enum.Enum):
    """How a file, or a whole source tree, compares with a patch set."""

    ORIGINAL = "not applied"
    PATCHED = "applied"
    MIXED = "applied to some files only"
    FOREIGN = "neither the released source nor the patched one"


class Hunk(NamedTuple):
    """Lines before and after, both with their context."""

    old: bytes
    new: bytes

    def reversed(self) -> Hunk:
        return Hunk(self.new, self.old)


def parse_diff(diff: bytes) -> dict[str, list[Hunk]]:
    """Return a unified diff's hunks by path; text before the first file is a comment.

    A diff that is malformed, creates, removes or renames a file, or has no context is refused.
    """
    comment, *files = _FILE.split(diff)
    found: dict[str, list[Hunk]] = {}
    if not files or b"\n--- " in b"\n" + comment:
        raise Refused("expected '--- a/PATH', '+++ b/PATH' of the same file, and a hunk")
    for path, body in zip(files[::2], files[1::2], strict=True):
        name = path.decode()
        if name in found or ".." in name.split("/"):
            raise Refused(f"{name} is not a path inside the package, or comes twice")
        found[name] = []
        start, *hunks = _HUNK.split(body)
        if start:
            raise Refused(f"{name}: not the header of a hunk: {start!r}")
        for old_count, new_count, text in zip(hunks[::3], hunks[1::3], hunks[2::3], strict=True):
            lines = text.splitlines(keepends=True)
            old, new = ([line[1:] for line in lines if line[0] in side] for side in (b" -", b" +"))
            counts = (int(old_count or 1), int(new_count or 1))
            marks = {line[:1] for line in lines}
            if counts != (len(old), len(new)) or not marks <= {b" ", b"-", b"+"}:
                raise Refused(f"{name}: a hunk has other lines than its header says")
            if b" " not in marks or not text.endswith(b"\n"):
                raise Refused(f"{name}: a hunk has no context, or no last line end")
            found[name].append(Hunk(b"".join(old), b"".join(new)))
    return found


def apply_hunks(content: bytes, hunks: Iterable[Hunk]) -> bytes:
    """Return a file's content after its hunks.

    Nothing is guessed: the old lines of a hunk must be in the file exactly once, and after those of
    the hunk before. The line numbers of the diff are not looked at.
    """
    text = b"\n" + content  # so that every line has a line end in front
    after = b""
    done = 0
    for number, (old, new) in enumerate(hunks, 1):
        at = text.find(b"\n" + old)
        if at < 0:
            raise Refused(f"hunk {number} does not fit")
        if at + 1 < done or text.find(b"\n" + old, at + 1) >= 0:
            raise Refused(f"hunk {number} is not in order, or fits more than once")
        after += text[done : at + 1] + new
        done = at + 1 + len(old)
    return (after + text[done:])[1:]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class PatchSet:
    """The patches for one version of an engine, compared with a source.

    Attributes:
        folder: of the patches; its name is the version.
        by_hash: whether a file's hash gives its state; otherwise, for a source of another version,
            whether the patches fit it or what they lead to.
        patches: by file name, in order: hunks by path.
        contents: of the source's files by path; a missing one is empty.
        states: of the source's files by path: ORIGINAL, PATCHED or FOREIGN.
    """

    def __init__(self, folder: Path, root: Path, *, by_hash: bool) -> None:
        self.folder, self.version, self.by_hash = folder, folder.name, by_hash
        self.patches: dict[str, dict[str, list[Hunk]]] = {}
        for number, file in enumerate(sorted(folder.glob("*.patch")), 1):
            if not re.fullmatch(rf"{number:04}-[a-z0-9-]+\.patch", file.name):
                raise Refused(f"{file}: expected a name like {number:04}-what.patch")
            try:
                self.patches[file.name] = parse_diff(file.read_bytes())
            except Refused as error:
                raise Refused(f"{file}: {error}") from None
        if not self.patches:
            raise Refused(f"{folder}: no patches")
        self.contents: dict[str, bytes] = {}
        for path in sorted({path for files in self.patches.values() for path in files}):
            file = root / path
            self.contents[path] = file.read_bytes() if file.is_file() else b""
        self._hashes = self._read_manifest() if by_hash else {}
        self.states = {path: self._state(path) for path in self.contents}

    @property
    def state(self) -> State:
        """The state of the whole source."""
        distinct = set(self.states.values())
        if State.FOREIGN in distinct:
            return State.FOREIGN
        return distinct.pop() if len(distinct) == 1 else State.MIXED

    @property
    def foreign(self) -> list[str]:
        """The files that are neither as released nor patched."""
        return [path for path, state in self.states.items() if state is State.FOREIGN]

    def _read_manifest(self) -> dict[str, dict[str, State]]:
        manifest = self.folder / "manifest.json"
        try:
            hashes = {
                path: {entry["before"]: State.ORIGINAL, entry["after"]: State.PATCHED}
                for path, entry in json.loads(manifest.read_bytes())["files"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"{manifest}: {error!r}") from error
        if set(hashes) != set(self.contents):
            raise Refused(f"{manifest} and the patches name different files")
        return hashes

    def write_manifest(self) -> Path:
        """Write the hashes of an unpatched source, and of what the patches make of it."""
        hashes = {
            path: {"before": sha256(before), "after": sha256(self.rewritten(path, State.PATCHED))}
            for path, before in self.contents.items()
        }
        manifest = self.folder / "manifest.json"
        manifest.write_text(json.dumps({"files": hashes}, indent=2) + "\n", encoding="utf-8")
        return manifest

    def _state(self, path: str) -> State:
        if self.by_hash:
            return self._hashes[path].get(sha256(self.contents[path]), State.FOREIGN)
        fits: list[State] = []
        for state, other in ((State.ORIGINAL, State.PATCHED), (State.PATCHED, State.ORIGINAL)):
            with contextlib.suppress(Refused):
                self.rewritten(path, other)
                fits.append(state)
        return fits[0] if len(fits) == 1 else State.FOREIGN

    def rewritten(self, path: str, wanted: State) -> bytes:
        """Return a file's content with all patches if PATCHED is wanted, otherwise without them."""
        content = self.contents[path]
        revert = wanted is State.ORIGINAL
        for name in sorted(self.patches, reverse=revert):
            hunks = self.patches[name].get(path, [])
            try:
                content = apply_hunks(content, map(Hunk.reversed, hunks) if revert else hunks)
            except Refused as error:
                raise Refused(f"{self.folder / name}: {path}: {error}") from None
        if self.by_hash and self._hashes[path].get(sha256(content)) is not wanted:
            raise Refused(f"{self.folder}: manifest.json has another hash for {path}")
        return content


class Engine(NamedTuple):
    """An engine's source: `root` holds the package; a checkout may record no version."""

    name: str
    root: Path
    version: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.version or '(no version recorded)'} in {self.root}"


def find(name: str, target: Path | None) -> Engine:
    """Return the engine in a folder, or the one that this Python has."""
    if target is None:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise Refused(f"{sys.executable} has no {name}; use its Python, or --target its folder")
        places = [Path(next(iter(spec.submodule_search_locations)))]
    else:
        places = [target] if target.name == name else []
        places += [target / name, target / "python" / name]
        places += sorted(target.glob(f"lib/python3*/site-packages/{name}"))
    for package in places:
        if (package / "__init__.py").is_file():
            files = [package / "_version.py", package / "version.py"]
            texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
            found = [match[1] for text in texts if (match := _VERSION.search(text))]
            return Engine(name, package.resolve().parent, found[0] if found else None)
    raise Refused(f"no {name} package there (looked for {', '.join(map(str, places))})")


def choose(engine: Engine, use: str | None = None) -> PatchSet:
    """Return the patch set for the engine's version or, if there is none, the nearest that fits.

    Args:
        engine: the source.
        use: the only version whose patches are considered.
    """
    manifests = sorted(PATCHES.glob(f"{engine.name}/*/manifest.json"))
    folders = {manifest.parent.name: manifest.parent for manifest in manifests}
    have = ", ".join(folders) or "none"
    if use is not None and use not in folders:
        raise Refused(f"no patches for {engine.name} {use}; there are patches for: {have}")
    versions = sorted(folders, key=lambda version: _distance(version, engine.version or ""))
    folders = {version: folders[version] for version in versions if use in (None, version)}
    for folder in folders.values():
        found = PatchSet(folder, engine.root, by_hash=True)
        # A checkout may not record its version; its files' hashes identify it.
        recognised = engine.version is None and found.state is not State.FOREIGN
        if recognised or found.version == engine.version:
            return found
    others = [PatchSet(folder, engine.root, by_hash=False) for folder in folders.values()]
    for other in others:
        if other.state is not State.FOREIGN:
            return other
    lines = [f"no patches for this version; there are patches for: {have}"]
    for other in others[:1]:
        lines += [f"  {path}: those for {other.version} do not fit" for path in other.foreign]
    raise Refused("\n".join([*lines, f"{PATCHES / 'README.md'} says how to port them"]))


def _distance(version: str, other: str) -> list[int]:
    """Return how far two versions are apart, the major number first."""
    mine, theirs = ([int(n) for n in re.findall(r"\d+", text)[:3]] for text in (version, other))
    return [abs(a - b) for a, b in zip(mine, theirs, strict=False)]


def apply(root: Path, found: PatchSet, *, revert: bool, check: bool, use: str | None) -> str:
    """Apply or revert the patches, or only check whether that works; return what was done.

    Raises:
        Refused, OSError: a file is not what it should be, or not writable. Nothing was changed.
        HalfDone: a file could not be written, and not all others could be put back.
    """
    if found.foreign:
        raise Refused(
            "\n  ".join([f"these files are {State.FOREIGN.value}:", *found.foreign])
            + f"\nReinstall {found.folder.parent.name} {found.version}, or port the patches to "
            f"your changes ({PATCHES / 'README.md'})"
        )
    if not check:
        _remove_temporaries(root / path for path in found.states)
    wanted = State.ORIGINAL if revert else State.PATCHED
    paths = [path for path, state in found.states.items() if state is not wanted]
    if not paths:
        return "nothing to do: " + ("the patches are not in" if revert else "already applied")
    before = {root / path: found.contents[path] for path in paths}
    after = {root / path: found.rewritten(path, wanted) for path in paths}
    count = f"{len(paths)} of {len(found.states)} files"
    if check:
        how = "" if found.by_hash else f" (with --use {found.version})"
        return f"can be applied{how}: {count} would change"
    if not (found.by_hash or revert or use):
        raise Refused(
            f"there are no patches for this version. Those for {found.version} fit its source, but "
            f"nobody has tested that: --use {found.version} applies them"
        )
    replace_all(before, after)
    return f"{'reverted' if revert else 'applied'}: {count} changed"


def replace_all(before: dict[Path, bytes], after: dict[Path, bytes]) -> None:
    """Replace the content of all files, or of none.

    Files are never written in place: a package manager may have linked them into its cache.

    Raises:
        Refused, OSError: a file is not as `before` has it, or not writable. Nothing was changed.
        HalfDone: not all files could be put back.
    """
    try:
        for file, content in after.items():
            _write_temporary(file, content)
        for file, content in before.items():
            if file.read_bytes() != content:
                raise Refused(f"{file} was changed just now")
            _replace(file)
    except BaseException as error:
        try:
            for file in [file for file in before if file.read_bytes() == after[file]]:
                _write_temporary(file, before[file])
                _replace(file)
        except OSError as second:
            raise HalfDone(
                f"{error}; then {second}. Some files are changed and others are not: once the "
                "cause is gone, run this again, or with --revert"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # the next run removes what remains
                _remove_temporaries(before)
        raise


def _temporary(file: Path) -> Path:
    return file.with_name(file.name + ".apply_patches.new")


def _write_temporary(file: Path, content: bytes) -> None:
    status = file.stat()
    with _temporary(file).open("wb") as handle:
        with contextlib.suppress(OSError):  # only root may give files away
            os.fchown(handle.fileno(), status.st_uid, status.st_gid)
        os.fchmod(handle.fileno(), status.st_mode & 0o7777)
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())  # so that no power cut leaves the name without the content


def _replace(file: Path) -> None:
    # Some builds have Python never check compiled files against their source. They are removed
    # first, so that a kill in between leaves none that is out of date.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
    os.replace(_temporary(file), file)


def _remove_temporaries(files: Iterable[Path]) -> None:
    for file in map(_temporary, files):
        if file.exists():  # on a read-only file system unlink always fails
            file.unlink()


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Refused(f"another run is at work in {folder}; wait for it to end") from None
    finally:
        os.close(handle)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=(__doc__ or "").replace(_CLONED_COMMAND, COMMAND),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="a source checkout, the package's folder, the folder that holds it, or a virtual "
        "environment (default: the engine that this Python would import)",
    )
    parser.add_argument(
        "--use",
        metavar="VERSION",
        help="apply the patches of another version if they fit; hashes cannot be checked then",
    )
    action = parser.add_mutually_exclusive_group()
    for option, what in (
        ("--check", "change nothing, say whether these patches, or others, can be applied"),
        ("--revert", "take the patches out"),
        ("--status", "change nothing, say what is applied to which file"),
    ):
        action.add_argument(option, action="store_true", help=what)
    action.add_argument(
        "--write-manifest",
        metavar="VERSION",
        help="for porting: write the manifest of patches/ENGINE/VERSION from an unpatched source",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Do what the command line asks for; return the exit status."""
    engine = find(args.engine, args.target and args.target.resolve())
    print(engine)
    if args.write_manifest:
        folder = PATCHES / engine.name / args.write_manifest
        print(f"wrote {PatchSet(folder, engine.root, by_hash=False).write_manifest()}")
        return 0
    changing = not (args.check or args.status)
    with exclusive(engine.root) if changing else contextlib.nullcontext():
        found = choose(engine, args.use)
        how = "" if found.by_hash else ", of another version: no hashes to check"
        print(f"patches: {found.folder}{how}")
        if args.status:
            print(f"{found.state.value}:")
            for name, paths in found.patches.items():
                for path in paths:
                    print(f"  {name:<26} {path}: {found.states[path].value}")
            return 0 if found.state is State.PATCHED else 1
        print(apply(engine.root, found, revert=args.revert, check=args.check, use=args.use))
    if changing and not (args.revert or args.target or importlib.util.find_spec("engine_ext")):
        print(f"note: a patched {engine.name} imports engine_ext; install it into this Python too")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return run(args)
    except HalfDone as error:
        print(f"failed halfway: {error}", file=sys.stderr)
        return 3
    except (Refused, OSError) as error:
        print(f"refused, nothing was changed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
