"""Replaying a delta log: at start-up, when asked for, and around what is damaged."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_server.board import LOG
from delta_server.request_options import Flush
from delta_server.service import DeltaService
from delta_server.spool_files import SpoolFiles
from engine_ext.errors import SaltUnavailable, SpoolFull
from engine_ext.format.signature import SIGNATURE_SUFFIX, sign
from engine_ext.log.catalog import DONE, folder_name
from engine_ext.ranks.operations import LeaseItem, Operation
from engine_ext.ranks.status import LogStatus
from tests.support.delta_bodies import (
    STEP,
    VERSION,
    after,
    delta_part,
    fresh_weights,
    full_part,
    same,
)
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.in_process_engine import Engine
from tests.support.present import present
from tests.unit.server.delta_logs import CATCH_UP, NEWEST, STEPS, write, write_steps


def problem(rig: Rig) -> dict[str, Any]:
    found = present(present(rig.status().log).problem)
    assert found["type"] == "LogDamaged"
    return found


def test_an_engine_starts_at_the_newest_version(log: Path, started: Callable[..., Rig]) -> None:
    write_steps(log)
    rig = started()
    assert rig.status().version.number == VERSION + 3
    assert rig.engine.weight_version == str(VERSION + 3)
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
    assert rig.status().log == LogStatus(folder=str(log), newest=VERSION + 3, problem=None)
    assert rig.spooled() == []
    assert not rig.engine.paused
    last = delta_part(STEPS[2], VERSION + 3, base_version=VERSION + 2)
    assert rig.send(last).json()["status"] == "already_applied"
    rig.assert_committed(
        rig.send(delta_part({"norm.weight": {1: 5}}, VERSION + 4)),
        after(fresh_weights(), *STEPS, {"norm.weight": {1: 5}}),
        VERSION + 4,
    )


@pytest.mark.slow
def test_an_engine_that_cannot_salt_has_a_sound_log(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    write_steps(log)
    rig.engine.fails["salt"] = SaltUnavailable("not as it was started")
    refused = rig.post(CATCH_UP, params={"flush_cache": "salt"})
    assert_error(refused, 422, "SaltUnavailable")
    assert present(rig.status().log).problem is None
    assert same(rig.engine.weights, fresh_weights())
    assert rig.post(CATCH_UP).json()["version"] == VERSION + 3


def test_nothing_is_flushed_before_anything_was_served(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Any] = []
    call_stopped = Engine.call_stopped

    async def noted(engine: Engine, request: Operation[Any], flush_cache: Flush) -> Any:
        flushed.append(flush_cache)
        return await call_stopped(engine, request, flush_cache)

    monkeypatch.setattr(Engine, "call_stopped", noted)
    write_steps(log, 2)
    rig = started()
    assert flushed == [False, False]
    write(log, delta_part(STEPS[2], VERSION + 3, base_version=VERSION + 2), number=VERSION + 3)
    assert rig.post(CATCH_UP).json()["applied"] == [VERSION + 3]
    assert flushed == [False, False, True]


def test_versions_of_several_parts(log: Path, started: Callable[..., Rig]) -> None:
    numbers = {"sync_id": "one", "num_parts": 2}
    parts = [delta_part(STEPS[k], VERSION + 1, part=k, **numbers) for k in range(2)]
    write(log, *parts, number=VERSION + 1)
    assert same(started().engine.weights, after(fresh_weights(), *STEPS[:2]))


def test_an_empty_log(started: Callable[..., Rig]) -> None:
    rig = started()
    assert rig.status().version.number == VERSION
    assert present(rig.status().log).problem is None
    answer = rig.post(CATCH_UP).json()
    assert answer == {"status": "caught_up", "version": VERSION, "applied": [], "newest": None}


def test_without_a_log(started: Callable[..., Rig]) -> None:
    rig = started(log=None)
    assert rig.status().log is None
    assert_error(rig.post(CATCH_UP), 409, "Conflict")


def test_catching_up_when_asked(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    write_steps(log)
    answer = rig.post(CATCH_UP, params={"pause_mode": "wait", "flush_cache": "false"}).json()
    assert answer["applied"] == [VERSION + 1, VERSION + 2, VERSION + 3]
    assert rig.engine.events.count(("end_requests", "wait")) == 3
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))


def test_catching_up_needs_the_token(
    started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = started()
    monkeypatch.setenv("DELTA_API_KEY", "secret")
    assert_error(rig.post(CATCH_UP), 401, "Unauthorized")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def garble_done(path: Path) -> None:
    (path.parent / DONE).write_text("{")


def remove_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, garble_done, remove_folder])
def test_a_damaged_version_is_where_it_ends(
    log: Path, started: Callable[..., Rig], damage: Callable[[Path], None]
) -> None:
    folders = write_steps(log)
    damage(folders[1] / "rank0_flush000.safetensors")
    rig = started()
    assert same(rig.engine.weights, after(fresh_weights(), STEPS[0]))
    assert rig.engine.weight_version == str(VERSION + 1)
    assert rig.spooled() == []
    assert problem(rig)["newest"] == VERSION + 3
    assert problem(rig)["version"] == VERSION + 1
    assert_error(rig.post(CATCH_UP), 409, "LogDamaged", newest=VERSION + 3)
    rig.assert_committed(
        rig.send(delta_part(STEPS[2], VERSION + 2, sync_id="by HTTP")),
        after(fresh_weights(), STEPS[0], STEPS[2]),
        VERSION + 2,
    )


def test_a_missing_part_keeps_nobody_out(log: Path, started: Callable[..., Rig]) -> None:
    part = delta_part(STEP, VERSION + 1, sync_id="one", part=0, num_parts=2)
    write(log, part, number=VERSION + 1)
    rig = started()
    assert "not all of a sync" in str(problem(rig)["damaged"])
    assert rig.status().staged is None
    rig.assert_untouched()


def test_a_damaged_part_keeps_no_other_route_out(log: Path, started: Callable[..., Rig]) -> None:
    """Parts of the version that were staged before its damaged part are dropped."""
    numbers = {"sync_id": "one", "num_parts": 2}
    parts = [delta_part(STEPS[k], VERSION + 1, part=k, **numbers) for k in range(2)]
    flip(write(log, *parts, number=VERSION + 1) / "rank0_flush001.safetensors")
    target = after(fresh_weights(), *STEPS)
    write(log, full_part(target, VERSION + 2), number=VERSION + 2)
    rig = started()
    assert (rig.status().version.number, rig.status().staged) == (VERSION + 2, None)
    assert same(rig.engine.weights, target)


def test_a_folder_that_cannot_be_read_is_damaged(log: Path, started: Callable[..., Rig]) -> None:
    write_steps(log)
    loop = log / folder_name(VERSION + 9)
    loop.symlink_to(loop)
    rig = started()
    assert rig.status().version.number == VERSION + 3
    assert list(problem(rig)["damaged"]) == [loop.name]


def test_what_leads_from_other_weights_is_refused(log: Path, started: Callable[..., Rig]) -> None:
    """`DONE` says that it leads on from here, and the part says otherwise."""
    folder = write(log, delta_part(STEP, VERSION + 5, base_version=VERSION + 4), number=VERSION + 5)
    done = folder / DONE
    done.write_text(done.read_text().replace(str(VERSION + 4), str(VERSION)))
    rig = started()
    assert problem(rig)["version"] == VERSION
    rig.assert_untouched()


def test_a_folded_delta_leads_around_a_damaged_one(log: Path, started: Callable[..., Rig]) -> None:
    folders = write_steps(log)
    flip(folders[1] / "rank0_flush000.safetensors")
    both = after({n: b.copy() for n, b in fresh_weights().items()}, *STEPS[:2])
    changes = {
        name: {int(i): int(both[name][i]) for i in (both[name] != bits).nonzero()[0]}
        for name, bits in fresh_weights().items()
    }
    folded = write(log, delta_part(changes, VERSION + 2, base_version=VERSION), number=99)
    folded.rename(log / folder_name(VERSION + 2, VERSION))
    rig = started()
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
    assert rig.status().version.number == VERSION + 3


def test_a_full_version_leads_on_from_anywhere(log: Path, started: Callable[..., Rig]) -> None:
    target = after(fresh_weights(), *STEPS)
    write(log, full_part(target, VERSION + 9), number=VERSION + 9)
    rig = started()
    assert same(rig.engine.weights, target)
    assert rig.status().version.number == VERSION + 9


def test_uncertain_weights_need_a_full_version(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    assert_error(rig.fail_commit(), 500, "CommitFailed", "uncertain", version=VERSION)
    write_steps(log)
    assert_error(rig.post(CATCH_UP), 409, "LogDamaged")
    target = after(fresh_weights(), *STEPS)
    write(log, full_part(target, VERSION + 9), number=VERSION + 9)
    assert rig.post(CATCH_UP).json()["applied"] == [VERSION + 9]
    assert same(rig.engine.weights, target)


def test_signed_versions(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTA_HMAC_KEY", "key")
    [first, second] = write_steps(log, 2)
    for folder, key in ((first, "key"), (second, "another")):
        part = folder / "rank0_flush000.safetensors"
        part.with_name(part.name + SIGNATURE_SUFFIX).write_text(sign(key, part.read_bytes()))
    rig = started()
    assert rig.status().version.number == VERSION + 1
    assert "signature" in str(problem(rig)["damaged"])


def test_sender_forges_no_line_of_the_log(
    log: Path, started: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = started()
    write(
        log, delta_part({"w\nERROR forged" + "x" * 1000: {0: 1}}, VERSION + 1), number=VERSION + 1
    )
    assert_error(rig.post(CATCH_UP), 409, "LogDamaged")
    lines = [one.getMessage() for one in caplog.records if "forged" in one.getMessage()]
    assert lines
    assert all("\n" not in line and len(line) < 600 for line in lines)


@pytest.mark.parametrize("version", [VERSION, VERSION + 1])
def test_unsigned_version_shows_no_other_history(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Nothing that it declares counts, whether it leads to the engine's version or from there."""
    monkeypatch.setenv("DELTA_HMAC_KEY", "key")
    rig, digests = started(), {"digest_before": "0" * 32, "digest_after": "1" * 32}
    body = delta_part(STEPS[0], version, base_version=version - 1, **digests)
    write(log, body, number=version)
    found = rig.post(CATCH_UP)
    if version == VERSION:
        assert found.json()["version"] == VERSION
    else:
        assert_error(found, 409, "LogDamaged")
        assert "signed parts only" in str(problem(rig)["damaged"])


