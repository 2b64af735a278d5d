"""``GET /delta_parts``: an engine hands on the parts of its log."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest
import uvicorn
import xxhash

from delta_server import part_server
from delta_server.sources import log as replaying
from engine_ext.format import SIGNATURE_SUFFIX, sign
from engine_ext.log import (
    DeltaLog,
    FolderStore,
    Heartbeat,
    SharedParts,
    fold_versions,
    open_log,
    route,
    write_heartbeat,
)
from engine_ext.remote_parts import PartCache
from engine_ext.settings import API_KEY_ENVIRONMENT, HMAC_KEY_ENVIRONMENT
from tests.support.cases import case
from tests.support.delta_bodies import VERSION, after, delta_part, fresh_weights, same
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.present import present
from tests.support.store_proxy import StoreProxy
from tests.unit.server.delta_logs import STEPS, write, write_steps

pytestmark = pytest.mark.slow

PARTS = "/delta_parts"


def content_of(folder: Path) -> tuple[str, bytes]:
    data = (folder / "rank0_flush000.safetensors").read_bytes()
    return xxhash.xxh3_128_hexdigest(data), data


def test_part_of_the_log_is_served(make_rig: Callable[..., Rig], log: Path) -> None:
    rig = make_rig(log=str(log))
    [folder, *_] = write_steps(log)
    content, data = content_of(folder)
    assert rig.get(f"{PARTS}/{content}").content == data
    rest = rig.get(f"{PARTS}/{content}", headers={"Range": "bytes=10-"})
    assert (rest.status_code, rest.content) == (206, data[10:])
    assert rig.get(f"{PARTS}/{content}?cached=true").content == data


def test_nothing_else_is_served(make_rig: Callable[..., Rig], log: Path) -> None:
    rig = make_rig(log=str(log))
    write_steps(log)
    for name in ("0" * 32, "DONE", "..", "%2e%2e%2fDONE"):
        assert rig.get(f"{PARTS}/{name}").status_code == 404, name


@pytest.mark.parametrize("linked", ["folder", "file"])
def test_link_in_the_log_is_not_served(
    make_rig: Callable[..., Rig], log: Path, tmp_path: Path, linked: str
) -> None:
    """Who can write into the log cannot read the engine's other files by it."""
    rig = make_rig(log=str(log))
    [folder, *_] = write_steps(log)
    content, data = content_of(folder)
    assert rig.get(f"{PARTS}/{content}").status_code == 200
    [part] = folder.glob("*.safetensors")
    secret = tmp_path / "secret" / part.name
    secret.parent.mkdir()
    secret.write_bytes(bytes(len(data)))
    moved, target = (folder, secret.parent) if linked == "folder" else (part, secret)
    moved.rename(tmp_path / "gone")
    moved.symlink_to(target)
    assert rig.get(f"{PARTS}/{content}").status_code in (404, 409)


def test_engine_without_log_serves_none(rig: Rig) -> None:
    assert_error(rig.get(f"{PARTS}/{'0' * 32}"), 409, "Conflict")


