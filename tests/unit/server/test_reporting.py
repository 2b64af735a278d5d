"""Reports of every update: Prometheus, the log, and the history that the ranks keep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from delta_server import reporting
from delta_server.board import HISTORY
from engine_ext.errors import BaseMismatch
from engine_ext.settings import API_KEY_ENVIRONMENT
from tests.support.delta_bodies import (
    OTHER_STEP,
    VERSION,
    delta_part,
    forged,
    fresh_weights,
    full_part,
)
from tests.support.endpoint_rig import DELTA, STATUS, Rig
from tests.unit.server.service_parts import PHASES


class Samples:
    """The counts that Prometheus has added since this was made."""

    def __init__(self) -> None:
        self._before = self._all()

    def __getitem__(self, name: str) -> float:
        return self._all().get(name, 0.0) - self._before.get(name, 0.0)

    @staticmethod
    def _all() -> dict[str, float]:
        return {
            s.name + "".join(f"/{value}" for _, value in sorted(s.labels.items())): s.value
            for metric in REGISTRY.collect()
            for s in metric.samples
        }


def history(rig: Rig) -> list[dict[str, Any]]:
    response = rig.get(STATUS, params={"history": "true"})
    assert response.status_code == 200, response.text
    return response.json()["history"]


def lines(rig: Rig, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of updates, without the timings."""
    rig.run(rig.service.reporter.flush())
    told = [r.getMessage() for r in caplog.records if r.name == reporting.__name__]
    return [" ".join(w for w in text.split(" ") if "_ms=" not in w) for text in told]


def test_a_sync_is_counted(rig: Rig) -> None:
    samples = Samples()
    body = delta_part()
    rig.send(body)
    assert samples["delta_updates_syncs_total//committed"] == 1
    assert samples["delta_updates_bytes_total"] == len(body)
    assert samples["delta_updates_elements_total"] == 3
    assert samples["delta_updates_density_count"] == 1
    assert samples["delta_updates_density_sum"] == pytest.approx(3 / 32)
    for phase in ("receive", "stage", "pause", "commit"):
        assert samples[f"delta_updates_phase_seconds_count/{phase}"] == 1
    assert REGISTRY.get_sample_value("delta_updates_version") == VERSION + 1
    rig.send(body)
    assert samples["delta_updates_syncs_total//already_applied"] == 1
    assert samples["delta_updates_elements_total"] == 3
    rig.post("/delta_rollback")
    assert samples["delta_updates_syncs_total//rolled_back"] == 1
    assert REGISTRY.get_sample_value("delta_updates_version") == VERSION


