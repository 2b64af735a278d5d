"""A delta log in a real object store: what readers see, and what they fetch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_ext.errors import LogDamaged, PartUnavailable
from engine_ext.format import HMAC_KEY_ENVIRONMENT, SIGNATURE_SUFFIX, sign
from engine_ext.log import (
    CannotFold,
    FolderLog,
    Heartbeat,
    StoreLog,
    fold_versions,
    follower_lags,
    live_heartbeats,
    open_log,
    read_heartbeats,
    read_version,
    remove_heartbeat,
    route,
    verify_version,
    write_heartbeat,
)
from engine_ext.log.catalog import DONE, MAX_DONE_BYTES, REFUSED
from engine_ext.object_store import ObjectStore
from engine_ext.remote_parts import PartCache
from engine_ext.version_folders import INDEX
from tests.support.folder_writer import write_checkpoint, write_version
from tests.support.object_stores import StoreServer
from tests.support.store_proxy import Fault, StoreProxy
from tests.unit.log.test_delta_log import part
from tests.unit.log.test_foreign import step

pytestmark = pytest.mark.slow


@pytest.fixture
def log(store_url: str, tmp_path: Path) -> StoreLog:
    """An empty log that keeps no parts."""
    opened = open_log(store_url, scratch=str(tmp_path))
    assert isinstance(opened, StoreLog)
    return opened


def write(log: StoreLog, version: int, *parts: bytes) -> None:
    draft = log.writer().begin(version)
    for body in parts or (part(version, version - 1),):
        draft.add(body)
    draft.finish()


def names(log: StoreLog) -> list[str]:
    return [one.name for one in log.store.list() if not one.name.startswith("claims/")]


def versions(log: StoreLog) -> list[tuple[int | None, int]]:
    return [(entry.base_version, entry.version) for entry in log.listing().entries]


def test_what_a_version_is_in_a_store(log: StoreLog) -> None:
    bodies = [part(12, 11, part=k, num_parts=2, sync_id="sync") for k in range(2)]
    write(log, 12, *bodies)
    parts = [f"sync_flush000{k}.safetensors" for k in range(2)]
    assert names(log) == [f"weight_v000012/{name}" for name in (DONE, *parts)]
    [entry] = log.listing().entries
    assert (entry.version, entry.base_version, entry.full) == (12, 11, False)
    assert entry.nbytes == sum(map(len, bodies))
    assert abs(entry.written_at - log.store.list()[-1].written_at) < 2
    with log.fetched(entry):
        entry.require_files()
        assert [path.read_bytes() for path in entry.paths] == bodies
        assert len(read_version(entry)) == 2
    assert not entry.folder.exists()


def test_nothing_is_seen_before_the_end(log: StoreLog) -> None:
    writer = log.writer()
    assert writer.last_number == -1
    draft = writer.begin(1)
    draft.add(part(1, 0))
    assert log.listing().entries == []
    assert log.listing().damaged == {}
    draft.drop()
    assert names(log) == []
    draft = writer.begin(1)
    draft.add(part(1, 0))
    draft.finish()
    assert (versions(log), writer.last_number) == ([(0, 1)], 1)
    with pytest.raises(FileExistsError, match="weight_v000001"):
        writer.begin(1)


def test_a_new_sender_keeps_the_old_one_out(log: StoreLog) -> None:
    """What that one has begun is never in the log, and its number is used up."""
    old = log.writer()
    draft_of_old = old.begin(1)
    draft_of_old.add(part(1, 0))
    new = log.writer()
    with pytest.raises(BlockingIOError, match="another sender"):
        draft_of_old.finish()
    with pytest.raises(BlockingIOError, match="another sender"):
        old.begin(2)
    with pytest.raises(BlockingIOError, match="another sender"):
        old.refuse(1)
    assert (new.last_number, versions(log)) == (1, [])
    assert [folder.name for folder in log.listing().refused] == ["weight_v000001"]
    draft = new.begin(2)
    draft.add(part(2, 0))
    draft.finish()
    assert versions(log) == [(0, 2)]
    log.tidy(log.listing())
    assert [name for name in names(log) if "v000001" in name] == [f"weight_v000001/{DONE}"]
    with pytest.raises(BlockingIOError, match="another sender"):
        draft_of_old.finish()
    with pytest.raises(BlockingIOError, match="another sender"):
        old.begin(3)  # the claim that it asks for was deleted, and could be made again
    assert versions(log) == [(0, 2)]


def test_a_version_that_was_finished_first_stays(log: StoreLog) -> None:
    old = log.writer()
    draft = old.begin(1)
    draft.add(part(1, 0))
    draft.finish()
    new = log.writer()
    assert (versions(log), new.last_number) == ([(0, 1)], 1)


def test_a_refused_version_keeps_its_number(log: StoreLog) -> None:
    writer = log.writer()
    draft = writer.begin(1)
    draft.add(part(1, 0))
    draft.finish()
    writer.refuse(1)
    assert names(log) == [f"weight_v000001/{REFUSED}"]
    assert (versions(log), writer.last_number) == ([], 1)


def test_discarding_leaves_nothing(log: StoreLog) -> None:
    write(log, 1)
    write(log, 2)
    log.listing()
    log.discard("weight_v000001")
    assert versions(log) == [(1, 2)]
    assert all(name.startswith("weight_v000002/") for name in names(log))


def test_a_refusal_that_was_cut_off_is_finished(
    log: StoreLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next sender, before it looks which version is the newest."""
    writer = log.writer()
    draft = writer.begin(1)
    draft.add(part(1, 0))
    draft.finish()

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.refuse(1)
    assert log.writer().last_number == 1
    assert names(log) == [f"weight_v000001/{REFUSED}"]
    with pytest.raises(BlockingIOError):
        writer.refuse(1)