def test_without_room_to_fold_versions_come_one_by_one(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can a folder be made."""
    write_steps(log)
    made = tempfile.TemporaryDirectory

    def full(*, prefix: str, **options: Any) -> Any:
        if prefix.startswith("delta-fold"):
            raise OSError(errno.ENOSPC, "no space")
        return made(prefix=prefix, **options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    rig = started(follow=True, follow_interval=1000.0)
    assert rig.status().version.number == NEWEST
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
    assert rig.engine.writes == [len(STEPS)] * 2


def test_fold_that_does_not_fit_is_applied_one_by_one(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold takes room of its own in the spool, which one version alone does not need."""
    write_steps(log)

    def full(*_: object) -> Any:
        raise SpoolFull("no room")

    monkeypatch.setattr(SpoolFiles, "scratch", full)
    rig = started(follow=True, follow_interval=1000.0)
    assert rig.status().version.number == NEWEST
    assert rig.engine.writes == [len(STEPS)] * 2


def test_folded_versions_are_in_the_spools_folder(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start removes it if this process is killed."""
    write_steps(log)
    made, parents = tempfile.TemporaryDirectory, list[object]()

    def noted(*, prefix: str, **options: Any) -> Any:
        parents.extend([options["dir"]] if prefix.startswith("delta-fold") else [])
        return made(prefix=prefix, **options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", noted)
    rig = started()
    assert rig.status().version.number == NEWEST
    assert {*parents} == {rig.service.intake.directory}


def test_another_writers_folder(log: Path, started: Callable[..., Rig]) -> None:
    """An empty `DONE`: the version is the folder's, its base the one before."""
    folder = log / folder_name(VERSION + 1)
    folder.mkdir()
    (folder / "rank0_flush000.safetensors").write_bytes(delta_part(STEP, None))
    (folder / DONE).touch()
    assert same(started().engine.weights, after(fresh_weights(), STEP))


def test_a_failed_write_is_no_fault_of_the_log(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    write_steps(log, 1)
    for shard in rig.engine.shards:
        shard.breaks = shard.undoes = True
    assert_error(rig.post(CATCH_UP), 500, "WriteUndone")
    for shard in rig.engine.shards:
        shard.breaks = False
    assert rig.post(CATCH_UP).json()["applied"] == [VERSION + 1]


@pytest.mark.slow
def test_only_one_process_replays(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    write_steps(log)
    other = DeltaService(rig.engine, rig.settings)
    assert other.log_replay is not None
    assert rig.service.log_replay is not None

    async def both() -> None:
        assert other.log_replay is not None
        await asyncio.gather(rig.request("POST", CATCH_UP), other.log_replay.at_start())

    try:
        rig.run(both())
    finally:
        other.intake.close()
    assert rig.engine.writes == [2, 2]  # two versions are folded into one
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))


def test_a_dead_process_does_not_keep_others_out(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    write_steps(log)
    rig.run(rig.engine.call(LeaseItem(key=LOG, holder="999999999:1:x")))
    assert rig.post(CATCH_UP).json()["version"] == VERSION + 3
