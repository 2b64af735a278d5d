"""A log's number with two contents: engines that have applied the one, and find the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from delta_server.service import DeltaService
from engine_ext.log import DeltaLog, fold_versions, live_heartbeats, open_log
from engine_ext.log.catalog import DONE, folder_name
from tests.support.delta_bodies import (
    VERSION,
    Changes,
    Weights,
    after,
    delta_part,
    fresh_weights,
    full_part,
    same,
)
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.plain_trainer import remove_versions
from tests.support.present import present
from tests.unit.server.delta_logs import CATCH_UP, STEPS, looked, until

# What another run writes, version by version.
OTHER: tuple[Changes, ...] = (
    {"norm.weight": {1: 0x0101}},
    {"embed.weight": {2: 0x0202}},
    {"layer.weight": {3: 0x0303}},
    {"norm.weight": {4: 0x0404}},
)


# `tests/unit/log` has the marks, heartbeats and listings of each kind of store.
IN_A_STORE_TOO = pytest.mark.parametrize(
    "log", ["folder", pytest.param("store", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def log(request: pytest.FixtureRequest, tmp_path: Path) -> DeltaLog:
    """An empty log."""
    if getattr(request, "param", "folder") == "store":
        return open_log(request.getfixturevalue("store_url"), scratch=str(tmp_path))
    (tmp_path / "log").mkdir()
    return open_log(tmp_path / "log")


def following(started: Callable[..., Rig]) -> Rig:
    return started(follow=True, follow_interval=0.01)


def write(log: DeltaLog, body: bytes, version: int) -> None:
    with contextlib.closing(log.writer()) as writer:
        draft = writer.begin(version)
        draft.add(body)
        draft.finish()


def write_run(
    log: DeltaLog, steps: tuple[Changes, ...], first: int = VERSION, digests: bool = False
) -> Weights:
    """Write a run's versions from `first` on, and return what it leads to from the base."""
    weights = fresh_weights()
    for k, step in enumerate(steps):
        before, weights = weights, after(weights, step)
        declared = {"digest_before": Rig.digest_of(before), "digest_after": Rig.digest_of(weights)}
        declared = declared if digests else {}
        body = delta_part(step, first + k + 1, base_version=first + k, **declared)
        write(log, body, first + k + 1)
    return weights


def remove(log: DeltaLog, *versions: int) -> None:
    """Remove some versions, without any all of them."""
    remove_versions(log.location, *versions)


def diverged(rig: Rig, version: int) -> dict[str, Any]:
    """Return the problem of an engine that finds another history, and checks where it shows."""
    answer = rig.post(CATCH_UP)
    assert_error(answer, 409, "LogDiverged", version=version)
    found = present(present(rig.status().log).problem)
    assert found == answer.json()["error"]
    assert "damaged" not in found["message"]
    assert REGISTRY.get_sample_value("delta_updates_log_diverged") == 1
    assert rig.status().version.number == version
    return dict(found)


@pytest.mark.slow
def test_a_follower_takes_a_full_version(log: DeltaLog, started: Callable[..., Rig]) -> None:
    """Its version was removed; a sender has written another one of the same number, and a next."""
    rig = following(started)
    write_run(log, STEPS[:2])
    until(rig, version=VERSION + 2)
    remove(log, VERSION + 2)
    target = after(fresh_weights(), *OTHER[:2])
    write(log, full_part(target, VERSION + 2), VERSION + 2)
    write(
        log,
        delta_part(OTHER[2], VERSION + 3, base_version=VERSION + 2),
        VERSION + 3,
    )
    until(rig, version=VERSION + 3, error=None)
    assert same(rig.engine.weights, after(target, OTHER[2]))
    assert looked(rig)["problem"] is None
    assert REGISTRY.get_sample_value("delta_updates_log_diverged") == 0