def test_access_is_that_of_other_routes(
    make_rig: Callable[..., Rig], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(log=str(log))
    [folder, *_] = write_steps(log)
    url = f"{PARTS}/{content_of(folder)[0]}"
    elsewhere = rig.get(url, peer=("10.1.2.3", 9))
    assert_error(elsewhere, 403, "AccessDenied")
    monkeypatch.setenv(API_KEY_ENVIRONMENT, "token")
    assert_error(rig.get(url), 401, "Unauthorized")
    headers = {"Authorization": "Bearer token"}
    assert rig.get(url, peer=("10.1.2.3", 9), headers=headers).status_code == 200


def test_slow_read_is_asked_for_again(
    make_rig: Callable[..., Rig], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a large part does not take the engine for silent; the store is read once."""
    rig, end, began = make_rig(log=str(log)), threading.Event(), list[str]()
    [folder, *_] = write_steps(log)
    content, data = content_of(folder)
    path = SharedParts.path

    def slow(parts: SharedParts, content: str, *, reads: bool) -> Path | None:
        began.append(content)
        end.wait(30)
        return path(parts, content, reads=reads)

    monkeypatch.setattr(SharedParts, "path", slow)
    monkeypatch.setattr(part_server, "_LONGEST_WAIT_S", 0.05)
    url = f"{PARTS}/{content}"
    assert [rig.get(url).status_code for _ in range(3)] == [202] * 3
    assert len(began) == 1
    monkeypatch.setattr(part_server, "_LONGEST_WAIT_S", 30.0)
    end.set()
    assert rig.get(url).content == data


def test_signature_of_a_part_is_read_once(
    make_rig: Callable[..., Rig], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, "key")
    bodies = [delta_part(step, VERSION + k + 1) for k, step in enumerate(STEPS[:2])]
    with open_log(log).writer() as writer:
        for k, body in enumerate(bodies):
            draft = writer.begin(VERSION + k + 1)
            draft.add(body, sign("key", body))
            draft.finish("key")
    rig, read = make_rig(log=str(log)), list[str]()
    original = FolderStore.read

    def noted(store: FolderStore, name: str, most: int) -> bytes:
        read.append(name)
        return original(store, name, most)

    monkeypatch.setattr(FolderStore, "read", noted)
    parts = SharedParts(open_log(log))
    digest = rig.status().version.digest
    offers = [parts.offer(VERSION + 2, digest) for _ in range(3)]
    found = [[*one.signatures.values()] for one in offers[0].versions]
    assert found == [[sign("key", body)] for body in bodies]
    assert offers[1:] == offers[:1] * 2
    assert len([name for name in read if name.endswith(SIGNATURE_SUFFIX)]) == 2


def test_signature_that_is_no_text_is_handed_on(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets it refuses the part."""
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, "key")
    body = delta_part(STEPS[0], VERSION + 1)
    folder = write(log, body, number=VERSION + 1)
    [path] = folder.glob("*.safetensors")
    path.with_name(path.name + SIGNATURE_SUFFIX).write_bytes(b"\xff" * 64)
    [offered] = SharedParts(open_log(log)).offer(VERSION + 1, "0" * 32).versions
    assert [*offered.signatures.values()] == ["\ufffd" * 64]


# An engine without a log ---------------------------------------------------------------------


class Fleet:
    """An engine with a log in a folder, whose endpoints are served, and one that joins it."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self.first = Rig(folder / "first", log=str(log))
        self._stack.callback(self.first.close)
        # Its ranks are those of the rig's loop, so an offer is asked for there.
        self.answers: dict[str, Any] = {}
        self.url = self._serve(self.answers)

    def _serve(self, answers: dict[str, Any]) -> str:
        listening = socket.create_server(("127.0.0.1", 0))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body = answers.get(scope["path"])
            if body is None:
                await self.first.app(scope, receive, send)
                return
            start = {"type": "http.response.start", "status": 200, "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": body})

        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()

        self._stack.callback(stop)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    def also(self, answers: dict[str, Any]) -> str:
        """Serve the engine at another URL, with some answers in place of its own."""
        return self._serve(self.answers | answers)

    def offer(self) -> dict[str, Any]:
        answer = self.first.get(PARTS)
        self.answers[PARTS] = answer.content
        found: dict[str, Any] = answer.json()
        return found

    def join(self, **settings: Any) -> Rig:
        given = {"peers": (self.url,), "cache_dir": str(self._folder / "cache")}
        rig = Rig(self._folder / "joins", **given | settings)
        self._stack.callback(rig.close)
        return rig

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def fleet(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(replaying, "_WAITS_S", ())
    weights = fresh_weights()
    for k, step in enumerate(STEPS):
        before, weights = Rig.digest_of(weights), after(weights, step)
        version = VERSION + k + 1
        digests = {"digest_before": before, "digest_after": Rig.digest_of(weights)}
        body = delta_part(step, version, base_version=version - 1, **digests)
        write(log, body, number=version)
    found = Fleet(tmp_path, log)
    yield found
    found.close()


def test_engine_without_log_joins_by_peer(fleet: Fleet) -> None:
    offer = fleet.offer()
    assert (offer["version"], len(offer["versions"])) == (VERSION + 3, 3)
    rig = fleet.join()
    status = rig.status()
    assert (status.version.number, status.version.digest) == (VERSION + 3, offer["digest"])
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
    found = present(status.log)
    assert (found.folder, found.problem) == (fleet.url, None)
    assert found.from_peers > 0
    more = delta_part({"norm.weight": {1: 9}}, VERSION + 4, base_version=VERSION + 3)
    assert rig.send(more).json()["status"] == "committed"


def test_versions_past_the_peers_own_are_not_taken(fleet: Fleet) -> None:
    assert fleet.first.post("/delta_rollback").status_code == 200
    fleet.offer()
    rig = fleet.join()
    assert rig.status().version.digest == fleet.first.status().version.digest
    assert rig.status().version.number < VERSION + 3


def test_peer_whose_digest_differs_is_not_joined(fleet: Fleet) -> None:
    offer = fleet.offer()
    fleet.answers[PARTS] = msgspec.json.encode(offer | {"digest": "e" * 32})
    rig = fleet.join()
    assert same(rig.engine.weights, fresh_weights())
    problem = present(present(rig.status().log).problem)
    assert problem["type"] == "LogDamaged"
    assert "nothing shows that one leads to the other" in problem["message"]


@pytest.mark.parametrize("lacks", ["own version", "sound fold"])
def test_peer_whose_log_proves_nothing_is_not_joined(fleet: Fleet, log: Path, lacks: str) -> None:
    if lacks == "sound fold":
        found = open_log(log)
        fold_versions(found, route(found.listing().entries, VERSION), VERSION)
    offer = fleet.offer()
    assert len(offer["versions"]) == (4 if lacks == "sound fold" else 3)
    folds = [one for one in offer["versions"] if "_from_" in one["folder"]]
    for fold in folds:
        fold["done"]["publication"]["digest_after"] = "e" * 32
    fleet.answers[PARTS] = msgspec.json.encode(
        offer | {"versions": folds or offer["versions"][:-1]}
    )
    rig = fleet.join()
    assert same(rig.engine.weights, fresh_weights())
    problem = present(present(rig.status().log).problem)
    assert problem["type"] == "LogDamaged"
    assert "nothing shows that one leads to the other" in problem["message"]


def test_peer_that_offers_no_versions_is_not_joined(fleet: Fleet) -> None:
    for offer in (b"", b'{"digest": "\xff"}', b"[" * 10_000):
        with case(offer[:20]):
            fleet.answers[PARTS] = offer
            rig = fleet.join()
            assert same(rig.engine.weights, fresh_weights())
            problem = present(present(rig.status().log).problem)
            assert "a peer's offer cannot be read" in problem["message"]


def test_peer_that_is_down_leaves_the_checkpoint(fleet: Fleet) -> None:
    rig = fleet.join(peers=("http://127.0.0.1:9",))
    assert same(rig.engine.weights, fresh_weights())
    assert present(present(rig.status().log).problem)["type"] == "LogDamaged"
    fleet.offer()


def test_other_peers_have_what_one_sends_wrong(fleet: Fleet, log: Path) -> None:
    fleet.offer()
    content, data = content_of(min(log.glob("weight_v*")))
    bad = fleet.also({f"{PARTS}/{content}": data[::-1]})
    rig = fleet.join(peers=(bad, fleet.url))
    assert rig.status().version.number == VERSION + 3
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))


@pytest.mark.parametrize("key", ["key", "another key"])
def test_part_of_a_peer_needs_the_signature(
    fleet: Fleet, log: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Its hash is what the peer's own log says."""
    for folder in log.glob("weight_v*"):
        [part] = folder.glob("*.safetensors")
        part.with_name(part.name + SIGNATURE_SUFFIX).write_text(sign(key, part.read_bytes()))
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, "key")
    fleet.offer()
    rig = fleet.join()
    weights = after(fresh_weights(), *STEPS) if key == "key" else fresh_weights()
    assert same(rig.engine.weights, weights)
    if key != "key":
        assert "signature" in str(present(present(rig.status().log).problem)["damaged"])


