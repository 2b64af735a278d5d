"""The cache of a host: whose folder, what it keeps, what it removes, and that it trusts nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import xxhash

from engine_ext.errors import ChecksumMismatch, PartUnavailable, SpoolFull
from engine_ext.files import FileLock
from engine_ext.remote_parts import LocalFolder, PartCache
from engine_ext.remote_parts import cache as remote_cache

pytestmark = pytest.mark.slow

LIMIT = 10_000


class Origin:
    """Serves one part and counts how often; `sends` are the bytes that it really sends."""

    def __init__(self, data: bytes, *, sends: bytes | None = None, delay_s: float = 0.0) -> None:
        self.data, self.sends = data, data if sends is None else sends
        self.content = xxhash.xxh3_128_hexdigest(data)
        self.delay_s, self.fetched = delay_s, 0

    def __call__(self, file: BinaryIO) -> None:
        self.fetched += 1
        time.sleep(self.delay_s)
        file.write(self.sends)

    def get(self, cache: PartCache, delivery: str | None = None) -> Path:
        return cache.get(self.content, len(self.data), self, delivery)


@pytest.fixture
def cache(tmp_path: Path) -> PartCache:
    return PartCache(str(tmp_path / "cache"), LIMIT)


def age(path: Path, seconds: float) -> None:
    """Let it have been read so long ago."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns - int(seconds * 1e9), status.st_mtime_ns))


def test_a_part_is_fetched_once(cache: PartCache) -> None:
    origin = Origin(b"a part" * 100)
    assert [origin.get(cache).read_bytes() for _ in range(3)] == [origin.data] * 3
    assert origin.fetched == 1


def test_ranks_of_a_host_fetch_once(tmp_path: Path) -> None:
    origin, found = Origin(b"a part" * 100, delay_s=0.2), list[Path]()
    ranks = [PartCache(str(tmp_path / "cache"), LIMIT) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(origin.get(rank))) for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found)), origin.fetched) == (4, 1, 1)


def test_nothing_but_parts_is_left(cache: PartCache) -> None:
    path = Origin(b"a part").get(cache)
    assert os.listdir(cache.folder) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_part_is_fetched_again(cache: PartCache) -> None:
    origin = Origin(b"a part" * 100)
    path = origin.get(cache)
    path.write_bytes(b"b" + origin.data[1:])
    assert origin.get(cache).read_bytes() == origin.data
    assert origin.fetched == 2


@pytest.mark.parametrize("sends", [b"another", b"a par", b"a part and more"])
def test_what_is_not_the_part_is_refused(cache: PartCache, sends: bytes) -> None:
    with pytest.raises(ChecksumMismatch):
        Origin(b"a part", sends=sends).get(cache)
    assert os.listdir(cache.folder) == []


def test_a_failed_fetch_leaves_nothing(cache: PartCache) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise PartUnavailable("gone")

    with pytest.raises(PartUnavailable):
        cache.get("0" * 32, 100, fail)
    assert os.listdir(cache.folder) == []


def test_what_a_killed_rank_left_is_written_again(cache: PartCache) -> None:
    origin = Origin(b"a part")
    (cache.folder / f"{origin.content}.fetching").write_bytes(b"longer than the part itself")
    (cache.folder / f"{origin.content}.fetch").touch()
    assert origin.get(cache).read_bytes() == b"a part"


def test_the_longest_unread_part_gives_way(cache: PartCache) -> None:
    first, second, third = (Origin(bytes([n]) * 4000) for n in range(3))
    age(first.get(cache), 200)
    age(second.get(cache), 100)
    third.get(cache)
    second.get(cache)
    assert second.fetched == 1
    assert not (cache.folder / f"{first.content}.part").exists()


