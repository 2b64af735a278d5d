"""The lock that the spool, the log and the sender's state share."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_ext.files import FileLock

FOLDER = os.O_RDONLY | os.O_DIRECTORY


def test_one_lock_at_a_time(tmp_path: Path) -> None:
    with FileLock(tmp_path, FOLDER, "taken") as lock:
        assert lock.is_enforced
        with pytest.raises(BlockingIOError, match="taken"):
            FileLock(tmp_path, FOLDER, "taken")
    lock.close()
    again = FileLock(tmp_path, FOLDER, None)
    del again  # a lock that nobody refers to is released
    FileLock(tmp_path, FOLDER, "taken").close()


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Return a function that forks a child; it runs a function and then waits until the end."""
    children: list[int] = []

    def fork(run: Callable[[], object]) -> int:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run()
                os.write(writer, b"x")
                signal.pause()
            finally:
                os._exit(1)
        children.append(child)
        os.close(writer)
        assert os.read(reader, 1) == b"x"
        os.close(reader)
        return child

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_closing_releases_what_a_forked_child_still_has_open(
    tmp_path: Path, forked: Callable[[Callable[[], object]], int]
) -> None:
    lock = FileLock(tmp_path, FOLDER, "taken")
    forked(lambda: None)
    lock.close()
    with FileLock(tmp_path, FOLDER, "taken"):
        lock.close()  # its descriptor's number might be in use again
        with pytest.raises(BlockingIOError, match="taken"):
            FileLock(tmp_path, FOLDER, "taken")


def test_a_forked_child_does_not_release_its_parents_lock(
    tmp_path: Path, forked: Callable[[Callable[[], object]], int]
) -> None:
    with FileLock(tmp_path, FOLDER, "taken") as lock:
        forked(lock.close)
        with pytest.raises(BlockingIOError, match="taken"):
            FileLock(tmp_path, FOLDER, "taken")


def test_a_lock_ends_with_a_process_that_did_not_close_it(
    tmp_path: Path, forked: Callable[[Callable[[], object]], int]
) -> None:
    locks: list[FileLock] = []
    child = forked(lambda: locks.append(FileLock(tmp_path, FOLDER, "taken")))
    with pytest.raises(BlockingIOError, match="taken"):
        FileLock(tmp_path, FOLDER, "taken")
    os.kill(child, signal.SIGKILL)
    FileLock(tmp_path, FOLDER, None).close()  # waits for it


def test_whether_the_path_still_names_what_is_locked(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with FileLock(file, os.O_RDWR | os.O_CREAT, "taken") as lock:
        assert lock.is_in_place()
        file.unlink()
        assert not lock.is_in_place()
        file.touch()
        assert not lock.is_in_place()
        assert lock.stat().st_nlink == 0


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with FileLock(tmp_path, FOLDER, "taken") as one, FileLock(tmp_path, FOLDER, "taken") as other:
        assert not one.is_enforced
        assert not other.is_enforced


def test_waiting_on_a_file_system_that_denies_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(fcntl, "flock", flock)
    with FileLock(tmp_path, FOLDER, None) as lock:
        assert not lock.is_enforced


def test_a_lock_is_held_until_the_process_ends(tmp_path: Path) -> None:
    """Threads might still write while exit handlers run."""
    code = (
        "import atexit, os, sys\n"
        "from engine_ext.files import FileLock\n"
        "folder, flags = sys.argv[1], os.O_RDONLY | os.O_DIRECTORY\n"
        "def take():\n"
        "    try: FileLock(folder, flags, 'taken')\n"
        "    except BlockingIOError as error: print(error)\n"
        "atexit.register(take)\n"
        "kept = FileLock(folder, flags, 'taken')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "taken\n"
    FileLock(tmp_path, FOLDER, "taken").close()
