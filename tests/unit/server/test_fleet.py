"""Steps of a commit of several engines at the endpoints, and what an engine settles alone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_server import fleet as fleet_module
from delta_server.audit import Audit
from delta_server.board import FLEET
from delta_server.fleet import PeerAnswer
from engine_ext.errors import (
    AuditUnavailable,
    Conflict,
    DeltaError,
    SaltUnavailable,
    WriteUndone,
)
from engine_ext.ranks import ENGINE
from engine_ext.ranks.operations import LeaseItem, Operation, PutItem
from tests.support.delta_bodies import BASE, NEXT, OTHER_STEP, VERSION, after, delta_part, same
from tests.support.endpoint_rig import DELTA, assert_error
from tests.support.fleet_rig import COMMIT, LONG, FleetRig
from tests.support.present import present
from tests.unit.server.other_process import Process

GROUP = "g"
PEER_ANSWER = b'{"decision": "commit", "committed": true}'
SYNC = {"version": VERSION + 1, "sync_id": "s"}
RUN: dict[str, Any] = {"run": "a", "run_epoch": 1, "run_owner": "host:1"}


@pytest.fixture
def size() -> int:
    return 3


@pytest.fixture
def fleet(tmp_path: Path, size: int) -> Iterator[FleetRig]:
    made = FleetRig(tmp_path, size)
    yield made
    made.close()


ALONE = pytest.mark.parametrize("size", [1])
PAIR = pytest.mark.parametrize("size", [2])


def prepare(fleet: FleetRig, url: str, **more: Any) -> None:
    """Stage the step and prepare it."""
    answer = fleet.hold(url, delta_part(sync_id="s", **RUN))
    assert (answer.status_code, answer.json()["status"]) == (200, "staged"), answer.text
    answer = fleet.step(url, "prepare", GROUP, **{**SYNC, "lease": LONG, **more})
    assert (answer.status_code, answer.json()["status"]) == (200, "prepared"), answer.text


def record(fleet: FleetRig, url: str, **more: Any) -> None:
    answer = fleet.step(url, "record", GROUP, **{"peers": fleet.urls, "lease": LONG, **more})
    assert (answer.status_code, answer.json()["status"]) == (200, "recorded"), answer.text


def record_all(fleet: FleetRig) -> None:
    """Let every engine prepare the step, and then record that the group commits it."""
    for url in fleet.urls:
        prepare(fleet, url)
    for url in fleet.urls:
        record(fleet, url)


def versions(fleet: FleetRig) -> list[int]:
    return [fleet.status(url).version.number for url in fleet.urls]


def held(fleet: FleetRig) -> list[bool]:
    return [fleet.prepared(url) is not None for url in fleet.urls]


def claim(fleet: FleetRig, url: str, **more: Any) -> httpx.Response:
    body = {"action": "claim", "run": "a", "epoch": 2, "host": "host", "pid": 2, **more}
    return fleet.rigs[url].post("/delta_run", json=body)


def test_engines_commit_what_they_have_recorded(fleet: FleetRig) -> None:
    for url in fleet.urls:
        prepare(fleet, url)
        rig = fleet.rigs[url]
        assert (rig.engine.events, rig.engine.writes) == ([], [0, 0])  # it serves, unpaused
    for url in fleet.urls:
        record(fleet, url)
        assert present(fleet.prepared(url)).recorded
    for url in fleet.urls:
        fleet.rigs[url].assert_committed(fleet.step(url, "commit", GROUP), NEXT, VERSION + 1)
        again = fleet.step(url, "commit", GROUP).json()
        assert (again["status"], again["version"]) == ("already_applied", VERSION + 1)
    assert held(fleet) == [False] * 3


@ALONE
def test_held_sync_is_not_committed_by_its_parts(fleet: FleetRig) -> None:
    [url] = fleet.urls
    prepare(fleet, url)
    answer = fleet.rigs[url].send(delta_part(sync_id="s", **RUN))
    assert_error(answer, 409, "SyncInProgress", staged_version=VERSION + 1)
    assert held(fleet) == [True]
    assert same(fleet.rigs[url].engine.weights, BASE)


@pytest.mark.slow
def test_held_sync_keeps_others_out(tmp_path: Path) -> None:
    fleet = FleetRig(tmp_path, 1, stage_timeout=0.2)
    [url] = fleet.urls
    rig = fleet.rigs[url]
    prepare(fleet, url)
    time.sleep(0.3)
    later = delta_part(OTHER_STEP, VERSION + 2, base_version=VERSION, sync_id="t", **RUN)
    error = assert_error(rig.send(later), 409, "SyncInProgress")
    assert error["retry_after"] <= 5
    assert_error(rig.post("/delta_rollback"), 409, "SyncInProgress")
    other = {"action": "release", "run": "a", "epoch": 1, "host": "host", "pid": 1}
    assert rig.post("/delta_run", json=other).json()["released"]
    assert held(fleet) == [True]
    assert fleet.step(url, "abort", GROUP, **SYNC).json()["status"] == "aborted"
    assert (held(fleet), rig.status().staged) == ([False], None)
    fleet.close()


@ALONE
@pytest.mark.parametrize("action", ["prepare", "record", "commit"])
def test_aborted_group_stays_aborted(fleet: FleetRig, action: str) -> None:
    [url] = fleet.urls
    if action != "prepare":
        prepare(fleet, url)
    assert fleet.step(url, "abort", GROUP, **SYNC).json()["status"] == "aborted"
    if action == "prepare":  # its parts come late
        assert fleet.hold(url, delta_part(sync_id="s")).json()["status"] == "staged"
    answer = fleet.step(url, action, GROUP, peers=fleet.urls, **SYNC)
    assert_error(answer, 409, "GroupAborted")
    assert versions(fleet) == [VERSION]


@ALONE
def test_steps_need_the_one_before(fleet: FleetRig) -> None:
    [url] = fleet.urls
    assert_error(fleet.step(url, "prepare", GROUP, **SYNC), 409, "Conflict")
    assert_error(fleet.step(url, "prepare", GROUP), 400, "MalformedPart")
    assert_error(fleet.step(url, "record", GROUP), 409, "Conflict")
    assert_error(fleet.step(url, "commit", GROUP), 409, "Conflict")
    prepare(fleet, url)
    assert_error(fleet.step(url, "commit", GROUP), 409, "Conflict")
    assert_error(fleet.step(url, "prepare", "other", **SYNC), 409, "SyncInProgress")
    assert held(fleet) == [True]


@PAIR
def test_engine_that_cannot_salt_prepares_nothing(fleet: FleetRig) -> None:
    first, second = fleet.urls
    for url in (first, second):
        fleet.rigs[url].engine.fails["salt"] = SaltUnavailable("not as it was started")
    fleet.hold(first, delta_part(sync_id="s", **RUN))
    assert_error(fleet.step(first, "prepare", GROUP, "salt", **SYNC), 422, "SaltUnavailable")
    assert fleet.status(first).staged is None
    prepare(fleet, second)  # whose commit would not salt
    answer = fleet.step(second, "record", GROUP, "salt", peers=fleet.urls)
    assert_error(answer, 422, "SaltUnavailable")
    assert not present(fleet.prepared(second)).recorded
    assert fleet.step(second, "abort", GROUP, **SYNC).json()["status"] == "aborted"
    assert versions(fleet) == [VERSION] * 2


@PAIR
def test_sync_recorded_everywhere_is_committed_with_its_salt(fleet: FleetRig) -> None:
    for url in fleet.urls:
        prepare(fleet, url)
        answer = fleet.step(url, "record", GROUP, "salt", peers=fleet.urls, lease=LONG)
        assert answer.status_code == 200
    for url in fleet.urls:
        assert fleet.settle(url)
        assert fleet.rigs[url].engine.events[0] == ("stop", "salt")
        assert same(fleet.rigs[url].engine.weights, NEXT)
    assert versions(fleet) == [VERSION + 1] * 2


@ALONE
def test_sync_that_ranks_refuse_is_not_prepared(fleet: FleetRig) -> None:
    [url] = fleet.urls
    fleet.hold(url, delta_part(sync_id="s"))
    fleet.rigs[url].engine.receivers[1].weights_replaced("a reload")
    answer = fleet.step(url, "prepare", GROUP, **SYNC)
    assert answer.status_code == 409
    assert fleet.status(url).staged is None


@ALONE
def test_malformed_steps_are_refused(fleet: FleetRig) -> None:
    [rig] = fleet.rigs.values()
    wrongs: list[dict[str, Any]] = [
        {"action": "decide"}, {"group": ""}, {"group": "g\n"}, {"peers": ["file:///x"]},
        {"peers": ["http://host\n"]},
    ]  # fmt: skip
    for wrong in wrongs:
        answer = rig.post(COMMIT, json={"action": "prepare", "group": GROUP, **SYNC, **wrong})
        assert (wrong, answer.status_code) == (wrong, 400)
        assert_error(answer, 400, "MalformedPart")
    assert_error(rig.send(b"", commit="never"), 400, "MalformedPart")
    files = {"model_path": "/shared", "load_format": "delta"}
    assert_error(rig.post(f"{DELTA}?commit=hold", json=files), 400, "MalformedPart")
    for commit in ("hold", "never"):
        assert_error(rig.post(DELTA, json={**files, "commit": commit}), 400, "MalformedPart")


# When a lease ends -------------------------------------------------------------------------------


@ALONE
def test_unrecorded_sync_is_dropped_and_stays_aborted(fleet: FleetRig) -> None:
    [url] = fleet.urls
    prepare(fleet, url)
    assert fleet.settle(url)
    assert held(fleet) == [False]
    answer = fleet.step(url, "record", GROUP, peers=fleet.urls)
    assert_error(answer, 409, "GroupAborted")


def test_sync_recorded_by_some_is_dropped(fleet: FleetRig) -> None:
    for url in fleet.urls:
        prepare(fleet, url)
    for url in fleet.urls[:2]:
        record(fleet, url)
    for url in fleet.urls:
        assert fleet.settle(url)
    assert versions(fleet) == [VERSION] * 3
    assert held(fleet) == [False] * 3


def test_commit_of_one_is_enough_for_others(fleet: FleetRig) -> None:
    a, b, c = fleet.urls
    record_all(fleet)
    assert fleet.step(a, "commit", GROUP).json()["status"] == "committed"
    fleet.cut.add(c)
    assert fleet.settle(b)
    assert versions(fleet) == [VERSION + 1, VERSION + 1, VERSION]


@PAIR
@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("fails", ["stop", "lease"])
def test_commit_that_did_not_reach_ranks_is_tried_again(
    fleet: FleetRig, fails: str, settles: bool
) -> None:
    """Its record says commit, and others have committed: dropped, the engine would stay behind."""
    a, b = fleet.urls
    record_all(fleet)
    assert fleet.step(a, "commit", GROUP).json()["status"] == "committed"
    engine = fleet.rigs[b].engine
    if settles:
        engine.fails[fails] = RuntimeError("the cache was not reset")
        with pytest.raises(DeltaError, match="was not reset"):
            fleet.settle(b)
    else:
        engine.fails[fails] = RuntimeError("the cache was not reset")
        error = assert_error(fleet.step(b, "commit", GROUP), 500, "DeltaError")
        assert error["held"] is True
    assert (engine.writes, engine.paused) == ([0, 0], False)
    assert held(fleet) == [False, True]
    if settles:
        assert fleet.settle(b)
    else:
        assert fleet.step(b, "commit", GROUP).json()["status"] == "committed"
    assert versions(fleet) == [VERSION + 1] * 2


def test_unrecorded_commit_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FleetRig(tmp_path, 1, audit_file=str(tmp_path / "audit"))
    [url] = fleet.urls
    prepare(fleet, url)
    record(fleet, url)

    async def unavailable(*_: Any, **__: Any) -> None:
        raise AuditUnavailable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Audit, "begin", unavailable)
        assert_error(fleet.step(url, "commit", GROUP), 507, "AuditUnavailable")
    assert held(fleet) == [True]
    fleet.rigs[url].assert_committed(fleet.step(url, "commit", GROUP), NEXT, VERSION + 1)
    fleet.close()


@ALONE
def test_commit_that_would_conflict_again_is_dropped(fleet: FleetRig) -> None:
    """A request that holds its KV can stay for hours, and each try preempts the others."""
    [a] = fleet.urls
    record_all(fleet)
    engine = fleet.rigs[a].engine
    engine.fails["stop"] = Conflict("a request holds KV")
    assert "held" not in assert_error(fleet.step(a, "commit", GROUP), 409, "Conflict")
    assert held(fleet) == [False]
    assert not engine.paused


@ALONE
@pytest.mark.parametrize("settles", [False, True])
def test_commit_that_ranks_refuse_is_dropped(fleet: FleetRig, settles: bool) -> None:
    """They would refuse it again, and generation would pause each time."""
    [a] = fleet.urls
    record_all(fleet)
    engine = fleet.rigs[a].engine
    for shard in engine.shards:
        shard.breaks = shard.undoes = True
    if settles:
        with pytest.raises(WriteUndone):
            fleet.settle(a)
    else:
        assert_error(fleet.step(a, "commit", GROUP), 500, "WriteUndone")
    assert held(fleet) == [False]
    assert not engine.paused


@ALONE
def test_refused_commit_of_a_group_keeps_none_out(fleet: FleetRig) -> None:
    [a] = fleet.urls
    prepare(fleet, a)
    record(fleet, a)
    engine = fleet.rigs[a].engine
    engine.breaks_vote(1)
    assert_error(fleet.step(a, "commit", GROUP), 500, "DeltaError")
    assert fleet.status(a).staged is None
    body = delta_part(OTHER_STEP, sync_id="t", **RUN)
    fleet.rigs[a].assert_committed(fleet.rigs[a].send(body), after(BASE, OTHER_STEP), VERSION + 1)


def test_unreachable_engines_are_waited_for(fleet: FleetRig) -> None:
    a, b, c = fleet.urls
    record_all(fleet)
    fleet.cut |= {b, c}
    assert not fleet.settle(a)
    assert present(fleet.prepared(a)).unreachable == [b, c]
    fleet.start(b)  # it has lost what it held
    fleet.cut.clear()
    assert fleet.settle(a)
    assert fleet.settle(c)
    assert versions(fleet) == [VERSION + 1, VERSION, VERSION + 1]


def test_abort_comes_too_late_for_settling_engines(fleet: FleetRig) -> None:
    a, b, c = fleet.urls
    record_all(fleet)
    fleet.cut.add(c)
    assert not fleet.settle(a)
    for url in (a, b):
        assert_error(fleet.step(url, "abort", GROUP, **SYNC), 409, "SyncInProgress", retry_after=1)
    assert fleet.step(c, "abort", GROUP, **SYNC).json()["status"] == "aborted"
    fleet.cut.clear()
    assert fleet.settle(a)
    assert fleet.settle(b)
    assert versions(fleet) == [VERSION] * 3


def test_operator_ends_what_cannot_be_settled(fleet: FleetRig) -> None:
    a, b, c = fleet.urls
    for url in (a, b):
        prepare(fleet, url)
    for url in (a, b):
        record(fleet, url)
    fleet.cut.add(c)
    assert not fleet.settle(a)
    assert not fleet.settle(b)
    assert fleet.step(a, "abort", GROUP, force=True).json()["status"] == "aborted"
    assert fleet.settle(b)
    assert versions(fleet) == [VERSION] * 3


@PAIR
def test_next_sender_does_not_wait_for_the_lease(fleet: FleetRig) -> None:
    a, b = fleet.urls
    prepare(fleet, a)
    assert claim(fleet, a).status_code == 200
    assert fleet.prepared(a) is None
    prepare_again = delta_part(sync_id="t", **{**RUN, "run_epoch": 2, "run_owner": "host:2"})
    fleet.rigs[a].assert_committed(fleet.rigs[a].send(prepare_again), NEXT, VERSION + 1)
    prepare(fleet, b)
    record(fleet, b)
    fleet.cut.add(a)
    assert_error(claim(fleet, b), 409, "SyncInProgress")
    assert_error(claim(fleet, b, run="b", takeover=True), 409, "SyncInProgress")
    fleet.cut.clear()
    assert claim(fleet, b).status_code == 200


@PAIR
@pytest.mark.parametrize("recorded", [0, 1, 2])
def test_refused_claim_leaves_the_group_alone(fleet: FleetRig, recorded: int) -> None:
    """A second trainer that does not take over gets an error, and the first one can continue."""
    for url in fleet.urls:
        prepare(fleet, url)
    for url in fleet.urls[:recorded]:
        record(fleet, url)
    for url in fleet.urls:
        assert_error(claim(fleet, url, run="other", epoch=1), 409, "RunConflict")
    assert (held(fleet), versions(fleet)) == ([True] * 2, [VERSION] * 2)
    for url in fleet.urls:
        record(fleet, url)
    for url in fleet.urls:
        fleet.rigs[url].assert_committed(fleet.step(url, "commit", GROUP), NEXT, VERSION + 1)


def test_rollback_of_all_others_ends_the_group(fleet: FleetRig) -> None:
    a, *others = fleet.urls
    record_all(fleet)
    fleet.rigs[a].engine.fails["stop"] = RuntimeError("no")
    assert_error(fleet.step(a, "commit", GROUP), 500, "DeltaError", held=True)
    for url in others:
        assert fleet.step(url, "commit", GROUP).json()["status"] == "committed"
        assert fleet.rigs[url].post("/delta_rollback").json()["status"] == "rolled_back"
    assert fleet.settle(a)
    assert (held(fleet), versions(fleet)) == ([False] * 3, [VERSION] * 3)
    for url in others:
        assert_error(fleet.step(url, "commit", GROUP), 409, "GroupAborted")


@PAIR
def test_abort_is_known_after_many_other_groups(fleet: FleetRig) -> None:
    a, b = fleet.urls
    for url in fleet.urls:
        prepare(fleet, url)
    record(fleet, a)  # and it is cut off from the sender before the abort comes
    assert fleet.step(b, "abort", GROUP, **SYNC).json()["status"] == "aborted"
    for later in range(70):
        fleet.step(b, "ask", f"later-{later}")
    assert fleet.settle(a)
    assert versions(fleet) == [VERSION] * 2


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [False, True])
def test_engine_settles_when_the_lease_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    """The engine does so without any request; it asks again what did not answer."""
    monkeypatch.setattr(fleet_module, "_AGAIN_S", 0.02)
    fleet = FleetRig(tmp_path, 2)
    a, b = fleet.urls
    prepare(fleet, a, lease=0.3)
    if is_recorded:
        prepare(fleet, b)
        record(fleet, b)
        record(fleet, a, lease=0.1)
        fleet.cut.add(b)

    async def settled() -> None:
        deadline = time.monotonic() + 20
        service = fleet.rigs[a].service
        while (await service.coordinator.held()).staged is not None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
            if time.monotonic() > deadline - 19.5:
                fleet.cut.clear()

    fleet.rigs[a].run(settled())
    assert versions(fleet) == [VERSION + is_recorded, VERSION]
    fleet.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[tuple[FleetRig, Process]]:
    """A fleet of one engine that has recorded a sync, and another HTTP process of this engine."""
    fleet = FleetRig(tmp_path, 1)
    [rig] = fleet.rigs.values()
    rig.engine.shared = True
    other = Process(rig)
    other.service.fleet.ask = rig.service.fleet.ask
    prepare(fleet, fleet.urls[0])
    record(fleet, fleet.urls[0])
    yield fleet, other
    other.service.intake.close()
    fleet.close()


@pytest.mark.parametrize("notices", ["start", "sync", "rollback"])
def test_process_settles_for_dead_one(tmp_path: Path, notices: str) -> None:
    """Nobody watches a held sync when its process dies; the next one must, without being asked."""
    fleet = FleetRig(tmp_path, 1)
    [rig] = fleet.rigs.values()
    rig.engine.shared = True
    prepare(fleet, fleet.urls[0], lease=0.2)
    present(rig.service.fleet.watch).cancel()
    other = Process(rig)
    if notices == "start":
        rig.run(other.service.start())
    elif notices == "sync":
        body = delta_part(OTHER_STEP, sync_id="t", **RUN)
        assert_error(other.send(body), 409, "SyncInProgress")
    else:
        answer = rig.run(rig.request("POST", "/delta_rollback", app=other.app))
        assert_error(answer, 409, "SyncInProgress")

    async def settled() -> None:
        while (await rig.service.coordinator.held()).staged is not None:
            await asyncio.sleep(0.02)

    rig.run(settled())
    assert versions(fleet) == [VERSION]
    other.close()
    fleet.close()


def test_processes_of_an_engine_settle_once(processes: tuple[FleetRig, Process]) -> None:
    fleet, other = processes
    [rig] = fleet.rigs.values()
    works = [rig.service.fleet.settle(), other.service.fleet.settle()]

    async def settle() -> list[Any]:
        return list(await asyncio.gather(*works, return_exceptions=True))

    assert True in rig.run(settle())
    assert (versions(fleet), rig.engine.writes) == ([VERSION + 1], [1, 1])
    assert not rig.engine.paused


def test_commit_that_another_process_was_faster_with(processes: tuple[FleetRig, Process]) -> None:
    fleet, other = processes
    [rig] = fleet.rigs.values()
    call, asked, both = rig.engine.call, [], asyncio.Event()

    async def late(request: Operation[Any]) -> list[Any]:
        """Let both processes see the held sync before either commits it."""
        if isinstance(request, LeaseItem) and request.key == ENGINE and not request.release:
            asked.append(request)
            if len(asked) == 2:
                both.set()
            await both.wait()
        return await call(request)

    rig.engine.call = late  # type: ignore[method-assign]

    async def commit() -> list[httpx.Response]:
        body = {"action": "commit", "group": GROUP}
        asking = (rig.request("POST", COMMIT, app=app, json=body) for app in (rig.app, other.app))
        return list(await asyncio.gather(*asking))

    answers = [(one.status_code, one.json()) for one in rig.run(commit())]
    assert sorted((code, answer.get("status")) for code, answer in answers) == [
        (200, "already_applied"),
        (200, "committed"),
    ]
    assert {answer["version"] for _, answer in answers} == {VERSION + 1}
    assert (rig.engine.writes, rig.engine.paused) == ([1, 1], False)


@ALONE
def test_commit_that_cannot_be_noted_is_answered(fleet: FleetRig) -> None:
    [a] = fleet.urls
    prepare(fleet, a)
    record(fleet, a)
    rig = fleet.rigs[a]
    call = rig.engine.call

    async def fails(request: Operation[Any]) -> list[Any]:
        if isinstance(request, PutItem) and request.key == FLEET:
            raise ConnectionError("lost")
        return await call(request)

    rig.engine.call = fails  # type: ignore[method-assign]
    rig.assert_committed(fleet.step(a, "commit", GROUP), NEXT, VERSION + 1)
    rig.engine.call = call  # type: ignore[method-assign]
    assert fleet.step(a, "commit", GROUP).json()["status"] == "already_applied"


class Peer(BaseHTTPRequestHandler):
    """Answers as an engine of a group, if it is asked with the token."""

    status, body = 200, b"{}"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_right = asked == {"action": "ask", "group": GROUP} and self.path == COMMIT
        has_token = self.headers["Authorization"] == "Bearer secret"
        self.send_response(self.status if is_right and has_token else 401)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *text: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "body", "raises"),
    [
        (200, PEER_ANSWER, None),
        (200, b"<html>", ValueError),
        (200, PEER_ANSWER + b" " * (1 << 20), ValueError),
        (409, b"{}", ValueError),
        (None, b"", OSError),
    ],
)
def test_peers_are_asked_with_the_token(
    status: int | None, body: bytes, raises: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTA_API_KEY", "secret")
    handler = type("Handler", (Peer,), {"status": status, "body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        root = f"http://127.0.0.1:{server.server_port}/"
        if status is None:
            server.server_close()
        else:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        asking = fleet_module.ask_peer(root, GROUP)
        if raises is None:
            assert asyncio.run(asking) == PeerAnswer(decision="commit", committed=True)
        else:
            with pytest.raises(raises):
                asyncio.run(asking)
        if status is not None:
            server.shutdown()


@pytest.mark.slow
def test_peers_are_asked_by_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client takes longer to make than an answer to come."""
    monkeypatch.setenv("DELTA_API_KEY", "secret")
    made: list[httpx.AsyncClient] = []
    client = httpx.AsyncClient

    def noted(**options: Any) -> httpx.AsyncClient:
        made.append(client(**options))
        return made[-1]

    monkeypatch.setattr(httpx, "AsyncClient", noted)
    handler = type("Handler", (Peer,), {"status": 200, "body": PEER_ANSWER})

    async def ask(root: str) -> list[PeerAnswer]:
        return list(await asyncio.gather(*(fleet_module.ask_peer(root, GROUP) for _ in range(8))))

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answers = asyncio.run(ask(f"http://127.0.0.1:{server.server_port}/"))
        server.shutdown()
    assert answers == [PeerAnswer(decision="commit", committed=True)] * 8
    assert len(made) <= 1  # none, if this process has asked before


@ALONE
def test_engine_that_was_asked_late_prepares_nothing(fleet: FleetRig) -> None:
    [a] = fleet.urls
    assert fleet.step(a, "ask", GROUP).json() == {"decision": "lost", "committed": False}
    fleet.hold(a, delta_part(sync_id="s"))
    assert_error(fleet.step(a, "prepare", GROUP, **SYNC), 409, "GroupAborted")


@ALONE
def test_next_sync_follows_an_aborted_one(fleet: FleetRig) -> None:
    [a] = fleet.urls
    prepare(fleet, a)
    fleet.settle(a)
    body = delta_part(OTHER_STEP, VERSION + 2, base_version=VERSION, sync_id="t", **RUN)
    fleet.rigs[a].assert_committed(fleet.rigs[a].send(body), after(BASE, OTHER_STEP), VERSION + 2)
