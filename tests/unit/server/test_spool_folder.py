"""Where a spool's folder is, and when it goes: with its server, or when the next one starts."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delta_server import spool as spool_module
from delta_server.intake import Intake
from tests.support.delta_bodies import pieces
from tests.unit.server.test_spool import LIMITS, PLAIN, receive


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Intake]:
    spool = Intake(str(tmp_path), LIMITS)
    yield spool
    spool.close()


def test_the_folder_is_private_and_goes_with_close(tmp_path: Path) -> None:
    spool = Intake(str(tmp_path), LIMITS)
    assert spool.directory.parent == tmp_path
    assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
    spooled = receive(spool, pieces(PLAIN, 100))
    assert stat.S_IMODE(spooled.path.stat().st_mode) == 0o600
    spool.close()
    assert list(tmp_path.iterdir()) == []
    spool.close()


@pytest.mark.slow
def test_the_folder_goes_with_the_spool(tmp_path: Path) -> None:
    Intake(str(tmp_path), LIMITS)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


SERVERS = """
import os, signal, sys
from delta_server.intake import Intake
from engine_ext.format import Limits

def start():
    spool = Intake(sys.argv[1], Limits())
    (spool.directory / "part.safetensors").write_bytes(b"left behind")
    print(spool.directory, flush=True)
    return spool

killed = os.fork()
if not killed:
    left = start()  # a spool that nobody holds is removed at once
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitpid(killed, 0)[1] == signal.SIGKILL
assert sys.stdin.readline()
living = start()
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_server_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVERS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as servers:
        assert servers.stdin is not None
        assert servers.stdout is not None
        its = Path(servers.stdout.readline().strip())
        assert (its / "part.safetensors").exists()
        print("continue", file=servers.stdin, flush=True)
        other = Path(servers.stdout.readline().strip())
        assert not its.exists()
        mine = Intake(str(tmp_path), LIMITS)
        assert (other / "part.safetensors").exists()
        servers.communicate("", timeout=10)
        assert servers.returncode == 0
    assert not other.exists()  # it has ended in order
    assert list(tmp_path.iterdir()) == [mine.directory]
    mine.close()


def test_folder_that_was_removed_is_made_and_locked_again(tmp_path: Path) -> None:
    """As by logind's RemoveIPC, or by a cleaner of shared memory."""
    spool = Intake(str(tmp_path), LIMITS)
    for _ in range(2):
        shutil.rmtree(spool.directory)
        part = receive(spool, pieces(PLAIN, 100))
        assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
        Intake(str(tmp_path), LIMITS).close()  # it removes the folders of killed servers
        assert part.path.read_bytes()
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_only_spools_are_removed(tmp_path: Path) -> None:
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "delta-spool-without-a-lock").mkdir()  # as the first versions made them
    target = tmp_path / "delta-elsewhere"
    target.mkdir()
    (target / "kept").touch()
    (tmp_path / "delta-updates-spool-link").symlink_to(target)
    (tmp_path / "delta-updates-spool-file").touch()
    Intake(str(tmp_path), LIMITS).close()
    left = {path.name for path in tmp_path.iterdir()}
    left.remove("delta-spool-without-a-lock")
    assert left == {"somebody's", "delta-elsewhere"} | {
        f"delta-updates-spool-{kind}" for kind in ("link", "file")
    }
    assert (target / "kept").exists()


def test_another_users_spool_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "delta-updates-spool-theirs"
    theirs.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        Intake(str(tmp_path), LIMITS).close()
    assert theirs.exists()
    Intake(str(tmp_path), LIMITS).close()
    assert not theirs.exists()


def test_where_nothing_can_be_locked_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    one = Intake(str(tmp_path), LIMITS)
    other = Intake(str(tmp_path), LIMITS)
    assert one.directory.exists()
    one.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_that_another_server_takes_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed before it is locked; then another is made."""
    make = tempfile.mkdtemp
    removed: list[str] = []

    def mkdtemp(**options: Any) -> str:
        folder = make(**options)
        if len(removed) < 2:
            removed.append(folder)
            os.rmdir(folder)
            if len(removed) == 2:
                os.mkdir(folder + "-other")
                monkeypatch.setattr(os, "open", opening(folder + "-other"))
        return str(folder)

    def opening(other: str) -> Any:
        original = os.open

        def opened(path: Any, *arguments: Any, **options: Any) -> int:
            monkeypatch.setattr(os, "open", original)
            return original(other, *arguments, **options)

        return opened

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    spool = Intake(str(tmp_path), LIMITS)
    assert len(removed) == 2
    assert spool.directory.exists()
    assert str(spool.directory) not in removed
    spool.close()


def test_two_spools_share_a_parent(tmp_path: Path, spool: Intake) -> None:
    other = Intake(str(tmp_path), LIMITS)
    kept = receive(spool, pieces(PLAIN, 100))
    other.close()
    assert kept.path.exists()


@pytest.mark.parametrize(("more", "chosen"), [(0, "shared"), (-1, "temporary")])
def test_default_parent_has_room_for_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, chosen: str
) -> None:
    for name in ("shared", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(spool_module, "_SHARED_MEMORY", tmp_path / "shared")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    found = SimpleNamespace(total=800, free=100 + LIMITS.max_part_bytes + more)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: found)
    spool = Intake(None, LIMITS)
    assert spool.directory.parent == tmp_path / chosen
    spool.close()


def test_default_parent_without_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "_SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = Intake(None, LIMITS)
    assert spool.directory.parent == tmp_path
    spool.close()