def test_one_rank_of_a_host_verifies_a_delivery(
    cache: PartCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []

    def is_whole(path: Path, *arguments: Any) -> bool:
        found = original(path, *arguments)
        hashed.append(path)
        return found

    original = remote_cache._is_whole
    monkeypatch.setattr(remote_cache, "_is_whole", is_whole)
    origin = Origin(b"a part" * 100)
    for delivery in ("first", "first", "second", "second"):
        assert origin.get(cache, delivery).read_bytes() == origin.data
    assert (origin.fetched, len(hashed)) == (1, 2)


def test_a_part_damaged_since_its_last_delivery_is_fetched_again(cache: PartCache) -> None:
    origin = Origin(b"a part" * 100)
    origin.get(cache, "first").write_bytes(b"b" + origin.data[1:])
    assert origin.get(cache, "second").read_bytes() == origin.data
    assert origin.fetched == 2


def test_part_is_found_without_room_for_its_mark(
    cache: PartCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Path, "write_text", full)
    origin = Origin(b"a part" * 100)
    for delivery in ("first", "first", "second"):
        assert origin.get(cache, delivery).read_bytes() == origin.data
    assert origin.fetched == 1


@pytest.fixture
def grace(monkeypatch: pytest.MonkeyPatch) -> float:
    """A short time in which a rank maps what it was given."""
    monkeypatch.setattr(remote_cache, "_GRACE_S", 0.3)
    monkeypatch.setattr(remote_cache, "_AGAIN_S", 0.05)
    return 0.3


def test_a_mapped_part_stays(cache: PartCache, grace: float) -> None:
    first, second = Origin(b"1" * 6000), Origin(b"2" * 6000)
    path = first.get(cache)
    with path.open("rb") as mapped:
        fcntl.flock(mapped, fcntl.LOCK_SH)  # as a rank does
        age(path, 100)
        with pytest.raises(SpoolFull, match="--delta-tuning cache-bytes"):
            second.get(cache)
    assert second.get(cache).is_file()


def removed_after(first: Path, cache: PartCache) -> float:
    """Return the seconds after which a part gives way to another one."""
    begin = time.monotonic()
    Origin(b"2" * 6000).get(cache)
    assert not first.exists()
    return time.monotonic() - begin


def test_a_part_that_was_just_given_out_stays(cache: PartCache, grace: float) -> None:
    first = Origin(b"1" * 6000)
    age(first.get(cache), 100)
    assert removed_after(first.get(cache), cache) >= grace


def test_a_part_that_took_long_to_fetch_stays(cache: PartCache, grace: float) -> None:
    """On a file system that keeps no times of access, too."""

    class Slow(Origin):
        def __call__(self, file: BinaryIO) -> None:
            super().__call__(file)
            os.utime(file.name, (0, time.time()))

    assert removed_after(Slow(b"1" * 6000).get(cache), cache) >= grace


def test_more_than_the_cache_holds_is_taken_in_turn(cache: PartCache, grace: float) -> None:
    for number in range(4):
        origin = Origin(bytes([number]) * 6000)
        assert origin.get(cache).read_bytes() == origin.data


def test_a_part_that_another_rank_is_given_meanwhile_stays(
    cache: PartCache, monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    first, second = Origin(b"1" * 6000), Origin(b"2" * 6000)
    path = first.get(cache)
    age(path, 100)
    flock = fcntl.flock

    def given_out(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            age(path, -100)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", given_out)
    with pytest.raises(SpoolFull):
        second.get(cache)
    assert path.exists()


@pytest.mark.parametrize("read_s", [0, 100])
def test_a_part_is_mapped_while_room_is_made(
    cache: PartCache, monkeypatch: pytest.MonkeyPatch, grace: float, read_s: float
) -> None:
    """One that a rank has, or one that it asks for just then."""
    first, flock, threads = Origin(b"1" * 6000), fcntl.flock, list[threading.Thread]()
    mapped: list[bytes | OSError] = []
    path = first.get(cache)
    age(path, read_s)

    def map_it() -> None:
        try:
            with first.get(cache).open("rb") as file:
                flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as a rank does
                mapped.append(file.read())
        except OSError as error:
            mapped.append(error)

    def other_process(file: Any, operation: int) -> None:
        flock(file, operation)
        is_part = path.exists() and os.path.samestat(os.fstat(fileno(file)), path.stat())
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB and is_part and not threads:
            threads.append(threading.Thread(target=map_it))
            threads[0].start()
            threads[0].join(0.1)

    monkeypatch.setattr(fcntl, "flock", other_process)
    has_room = True
    try:
        Origin(b"2" * 6000).get(cache)
    except SpoolFull:  # only if the first part was asked for again, and so is still there
        has_room = False
    for thread in threads:
        thread.join()
    assert mapped in (([], [first.data]) if has_room else ([first.data],))
    assert has_room or path.exists()


def fileno(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


def test_a_part_that_cannot_fit_removes_nothing(cache: PartCache) -> None:
    first = Origin(b"1" * 6000)
    age(first.get(cache), 100)
    with pytest.raises(SpoolFull):
        Origin(b"2" * (LIMIT + 1)).get(cache)
    assert (cache.folder / f"{first.content}.part").exists()


def test_what_killed_ranks_left_is_removed(cache: PartCache) -> None:
    left = cache.folder / f"{'0' * 32}.fetching"
    left.write_bytes(b"1" * 100)
    lock, busy = (cache.folder / f"{'1' * 32}{end}" for end in (".fetch", ".fetching"))
    busy.write_bytes(b"2" * 100)
    with FileLock(lock, os.O_RDWR | os.O_CREAT, None):
        Origin(b"a part").get(cache)
        assert (left.exists(), busy.exists()) == (False, True)


def test_what_another_rank_began_meanwhile_is_kept(
    cache: PartCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began once the rank before it had removed its lock, which another one had open."""
    lock, busy = (cache.folder / f"{'1' * 32}{end}" for end in (".fetch", ".fetching"))
    lock.touch()
    busy.write_bytes(b"2" * 100)
    flock, others = fcntl.flock, list[FileLock]()

    def begun(file: Any, operation: int) -> None:
        if os.path.samestat(os.fstat(fileno(file)), lock.stat()):
            monkeypatch.setattr(fcntl, "flock", flock)
            lock.unlink()
            others.append(FileLock(lock, os.O_RDWR | os.O_CREAT, None))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", begun)
    Origin(b"a part").get(cache)
    assert len(others) == 1
    assert (lock.exists(), busy.exists()) == (True, True)


def test_a_folder_that_was_removed_is_made_again(cache: PartCache) -> None:
    shutil.rmtree(cache.folder)
    assert Origin(b"a part").get(cache).read_bytes() == b"a part"
    shutil.rmtree(cache.folder)
    with LocalFolder(cache) as folder:
        assert folder.path.is_dir()


def test_a_full_disk_is_named(cache: PartCache) -> None:
    def fill(file: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(SpoolFull, match="--delta-tuning cache-dir"):
        cache.get("0" * 32, 100, fill)


def test_another_error_of_the_disk_is_itself(cache: PartCache) -> None:
    def fail(file: BinaryIO) -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        cache.get("0" * 32, 100, fail)


def test_a_folder_that_others_can_write_into_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(PermissionError, match="--delta-tuning cache-dir"):
            PartCache(str(tmp_path / name), LIMIT)


def test_the_default_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = PartCache(None, LIMIT).folder
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
