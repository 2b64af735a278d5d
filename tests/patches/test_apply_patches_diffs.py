"""Diffs: what is read, what fits, and what is refused."""

from __future__ import annotations

import difflib
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import apply_patches
from scripts.apply_patches import Hunk, PatchSet, Refused, State
from tests.support.cases import in_one_test

HEADER = b"--- a/x.py\n+++ b/x.py\n"
LINES = [b"%d\n" % k for k in range(10)]
CONTENT = b"".join(LINES)
INSERT = HEADER + b"@@ -4,2 +4,3 @@ class X:\n 3\n+new\n 4\n"


def hunks_of(diff: bytes) -> list[Hunk]:
    ((path, hunks),) = apply_patches.parse_diff(diff).items()
    assert path == "x.py"
    return hunks


def refusal(before: list[str], after: list[str], context: int) -> str:
    """Check that hunks lead from one text to the other and back; why not, if they are refused."""
    old, new = "".join(before).encode(), "".join(after).encode()
    diff = "".join(difflib.unified_diff(before, after, "a/x.py", "b/x.py", n=context)).encode()
    try:
        hunks = hunks_of(diff)
        found = apply_patches.apply_hunks(old, hunks)
        back = apply_patches.apply_hunks(new, [hunk.reversed() for hunk in hunks])
    except Refused as error:
        return str(error)
    assert (found, back) == (new, old)
    return ""


marked = st.sampled_from(["", "+", "-- ", "--- a/", "@@ -1 +1 @@", " "])
distinct = st.lists(st.tuples(marked, st.integers(0, 60)), unique_by=lambda line: line[1])
repeated = st.lists(st.sampled_from(["a\n", "b\n", "c\r\n", "\n", "+\n", "-- x\n"]), max_size=30)


@pytest.mark.slow
@given(lines=distinct, before=st.randoms(), after=st.randoms(), context=st.integers(1, 3))
def test_what_difflib_writes_leads_there_and_back(
    lines: list[tuple[str, int]], before: random.Random, after: random.Random, context: int
) -> None:
    texts = [f"{mark}{number}\n" for mark, number in lines]
    old, new = ([text for text in texts if draw.random() < 0.8] for draw in (before, after))
    why = refusal(old, new, context)
    assert not why or old == new or "no context" in why


@given(before=repeated, after=repeated)
def test_lines_that_repeat_are_never_mistaken(before: list[str], after: list[str]) -> None:
    why = refusal(before, after, 2)
    assert not why or before == after or "no context" in why or "more than once" in why


def test_text_before_the_first_file_is_a_comment() -> None:
    assert apply_patches.parse_diff(b"Why.\n\n" + INSERT) == apply_patches.parse_diff(INSERT)


def test_several_files() -> None:
    diff = INSERT + INSERT.replace(b"x.py", b"sub/y.py")
    assert list(apply_patches.parse_diff(diff)) == ["x.py", "sub/y.py"]


def test_lines_may_have_moved() -> None:
    for above in (b"", b"more\n"):
        found = apply_patches.apply_hunks(above + CONTENT, hunks_of(INSERT))
        assert found == above + CONTENT.replace(b"3\n", b"3\nnew\n")


@in_one_test("content", [CONTENT * 2, b"3\n4\n3\n4\n", CONTENT + b"3\n4\n"])
def test_a_hunk_that_fits_twice_is_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="more than once"):
        apply_patches.apply_hunks(content, hunks_of(INSERT))


def test_places_that_overlap_are_two() -> None:
    with pytest.raises(Refused, match="more than once"):
        apply_patches.apply_hunks(b"a\na\na\n", [Hunk(b"a\na\n", b"a\nb\na\n")])


def test_hunks_keep_their_order() -> None:
    second = b"@@ -8,2 +9,3 @@\n 7\n+last\n 8\n"
    swapped = b"".join(LINES[5:] + LINES[:5])
    with pytest.raises(Refused, match="hunk 2 is not in order"):
        apply_patches.apply_hunks(swapped, hunks_of(INSERT + second))


def test_hunks_may_touch_but_not_overlap() -> None:
    hunks = [Hunk(b"1\n2\n", b"1\n"), Hunk(b"3\n4\n", b"4\n")]
    assert apply_patches.apply_hunks(b"1\n2\n3\n4\n", hunks) == b"1\n4\n"
    with pytest.raises(Refused, match="not in order"):
        apply_patches.apply_hunks(b"1\n2\n3\n", [hunks[0], Hunk(b"2\n3\n", b"3\n")])


@in_one_test(
    "content",
    [
        CONTENT.replace(b"4", b"four"),
        CONTENT.replace(b"3", b"13"),
        CONTENT.replace(b"3\n", b"3 \n"),
    ],
)
def test_other_context_does_not_fit(content: bytes) -> None:
    with pytest.raises(Refused, match="hunk 1 does not fit"):
        apply_patches.apply_hunks(content, hunks_of(INSERT))


@in_one_test(
    ("diff", "message"),
    [
        (b"", "expected '--- a/PATH'"),
        (b"only words\n", "expected '--- a/PATH'"),
        (HEADER, "expected '--- a/PATH'"),
        (b"--- a/x.py\n", "expected '--- a/PATH'"),
        (INSERT.replace(b"b/x.py", b"b/y.py"), "of the same file"),
        (INSERT.replace(b"a/x.py", b"/dev/null"), "expected '--- a/PATH'"),
        (INSERT.replace(b"b/x.py", b"/dev/null"), "expected '--- a/PATH'"),
        (INSERT.replace(b"b/x.py", b"/dev/null") + INSERT, "expected '--- a/PATH'"),
        (INSERT.replace(b"x.py", b"../x.py"), "not a path inside"),
        (INSERT.replace(b"x.py", b"/x.py"), "expected '--- a/PATH'"),
        (INSERT + INSERT, "comes twice"),
        (HEADER + b"@@ nonsense @@\n", "not the header"),
        (INSERT + b"@@ nonsense @@\n", "other lines than its header"),
        (INSERT + b"--- a/y.py\n+++ b/z.py\n", "other lines than its header"),
        (INSERT + b"diff --git a/y.py b/y.py\n", "other lines than its header"),
        (HEADER + b"@@ -4,2 +4,3 @@\n 3\n+new\n", "other lines than its header"),
        (HEADER + b"@@ -4,1 +4,2 @@\n 3\n+new\n 4\n", "other lines than its header"),
        (HEADER + b"@@ -4,1 +4,2 @@\n 3\n 4\n", "other lines than its header"),
        (HEADER + b"@@ -4,1 +4,1 @@\n-3\n+new\n", "no context"),
        (HEADER + b"@@ -4,1 +4,2 @@\n+3\n 4\n\\ No newline at end of file\n", "other lines than"),
        (INSERT.removesuffix(b"\n"), "no last line end"),
    ],
)
def test_malformed(diff: bytes, message: str) -> None:
    with pytest.raises(Refused, match=message):
        apply_patches.parse_diff(diff)


def test_patches_that_fit_both_ways_are_refused(tmp_path: Path) -> None:
    """Without hashes nobody can say whether such a file is patched."""
    (tmp_path / "x.py").write_text("a\nold\nb\nelsewhere\na\nb\n")
    (tmp_path / "0001-x.patch").write_bytes(HEADER + b"@@ -1,3 +1,2 @@\n a\n-old\n b\n")
    assert PatchSet(tmp_path, tmp_path, by_hash=False).states == {"x.py": State.FOREIGN}
