"""A delta log in a folder: what is on disk, in which order, and what else can be there."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from engine_ext.errors import LogDamaged, MalformedPart
from engine_ext.log import Heartbeat, live_heartbeats, open_log, read_digests, write_heartbeat
from engine_ext.log.catalog import DONE, REFUSED
from engine_ext.log.heartbeats import FOLDER
from engine_ext.log.records import Digests
from engine_ext.log.writer import begin, manifest_of
from engine_ext.settings import HMAC_KEY_ENVIRONMENT
from tests.unit.log.places import folders, part, versions, write
from tests.unit.log.test_log import heartbeat

FIRST = "weight_v000001"


def test_killed_writer_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    with open_log(tmp_path).writer() as writer:
        writer.begin(1).add(part(1, 0))
    assert folders(tmp_path) == [f".{FIRST}.partial"]
    write(open_log(tmp_path), 1)
    assert folders(tmp_path) == [FIRST]


def test_file_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    log, beat = open_log(tmp_path), heartbeat("engine")
    (tmp_path / FOLDER / "engine.json" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match=r"engine\.json"):
        write_heartbeat(log, beat)
    assert os.listdir(tmp_path / FOLDER) == ["engine.json"]


def test_everything_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        steps.append(f"-> {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    log = open_log(tmp_path)
    write(log, 3)
    assert steps == [
        "rank0_flush000.safetensors", DONE, ".weight_v000003.partial", "-> weight_v000003",
        tmp_path.name,
    ]  # fmt: skip
    steps.clear()
    with log.writer() as writer:
        writer.refuse(3)
    assert steps == ["-> REFUSED", "weight_v000003"]
    steps.clear()
    write(log, 4)
    steps.clear()
    log.store.delete(["weight_v000003", "weight_v000004"])
    hidden = [f"-> .weight_v00000{version}.gone" for version in (3, 4)]
    assert steps == [*hidden, tmp_path.name]


def test_writer_locks_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, each host grants the lock of a folder alone, and asks the server for a file's."""
    lock = fcntl.flock

    def on_this_host(descriptor: int, operation: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", on_this_host)
    with open_log(tmp_path).writer():
        with pytest.raises(BlockingIOError, match="another sender"):
            open_log(tmp_path).writer()
    open_log(tmp_path).writer().close()


def test_two_folds_of_one_range_do_not_meet(tmp_path: Path) -> None:
    log, name = open_log(tmp_path), f"{FIRST}_from_v000000"
    write(log, 2)
    first = begin(log.store, name)
    first.add(part(1, 0))
    with pytest.raises(BlockingIOError, match=name):
        begin(open_log(tmp_path).store, name)
    log.store.delete(["weight_v000002"])
    first.finish()
    assert versions(log) == [(0, 1)]
    with pytest.raises(FileExistsError):
        begin(log.store, name)
    log.store.delete([name])
    begin(log.store, name).drop()
    assert folders(tmp_path) == []


def test_pruning_removes_what_a_killed_fold_has_left(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    write(log, 1)
    remains = tmp_path / ".weight_v000009_from_v000002.partial"
    remains.mkdir()
    (remains / "rank0_flush000.safetensors").write_bytes(b"part")
    log.tidy(log.listing())
    assert folders(tmp_path) == [FIRST]


def test_two_processes_with_one_number_write_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers, whose numbers of processes are their own."""
    store, replace = open_log(tmp_path).store, Path.replace
    others = [b"other"]

    def replaced(path: Path, target: Path) -> Path:
        if others:
            store.put("groups/mark.json", others.pop())
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replaced)
    store.put("groups/mark.json", b"own")
    assert store.read("groups/mark.json", 9) == b"own"
    assert os.listdir(tmp_path / "groups") == ["mark.json"]


def test_refusal_needs_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is the renamed ``DONE``, so a full disk does not keep a version in the log."""
    log = open_log(tmp_path)
    write(log, 1)
    done = (tmp_path / FIRST / DONE).read_bytes()

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with log.writer() as writer, monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        patched.setattr("builtins.open", full)
        writer.refuse(1)
    assert (tmp_path / FIRST / REFUSED).read_bytes() == done


def test_writer_warns_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    write(open_log(tmp_path), 1)
    assert f"the file system of {tmp_path} has no locks" in caplog.text


@pytest.mark.parametrize("key", ["key", "another"])
def test_signed_mark_has_the_digests_of_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The parts are not read for them; with another key, the mark does not count."""
    digests = {"digest_before": "0" * 32, "digest_after": "1" * 32}
    with open_log(tmp_path).writer() as writer:
        draft = writer.begin(1)
        draft.add(part(1, 0, **digests))
        folder = draft.finish("key")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    [entry] = open_log(tmp_path).listing().entries
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, key)
    if key == "key":
        assert read_digests(entry) == Digests("0" * 32, "1" * 32)
    else:
        with pytest.raises(LogDamaged):
            read_digests(entry)


def test_whoever_can_write_the_log_can_lock_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)
    before = os.umask(0o022)
    try:
        open_log(tmp_path).writer().close()
    finally:
        os.umask(before)
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o666


def test_writer_of_emptied_log_takes_the_lock_again(tmp_path: Path) -> None:
    with open_log(tmp_path).writer() as writer:
        (tmp_path / ".lock").unlink()
        writer.begin(1)
        with pytest.raises(BlockingIOError, match="another sender"):
            open_log(tmp_path).writer()


def test_lock_ends_with_its_writer(tmp_path: Path) -> None:
    log = open_log(tmp_path / "new" / "log")
    with log.writer(), pytest.raises(BlockingIOError, match="another sender"):
        log.writer()
    log.writer().close()


def test_deletion_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is visible in part, and the next deletion removes what is left."""
    log = open_log(tmp_path)
    for version in (1, 2):
        write(log, version)

    def fails(*arguments: object, **named: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fails)
        with pytest.raises(OSError, match="Input/output error"):
            log.store.delete([FIRST])
    assert versions(log) == [(1, 2)]
    log.tidy(log.listing())
    assert folders(tmp_path) == ["weight_v000002"]


def test_interrupted_deletion_is_finished(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    write(log, 1)
    (tmp_path / ".weight_v000009.gone" / "part").mkdir(parents=True)
    log.tidy(log.listing())
    assert folders(tmp_path) == [FIRST]


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        ("fifo", "its DONE is not a regular file"),
        ("link", "its DONE cannot be read: Too many levels"),
        ("none", "it has no DONE: it was not written completely"),
    ],
)
def test_done_that_is_no_file_is_damage(tmp_path: Path, thing: str, why: str) -> None:
    log = open_log(tmp_path)
    done = write(log, 1) / DONE
    write(log, 2)
    done.rename(tmp_path / "elsewhere")
    if thing == "fifo":
        os.mkfifo(done)
    elif thing == "link":
        done.symlink_to(tmp_path / "elsewhere")
    assert log.listing().damaged[FIRST].startswith(why)


def test_file_in_place_of_a_version_is_damage(tmp_path: Path) -> None:
    (tmp_path / FIRST).touch()
    assert "cannot be read" in open_log(tmp_path).listing().damaged[FIRST]


def test_version_that_is_deleted_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    write(log, 1)
    write(log, 2)
    listdir = os.listdir

    def listed(path: Any) -> list[str]:
        names = listdir(path)
        if Path(path) == tmp_path:
            open_log(tmp_path).store.delete([FIRST])
        return names

    monkeypatch.setattr(os, "listdir", listed)
    listing = log.listing()
    assert ([entry.version for entry in listing.entries], listing.damaged) == ([2], {})


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_files_are_compared_with_done(tmp_path: Path, damage: str) -> None:
    log = open_log(tmp_path)
    write(log, 1)
    [path] = log.listing().entries[0].paths
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LogDamaged) as caught:
        log.listing().entries[0].require_files()
    assert caught.value.operands["version"] == 1


@pytest.mark.parametrize("encoding", ["deltas", "deltas_zstd", "gap8_exp"])
def test_part_needs_a_manifest(tmp_path: Path, encoding: str) -> None:
    body = part(5, 4, sync_id="x", encoding=encoding)
    assert manifest_of(body).sync_id == "x"
    log = open_log(tmp_path)
    with log.writer() as writer:
        draft = writer.begin(5)
        with pytest.raises(MalformedPart):
            draft.add(body[:20])
        draft.drop()
    assert versions(log) == []


def test_age_of_a_heartbeat_is_that_of_its_file(tmp_path: Path) -> None:
    """The clock of the host that wrote it does not count."""
    log = open_log(tmp_path)
    beats: list[Heartbeat] = [
        heartbeat("old", at=time.time() + 1e6),
        heartbeat("new", at=0.0),
        heartbeat("of the future"),
    ]
    for beat in beats:
        write_heartbeat(log, beat)
    now = time.time()
    os.utime(tmp_path / FOLDER / "old.json", (now - 61, now - 61))
    os.utime(tmp_path / FOLDER / "of the future.json", (now + 1e6, now + 1e6))
    assert [one.name for one in live_heartbeats(log)] == ["new", "of the future"]