@IN_A_STORE_TOO
@pytest.mark.slow
@pytest.mark.parametrize("digests", [False, True])
def test_a_follower_of_an_emptied_log_stops(
    log: DeltaLog, started: Callable[..., Rig], digests: bool
) -> None:
    """A new run from the same base has reached the engine's number, and passed it."""
    rig = following(started)
    weights = write_run(log, STEPS[:2], digests=digests)
    until(rig, version=VERSION + 2)
    remove(log)
    write_run(log, OTHER, digests=digests)
    found = looked(rig)
    assert found["error"]["type"] == "LogDiverged"
    assert "another history" in diverged(rig, VERSION + 2)["message"]
    assert same(rig.engine.weights, weights)
    [heartbeat] = live_heartbeats(log)
    assert (heartbeat.state, heartbeat.version) == ("diverged", VERSION + 2)
    write(log, full_part(after(weights, OTHER[0]), VERSION + 5), VERSION + 5)
    until(rig, version=VERSION + 5, error=None)


@pytest.mark.slow
def test_a_rewritten_version_before_the_engines_shows(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    """The new run has not yet come as far as the old one."""
    rig = started()
    write_run(log, STEPS)
    assert rig.post(CATCH_UP).json()["version"] == VERSION + 3
    remove(log)
    write_run(log, OTHER[:1])
    assert diverged(rig, VERSION + 3)["changed"] == [folder_name(VERSION + 1)]


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_that_ends_before_the_engine_shows(
    log: DeltaLog, started: Callable[..., Rig], follow: bool
) -> None:
    write_run(log, STEPS)
    rig = following(started) if follow else started()
    until(rig, version=VERSION + 3) if follow else None
    remove(log)
    assert "no longer leads" in diverged(rig, VERSION + 3)["message"]


def test_an_engine_that_does_not_follow_stops(log: DeltaLog, started: Callable[..., Rig]) -> None:
    write_run(log, STEPS[:2])
    rig = started()
    remove(log, VERSION + 2)
    write(log, delta_part(OTHER[1], VERSION + 2, base_version=VERSION + 1), VERSION + 2)
    write(log, delta_part(OTHER[2], VERSION + 3, base_version=VERSION + 2), VERSION + 3)
    assert diverged(rig, VERSION + 2)["changed"] == [folder_name(VERSION + 2)]
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS[:2]))
    # A full version by request is no longer what the problem was about.
    target = after(fresh_weights(), *OTHER[:3])
    assert rig.send(full_part(target, VERSION + 9)).json()["status"] == "committed"
    assert present(rig.status().log).problem is None


@pytest.mark.slow
def test_versions_that_were_merged_are_known(log: DeltaLog, started: Callable[..., Rig]) -> None:
    """Several versions that waited were one commit."""
    rig = following(started)
    until(rig, failures=0)
    rig.post("/delta_pin", params={"version": VERSION})
    write_run(log, STEPS)
    rig.post("/delta_pin")
    until(rig, version=VERSION + 3)
    remove(log)
    write_run(log, OTHER)
    looked(rig)
    diverged(rig, VERSION + 3)


def test_another_process_finds_the_same(log: DeltaLog, started: Callable[..., Rig]) -> None:
    """It knows nothing but what the ranks keep, as after a restart."""
    write_run(log, STEPS)
    rig = started()
    remove(log)
    write_run(log, OTHER)
    other = DeltaService(rig.engine, rig.settings)
    assert other.log_replay is not None
    try:
        rig.run(other.log_replay.at_start())
        assert other.log_replay.problem is not None
        assert other.log_replay.problem["type"] == "LogDiverged"
    finally:
        other.intake.close()
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))


@IN_A_STORE_TOO
@pytest.mark.slow
@pytest.mark.parametrize("follow", [False, True])
def test_a_pruned_version_is_no_other_history(
    log: DeltaLog, started: Callable[..., Rig], follow: bool
) -> None:
    """What starts from it proves itself by the digest."""
    write_run(log, STEPS[:2], digests=True)
    rig = following(started) if follow else started()
    until(rig, version=VERSION + 2) if follow else None
    weights = after(fresh_weights(), *STEPS[:2])
    digest = Rig.digest_of(weights)
    body = delta_part(STEPS[2], VERSION + 3, base_version=VERSION + 2, digest_before=digest)
    write(log, body, VERSION + 3)
    body = delta_part(OTHER[0], VERSION + 4, base_version=VERSION + 3)
    write(log, body, VERSION + 4)
    remove(log, VERSION + 1, VERSION + 2)
    until(rig, version=VERSION + 4) if follow else rig.post(CATCH_UP)
    assert rig.status().version.number == VERSION + 4
    assert same(rig.engine.weights, after(weights, STEPS[2], OTHER[0]))


