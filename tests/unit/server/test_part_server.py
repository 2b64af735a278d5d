"""An engine with a rank on another host, which gets every part from the server over HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from delta_server.part_server import PartServer
from engine_ext.ranks.operations import PartSource
from engine_ext.remote_parts import PartCache, locate_part
from engine_ext.remote_parts.fetch import fetch_part
from tests.support.delta_bodies import NEXT, delta_part
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.in_process_engine import Engine

pytestmark = pytest.mark.slow


class Elsewhere:
    """Another host: no path of the server's leads anywhere on it.

    Attributes:
        sources: of the parts that its rank was to stage.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.sources: list[PartSource] = []
        self._cache = PartCache(str(cache), 1 << 20)

    def locate(self, path: str, source: PartSource | None) -> str:
        assert source is not None
        self.sources.append(source)
        return locate_part(self._cache, f"/no/such/host{path}", source)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path / "cache")


@pytest.fixture
def hosts(
    make_rig: Callable[..., Rig], elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    """A server whose rank 1 is on another host."""
    monkeypatch.setattr(Engine, "address", "127.0.0.1")
    rig = make_rig()
    rig.engine.receivers[1]._staging._locate = elsewhere.locate
    yield rig
    assert rig.service._part_server is not None
    rig.service._part_server.close()


def test_all_ranks_commit(hosts: Rig, elsewhere: Elsewhere) -> None:
    hosts.assert_committed(hosts.send(delta_part()), NEXT, 8)
    [source] = elsewhere.sources
    assert {path.name.split(".")[0] for path in elsewhere.cache.iterdir()} == {source.content}


def test_an_engine_on_one_host_serves_no_parts(rig: Rig) -> None:
    assert rig.service._part_server is None


def test_a_part_is_served_only_while_it_is_staged(
    hosts: Rig, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    hosts.send(delta_part())
    with (tmp_path / "late").open("w+b") as file, pytest.raises(Exception, match="404"):
        fetch_part(elsewhere.sources[0], file)


def test_a_rank_that_gets_no_part_refuses_the_sync(
    hosts: Rig, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(path: str, source: PartSource | None) -> str:
        assert source is not None
        with open(os.devnull, "w+b") as file:
            fetch_part(msgspec.structs.replace(source, url="http://127.0.0.1:9/x"), file)
        raise AssertionError

    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    hosts.engine.receivers[1]._staging._locate = unreachable
    assert_error(hosts.send(delta_part()), 502, "PartUnavailable")
    hosts.engine.receivers[1]._staging._locate = elsewhere.locate
    hosts.assert_untouched()


def test_a_full_cache_refuses_the_sync(hosts: Rig, elsewhere: Elsewhere, tmp_path: Path) -> None:
    small = PartCache(str(tmp_path / "small"), 16)
    hosts.engine.receivers[1]._staging._locate = lambda path, source: locate_part(
        small, f"/no/such/host{path}", source
    )
    assert_error(hosts.send(delta_part()), 507, "SpoolFull")
    hosts.engine.receivers[1]._staging._locate = elsewhere.locate
    hosts.assert_untouched()


def test_same_changes_with_other_metadata_are_another_part(
    hosts: Rig, elsewhere: Elsewhere
) -> None:
    """So a rank never sees another sync's digests, versions or numbers."""
    hosts.assert_committed(hosts.send(delta_part(sync_id="one")), NEXT, 8)
    assert hosts.post("/delta_rollback").status_code == 200
    hosts.assert_committed(hosts.send(delta_part(sync_id="another")), NEXT, 8)
    assert len({source.content for source in elsewhere.sources}) == 2


def test_a_damaged_copy_is_not_read(hosts: Rig, elsewhere: Elsewhere) -> None:
    hosts.assert_committed(hosts.send(delta_part()), NEXT, 8)
    [copy] = elsewhere.cache.glob("*.part")
    copy.write_bytes(bytes(copy.stat().st_size))
    assert hosts.post("/delta_rollback").status_code == 200
    hosts.assert_committed(hosts.send(delta_part()), NEXT, 8)


def test_restarted_engine_verifies_its_cache_again(tmp_path: Path) -> None:
    """On the same port, with the same part as its first one."""
    part = tmp_path / "part"
    part.write_bytes(b"a part" * 100)
    cache = PartCache(str(tmp_path / "cache"), 1 << 20)
    port = 0
    for _ in range(2):
        server = PartServer("127.0.0.1", port)
        port = urlsplit(server.url).port or 0
        try:
            with server.offer(part) as source:
                found = Path(locate_part(cache, "/no/such/host", source))
                assert found.read_bytes() == part.read_bytes()
        finally:
            server.close()
        found.write_bytes(b"b" + part.read_bytes()[1:])  # damaged while no engine runs