def test_offered_signature_overwrites_no_part(fleet: Fleet, log: Path, tmp_path: Path) -> None:
    """A signature's file could be a link to a part that other engines of the host use."""
    offer = fleet.offer()
    [first, *_], (content, data) = offer["versions"], content_of(max(log.glob("weight_v*")))
    [name] = first["done"]["files"]
    part = {name + SIGNATURE_SUFFIX: {"bytes": len(data), "xxh3_128": content}}
    first["done"]["files"] = part | first["done"]["files"]
    first["signatures"] = {name: "other bytes"}
    fleet.answers[PARTS] = msgspec.json.encode(offer)
    cache = PartCache(str(tmp_path / "cache"), 1 << 30)

    def fetch(file: BinaryIO) -> None:
        file.write(data)

    kept = cache.get(content, len(data), fetch)
    rig = fleet.join()
    assert same(rig.engine.weights, fresh_weights())
    assert kept.read_bytes() == data


def test_uncertain_engine_offers_nothing(fleet: Fleet) -> None:
    fleet.first.fail_commit(VERSION + 4)
    assert_error(fleet.first.get(PARTS), 409, "Conflict")


# A group of engines that follow a log in a store ---------------------------------------------


class Group:
    """Engines with a cache each, whose endpoints are served."""

    def __init__(self, folder: Path, log: str, size: int) -> None:
        self._folder, self._log = folder, log
        self._stack = ExitStack()
        self.listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        self.urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in self.listening]
        self.rigs: list[Rig] = []

    def start(self, number: int, **settings: Any) -> Rig:
        """Start one of the engines."""
        given = {
            "log": self._log,
            "follow": True,
            "follow_interval": 1000.0,
            "cache_dir": str(self._folder / f"cache{number}"),
            "peers": tuple(self.urls),
            "own_url": self.urls[number],
        }
        rig = Rig(self._folder / f"spool{number}", **given | settings)
        self._stack.callback(rig.close)
        config = uvicorn.Config(rig.app, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        listening = self.listening[number]
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()

        self._stack.callback(stop)
        self.rigs.append(rig)
        return rig

    def close(self) -> None:
        self._stack.close()
        for one in self.listening:
            one.close()


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> DeltaLog:
    return open_log(store_url, scratch=str(tmp_path))


@pytest.fixture
def proxy(
    store_server: Any, store: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreProxy]:
    with StoreProxy(store_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.server.endpoint)
        yield proxy


@pytest.fixture
def group(tmp_path: Path, store: DeltaLog, proxy: StoreProxy) -> Iterator[Group]:
    found = Group(tmp_path, store.location, 3)
    yield found
    found.close()


def publish(log: DeltaLog, count: int = len(STEPS)) -> None:
    writer = log.writer()
    for k, step in enumerate(STEPS[:count]):
        draft = writer.begin(VERSION + k + 1)
        draft.add(delta_part(step, VERSION + k + 1, base_version=VERSION + k))
        draft.finish()


def reads_of_parts(proxy: StoreProxy) -> list[int]:
    """How often each part was read from the store."""
    return sorted(
        count
        for (method, path), count in proxy.requests.items()
        if method == "GET" and "_flush" in path
    )


def test_store_sends_each_part_once_to_a_group(
    group: Group, store: DeltaLog, proxy: StoreProxy
) -> None:
    for number in range(3):
        group.start(number)
    publish(store)
    proxy.requests.clear()
    for rig in group.rigs:
        assert rig.post("/delta_catch_up").json()["version"] == VERSION + 3
        assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
    assert reads_of_parts(proxy) == [1, 1, 1]
    assert sum(present(rig.status().log).from_peers for rig in group.rigs) > 0


@pytest.mark.full
@pytest.mark.timeout(600)
def test_store_sends_each_part_once_to_64_engines(
    tmp_path: Path, store: DeltaLog, proxy: StoreProxy
) -> None:
    """All of them ask for the new versions at once."""
    group = Group(tmp_path, store.location, 64)
    try:
        for number in range(64):
            group.start(number)
        publish(store)
        proxy.requests.clear()

        def catch_up(rig: Rig) -> Any:  # all of them share a processor
            return rig.run(rig.request("POST", "/delta_catch_up"), timeout_s=300)

        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(catch_up, group.rigs))
        assert {answer.json()["version"] for answer in answers} == {VERSION + 3}
        assert all(same(rig.engine.weights, after(fresh_weights(), *STEPS)) for rig in group.rigs)
        assert reads_of_parts(proxy) == [1, 1, 1]
    finally:
        group.close()


