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
then shows "applied to some files only". The next run recognises each file by its hash, patches the
rest (or, with --revert, takes the patches out) and removes the temporary files. A second run
changes nothing. Only the standard library is used. patches/README.md describes each patch.

exit status:
  0  done, or nothing to do; --check: it would work; --status: applied
  1  refused, and nothing was changed; --status: not applied
  2  wrong usage
  3  failed halfway and could not be undone; the message says what to do next
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import fcntl
import hashlib
import importlib.util
import itertools
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
_NEW: Final = ".apply_patches.new"
_VERSION: Final = re.compile(r"^__version__\b[^\n]*=\s*['\"](\d[^'\"+\n]*)", re.MULTILINE)


class Refused(Exception):
    """Something is not as it has to be, and nothing was changed; so too if OSError is raised."""


class HalfDone(Exception):
    """Some files are changed and others are not; the next run continues from there."""


class State(enum.Enum):
    """How a file, or a whole source tree, compares with a patch set."""

    ORIGINAL = "not applied"
    PATCHED = "applied"
    MIXED = "applied to some files only"
    FOREIGN = "neither the released source nor the patched one"


class Hunk(NamedTuple):
    old: bytes  # lines with their context
    new: bytes

    def reversed(self) -> Hunk:
        return Hunk(self.new, self.old)


def parse_diff(diff: bytes) -> dict[str, list[Hunk]]:
    """Return the hunks by path of a unified diff, which must have context and only change files."""
    found: dict[str, list[Hunk]] = {}
    comment, *files = _FILE.split(diff)
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
            if counts != (len(old), len(new)) or not {line[0] for line in lines} <= set(b" +-"):
                raise Refused(f"{name}: a hunk has other lines than its header says")
            if b"\n " not in b"\n" + text or not text.endswith(b"\n"):
                raise Refused(f"{name}: a hunk has no context, or no last line end")
            found[name].append(Hunk(b"".join(old), b"".join(new)))
    return found


def apply_hunks(content: bytes, hunks: Iterable[Hunk]) -> bytes:
    """Return a file's content after its hunks; the old lines of each must be there exactly once."""
    text, after, done = b"\n" + content, b"", 0  # every line has a line end in front
    for number, (old, new) in enumerate(hunks, 1):
        at = text.find(b"\n" + old)
        if at < 0:
            raise Refused(f"hunk {number} does not fit")
        if at + 1 < done or text.find(b"\n" + old, at + 1) >= 0:
            raise Refused(f"hunk {number} is not in order, or fits more than once")
        after += text[done : at + 1] + new
        done = at + 1 + len(old)
    return (after + text[done:])[1:]


class PatchSet:
    """The patches for one version, and how a source compares with them, by hash or by what fits."""

    def __init__(self, folder: Path, root: Path, *, by_hash: bool) -> None:
        self.folder, self.version, self.by_hash = folder, folder.name, by_hash
        self.patches: dict[str, dict[str, list[Hunk]]] = {}  # by file name, then by path
        # A version has its own of those whose context differs.
        self._files = {f.name: f for f in (*folder.parent.glob("*.patch"), *folder.glob("*.patch"))}
        for number, (_, file) in enumerate(sorted(self._files.items()), 1):
            if not re.fullmatch(rf"{number:04}-[a-z0-9-]+\.patch", file.name):
                raise Refused(f"{file}: expected a name like {number:04}-what.patch")
            try:
                self.patches[file.name] = parse_diff(file.read_bytes())
            except Refused as error:
                raise Refused(f"{file}: {error}") from None
        if not self.patches:
            raise Refused(f"{folder}: no patches")
        files = {path: root / path for path in sorted(set().union(*self.patches.values()))}
        self.contents = {p: f.read_bytes() if f.is_file() else b"" for p, f in files.items()}
        self._manifest = folder / "manifest.json"
        self._hashes: dict[str, dict[str, State]] = {}
        if by_hash:
            self._read_manifest()
        self.states = {path: self._state(path) for path in self.contents}
        self.foreign = [path for path, s in self.states.items() if s is State.FOREIGN]
        distinct = set(self.states.values())
        several = State.FOREIGN if self.foreign else State.MIXED
        self.state = distinct.pop() if len(distinct) == 1 else several

    def _read_manifest(self) -> None:
        try:
            for path, entry in json.loads(self._manifest.read_bytes())["files"].items():
                before, after = entry["before"], entry["after"]
                self._hashes[path] = {before: State.ORIGINAL, after: State.PATCHED}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"{self._manifest}: {error!r}") from error
        if set(self._hashes) != set(self.contents):
            raise Refused(f"{self._manifest} and the patches name different files")

    def write_manifest(self) -> Path:
        """Write the hashes of an unpatched source, and of what the patches make of it."""
        hashes = {
            path: {"before": _sha256(before), "after": _sha256(self.rewritten(path, State.PATCHED))}
            for path, before in self.contents.items()
        }
        self.folder.mkdir(exist_ok=True)
        self._manifest.write_text(json.dumps({"files": hashes}, indent=2) + "\n")
        return self._manifest

    def _state(self, path: str) -> State:
        if self.by_hash:
            return self._hashes[path].get(_sha256(self.contents[path]), State.FOREIGN)
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
                raise Refused(f"{self._files[name]}: {path}: {error}") from None
        if self.by_hash and self._hashes[path].get(_sha256(content)) is not wanted:
            raise Refused(f"{self.folder}: manifest.json has another hash for {path}")
        return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Engine(NamedTuple):
    name: str
    root: Path  # holds the package
    version: str  # empty if a checkout records none


