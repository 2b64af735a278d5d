"""The endpoints: which run owns the engine, and which run a version is of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import REGISTRY

from engine_ext.log import open_log
from tests.support.cases import case
from tests.support.delta_bodies import (
    NEXT,
    OTHER_STEP,
    STEP,
    VERSION,
    after,
    delta_part,
    fresh_weights,
    full_part,
)
from tests.support.endpoint_rig import STATUS, Rig, assert_error
from tests.support.present import present
from tests.support.served_models import delta_between, one_part
from tests.support.toy_adapters import A as ADAPTER_TENSOR
from tests.support.toy_adapters import fresh_adapter, with_adapters
from tests.unit.server.other_process import Process

RUN = "/delta_run"
A = {"run": "a", "run_epoch": 1, "run_owner": "first-host:11"}
A_AGAIN = {"run": "a", "run_epoch": 2, "run_owner": "first-host:12"}
B = {"run": "b", "run_epoch": 1, "run_owner": "second-host:22"}


def a_step(number: int = 1, sender: dict[str, Any] = A, **metadata: Any) -> bytes:
    """The delta to the version `number` after the one that the engine has loaded."""
    step = STEP if number == 1 else {"norm.weight": {0: number}}
    version = VERSION + number
    metadata = {"base_version": version - 1, "sync_id": f"{number}", **sender, **metadata}
    return delta_part(step, version, **metadata)


def whole(version: int, sender: dict[str, Any], **metadata: Any) -> bytes:
    weights = after(fresh_weights(), OTHER_STEP)
    return full_part(weights, version, sync_id=f"full {version}", **sender, **metadata)


def ask(rig: Rig, action: str, sender: dict[str, Any], /, **keys: Any) -> httpx.Response:
    host, pid = sender["run_owner"].split(":")
    body = {"run": sender["run"], "epoch": sender["run_epoch"], "host": host, "pid": int(pid)}
    return rig.post(RUN, json={"action": action, **body, **keys})


def owner_of(answer: Any) -> dict[str, Any]:
    """The owner in an answer or a status, without the time, which is now."""
    owner = dict(msgspec.to_builtins(answer)["owner"])
    assert owner.pop("since") == pytest.approx(time.time(), abs=60)
    return owner


OWNER_A = {"run": "a", "epoch": 1, "host": "first-host", "pid": 11}
OWNER_B = {"run": "b", "epoch": 1, "host": "second-host", "pid": 22}


# One owner at a time -------------------------------------------------------------------------


def test_the_second_of_two_trainers_is_refused(rig: Rig) -> None:
    rig.assert_committed(rig.send(a_step()), NEXT, VERSION + 1)
    for body in (a_step(2, B), whole(99, B), delta_part({}, VERSION + 2), whole(1, {})):
        error = assert_error(rig.send(body), 409, "RunConflict")
        assert owner_of(error) == OWNER_A
        assert "process 11 on first-host" in error["message"]
    rig.assert_committed(rig.send(a_step(2)), after(NEXT, {"norm.weight": {0: 2}}), VERSION + 2)
    assert rig.engine.writes == [2, 2]


def test_an_answer_names_the_run(rig: Rig) -> None:
    first = rig.send(a_step(part=0, num_parts=2)).json()
    assert (first["status"], first["run"]) == ("staged", "a")
    body = delta_part({}, VERSION + 1, base_version=VERSION, sync_id="1", part=1, num_parts=2, **A)
    assert rig.send(body).json()["run"] == "a"
    again = rig.send(body).json()
    assert (again["status"], again["run"]) == ("already_applied", "a")
    assert rig.post("/delta_rollback").json()["run"] is None


def test_the_status_names_run_and_owner(rig: Rig) -> None:
    assert (rig.status().version.run, rig.status().owner, rig.status().version.loaded) == (
        None,
        None,
        True,
    )
    rig.send(a_step(part=0, num_parts=2))
    status = rig.status()
    assert (status.version.run, owner_of(status), status.version.loaded) == (None, OWNER_A, True)
    assert (present(status.staged).run, owner_of(status.staged)) == ("a", OWNER_A)
    rig.send(a_step(1, A_AGAIN))
    status = rig.status()
    assert (status.version.run, status.version.loaded) == ("a", False)
    assert present(status.owner).epoch == 2
    synced = present(status.last_sync)
    assert (synced.run, synced.base_run) == ("a", None)


def test_every_process_knows_the_owner(rig: Rig, other: Process) -> None:
    rig.send(a_step())
    assert_error(other.send(a_step(2, B)), 409, "RunConflict")
    assert other.send(a_step(2)).json()["status"] == "committed"


def test_files_claim_as_bodies_do(disk_rig: Rig, root: Path) -> None:
    (root / "one.safetensors").write_bytes(a_step())
    assert disk_rig.disk(root, "one.safetensors").json()["run"] == "a"
    assert owner_of(disk_rig.status()) == OWNER_A
    (root / "two.safetensors").write_bytes(a_step(2, B))
    assert_error(disk_rig.disk(root, "two.safetensors"), 409, "RunConflict")


def test_files_of_two_runs_are_refused(disk_rig: Rig, root: Path) -> None:
    for sender in (A, B):
        (root / f"{sender['run']}.safetensors").write_bytes(a_step(1, sender))
    assert_error(disk_rig.disk(root), 400, "MalformedPart")
    assert disk_rig.status().owner is None


def test_who_keeps_others_out_is_named(rig: Rig) -> None:
    rig.send(delta_part(sync_id="anonymous", part=0, num_parts=2))
    error = assert_error(rig.send(a_step()), 409, "SyncInProgress", owner=None, staged_run=None)
    timeout = rig.settings.stage_timeout
    assert error["until"] - error["staged_since"] == pytest.approx(timeout, abs=5)
    assert rig.status().owner is None
    assert ask(rig, "claim", A, takeover=True).status_code == 200
    assert rig.send(a_step()).json()["status"] == "committed"


# POST /delta_run -----------------------------------------------------------------------------


def test_a_claim(rig: Rig) -> None:
    answer = ask(rig, "claim", A).json()
    assert owner_of(answer) == OWNER_A
    del answer["owner"]
    assert answer == {
        "status": "claimed",
        "run": None,
        "version": VERSION,
        "highest": None,
        "loaded": True,
        "engine_state": "certain",
        "digest": rig.digest_of(fresh_weights()),
        "digest_algorithm": "multilinear-1",
    }
    rig.send(a_step())
    again = ask(rig, "claim", A).json()
    assert (again["run"], again["highest"], again["loaded"]) == ("a", VERSION + 1, False)
    error = assert_error(ask(rig, "claim", B), 409, "RunConflict")
    assert owner_of(error) == OWNER_A


def test_a_takeover_fences_for_good(rig: Rig) -> None:
    committed = a_step()
    rig.send(committed)
    assert rig.send(a_step(2, part=0, num_parts=2)).json()["status"] == "staged"
    answer = ask(rig, "claim", B, takeover=True).json()
    assert (owner_of(answer), answer["run"], answer["highest"]) == (OWNER_B, "a", None)
    assert rig.status().staged is None
    rig.assert_committed(rig.send(whole(1, B)), after(fresh_weights(), OTHER_STEP), 1)
    assert rig.status().version.run == "b"
    for body in (committed, a_step(2), a_step(2, A_AGAIN), whole(99, A)):
        error = assert_error(rig.send(body), 409, "RunFenced")
        assert owner_of(error) == OWNER_B
    assert_error(ask(rig, "claim", A_AGAIN, takeover=True), 409, "RunFenced")
    ask(rig, "release", B)
    assert_error(rig.send(whole(99, A)), 409, "RunFenced")


def test_a_release(rig: Rig) -> None:
    rig.send(a_step())
    rig.send(a_step(2, part=0, num_parts=2))
    assert ask(rig, "release", B).json() == {"status": "not_owner", "released": False}
    assert ask(rig, "release", A).json() == {"status": "released", "released": True}
    status = rig.status()
    assert (status.version.run, status.owner, status.staged) == ("a", None, None)
    assert ask(rig, "claim", B).status_code == 200
    assert rig.send(a_step(2, B)).json()["run"] == "b"


def test_a_bad_claim(rig: Rig) -> None:
    bad: list[dict[str, Any]] = [
        {"action": "steal"},
        {"run": ""},
        {"run": "a b"},
        {"run": "anonymous-1"},
        {"run": "a" * 65},
        {"epoch": 0},
        {"epoch": "1"},
        {"host": "a host"},
        {"pid": -1},
        {"takeover": "yes"},
    ]
    for keys in bad:
        with case(keys):
            assert_error(ask(rig, "claim", A, **keys), 400, "MalformedPart")
            assert rig.status().owner is None
    for sent in ("text", "{}", "[]"):
        with case(sent):
            assert_error(rig.post(RUN, content=sent), 400, "MalformedPart")


def test_an_engine_that_follows_a_log(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    rig = make_rig(log=str(tmp_path / "log"), follow=True)
    assert_error(ask(rig, "claim", A), 409, "Conflict")


def test_every_adapter_has_its_own_owner(rig: Rig) -> None:
    with_adapters(rig, "one", "two")
    assert ask(rig, "claim", A).status_code == 200
    base = fresh_adapter()
    delta = delta_between(ADAPTER_TENSOR, base[ADAPTER_TENSOR], base[ADAPTER_TENSOR] + 1)
    body = one_part([delta], current_version=1, **B)
    assert rig.send(body, adapter="one").json()["run"] == "b"
    status = rig.status(adapter="one")
    assert (status.version.run, owner_of(status)) == ("b", OWNER_B)
    assert_error(
        rig.send(one_part([delta], current_version=2, **A), adapter="one"), 409, "RunConflict"
    )
    assert rig.get(STATUS, params={"adapter": "two"}).json()["owner"] is None
    claim = {"action": "release", "run": "b"}
    assert rig.post(RUN, json=claim, params={"adapter": "one"}).json()["released"]


# Numbers -------------------------------------------------------------------------------------


def test_a_trainer_that_starts_over_shows(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """As those of slime, vime and miles after a resume."""
    for version in (VERSION + 1, VERSION + 2):
        assert rig.send(delta_part({}, version)).json()["run"] == "anonymous-1"
    caplog.clear()
    assert rig.send(whole(1, {})).json()["run"] == "anonymous-2"
    assert (rig.status().version.number, rig.status().version.run) == (1, "anonymous-2")
    assert (
        "delta run replaced run=anonymous-2 version=1 base_run=anonymous-1 "
        f"base_version={VERSION + 2} full=true"
    ) in caplog.text
    assert rig.send(delta_part({}, 2)).json()["run"] == "anonymous-2"


def test_the_engines_own_endpoints_need_no_run(rig: Rig) -> None:
    rig.send(a_step())
    response = rig.post("/update_weight_version", json={"new_version": str(VERSION + 2)})
    assert (response.status_code, response.json()["run"]) == (200, "a")
    assert (rig.status().version.run, owner_of(rig.status())) == ("a", OWNER_A)
    assert rig.post("/delta_rollback").json()["run"] == "a"
    assert rig.status().version.number == VERSION + 1
    assert rig.send(a_step(3, base_version=VERSION + 1)).json()["status"] == "committed"


# The delta log -------------------------------------------------------------------------------


def write(log: Path, body: bytes, number: int) -> None:
    with open_log(log).writer() as writer:
        draft = writer.begin(number)
        draft.add(body)
        draft.finish()


def test_a_log_says_the_run_and_takes_no_engine(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    write(log, a_step(), VERSION + 1)
    rig = make_rig(log=str(log))
    status = rig.status()
    assert (status.version.number, status.version.run, status.owner) == (VERSION + 1, "a", None)
    assert status.version.loaded is False
    assert rig.send(a_step()).json()["status"] == "already_applied"
    assert ask(rig, "claim", B).status_code == 200
    rig.send(a_step(2, B))
    write(log, a_step(2), VERSION + 2)
    write(log, a_step(3), VERSION + 3)
    assert rig.post("/delta_catch_up").json()["applied"] == [VERSION + 3]
    assert (rig.status().version.run, owner_of(rig.status())) == ("a", OWNER_B)


# Reasons, logs and metrics -------------------------------------------------------------------


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_a_full_sync_has_a_reason(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reasons = [
        ("restarted: the engine was", "restarted"),
        ("lost_track", "lost_track"),
        ("because", "other"),
    ]
    for number, (reason, kind) in enumerate(reasons, 1):
        with case(reason):
            before = sample("delta_updates_full_syncs_total", reason=kind)
            assert before is not None
            rig.send(whole(VERSION + number, A), reason=reason)
            rig.run(rig.service.reporter.flush())
            assert sample("delta_updates_full_syncs_total", reason=kind) == before + 1
            assert f"reason={reason} " in caplog.text or f'reason="{reason}" ' in caplog.text
            record = rig.get(STATUS, params={"history": "true"}).json()["history"][-1]
            assert (record["run"], record["reason"], record["full"]) == ("a", reason, True)


def test_a_full_sync_without_a_reason(rig: Rig) -> None:
    rig.send(whole(VERSION + 1, A))
    rig.send(a_step(2))
    rig.run(rig.service.reporter.flush())
    records = rig.get(STATUS, params={"history": "true"}).json()["history"]
    assert [record["reason"] for record in records] == ["sent in full", None]


def test_a_bad_reason(rig: Rig) -> None:
    for reason in ("", "two\nlines", "x" * 201, "\N{SNOWMAN}"):
        with case(reason):
            response = rig.send(whole(VERSION + 1, A), reason=reason)
            assert_error(response, 400, "MalformedPart")


def test_the_gauge_shows_the_run(rig: Rig) -> None:
    rig.status()
    rig.send(a_step())
    assert sample("delta_updates_run_info", run="a") == 1
    ask(rig, "claim", B, takeover=True)
    rig.send(whole(1, B))
    assert sample("delta_updates_run_info", run="a") is None
    assert sample("delta_updates_run_info", run="b") == 1


def test_claims_are_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask(rig, "claim", A)
    ask(rig, "claim", A)
    ask(rig, "claim", B, takeover=True)
    ask(rig, "release", B)
    lines = [r.getMessage() for r in caplog.records if "delta run" in r.getMessage()]
    assert lines == [
        "delta run claimed run=a epoch=1 host=first-host pid=11",
        "delta run claimed run=b epoch=1 host=second-host pid=22",
        "delta run released run=b epoch=1 host=second-host pid=22",
    ]