def test_refusals_are_counted_by_their_type(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples()
    rig.send(delta_part(version=VERSION + 5, base_version=VERSION + 4))
    rig.send(delta_part()[:-1])
    rig.post(DELTA, content=b"x")
    for error in ("VersionConflict", "MalformedPart", "UnsupportedMedia"):
        assert samples[f"delta_updates_syncs_total/{error}/refused"] == 1
    monkeypatch.setenv(API_KEY_ENVIRONMENT, "secret")
    rig.send(delta_part())
    assert samples["delta_updates_denied_total/Unauthorized"] == 1
    monkeypatch.delenv(API_KEY_ENVIRONMENT)
    assert len(history(rig)) == 3


def test_failed_writes_are_counted(rig: Rig) -> None:
    samples = Samples()
    rig.engine.shards[0].undoes = rig.engine.shards[1].undoes = True
    assert rig.fail_commit().json()["error"]["type"] == "WriteUndone"
    assert samples["delta_updates_syncs_total/WriteUndone/undone"] == 1
    rig.engine.shards[1].undoes = False
    assert rig.fail_commit().json()["error"]["type"] == "CommitFailed"
    assert samples["delta_updates_syncs_total/CommitFailed/uncertain"] == 1
    rig.send(delta_part())
    assert samples["delta_updates_syncs_total/EngineUncertain/refused"] == 1
    healed = rig.send(full_part(fresh_weights(), VERSION + 1))
    assert healed.json()["status"] == "committed"
    outcomes = ["undone", "uncertain", "refused", "committed"]
    assert [sync["outcome"] for sync in history(rig)] == outcomes


def test_a_commit_that_was_not_published(rig: Rig) -> None:
    samples = Samples()
    rig.engine.fails["publish"] = RuntimeError("gone")
    assert rig.send(delta_part()).json()["error"]["type"] == "CommittedNotResumed"
    assert samples["delta_updates_syncs_total/CommittedNotResumed/unpublished"] == 1
    assert REGISTRY.get_sample_value("delta_updates_version") == VERSION + 1
    rig.run(rig.service.start())
    assert rig.send(delta_part()).json()["status"] == "already_applied"
    assert REGISTRY.get_sample_value("delta_updates_version") == VERSION + 1


def test_digest_mismatches_are_counted(rig: Rig) -> None:
    samples = Samples()
    rig.engine.shards[0].refuses["embed.weight"] = BaseMismatch("other", expected="a", actual="b")
    rig.send(delta_part())
    assert samples["delta_updates_digest_mismatches_total"] == 1
    rig.engine.shards[0].refuses["embed.weight"] = BaseMismatch("after SGLang's own update")
    rig.send(delta_part())
    assert samples["delta_updates_digest_mismatches_total"] == 1


def test_the_history_is_the_ranks(rig: Rig, make_rig: Callable[..., Rig]) -> None:
    rig.send(delta_part(sync_id="a"))
    rig.send(delta_part(sync_id="b"))
    [committed, refused] = history(rig)
    assert (committed["outcome"], committed["version"], committed["base_version"]) == (
        "committed", VERSION + 1, VERSION,
    )  # fmt: skip
    assert (committed["nnz"], committed["elements"], committed["sync_id"]) == (3, 32, "a")
    assert committed["timings_ms"].keys() == PHASES
    assert (refused["outcome"], refused["error"]) == ("already_applied", None)
    for receiver in rig.engine.receivers:
        assert receiver.handle("get", {"key": HISTORY})["ok"]["entries"] == [committed, refused]
    assert rig.status().history is msgspec.UNSET


def test_a_sync_of_two_parts_is_one_record(rig: Rig) -> None:
    one = delta_part({"norm.weight": {1: 5}}, sync_id="s", part=0, num_parts=2)
    two = delta_part({"norm.weight": {2: 5}}, sync_id="s", part=1, num_parts=2)
    rig.send(one)
    assert history(rig) == []
    rig.send(two)
    [sync] = history(rig)
    assert (sync["outcome"], sync["parts"], sync["nnz"]) == ("committed", 2, 2)
    assert sync["bytes"] == len(one) + len(two)


def test_who_must_wait_does_not_fill_the_history(rig: Rig) -> None:
    rig.send(delta_part(sync_id="a", part=0, num_parts=2))
    answer = rig.send(delta_part(OTHER_STEP, sync_id="b"))
    assert answer.json()["error"]["type"] == "SyncInProgress"
    assert history(rig) == []


def test_a_rank_that_does_not_hear_stops_nothing(rig: Rig) -> None:
    rig.engine.fails["put"] = ConnectionError("gone")
    assert rig.send(delta_part()).json()["status"] == "committed"
    assert history(rig) == []


def test_one_line_for_each_sync(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    body = delta_part(sync_id="a")
    rig.send(delta_part(sync_id="a"))
    [line] = lines(rig, caplog)
    assert line == (
        "delta sync outcome=committed version=8 base_version=7 run=anonymous-1 sync_id=a "
        f"full=false parts=1 nnz=3 elements=32 tensors=2 bytes={len(body)} apply=shard"
    )
    assert "pause_ms=" in caplog.text


def test_a_sender_cannot_forge_a_line(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig.send(forged(delta_part(), sync_id='x\u2028outcome="forged" ' + "y" * 1000))
    [line] = lines(rig, caplog)
    assert r'sync_id="x\u2028outcome=\"forged\" yyyy' in line
    assert len(line) < 500


def test_a_refusal_says_why(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.send(delta_part(version=VERSION + 5, base_version=VERSION + 4))
    [line] = lines(rig, caplog)
    assert line.startswith("delta sync outcome=refused error=VersionConflict version=12 ")
    assert 'message="the delta starts from version 11, the engine is at 7' in line


def test_a_long_request_says_how_far_it_is(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(reporting, "_PROGRESS_EVERY_S", 0.01)
    body = delta_part(sync_id="a")

    async def slowly() -> Any:
        yield body[:100]
        await asyncio.sleep(0.03)
        yield body[100:]

    rig.send(slowly())
    told = lines(rig, caplog)
    assert told[0].startswith("delta sync phase=receive bytes=100 seconds=")
    assert told[-1].startswith("delta sync outcome=committed ")


def test_a_sync_of_many_parts_says_that_it_goes_on(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    clock = iter((0.0, 1.0, 6.0, 7.0, 12.0))
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for part in range(5):
        rig.send(delta_part({"norm.weight": {part: 5}}, sync_id="a", part=part))
        rig.run(rig.service.reporter.flush())
    told = lines(rig, caplog)
    assert len(told) == 2
    assert told[0].startswith("delta sync outcome=staged version=8 base_version=7 sync_id=a ")


def test_files_are_told_of_too(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(delta_part())
    disk_rig.disk(root, "a.safetensors")
    disk_rig.disk(root, "absent.safetensors")
    [committed, refused] = history(disk_rig)
    assert (committed["outcome"], committed["parts"]) == ("committed", 1)
    assert (refused["outcome"], refused["parts"]) == ("refused", 0)