def find(name: str, target: Path | None) -> Engine:
    """Return the engine in a folder, or the one that this Python has."""
    if target is None:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise Refused(f"{sys.executable} has no {name}; use its Python, or --target its folder")
        places = [Path(next(iter(spec.submodule_search_locations)))]
    else:
        places = [target, target / name, target / "python" / name]
        places += sorted(target.glob(f"lib/python3*/site-packages/{name}"))
    for package in places:
        if package.name == name and (package / "__init__.py").is_file():
            files = [package / "_version.py", package / "version.py"]
            texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
            version = _VERSION.search("\n".join(texts))
            return Engine(name, package.resolve().parent, version[1] if version else "")
    raise Refused(f"no {name} package there (looked for {', '.join(map(str, places))})")


def choose(engine: Engine, use: str | None = None) -> PatchSet:
    """Return the patches of version `use`, of the engine's version, or of the nearest that fits."""

    def distance(folder: Path) -> list[int]:  # the major number first
        numbers = [re.findall(r"\d+", v)[:3] for v in (folder.name, engine.version)]
        return [abs(int(a) - int(b)) for a, b in zip(*numbers, strict=False)]

    every = [file.parent for file in sorted(PATCHES.glob(f"{engine.name}/*/manifest.json"))]
    folders = sorted((folder for folder in every if use in (None, folder.name)), key=distance)
    for by_hash, folder in itertools.product((True, False), folders):
        found = PatchSet(folder, engine.root, by_hash=by_hash)
        # A checkout might not record its version; its files' hashes identify it.
        fits = found.state is not State.FOREIGN and not (by_hash and engine.version)
        if fits or (by_hash and found.version == engine.version):
            return found
    have = ", ".join(folder.name for folder in every) or "none"
    lines = [f"no patches for this version; there are patches for: {have}"]
    for folder in folders[:1]:
        foreign = PatchSet(folder, engine.root, by_hash=False).foreign
        lines += [f"  {path}: those for {folder.name} do not fit" for path in foreign]
    raise Refused("\n".join([*lines, f"{PATCHES / 'README.md'} says how to port them"]))


def apply(root: Path, found: PatchSet, *, revert: bool, check: bool, use: str | None) -> str:
    """Apply or revert the patches, or only check whether that works; return what was done."""
    if found.foreign:
        lines = [f"these files are {State.FOREIGN.value}:", *found.foreign]
        again = f"Reinstall {found.folder.parent.name} {found.version}, or port the patches to your"
        raise Refused("\n  ".join(lines) + f"\n{again} changes ({PATCHES / 'README.md'})")
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
        untested = "the patches fit, but nobody has tested them on this version"
        raise Refused(f"{untested}: --use {found.version} applies them")
    _replace_all(before, after)
    return f"{'reverted' if revert else 'applied'}: {count} changed"


def _replace_all(before: dict[Path, bytes], after: dict[Path, bytes]) -> None:
    """Replace all files or none, and none in place: it might be linked to a package cache."""
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
            advice = "Once the cause is gone, run this again, or with --revert"
            raise HalfDone(f"{error}; then {second}. {advice}") from error
        finally:
            with contextlib.suppress(OSError):  # the next run removes what remains
                _remove_temporaries(before)
        raise


def _write_temporary(file: Path, content: bytes) -> None:
    status = file.stat()
    with open(f"{file}{_NEW}", "wb") as handle:
        with contextlib.suppress(OSError):  # only root can give files away
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
    os.replace(f"{file}{_NEW}", file)


def _remove_temporaries(files: Iterable[Path]) -> None:
    for file in (Path(f"{file}{_NEW}") for file in files):
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


def run(args: argparse.Namespace) -> int:
    engine = find(args.engine, args.target and args.target.resolve())
    print(f"{engine.name} {engine.version or '(no version recorded)'} in {engine.root}")
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
    doc = (__doc__ or "").replace(_CLONED_COMMAND, COMMAND)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=COMMAND, description=doc, formatter_class=raw)
    add, action = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("engine", choices=("vllm", "sglang"))
    target_help = """a source checkout, the package's folder, the folder that holds it, or a virtual
        environment (default: the engine that this Python would import)"""
    add("--target", type=Path, metavar="DIR", help=target_help)
    use_help = "apply the patches of another version if they fit; hashes cannot be checked then"
    add("--use", metavar="VERSION", help=use_help)
    check_help = "change nothing, say whether these patches, or others, can be applied"
    action("--check", action="store_true", help=check_help)
    action("--revert", action="store_true", help="take the patches out")
    status_help = "change nothing, say what is applied to which file"
    action("--status", action="store_true", help=status_help)
    manifest_help = "write the manifest of patches/ENGINE/VERSION from an unpatched source"
    action("--write-manifest", metavar="VERSION", help=f"for porting: {manifest_help}")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (HalfDone, Refused, OSError) as error:
        halfway = isinstance(error, HalfDone)
        what = "failed halfway" if halfway else "refused, nothing was changed"
        print(f"{what}: {error}", file=sys.stderr)
        return 3 if halfway else 1


if __name__ == "__main__":
    sys.exit(main())
