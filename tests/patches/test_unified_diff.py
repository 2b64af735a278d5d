"""Unified diffs: what is read, what fits, and what is an error."""

from __future__ import annotations

import difflib

import pytest
import unified_diff
from hypothesis import given
from hypothesis import strategies as st
from unified_diff import DiffError, FileDiff

HEADER = b"--- a/x.py\n+++ b/x.py\n"
LINES = [b"%d\n" % k for k in range(10)]
CONTENT = b"".join(LINES)
INSERT = HEADER + b"@@ -4,2 +4,3 @@ class X:\n 3\n+new\n 4\n"


def one(diff: bytes) -> FileDiff:
    (file,) = unified_diff.parse(diff)
    return file


def made(before: list[str], after: list[str], context: int) -> bytes:
    return "".join(difflib.unified_diff(before, after, "a/x.py", "b/x.py", n=context)).encode()


texts = st.lists(st.sampled_from(["a\n", "b\n", "c\r\n", "\n", "+\n", "-- x\n"]), max_size=30)


@given(before=texts, after=texts, context=st.integers(1, 3))
def test_what_difflib_writes_leads_there_and_back(
    before: list[str], after: list[str], context: int
) -> None:
    diff = made(before, after, context)
    old, new = "".join(before).encode(), "".join(after).encode()
    try:
        file = one(diff)
    except DiffError:
        # An empty diff, or one that replaces everything and so has no context.
        assert old == new or not any(line.startswith(b" ") for line in diff.splitlines()[2:])
        return
    assert unified_diff.apply(old, file, exact=True) == new
    assert unified_diff.apply(new, file.reversed(), exact=True) == old


def test_text_before_the_first_file_is_a_comment() -> None:
    assert unified_diff.parse(b"Why.\n\n" + INSERT) == unified_diff.parse(INSERT)


def test_several_files() -> None:
    diff = INSERT + INSERT.replace(b"x.py", b"sub/y.py")
    assert [file.path for file in unified_diff.parse(diff)] == ["x.py", "sub/y.py"]


def test_exact_means_these_lines() -> None:
    file = one(INSERT)
    assert unified_diff.apply(CONTENT, file, exact=True) == CONTENT.replace(b"3\n", b"3\nnew\n")
    with pytest.raises(DiffError, match=r"x\.py: hunk 1 \(line 4\) does not fit"):
        unified_diff.apply(b"more\n" + CONTENT, file, exact=True)
    moved = unified_diff.apply(b"more\n" + CONTENT, file, exact=False)
    assert moved == b"more\n" + CONTENT.replace(b"3\n", b"3\nnew\n")


def test_a_hunk_that_fits_twice_is_an_error() -> None:
    with pytest.raises(DiffError, match="more than once"):
        unified_diff.apply(CONTENT * 2, one(INSERT), exact=False)


def test_hunks_keep_their_order() -> None:
    second = b"@@ -8,2 +9,3 @@\n 7\n+last\n 8\n"
    swapped = b"".join(LINES[5:] + LINES[:5])
    with pytest.raises(DiffError, match="not in order"):
        unified_diff.apply(swapped, one(INSERT + second), exact=False)


def test_other_context_does_not_fit() -> None:
    for exact in (True, False):
        with pytest.raises(DiffError, match="does not fit"):
            unified_diff.apply(CONTENT.replace(b"4", b"four"), one(INSERT), exact=exact)


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        (b"", "no file in it"),
        (b"only words\n", "no file in it"),
        (HEADER, "no hunks"),
        (b"--- a/x.py\n", "expected"),
        (b"--- a/x.py\n+++ b/y.py\n", "not renamed"),
        (b"--- /dev/null\n+++ b/x.py\n", "does not start with"),
        (b"--- a/../x.py\n+++ b/../x.py\n", "not a path inside"),
        (b"--- a//x.py\n+++ b//x.py\n", "not a path inside"),
        (HEADER + b"@@ nonsense @@\n", "not the header"),
        (HEADER + b"@@ -4,2 +4,3 @@\n 3\n+new\n", "shorter than its header"),
        (HEADER + b"@@ -4,1 +4,2 @@\n 3\n+new\n 4\n", "neither a hunk nor a file"),
        (HEADER + b"@@ -4,1 +4,1 @@\n-3\n+new\n", "no context"),
        (HEADER + b"@@ -4,1 +4,2 @@\n 3\n 4\n", "other lines than its header"),
        (HEADER + b"@@ -4,1 +4,2 @@\n+3\n 4\n\\ No newline at end of file\n", "last line end"),
    ],
)
def test_malformed(diff: bytes, message: str) -> None:
    with pytest.raises(DiffError, match=message):
        unified_diff.parse(diff)
