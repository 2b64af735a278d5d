"""The file of an engine's records: appended by one at a time, on disk, and nothing else's."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from engine_ext.audit import AuditFile, AuditRecord, audit_file, read_engine_trail, read_lines
from engine_ext.errors import AuditUnavailable
from engine_ext.files import FileLock

KEY = "a key"


def record(version: int, kind: Any = "committed", boot: str = "b", **facts: Any) -> AuditRecord:
    base = {} if kind == "loaded" else {"base_version": version - 1}
    digests = {"digest": digest(version)}
    if kind != "loaded":
        digests["digest_before"] = digest(version - 1)
    return AuditRecord(
        **{"kind": kind, "at": 1.5, "version": version, "boot": boot, **base, **digests, **facts}
    )


def digest(version: int) -> str:
    return f"{version:032x}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def versions(path: Path) -> list[int | None]:
    return [None if one.record is None else one.record.version for one in read_lines(path)]


def test_records_follow_each_other(path: Path) -> None:
    file = AuditFile(path, KEY)
    file.append([record(0, "loaded")])
    last = AuditFile(path, KEY).append([record(1), record(2)])
    assert versions(path) == [0, 1, 2]
    trail = read_engine_trail(path, KEY)
    assert (trail.problems, trail.signed) == ([], 3)
    assert last not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_lines_are_json(path: Path) -> None:
    AuditFile(path, KEY).append([record(0, "loaded")])
    AuditFile(path, KEY).append([record(1)])
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["kind"], first["version"]) == ("loaded", 0)
    assert "previous" not in first
    line = path.read_bytes().splitlines()[0]
    assert second["previous"] == hashlib.sha256(line).hexdigest()
    assert len(first["signature"]) == 64


def _append(path: Path, boot: str) -> None:
    file = AuditFile(path, None)
    file.append([record(0, "loaded", boot)])
    for version in range(1, 20):
        file.append([record(version, boot=boot)])


@pytest.mark.slow
def test_processes_share_a_file(path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_append, args=(path, boot)) for boot in "xyz"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(versions(path)) == 60
    assert read_engine_trail(path, None).problems == []


def test_renamed_file_is_begun_again(path: Path) -> None:
    file = AuditFile(path, None)
    file.append([record(0, "loaded"), record(1)])
    path.rename(path.with_suffix(".1"))
    file.append([record(2)])
    assert versions(path) == [2]
    assert read_engine_trail(path, None).problems == []


def test_cut_line_is_passed_over(path: Path) -> None:
    """A crash has left it; nothing was done because of it."""
    file = AuditFile(path, KEY)
    file.append([record(0, "loaded"), record(1)])
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[1][:40])
    assert "is cut" in read_engine_trail(path, KEY).problems[0]
    file.append([record(2)])
    assert versions(path) == [0, 1, None, 2]
    trail = read_engine_trail(path, KEY)
    assert trail.problems == []
    assert trail.notes == ["audit.jsonl:3 was cut while it was written"]


def test_record_without_line_end_is_continued(path: Path) -> None:
    file = AuditFile(path, KEY)
    file.append([record(0, "loaded"), record(1)])
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    file.append([record(2)])
    assert versions(path) == [0, 1, 2]
    assert read_engine_trail(path, KEY).problems == []


def test_file_renamed_while_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AuditFile(path, None)
    file.append([record(0, "loaded"), record(1)])
    left = [path.with_suffix(".1")]

    def renames(target: Path, *arguments: Any) -> FileLock:
        if left:
            target.rename(left.pop())
        return FileLock(target, *arguments)

    monkeypatch.setattr(audit_file, "FileLock", renames)
    file.append([record(2)])
    assert versions(path) == [2]
    assert versions(path.with_suffix(".1")) == [0, 1]


def test_full_disk_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AuditFile(path, None)
    file.append([record(0, "loaded")])
    before, write = path.read_bytes(), os.write

    def fail(descriptor: int, data: Any) -> int:
        if len(data) > 10:
            return write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        with pytest.raises(AuditUnavailable, match="No space left"):
            file.append([record(1)])
    assert path.read_bytes() == before
    file.append([record(1)])
    assert read_engine_trail(path, None).problems == []


def test_check_needs_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AuditFile(path, None)
    file.check()
    found = os.statvfs(path.parent)

    class Full:
        f_bavail, f_frsize = 1, found.f_frsize

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Full)
    with pytest.raises(AuditUnavailable, match="full"):
        file.check()


@pytest.mark.parametrize("what", ["folder", "fifo", "link", "text", "missing folder", "device"])
def test_something_else_is_refused(what: str, path: Path) -> None:
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(path.with_suffix(".other"))
    elif what == "text":
        path.write_text("a diary\n")
    elif what == "device":
        path = Path("/dev/full")
    else:
        path = path / "audit.jsonl"
    file = AuditFile(path, None)
    for act in (file.check, lambda: file.append([record(1)])):
        with pytest.raises(AuditUnavailable, match=f"audit file {path}"):
            act()
    if what == "text":
        assert path.read_text() == "a diary\n"