def test_part_that_was_pruned_is_not_there(group: Group, store: DeltaLog) -> None:
    for one in (1, 2):  # else the follower waits for their answers until it is closed
        group.listening[one].close()
    rig = group.start(0)
    publish(store)
    [entry, *_] = store.listing().entries
    [facts] = entry.files.values()
    url = f"{PARTS}/{present(facts).xxh3_128}"
    assert rig.get(f"{url}?cached=true").status_code == 404
    store.store.delete([entry.folder.name])
    assert rig.get(url).status_code == 404
    publish(store, 1)
    assert rig.get(url).status_code == 200


def test_peers_that_are_down_leave_the_store(
    group: Group, store: DeltaLog, proxy: StoreProxy
) -> None:
    for one in (0, 2):
        group.listening[one].close()
    rig = group.start(1)
    publish(store)
    proxy.requests.clear()
    assert rig.post("/delta_catch_up").json()["version"] == VERSION + 3
    assert reads_of_parts(proxy) == [1, 1, 1]


def test_heartbeat_names_an_engines_root_or_no_peer(group: Group, store: DeltaLog) -> None:
    """Who can write heartbeats does not choose what else an engine asks."""
    address = "{}:{}".format(*group.listening[2].getsockname())
    urls = [f"http://user{k}:key@{address}" for k in range(4)]
    urls += [f"http://{address}/path?a={k}" for k in range(4)]
    for number, url in enumerate(urls):
        beat = Heartbeat(
            name=f"other-{number}",
            engine="vllm",
            version=VERSION,
            newest=None,
            behind=0,
            state="following",
            failures=0,
            url=url,
            at=0.0,
            expires_s=1000.0,
        )
        write_heartbeat(store, beat)
    rig = group.start(0, peers=())
    publish(store)
    assert rig.post("/delta_catch_up").json()["version"] == VERSION + 3
    group.listening[2].settimeout(0.1)
    with pytest.raises(TimeoutError):
        group.listening[2].accept()


def test_peers_are_found_by_their_heartbeats(
    group: Group, store: DeltaLog, proxy: StoreProxy
) -> None:
    for number in range(3):
        group.start(number, peers=())
    publish(store)
    proxy.requests.clear()
    for rig in group.rigs:
        assert rig.post("/delta_catch_up").json()["version"] == VERSION + 3
    assert reads_of_parts(proxy) == [1, 1, 1]
