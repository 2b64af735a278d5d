"""The source patches of one engine version: read from ``patches/``, compared with a source tree."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import unified_diff
from file_swap import Change, sha256
from unified_diff import DiffError, FileDiff

MANIFEST: Final = "manifest.json"
_NUMBERED: Final = re.compile(r"(\d{4})-[a-z0-9-]+\.patch")


class PatchSetError(ValueError):
    """A folder of patches is not what it should be; the message says how."""


class State(enum.Enum):
    """What a file, or a whole source tree, is to a patch set."""

    ORIGINAL = "not applied"
    PATCHED = "applied"
    MIXED = "applied to some files only"
    FOREIGN = "neither the released source nor the patched one"


@dataclasses.dataclass(frozen=True)
class Hashes:
    """SHA-256, in hexadecimal, of a file before and after all patches."""

    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class PatchSet:
    """The patches for one version.

    Attributes:
        folder: where they lie.
        version: of the engine.
        patches: by file name, in order.
        hashes: by path, for every file that a patch touches.
    """

    folder: Path
    version: str
    patches: dict[str, list[FileDiff]]
    hashes: dict[str, Hashes]

    @property
    def paths(self) -> list[str]:
        return list(self.hashes)

    def states(self, root: Path, *, by_hash: bool) -> dict[str, State]:
        """The state of every file below `root`: ORIGINAL, PATCHED or FOREIGN.

        Args:
            root: where the paths begin.
            by_hash: only the released bytes are ORIGINAL. Otherwise every file is that the
                patches fit: the source of another version.
        """
        return {path: self._state(root, path, by_hash) for path in self.paths}

    def _state(self, root: Path, path: str, by_hash: bool) -> State:
        try:
            content = (root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return State.FOREIGN
        if by_hash:
            hashes, found = self.hashes[path], sha256(content)
            known = {hashes.before: State.ORIGINAL, hashes.after: State.PATCHED}
            return known.get(found, State.FOREIGN)
        for state, revert in ((State.ORIGINAL, False), (State.PATCHED, True)):
            try:
                self._rewrite(path, content, revert=revert, exact=False)
            except DiffError:
                continue
            return state
        return State.FOREIGN

    def change(self, root: Path, path: str, *, revert: bool, by_hash: bool) -> Change:
        """A file's content before and after it is patched, or reverted.

        Raises:
            PatchSetError: the patches and the manifest disagree.
            DiffError: a patch does not fit.
        """
        before = (root / path).read_bytes()
        after = self._rewrite(path, before, revert=revert, exact=by_hash)
        if by_hash:
            hashes = self.hashes[path]
            if sha256(after) != (hashes.before if revert else hashes.after):
                raise PatchSetError(f"{self.folder}: {MANIFEST} has another hash for {path}")
        return Change(before, after)

    def _rewrite(self, path: str, content: bytes, *, revert: bool, exact: bool) -> bytes:
        diffs = [diff for files in self.patches.values() for diff in files if diff.path == path]
        for diff in reversed(diffs) if revert else diffs:
            content = unified_diff.apply(content, diff.reversed() if revert else diff, exact=exact)
        return content


def overall(states: Sequence[State]) -> State:
    """The state of a tree from those of its files."""
    distinct = set(states)
    if State.FOREIGN in distinct:
        return State.FOREIGN
    return distinct.pop() if len(distinct) == 1 else State.MIXED


def read_patches(folder: Path) -> dict[str, list[FileDiff]]:
    """The numbered patches of a folder, in order.

    Raises:
        PatchSetError: there are none, one is malformed, or a name has no number or a second one's.
    """
    patches: dict[str, list[FileDiff]] = {}
    numbers: set[str] = set()
    for file in sorted(folder.glob("*.patch")):
        match = _NUMBERED.fullmatch(file.name)
        if match is None or match[1] in numbers:
            raise PatchSetError(f"{file}: not called like 0001-what.patch, or a number comes twice")
        numbers.add(match[1])
        try:
            patches[file.name] = unified_diff.parse(file.read_bytes())
        except DiffError as error:
            raise PatchSetError(f"{file}: {error}") from error
    if not patches:
        raise PatchSetError(f"{folder}: no patches")
    return patches


def read(folder: Path) -> PatchSet:
    """A patch set.

    Raises:
        PatchSetError: the folder is not complete, or does not agree with itself.
    """
    patches = read_patches(folder)
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        hashes = {path: Hashes(entry["before"], entry["after"]) for path, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchSetError(f"{folder / MANIFEST}: {error!r}") from error
    touched = {diff.path for files in patches.values() for diff in files}
    if touched != set(hashes):
        odd = ", ".join(sorted(touched ^ set(hashes)))
        raise PatchSetError(f"{folder}: {MANIFEST} and the patches name different files: {odd}")
    return PatchSet(folder, folder.name, patches, hashes)


def write_manifest(folder: Path, root: Path) -> Path:
    """Write the hashes of the files that the patches of a folder touch.

    Args:
        folder: the patches; its name is the version.
        root: where the paths begin in a released, unpatched source.

    Raises:
        PatchSetError: a file is missing.
        DiffError: a patch does not fit the source, line by line.
    """
    patches = read_patches(folder)
    unhashed = PatchSet(folder, folder.name, patches, {})
    hashes: dict[str, dict[str, str]] = {}
    for path in sorted({diff.path for files in patches.values() for diff in files}):
        try:
            before = (root / path).read_bytes()
        except OSError as error:
            raise PatchSetError(str(error)) from error
        after = unhashed._rewrite(path, before, revert=False, exact=True)
        hashes[path] = {"before": sha256(before), "after": sha256(after)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": hashes}, indent=2) + "\n", encoding="utf-8")
    return manifest