def test_nothing_follows_a_pruned_version_unproven(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    write_run(log, STEPS[:2])
    rig = started()
    remove(log)
    write(log, delta_part(OTHER[0], VERSION + 3, base_version=VERSION + 2), VERSION + 3)
    assert "does not declare the digest" in diverged(rig, VERSION + 2)["message"]
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS[:2]))
    target = after(fresh_weights(), *OTHER)
    write(log, full_part(target, VERSION + 4), VERSION + 4)
    assert rig.post(CATCH_UP).json()["applied"] == [VERSION + 4]
    assert same(rig.engine.weights, target)


def test_a_version_that_starts_elsewhere_is_named(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    """A log from another base: nothing of it was ever applied."""
    rig = started()
    body = delta_part(STEPS[0], VERSION + 1, base_version=VERSION, digest_before="00" * 16)
    write(log, body, VERSION + 1)
    message = diverged(rig, VERSION)["message"]
    assert "another history" in message
    assert "starts from other weights" in message
    rig.assert_untouched()


def test_a_wrong_digest_of_a_part_is_no_other_history(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    rig = started()
    facts = {"digest_before": Rig.digest_of(fresh_weights()), "digest_part": "00" * 16}
    write(log, delta_part(STEPS[0], VERSION + 1, base_version=VERSION, **facts), VERSION + 1)
    assert_error(rig.post(CATCH_UP), 409, "LogDamaged")
    rig.assert_untouched()


@IN_A_STORE_TOO
@pytest.mark.parametrize("proof", ["digest", "parts"])
def test_a_pushed_version_is_found_in_the_log(
    log: DeltaLog, started: Callable[..., Rig], proof: str
) -> None:
    """By its digest, though the log has it in another encoding; or by its parts."""
    rig = started()
    weights = after(fresh_weights(), STEPS[0])
    facts = {"digest_after": Rig.digest_of(weights)} if proof == "digest" else {}
    body = delta_part(STEPS[0], VERSION + 1, base_version=VERSION, **facts)
    logged = delta_part(
        STEPS[0],
        VERSION + 1,
        base_version=VERSION,
        encoding="deltas_zstd" if proof == "digest" else "indices",
        sync_id="other",
        **facts,
    )
    write(log, logged, VERSION + 1)
    assert rig.send(body).json()["status"] == "committed"
    assert rig.post(CATCH_UP).json()["applied"] == []
    write(log, delta_part(STEPS[1], VERSION + 2, base_version=VERSION + 1), VERSION + 2)
    assert rig.post(CATCH_UP).json()["applied"] == [VERSION + 2]
    assert rig.post("/delta_rollback").json()["version"] == VERSION + 1
    remove(log)
    write_run(log, OTHER)
    diverged(rig, VERSION + 1)


@pytest.mark.parametrize("digests", [False, True])
def test_a_fold_of_the_engines_version_is_no_other_history(
    log: DeltaLog, started: Callable[..., Rig], digests: bool
) -> None:
    """It was added after the engine had the version, which was deleted then."""
    write_run(log, STEPS[:2], digests=digests)
    rig = started()
    fold_versions(log, log.listing().entries, VERSION)
    log.store.delete([folder_name(VERSION + 2)])
    assert rig.post(CATCH_UP).json()["applied"] == []
    assert present(rig.status().log).problem is None


def test_fold_that_is_made_again_is_no_other_history(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    """A damaged one was deleted; no two folds of the same versions have the same bytes."""
    write_run(log, STEPS[:2])
    entries = log.listing().entries
    folded = fold_versions(log, entries, VERSION)
    rig = started()
    for number in (VERSION + 3, VERSION + 4):
        write(log, delta_part(STEPS[2], number, base_version=number - 1), number)
        assert rig.post(CATCH_UP).json()["applied"] == [number]
        log.store.delete([folded.name])
        folded = fold_versions(log, entries, VERSION)


def test_another_version_than_the_pushed_one_shows(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    rig = started()
    assert rig.send(delta_part(STEPS[0], VERSION + 1)).json()["status"] == "committed"
    write_run(log, OTHER, digests=True)
    diverged(rig, VERSION + 1)
    assert same(rig.engine.weights, after(fresh_weights(), STEPS[0]))


@IN_A_STORE_TOO
def test_the_same_content_again_is_no_other_history(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    """A sender that was restored has written it once more, under another id."""
    write_run(log, STEPS[:2], digests=True)
    rig = started()
    remove(log, VERSION + 2)
    weights = after(fresh_weights(), *STEPS[:2])
    facts = {"sync_id": "again", "digest_after": Rig.digest_of(weights)}
    write(log, delta_part(STEPS[1], VERSION + 2, base_version=VERSION + 1, **facts), VERSION + 2)
    write(log, delta_part(STEPS[2], VERSION + 3, base_version=VERSION + 2), VERSION + 3)
    assert rig.post(CATCH_UP).json()["applied"] == [VERSION + 3]


@pytest.mark.parametrize("hashes", [True, False])
def test_equal_version_does_not_hide_other_ones(
    log: DeltaLog, started: Callable[..., Rig], hashes: bool
) -> None:
    """The engine's own has the same bytes in both histories: a step that changed nothing."""

    def write_all(*steps: Changes) -> None:
        for k, step in enumerate(steps, start=VERSION + 1):
            write(log, delta_part(step, k, base_version=k - 1), k)
            if not hashes:
                (Path(log.location) / folder_name(k) / DONE).write_bytes(b"")

    write_all(STEPS[0], {})
    rig = started()
    remove(log)
    write_all(OTHER[0], {}, STEPS[1])
    assert diverged(rig, VERSION + 2)["changed"] == [folder_name(VERSION + 1)]
    assert same(rig.engine.weights, after(fresh_weights(), STEPS[0]))


def test_a_refused_version_of_the_engines_shows(log: DeltaLog, started: Callable[..., Rig]) -> None:
    """The follower has taken it before every engine that its sender posts to refused it."""
    write_run(log, STEPS[:1])
    rig = started()
    with contextlib.closing(log.writer()) as writer:
        writer.refuse(VERSION + 1)
    assert "refused" in diverged(rig, VERSION + 1)["message"]


def test_hashes_are_not_needed_to_compare(log: DeltaLog, started: Callable[..., Rig]) -> None:
    """The folders of other trainers have an empty `DONE`."""

    def publish(step: Changes, version: int) -> None:
        place = Path(log.location, folder_name(version))
        place.mkdir(parents=True, exist_ok=True)
        (place / "rank0_flush000.safetensors").write_bytes(delta_part(step, None))
        (place / DONE).touch()

    publish(STEPS[0], VERSION + 1)
    rig = started()
    publish({n: {i: v ^ 1 for i, v in e.items()} for n, e in STEPS[0].items()}, VERSION + 1)
    log.store.delete([folder_name(VERSION + 1)])
    publish({n: {i: v ^ 1 for i, v in e.items()} for n, e in STEPS[0].items()}, VERSION + 1)
    publish(STEPS[1], VERSION + 2)
    diverged(rig, VERSION + 1)
    assert same(rig.engine.weights, after(fresh_weights(), STEPS[0]))


def test_a_file_that_is_not_what_done_says_is_damaged(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    """A sound part of the same length, of another run."""
    write_run(log, STEPS[:1])
    other = {n: {i: v ^ 1 for i, v in e.items()} for n, e in STEPS[0].items()}
    [part] = Path(log.location, folder_name(VERSION + 1)).glob("*.safetensors")
    body = delta_part(other, VERSION + 1, base_version=VERSION)
    assert len(body) == part.stat().st_size
    part.write_bytes(body)
    rig = started()
    assert_error(rig.post(CATCH_UP), 409, "LogDamaged")
    rig.assert_untouched()
