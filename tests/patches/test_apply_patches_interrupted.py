"""All files or none: whatever fails, and wherever a run is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from scripts import apply_patches
from scripts.apply_patches import State
from tests.patches.fake_engine import FILES, PATCHED, VERSION, Tool, read, set_version

ROOT = Path(__file__).parents[2]


# Runs the tool for each line, in a process that dies, as by SIGKILL, at the n-th call that writes.
KILLED = """
import json, os, sys
from pathlib import Path
from scripts import apply_patches

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
for line in sys.stdin:
    left, patches, *arguments = json.loads(line)
    process = os.fork()
    if not process:
        sys.stdout = sys.stderr
        apply_patches.PATCHES = Path(patches)
        os._exit(apply_patches.main(arguments))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


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


Killed = Callable[..., bool]


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    """Runs the tool and kills it at its `at`-th write; whether it came to that."""
    command = [sys.executable, "-S", "-c", KILLED]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, answers = process.stdin, process.stdout

        def kill(source: Path, at: int, *options: str) -> bool:
            patches = str(apply_patches.PATCHES)
            print(json.dumps([at, patches, "vllm", "--target", str(source), *options]), file=given)
            given.flush()
            status = int(answers.readline())
            assert status in (0, 9)
            return status == 9

        yield kill


@pytest.mark.slow
@pytest.mark.parametrize("version", [VERSION, "1.2.9"])
@pytest.mark.parametrize("reverts", [False, True])
def test_killed_anywhere_the_next_run_goes_on(
    tool: Tool, source: Path, killed: Killed, version: str, reverts: bool
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
