"""A delta log in a real object store: what is fetched, asked for again, and settled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_ext.errors import LogDamaged, PartUnavailable
from engine_ext.files import INDEX
from engine_ext.log import DeltaLog, Objects, ObjectStore, open_log
from engine_ext.log.catalog import DONE, REFUSED
from engine_ext.remote_parts import PartCache
from tests.support.object_stores import StoreServer
from tests.support.store_proxy import Fault, StoreProxy
from tests.unit.log.places import no_sleep, part, versions, write

pytestmark = pytest.mark.slow


@pytest.fixture
def log(store_url: str, tmp_path: Path) -> DeltaLog:
    """An empty log that keeps no parts."""
    return open_log(store_url, scratch=str(tmp_path))


def names(log: DeltaLog) -> list[str]:
    found = [one.name for one in Objects(log.location).list()]
    return [name for name in found if not name.startswith("claims/")]


def test_a_refusal_that_was_cut_off_is_finished(
    log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next sender, before it looks which version is the newest."""
    writer = log.writer()
    draft = writer.begin(1)
    draft.add(part(1, 0))
    draft.finish()

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.refuse(1)
    assert log.writer().last_number == 1
    assert names(log) == [f"weight_v000001/{REFUSED}"]
    with pytest.raises(BlockingIOError):
        writer.refuse(1)


def test_a_folder_of_another_trainer_is_discarded_index_first(
    log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model-00001.safetensors", INDEX):
        Objects(log.location).put(f"weight_v000001/{name}", b"{}")
    deleted: list[str] = []
    monkeypatch.setattr(Objects, "delete", lambda self, names: deleted.extend(names))
    log.store.delete(["weight_v000001"])
    assert deleted[0] == f"weight_v000001/{INDEX}"


@pytest.fixture
def proxy(
    store_server: StoreServer, log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreProxy]:
    """A proxy before the store, for logs that are opened with it."""
    with StoreProxy(store_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.server.endpoint)
        yield proxy


def reader(log: DeltaLog, cache: PartCache | None) -> DeltaLog:
    return DeltaLog(ObjectStore(Objects(log.location, sleep=no_sleep), cache))


def test_engines_of_a_host_fetch_an_object_once(
    log: DeltaLog, proxy: StoreProxy, tmp_path: Path
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
    log: DeltaLog, proxy: StoreProxy, tmp_path: Path
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
def test_file_lost_or_changed_on_the_way_is_read_again(
    log: DeltaLog, proxy: StoreProxy, tmp_path: Path, cached: bool, fault: Fault
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


def test_a_done_that_was_not_found_is_asked_for_again(log: DeltaLog, proxy: StoreProxy) -> None:
    write(log, 1)
    gone = Fault(status=404)
    proxy.faults = lambda method, path, number: gone if DONE in path and not number else None
    assert versions(reader(log, None)) == [(0, 1)]
    proxy.faults = lambda method, path, number: gone if DONE in path else None
    assert "cannot be found" in reader(log, None).listing().damaged["weight_v000001"]


def test_a_store_that_is_away(log: DeltaLog, proxy: StoreProxy) -> None:
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


def test_done_is_read_once(log: DeltaLog, proxy: StoreProxy) -> None:
    write(log, 1)
    one = reader(log, None)
    for _ in range(3):
        one.listing()
    assert proxy.reads(DONE) == 1


def test_folders_of_processes_that_died_are_removed(log: DeltaLog, tmp_path: Path) -> None:
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
