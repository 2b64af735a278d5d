"""Unified diffs, read and applied strictly, in memory.

No `patch` or `git` is needed: the images that engines run in often have neither, and `patch`
guesses where context does not match. Here a hunk that does not match is an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final

_HUNK: Final = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")


class DiffError(ValueError):
    """A diff is malformed or does not fit; the message says where."""


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Lines that replace others; both sides hold the context.

    Attributes:
        old_start: line of the first old line, from 1.
        new_start: line of the first new line, from 1.
        old: lines before, with their line ends.
        new: lines after, with their line ends.
    """

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        return Hunk(self.new_start, self.old_start, self.new, self.old)


@dataclasses.dataclass(frozen=True)
class FileDiff:
    """The changes of one file.

    Attributes:
        path: relative, with forward slashes; the ``a/`` and ``b/`` of the diff are gone.
        hunks: in the order of the file.
    """

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        return FileDiff(self.path, tuple(hunk.reversed() for hunk in self.hunks))


def parse(diff: bytes) -> list[FileDiff]:
    """The files of a unified diff; text before the first ``---`` line is a comment.

    Raises:
        DiffError: it is malformed, makes, removes or renames a file, or a hunk has no context.
    """
    lines = diff.splitlines(keepends=True)
    files: list[FileDiff] = []
    at = next((k for k, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    while at < len(lines):
        if at + 1 == len(lines) or not lines[at + 1].startswith(b"+++ "):
            raise DiffError(f"line {at + 1}: expected '--- a/PATH' and '+++ b/PATH'")
        path = _path(lines[at], b"--- a/")
        if path != _path(lines[at + 1], b"+++ b/"):
            raise DiffError(f"line {at + 1}: two names; a file is changed, not renamed")
        hunks: list[Hunk] = []
        at += 2
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _hunk(lines, at)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"line {at + 1}: no hunks for {path}")
        files.append(FileDiff(path, tuple(hunks)))
        if at < len(lines) and not lines[at].startswith(b"--- "):
            raise DiffError(f"line {at + 1}: neither a hunk nor a file")
    if not files:
        raise DiffError("no file in it")
    return files


def _path(line: bytes, prefix: bytes) -> str:
    if not line.startswith(prefix):
        raise DiffError(f"{line!r} does not start with {prefix!r}")
    path = line[len(prefix) :].rstrip().decode()
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise DiffError(f"{path!r} is not a path inside the package")
    return path


def _hunk(lines: Sequence[bytes], at: int) -> tuple[Hunk, int]:
    """The hunk whose header is at `at`, and the line after it."""
    header = _HUNK.fullmatch(lines[at].rstrip(b"\r\n"))
    if header is None:
        raise DiffError(f"line {at + 1}: not the header of a hunk")
    old_start, new_start = int(header[1]), int(header[3])
    old_left, new_left = (int(header[k]) if header[k] else 1 for k in (2, 4))
    old: list[bytes] = []
    new: list[bytes] = []
    context = 0
    at += 1
    while len(old) < old_left or len(new) < new_left:
        mark = lines[at][:1] if at < len(lines) else b""
        if mark not in (b" ", b"-", b"+"):
            raise DiffError(f"line {at + 1}: the hunk is shorter than its header says")
        if mark != b"+":
            old.append(lines[at][1:])
        if mark != b"-":
            new.append(lines[at][1:])
        context += mark == b" "
        at += 1
    if (len(old), len(new)) != (old_left, new_left) or not context:
        raise DiffError(f"line {at}: the hunk has other lines than its header says, or no context")
    if at < len(lines) and lines[at].startswith(b"\\"):
        raise DiffError(f"line {at + 1}: files without a last line end are not supported")
    return Hunk(old_start, new_start, tuple(old), tuple(new)), at


def apply(content: bytes, diff: FileDiff, *, exact: bool) -> bytes:
    """The content after a diff.

    Args:
        content: of the file before.
        diff: of this file.
        exact: hunks must stand on the lines that the diff names. Otherwise each may stand on any
            lines after the hunk before it, but its old lines must be in the file only once.

    Raises:
        DiffError: a hunk does not fit; names it.
    """
    lines = content.splitlines(keepends=True)
    after: list[bytes] = []
    done = 0
    for number, hunk in enumerate(diff.hunks, 1):
        places = [hunk.old_start - 1] if exact else range(len(lines) - len(hunk.old) + 1)
        fits = [k for k in places if tuple(lines[k : k + len(hunk.old)]) == hunk.old]
        if len(fits) != 1 or fits[0] < done:
            why = "does not fit" if not fits else "is not in order, or fits more than once"
            raise DiffError(f"{diff.path}: hunk {number} (line {hunk.old_start}) {why}")
        after += lines[done : fits[0]]
        after += hunk.new
        done = fits[0] + len(hunk.old)
    return b"".join(after + lines[done:])