def test_a_folder_of_another_trainer_is_discarded_index_first(
    log: StoreLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model-00001.safetensors", INDEX):
        log.store.put(f"weight_v000001/{name}", b"{}")
    deleted: list[str] = []
    monkeypatch.setattr(ObjectStore, "delete", lambda self, names: deleted.extend(names))
    log.discard("weight_v000001")
    assert deleted[0] == f"weight_v000001/{INDEX}"


def test_signatures_come_along(log: StoreLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, "key")
    body = part(1, 0)
    draft = log.writer().begin(1)
    draft.add(body, sign("key", body))
    draft.finish()
    [entry] = log.listing().entries
    with log.fetched(entry):
        assert len(read_version(entry)) == 1
    [signature] = [name for name in names(log) if name.endswith(SIGNATURE_SUFFIX)]
    log.store.put(signature, b"00")
    log.listing()
    with log.fetched(entry), pytest.raises(LogDamaged, match="signature"):
        read_version(entry)


def test_what_is_being_written_stays_for_a_day(
    log: StoreLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold has the number of a version that is there."""
    write(log, 1)
    write(log, 2)
    draft = log.draft("weight_v000001_from_v000000")
    draft.add(part(1, 0))
    log.tidy(log.listing())
    draft.finish()
    [fold] = [entry for entry in log.listing().entries if "_from_" in entry.folder.name]
    with log.fetched(fold):
        read_version(fold)
    log.discard(fold.folder.name)
    draft = log.draft("weight_v000001_from_v000000")
    draft.add(part(1, 0))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 86400)
    log.tidy(log.listing())
    assert not any("_from_" in name for name in names(log))


@pytest.mark.parametrize("damage", ["flip", "short", "gone", "done", "large", "other"])
def test_damage_is_seen(log: StoreLog, damage: str) -> None:
    body = part(1, 0)
    write(log, 1, body)
    [name] = [name for name in names(log) if name.endswith(".safetensors")]
    if damage == "flip":
        log.store.put(name, body[:-1] + bytes([body[-1] ^ 1]))
    elif damage == "short":
        log.store.put(name, body[:-1])
    elif damage == "gone":
        log.store.delete([name])
    else:
        wrong = {"done": b"{", "large": bytes(MAX_DONE_BYTES + 1)}
        text = wrong.get(damage, b'{"version":2,"base_version":1,"files":{}}')
        log.store.put(f"weight_v000001/{DONE}", text)
        assert log.listing().entries == []
        assert "DONE" in log.listing().damaged["weight_v000001"]
        return
    [entry] = log.listing().entries
    with pytest.raises(LogDamaged, match="flush0000"), log.fetched(entry):
        pass
    assert not entry.folder.exists()


def test_folders_of_another_trainer(log: StoreLog, tmp_path: Path) -> None:
    """With an index in place of ``DONE``: they are listed and fetched as from a folder."""
    source = tmp_path / "source"
    write_version(source, 1, step(0), step(1))
    write_version(source, 2, step(1), step(1))
    write_checkpoint(source, 3, step(3))
    for path in source.rglob("*.*"):
        log.store.put(path.relative_to(source).as_posix(), path.read_bytes())
    entries = log.listing().entries
    facts = [(e.version, e.base_version, e.nbytes, e.foreign) for e in entries]
    expected = FolderLog(source).listing().entries
    assert facts == [(e.version, e.base_version, e.nbytes, e.foreign) for e in expected]
    for entry in entries:
        with log.fetched(entry):
            verify_version(entry)
            assert entry.paths == [entry.folder]
    log.store.put(f"weight_v000001/{DONE}", b"")
    assert log.listing().entries[0].foreign


def test_versions_are_folded_in_the_store(log: StoreLog, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write(log, version)
    listing = log.listing()
    folder = fold_versions(log, route(listing.entries, 0), 0)
    assert folder.name == "weight_v000003_from_v000000"
    steps = route(log.listing().entries, 0)
    assert [step.folder.name for step in steps] == [folder.name]
    with log.fetched(steps[0]):
        [found] = read_version(steps[0])
    assert found.deltas[0].values.tolist() == [3, 2]
    with pytest.raises(FileExistsError):
        fold_versions(log, route(listing.entries, 0), 0)
    local = FolderLog(tmp_path / "local")
    local.folder.mkdir()
    fold_versions(local, route(listing.entries, 0), 0, source=log)
    assert [entry.version for entry in local.listing().entries] == [3]
    with pytest.raises(CannotFold):
        fold_versions(log, [], 0)


def test_heartbeats(log: StoreLog) -> None:
    beat = Heartbeat(
        name="host-1", engine="vllm", version=1, newest=2, behind=1, state="following", failures=0,
        at=0.0, expires_s=60.0,
    )  # fmt: skip
    write(log, 1)
    write(log, 2)
    write_heartbeat(log, beat)
    [(found, age)] = read_heartbeats(log)
    assert (found, age < 30) == (beat, True)
    assert live_heartbeats(log) == [beat]
    [lag] = follower_lags(log)
    assert (lag.versions, lag.seconds < 60) == (1, True)
    remove_heartbeat(log, "host-1")
    assert read_heartbeats(log) == []
    assert versions(log) == [(0, 1), (1, 2)]


# Fetching --------------------------------------------------------------------------------------


@pytest.fixture
def proxy(
    store_server: StoreServer, log: StoreLog, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreProxy]:
    """A proxy before the store, for logs that are opened with it."""
    with StoreProxy(store_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.server.endpoint)
        yield proxy


def reader(log: StoreLog, cache: PartCache | None) -> StoreLog:
    return StoreLog(ObjectStore(log.location, sleep=lambda seconds: None), cache)


def test_engines_of_a_host_fetch_an_object_once(
    log: StoreLog, proxy: StoreProxy, tmp_path: Path
) -> None:
    bodies = [part(1, 0, part=k, num_parts=3, sync_id="sync") for k in range(3)]
    write(log, 1, *bodies)
    for _ in range(4):
        one = reader(log, PartCache(str(tmp_path / "cache"), 1 << 20))
        [entry] = one.listing().entries
        with one.fetched(entry):
            assert [path.read_bytes() for path in entry.paths] == bodies
    assert [proxy.reads(f"flush000{k}.safetensors") for k in range(3)] == [1, 1, 1]


def test_a_cached_part_that_was_tampered_with_is_fetched_again(
    log: StoreLog, proxy: StoreProxy, tmp_path: Path
) -> None:
    body = part(1, 0)
    write(log, 1, body)
    one = reader(log, PartCache(str(tmp_path / "cache"), 1 << 20))
    [entry] = one.listing().entries
    for reads in (1, 2):
        with one.fetched(entry):
            assert entry.paths[0].read_bytes() == body
        assert proxy.reads(".safetensors") == reads
        [kept] = (tmp_path / "cache").glob("*.part")
        kept.write_bytes(bytes(len(body)))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("fault", [Fault(flip=7), Fault(status=404)], ids=["flip", "404"])
def test_what_changed_on_the_way_or_was_not_found_is_asked_for_again(
    log: StoreLog, proxy: StoreProxy, tmp_path: Path, cached: bool, fault: Fault
) -> None:
    body = part(1, 0)
    write(log, 1, body)
    one = reader(log, PartCache(str(tmp_path / "cache"), 1 << 20) if cached else None)
    [entry] = one.listing().entries
    proxy.faults = lambda method, path, number: fault if "flush" in path and not number else None
    with one.fetched(entry):
        assert entry.paths[0].read_bytes() == body
    proxy.faults = lambda method, path, number: fault if "flush" in path else None
    for kept in (tmp_path / "cache").glob("*.part"):
        kept.unlink()
    with pytest.raises(LogDamaged, match="flush0000"), one.fetched(entry):
        pass


def test_a_done_that_was_not_found_is_asked_for_again(log: StoreLog, proxy: StoreProxy) -> None:
    write(log, 1)
    gone = Fault(status=404)
    proxy.faults = lambda method, path, number: gone if DONE in path and not number else None
    assert versions(reader(log, None)) == [(0, 1)]
    proxy.faults = lambda method, path, number: gone if DONE in path else None
    assert "cannot be found" in reader(log, None).listing().damaged["weight_v000001"]


def test_a_store_that_is_away(log: StoreLog, proxy: StoreProxy) -> None:
    write(log, 1)
    one = reader(log, None)
    [entry] = one.listing().entries
    proxy.faults = lambda method, path, number: Fault(status=403)
    with pytest.raises(PartUnavailable, match="flush0000"), one.fetched(entry):
        pass
    with pytest.raises(LogDamaged, match="cannot read the delta log"):
        one.listing()
    proxy.faults = lambda method, path, number: None
    with one.fetched(entry):
        assert len(os.listdir(entry.folder)) == 1
    assert versions(one) == [(0, 1)]


def test_done_is_read_once(log: StoreLog, proxy: StoreProxy) -> None:
    write(log, 1)
    one = reader(log, None)
    for _ in range(3):
        one.listing()
    assert proxy.reads(DONE) == 1


def test_folders_of_processes_that_died_are_removed(log: StoreLog, tmp_path: Path) -> None:
    cache = PartCache(str(tmp_path / "cache"), 1 << 20)
    dead = cache.folder / "log-dead"
    dead.mkdir()
    os.utime(dead, (0, 0))
    living = reader(log, cache)
    living.listing()
    [folder] = cache.folder.glob("log-*")
    os.utime(folder, (0, 0))
    reader(log, cache).listing()
    assert folder.exists()
    assert not dead.exists()
