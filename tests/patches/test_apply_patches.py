"""The patch tool: its command line on a small engine, its diffs, and how it replaces files."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import apply_patches
from scripts.apply_patches import Hunk, PatchSet, Refused, State
from tests.patches import fake_engine
from tests.patches.fake_engine import FILES, VERSION, read

PATCHED = fake_engine.patched_source()
ROOT = Path(__file__).parents[2]
Tool = Callable[..., tuple[int, str]]

# Runs the tool and dies, as by SIGKILL, at the n-th call that writes something.
KILLED = """
import os, sys
from pathlib import Path
from scripts import apply_patches

left = int(sys.argv[1])
apply_patches.PATCHES = Path(sys.argv[2])

def deadly(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return function(*args, **kwargs)
    return call

os.fchmod, os.fsync, os.replace = map(deadly, (os.fchmod, os.fsync, os.replace))
Path.unlink = deadly(Path.unlink)
sys.exit(apply_patches.main(sys.argv[3:]))
"""


@pytest.fixture
def tool(source: Path, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs the tool on the small engine; its exit status and all that it said."""

    def run(*options: str, target: Path = source) -> tuple[int, str]:
        code = apply_patches.main(["vllm", "--target", str(target), *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def set_version(source: Path, version: str) -> dict[str, str]:
    text = f'__version__ = version = "{version}"\n'
    (source / "vllm" / "version.py").write_text(text)
    return {**FILES, "vllm/version.py": text}


def test_apply_status_revert_apply(tool: Tool, source: Path) -> None:
    assert tool("--status")[0] == 1
    for _ in range(2):
        code, said = tool()
        assert (code, "applied: 3 of 3 files changed" in said) == (0, True)
        assert f"vllm {VERSION} in {source}" in said
        assert read(source) == PATCHED
        code, said = tool("--status")
        assert (code, said.count(": applied\n")) == (0, 4)
        code, said = tool("--revert")
        assert (code, "reverted: 3 of 3 files changed" in said) == (0, True)
        assert read(source) == FILES


def test_twice_is_once(tool: Tool, source: Path) -> None:
    tool()
    times = [file.stat().st_mtime_ns for file in sorted(source.rglob("*.py"))]
    code, said = tool()
    assert (code, "nothing to do: already applied" in said) == (0, True)
    assert [file.stat().st_mtime_ns for file in sorted(source.rglob("*.py"))] == times
    tool("--revert")
    code, said = tool("--revert")
    assert (code, "nothing to do: the patches are not in" in said) == (0, True)
    assert read(source) == FILES


def test_check_changes_nothing(tool: Tool, source: Path) -> None:
    code, said = tool("--check")
    assert (code, "can be applied: 3 of 3 files would change" in said) == (0, True)
    assert read(source) == FILES
    tool()
    code, said = tool("--check")
    assert (code, "already applied" in said) == (0, True)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("options", [(), ("--check",), ("--revert",)])
def test_a_tampered_file_is_refused(
    tool: Tool, source: Path, patched: bool, options: tuple[str, ...]
) -> None:
    """Even where the patches would fit: a byte outside their context."""
    if patched:
        tool()
    file = source / "vllm" / "one.py"
    file.write_bytes(file.read_bytes() + b"# mine\n")
    before = read(source)
    code, said = tool(*options)
    assert code == 1
    assert "refused, nothing was changed" in said
    assert "vllm/one.py" in said
    assert "two.py" not in said
    assert "Reinstall vllm" in said
    assert read(source) == before
    code, said = tool("--status")
    assert (code, "one.py: neither the released" in said) == (1, True)


def test_a_missing_file_is_refused(tool: Tool, source: Path) -> None:
    (source / "vllm" / "deep" / "two.py").unlink()
    before = read(source)
    code, said = tool()
    assert (code, "vllm/deep/two.py" in said) == (1, True)
    assert read(source) == before


def test_half_applied_is_completed_or_undone(tool: Tool, source: Path) -> None:
    """As after one file was restored by hand: every file's hash is known, so both are safe."""
    for options, wanted in (((), PATCHED), (("--revert",), FILES)):
        tool()
        (source / "vllm" / "one.py").write_bytes(FILES["vllm/one.py"].encode())
        code, said = tool("--status")
        assert (code, "applied to some files only" in said) == (1, True)
        assert tool(*options)[0] == 0
        assert read(source) == wanted


@pytest.mark.parametrize("layout", ["", "vllm", "python", "lib/python3.11/site-packages"])
def test_where_the_engine_may_lie(tool: Tool, source: Path, layout: str, tmp_path: Path) -> None:
    """The folder that holds it, the package, a checkout with a python folder, an environment."""
    target = source / layout if layout == "vllm" else source
    if layout not in ("", "vllm"):
        target = tmp_path / "tree"
        (target / layout).parent.mkdir(parents=True)
        source.rename(target / layout)
        source = target / layout
    assert tool(target=target)[0] == 0
    assert read(source) == PATCHED


def test_no_engine_there(tool: Tool, tmp_path: Path) -> None:
    code, said = tool(target=tmp_path)
    assert (code, "no vllm package there" in said) == (1, True)


def test_the_engine_of_this_python(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = type("Spec", (), {"submodule_search_locations": [str(source / "vllm")]})
    monkeypatch.setattr(apply_patches.importlib.util, "find_spec", lambda name: found)
    assert apply_patches.main(["vllm"]) == 0
    assert read(source) == PATCHED
    monkeypatch.setattr(apply_patches.importlib.util, "find_spec", lambda name: None)
    assert apply_patches.main(["vllm"]) == 1
    assert "--target" in capsys.readouterr().err


def test_a_build_label_is_no_other_version(tool: Tool, source: Path) -> None:
    set_version(source, VERSION + "+cu130")
    code, said = tool()
    assert (code, "another version" in said) == (0, False)


def test_a_checkout_without_a_version(tool: Tool, source: Path) -> None:
    """Its files' hashes say what it is."""
    (source / "vllm" / "version.py").unlink()
    code, said = tool()
    assert (code, "no version recorded" in said) == (0, True)
    assert "another version" not in said
    assert tool("--revert")[0] == 0
    (source / "vllm" / "one.py").write_bytes(b"first\n" + FILES["vllm/one.py"].encode())
    code, said = tool()
    assert (code, f"--use {VERSION} applies them" in said) == (1, True)


def test_another_version_where_the_patches_fit(tool: Tool, source: Path) -> None:
    """`--check` says so; they go in only by name, and come out by themselves."""
    original = set_version(source, "1.2.9")
    original["vllm/one.py"] = "new = 1\n" + FILES["vllm/one.py"]
    (source / "vllm" / "one.py").write_bytes(original["vllm/one.py"].encode())
    code, said = tool("--check")
    assert (code, f"can be applied (with --use {VERSION})" in said) == (0, True)
    code, said = tool()
    assert (code, f"--use {VERSION} applies them" in said) == (1, True)
    assert read(source) == original
    assert tool("--use", VERSION)[0] == 0
    one = {"vllm/one.py": "new = 1\n" + PATCHED["vllm/one.py"]}
    assert read(source) == {**PATCHED, "vllm/version.py": original["vllm/version.py"], **one}
    assert tool("--status")[0] == 0
    assert tool("--revert")[0] == 0
    assert read(source) == original


def test_another_version_where_they_do_not_fit(tool: Tool, source: Path) -> None:
    set_version(source, "2.0.0")
    (source / "vllm" / "one.py").write_text("all = 'new'\n")
    before = read(source)
    for options in ((), ("--check",), ("--use", VERSION), ("--revert",)):
        code, said = tool(*options)
        assert (code, "no patches for this version" in said) == (1, True)
        assert f"vllm/one.py: those for {VERSION} do not fit" in said
        assert "two.py" not in said
        assert "patches/README.md" in said
    assert read(source) == before


def test_the_nearest_version_is_taken(tool: Tool, source: Path) -> None:
    folder = apply_patches.PATCHES / "vllm"
    for version in ("0.9.0", "1.2.10", "1.3.0", "2.2.3"):
        fake_engine.write_patches(folder / version, source)
    for version, nearest in [("1.2.8", "1.2.10"), ("1.9.0", "1.3.0"), ("0.1.0", "0.9.0")]:
        set_version(source, version)
        assert f"with --use {nearest}" in tool("--check")[1]


def test_patches_that_nobody_has(tool: Tool) -> None:
    code, said = tool("--use", "9.9.9")
    assert (code, f"there are patches for: {VERSION}" in said) == (1, True)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "0002-second.patch").unlink(), "name different files"),
        (
            lambda folder: (folder / "0002-twice.patch").write_text("x"),
            "expected a name like 0003-what.patch",
        ),
        (
            lambda folder: (folder / "second.patch").write_text("x"),
            "expected a name like 0003-what.patch",
        ),
        (lambda folder: (folder / "0003-third.patch").write_text("x"), "expected '--- a/PATH'"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json"),
        (
            lambda folder: (folder / "manifest.json").write_text(
                (folder / "manifest.json").read_text().replace('"after": "', '"after": "0')
            ),
            "another hash",
        ),
    ],
)
def test_a_broken_patch_set(
    tool: Tool, source: Path, break_it: Callable[[Path], object], message: str
) -> None:
    break_it(apply_patches.PATCHES / "vllm" / VERSION)
    code, said = tool()
    assert (code, message in said) == (1, True)
    assert read(source) == FILES


def test_a_manifest_is_written_from_an_unpatched_source(tool: Tool, source: Path) -> None:
    manifest = apply_patches.PATCHES / "vllm" / VERSION / "manifest.json"
    before = json.loads(manifest.read_text())
    manifest.unlink()
    assert tool("--write-manifest", VERSION)[0] == 0
    assert json.loads(manifest.read_text()) == before
    tool()
    code, said = tool("--write-manifest", VERSION)
    assert (code, "does not fit" in said) == (1, True)
    assert json.loads(manifest.read_text()) == before


def test_help_needs_no_package() -> None:
    """On any Python: nothing but the standard library."""
    command = [sys.executable, "-E", "-S", apply_patches.__file__, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    assert shown.startswith("usage: python scripts/apply_patches.py [-h]")
    for word in ("--target", "--check", "--revert", "--status", "--use", "exit status"):
        assert word in shown


@pytest.fixture
def wheel(source: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a copy of the tool that is laid out as in the wheel."""
    installed = tmp_path / "installed"
    package = installed / "delta_patches"
    shutil.copytree(apply_patches.PATCHES, package / "patches")
    shutil.copy(apply_patches.__file__, package / "__main__.py")
    (installed / "patches").mkdir()  # another project's package

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-m", "delta_patches", *arguments]
        env = {**os.environ, "PYTHONPATH": str(installed)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    return run


def test_installed_from_the_wheel(
    wheel: Callable[..., subprocess.CompletedProcess[str]], source: Path, tmp_path: Path
) -> None:
    """It takes the patches next to it."""
    target = ("vllm", "--target", str(source))
    done = wheel(*target)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"patches: {tmp_path}/installed/delta_patches/patches/vllm/{VERSION}\n" in done.stdout
    assert read(source) == PATCHED
    assert wheel(*target, "--status").returncode == 0
    assert wheel(*target, "--revert").returncode == 0
    assert read(source) == FILES
    set_version(source, "9.0.0")
    (source / "vllm" / "one.py").unlink()
    assert f"{tmp_path}/installed/delta_patches/patches/README.md says how" in wheel(*target).stderr


def test_the_help_of_the_wheel_names_its_command(
    wheel: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    shown = wheel("--help").stdout
    assert shown.startswith("usage: python -m delta_patches [-h]")
    assert "    python -m delta_patches vllm --status\n" in shown
    assert "apply_patches.py" not in shown


@pytest.mark.parametrize("folder", sorted(apply_patches.PATCHES.glob("*/*/")), ids=str)
def test_the_patches_of_this_project(folder: Path, tmp_path: Path) -> None:
    """They are read, agree with their manifest, add more than they quote, and touch one engine."""
    patches = PatchSet(folder, tmp_path, by_hash=True)
    assert set(patches.states.values()) == {State.FOREIGN}
    for files in patches.patches.values():
        for path, hunks in files.items():
            assert path.startswith(f"{folder.parent.name}/")
            for hunk in hunks:
                old, new = set(hunk.old.splitlines()), set(hunk.new.splitlines())
                assert len(old & new) <= 4
                assert len(old - new) <= 1


@pytest.mark.parametrize("file", sorted(apply_patches.PATCHES.glob("*/*/*.patch")), ids=str)
def test_the_patches_call_what_is_there(file: Path) -> None:
    engine = file.parents[1].name
    hooks = importlib.import_module(f"engine_ext.adapters.{engine}.hooks")
    added = [line for line in file.read_text().splitlines() if line.startswith("+")]
    imports = [line for line in added if "engine_ext" in line]
    assert set(imports) <= {f"+from {hooks.__package__} import hooks as {hooks.NAME}"}
    for name in re.findall(rf"{hooks.NAME}\.(\w+)\(", "\n".join(added)):
        assert callable(getattr(hooks, name))


def test_the_patches_are_listed_in_their_readme() -> None:
    text = (apply_patches.PATCHES / "README.md").read_text()
    for file in apply_patches.PATCHES.glob("*/*/*.patch"):
        assert file.name in text


# Diffs: what is read, what fits, and what is refused.

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


@pytest.mark.parametrize("content", [CONTENT * 2, b"3\n4\n3\n4\n", CONTENT + b"3\n4\n"])
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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


# All files or none: whatever fails, and wherever a run is killed.


TEMPORARY = "vllm/deep/two.py.apply_patches.new"


def fail_at(monkeypatch: pytest.MonkeyPatch, function: str, at: int, error: BaseException) -> None:
    """Let the `at`-th call of a function of `os` fail, and only that one."""
    original = getattr(os, function)
    calls = 0

    def fails(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        original(*args)

    monkeypatch.setattr(os, function, fails)


def leave_mixed(source: Path) -> dict[str, str]:
    """Leave the source as a run that is killed while it replaces files; what is in it then."""
    one = "vllm/one.py"
    (source / one).write_bytes(PATCHED[one].encode())
    (source / TEMPORARY).write_bytes(b"half of a fi")
    return read(source)


def test_a_file_linked_elsewhere_keeps_its_content_there(
    tool: Tool, source: Path, tmp_path: Path
) -> None:
    """As package managers link installed files into their caches."""
    cache = tmp_path / "cache"
    cache.mkdir()
    os.link(source / "vllm" / "one.py", cache / "one.py")
    (source / "vllm" / "deep" / "two.py").rename(cache / "two.py")
    (source / "vllm" / "deep" / "two.py").symlink_to(cache / "two.py")
    assert tool()[0] == 0
    assert read(source) == PATCHED
    assert read(cache) == {"one.py": FILES["vllm/one.py"], "two.py": FILES["vllm/deep/two.py"]}


def test_the_mode_stays(tool: Tool, source: Path) -> None:
    (source / "vllm" / "one.py").chmod(0o640)
    tool()
    assert (source / "vllm" / "one.py").stat().st_mode & 0o7777 == 0o640


def test_compiled_files_go(tool: Tool, source: Path) -> None:
    cache = source / "vllm" / "deep" / "__pycache__"
    cache.mkdir()
    for name in ("two.cpython-311.pyc", "two_more.cpython-311.pyc"):
        (cache / name).write_bytes(b"")
    tool()
    assert [file.name for file in cache.iterdir()] == ["two_more.cpython-311.pyc"]


@pytest.mark.parametrize("path", ["vllm/deep/three.py", "vllm/one.py"])
def test_a_file_that_is_changed_meanwhile(
    tool: Tool, source: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Whether it is the first or the last: the others are put back, and it stays as it is."""
    original = os.fsync

    def changes(handle: int) -> None:
        (source / path).write_text("else")
        original(handle)

    monkeypatch.setattr(os, "fsync", changes)
    code, said = tool()
    assert (code, f"{path} was changed just now" in said) == (1, True)
    assert read(source) == {**FILES, path: "else"}


@pytest.mark.parametrize("start", ["released", "patched", "mixed"])
@pytest.mark.parametrize("function", ["fchmod", "fsync", "replace"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_fails_is_taken_back(
    tool: Tool, source: Path, monkeypatch: pytest.MonkeyPatch, start: str, function: str, at: int
) -> None:
    options = ["--revert"] if start == "patched" else []
    if start == "patched":
        tool()
    elif start == "mixed":
        leave_mixed(source)
    before = {path: text for path, text in read(source).items() if path != TEMPORARY}
    with monkeypatch.context() as patched:
        fail_at(patched, function, at, OSError(28, "No space left on device"))
        code, said = tool(*options)
    if start == "mixed" and at == 3:
        assert (code, read(source)) == (0, PATCHED)  # only two files were left
        return
    assert code == 1
    assert "refused, nothing was changed: [Errno 28] No space left on device" in said
    assert read(source) == before
    assert tool(*options)[0] == 0
    assert read(source) == (FILES if options else PATCHED)


def test_an_interrupt_is_taken_back(
    tool: Tool, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "replace", 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tool()
    assert read(source) == FILES


@pytest.mark.parametrize("options", [[], ["--revert"]])
def test_what_cannot_be_taken_back_goes_on_later(
    tool: Tool, source: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    original = os.replace
    calls = 0

    def fails(*args: Path) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise PermissionError(13, "Permission denied", str(args[1]))
        original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        code, said = tool()
    assert (code, "failed halfway" in said, "run this again" in said) == (3, True, True)
    three = "vllm/deep/three.py"
    assert read(source) == {**FILES, three: PATCHED[three]}
    assert tool(*options)[0] == 0
    assert read(source) == (FILES if options else PATCHED)


@pytest.mark.parametrize("options", [[], ["--revert"]])
def test_a_mixed_state_goes_on_either_way(tool: Tool, source: Path, options: list[str]) -> None:
    before = leave_mixed(source)
    code, said = tool("--status")
    assert (code, "applied to some files only:" in said) == (1, True)
    assert said.count(": applied\n") == 2  # both patches of one file
    code, said = tool("--check")
    assert (code, "can be applied: 2 of 3 files would change" in said) == (0, True)
    assert read(source) == before
    code, said = tool(*options)
    done = "reverted: 1 of 3 files changed" if options else "applied: 2 of 3 files changed"
    assert (code, done in said) == (0, True)
    assert read(source) == (FILES if options else PATCHED)


def test_a_mixed_state_of_another_version(tool: Tool, source: Path) -> None:
    """Without hashes: the files are known by which way the patches fit them."""
    set_version(source, "1.2.9")
    before = leave_mixed(source)
    code, said = tool()
    assert (code, f"--use {VERSION} applies them" in said) == (1, True)
    assert read(source) == {path: text for path, text in before.items() if path != TEMPORARY}
    assert tool("--use", VERSION)[0] == 0
    assert read(source) == {**PATCHED, "vllm/version.py": before["vllm/version.py"]}
    leave_mixed(source)
    (source / "vllm" / "deep" / "two.py").write_bytes(FILES["vllm/deep/two.py"].encode())
    assert tool("--revert")[0] == 0
    assert read(source) == {**FILES, "vllm/version.py": before["vllm/version.py"]}


@pytest.mark.parametrize("options", [[], ["--revert"]])
def test_a_mixed_state_with_another_change_is_refused(
    tool: Tool, source: Path, options: list[str]
) -> None:
    leave_mixed(source)
    (source / "vllm" / "deep" / "three.py").write_text("else")
    before = read(source)
    code, said = tool(*options)
    assert (code, "vllm/deep/three.py" in said, "one.py" in said) == (1, True, False)
    assert read(source) == before


def test_temporary_files_go_where_nothing_else_is_to_do(
    tool: Tool, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / TEMPORARY).write_bytes(b"")
    assert "nothing to do" in tool("--revert")[1]
    assert read(source) == FILES
    monkeypatch.setattr(Path, "unlink", None)  # on a read-only file system it would always fail
    assert tool("--revert")[0] == 0


def killed(source: Path, at: int, *options: str) -> bool:
    """Run the tool and kill it at its `at`-th write; whether it came to that."""
    arguments = [str(apply_patches.PATCHES), "vllm", "--target", str(source), *options]
    command = [sys.executable, "-S", "-c", KILLED, str(at), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert done.returncode in (0, 9), done.stderr
    return done.returncode == 9


@pytest.mark.parametrize("version", [VERSION, "1.2.9"])
@pytest.mark.parametrize("reverts", [False, True])
def test_killed_anywhere_the_next_run_goes_on(
    tool: Tool, source: Path, version: str, reverts: bool
) -> None:
    """Every file is as before or as after, and both ways lead on from there."""
    ways = {
        "--revert": set_version(source, version),
        "--use": {**PATCHED, "vllm/version.py": set_version(source, version)["vllm/version.py"]},
    }
    way, back = ("--revert", "--use") if reverts else ("--use", "--revert")
    options = {"--revert": ["--revert"], "--use": ["--use", VERSION]}
    seen: set[State] = set()
    for at in range(1, 10):
        for on in (way, back):
            tool(*options[back])
            assert read(source) == ways[back]
            assert killed(source, at, *options[way])
            for path, text in read(source).items():
                if not path.endswith(".apply_patches.new"):
                    assert text in (ways[way][path], ways[back][path])
            said = tool("--status")[1]
            seen |= {state for state in State if f"\n{state.value}:\n" in said}
            assert tool(*options[on])[0] == 0
            assert read(source) == ways[on]
    assert seen == {State.MIXED, State.PATCHED if reverts else State.ORIGINAL}
    tool(*options[back])
    assert not killed(source, 10, *options[way])  # three files: a mode, a sync, a rename each


def test_one_run_at_a_time(tool: Tool, source: Path) -> None:
    with apply_patches.exclusive(source):
        code, said = tool()
        assert (code, "another run is at work" in said) == (1, True)
        assert tool("--check")[0] == 0
    assert read(source) == FILES
    assert tool()[0] == 0
