"""All files or none: whatever fails, and wherever a run is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import file_swap
import pytest
from file_swap import Change, SwapBroken, SwapError

from tests.patches.fake_engine import read

BEFORE = {"a.py": "a\n", "deep/b.py": "b\n", "deep/c.py": "c\n"}
AFTER = {path: text * 2 for path, text in BEFORE.items()}
CHANGES = {path: Change(BEFORE[path].encode(), AFTER[path].encode()) for path in BEFORE}

# Runs the swap and dies, as by SIGKILL, at the n-th call that writes something.
KILLED = """
import json, os, sys
from pathlib import Path
import file_swap

left = int(sys.argv[2])
changes = {p: file_swap.Change(*map(str.encode, c)) for p, c in json.loads(sys.argv[3]).items()}

def deadly(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return function(*args, **kwargs)
    return call

os.fsync, Path.replace, Path.unlink = map(deadly, (os.fsync, Path.replace, Path.unlink))
file_swap.swap(Path(sys.argv[1]), changes)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, text in BEFORE.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_all_files(folder: Path) -> None:
    file_swap.swap(folder, CHANGES)
    assert read(folder) == AFTER
    assert file_swap.finish(folder) == []


def test_a_file_linked_elsewhere_keeps_its_content_there(folder: Path, tmp_path: Path) -> None:
    """As package managers link installed files into their caches."""
    cache = tmp_path.parent / f"{tmp_path.name}-cache"
    cache.mkdir()
    os.link(folder / "a.py", cache / "a.py")
    (folder / "deep" / "b.py").rename(cache / "b.py")
    (folder / "deep" / "b.py").symlink_to(cache / "b.py")
    file_swap.swap(folder, CHANGES)
    assert read(folder) == AFTER
    assert read(cache) == {"a.py": "a\n", "b.py": "b\n"}


def test_the_mode_stays(folder: Path) -> None:
    (folder / "a.py").chmod(0o640)
    file_swap.swap(folder, CHANGES)
    assert (folder / "a.py").stat().st_mode & 0o7777 == 0o640


def test_compiled_files_go(folder: Path) -> None:
    cache = folder / "deep" / "__pycache__"
    cache.mkdir()
    for name in ("b.cpython-311.pyc", "bb.cpython-311.pyc"):
        (cache / name).write_bytes(b"")
    file_swap.swap(folder, CHANGES)
    assert [file.name for file in cache.iterdir()] == ["bb.cpython-311.pyc"]


def test_a_file_that_changed_just_now(folder: Path) -> None:
    (folder / "deep" / "c.py").write_text("else")
    with pytest.raises(SwapError, match=r"deep/c\.py was changed just now"):
        file_swap.swap(folder, CHANGES)
    assert read(folder) == {**BEFORE, "deep/c.py": "else"}


@pytest.mark.parametrize("function", ["_write", "_replace", "_sync_folder"])
@pytest.mark.parametrize("at", range(1, 5))
def test_what_fails_is_taken_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str, at: int
) -> None:
    original = getattr(file_swap, function)
    calls = 0

    def fails(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError("the disk is full")
        original(*args)

    monkeypatch.setattr(file_swap, function, fails)
    if function == "_replace" and at > len(BEFORE):
        file_swap.swap(folder, CHANGES)
        assert read(folder) == AFTER
        return
    with pytest.raises(SwapError, match="the disk is full"):
        file_swap.swap(folder, CHANGES)
    assert read(folder) == BEFORE


def test_an_interrupt_is_taken_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = file_swap._replace

    def interrupted(file: Path) -> None:
        if file.name == "c.py" and file.read_text() == "c\n":
            monkeypatch.setattr(file_swap, "_replace", original)
            raise KeyboardInterrupt
        original(file)

    monkeypatch.setattr(file_swap, "_replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file_swap.swap(folder, CHANGES)
    assert read(folder) == BEFORE


def test_what_cannot_be_taken_back_is_finished_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = file_swap._replace

    def fails(file: Path) -> None:
        if (folder / "a.py").read_text() == AFTER["a.py"]:
            raise OSError("read-only now")
        original(file)

    with monkeypatch.context() as patched:
        patched.setattr(file_swap, "_replace", fails)
        with pytest.raises(SwapBroken, match="run this again"):
            file_swap.swap(folder, CHANGES)
    assert file_swap.is_pending(folder)
    assert file_swap.finish(folder) == list(BEFORE)
    assert read(folder) == AFTER


def test_killed_anywhere_the_next_run_finishes(folder: Path) -> None:
    """Before the journal stands nothing has happened; from then on everything will."""
    outcomes = []
    texts = json.dumps({path: [text, AFTER[path]] for path, text in BEFORE.items()})
    environment = {**os.environ, "PYTHONPATH": str(Path(file_swap.__file__).parent)}
    for at in range(1, 100):
        for path, text in BEFORE.items():
            (folder / path).write_text(text)
        command = [sys.executable, "-S", "-c", KILLED, str(folder), str(at), texts]
        code = subprocess.run(command, env=environment, check=False).returncode
        if code == 0:
            break
        assert code == 9
        pending = file_swap.is_pending(folder)
        assert file_swap.finish(folder) == (list(BEFORE) if pending else [])
        assert read(folder) in (BEFORE, AFTER)
        outcomes.append(read(folder) == AFTER)
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) >= 2
    assert outcomes.count(True) >= 10


def test_a_journal_that_does_not_match(folder: Path) -> None:
    file_swap._write_journal(folder, CHANGES)
    (folder / "a.py").write_text("reinstalled")
    before = read(folder)
    with pytest.raises(SwapBroken, match=r"a\.py was changed since.*Reinstall"):
        file_swap.finish(folder)
    assert read(folder) == before


def test_one_run_at_a_time(folder: Path) -> None:
    with file_swap.exclusive(folder):
        with pytest.raises(SwapError, match="another run is at work"), file_swap.exclusive(folder):
            pass
    with file_swap.exclusive(folder):
        pass
