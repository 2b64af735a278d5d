"""The promises of a delta log, in whatever store its files are."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine_ext.errors import LogDamaged, PartUnavailable
from engine_ext.files import INDEX
from engine_ext.format import SIGNATURE_SUFFIX, sign
from engine_ext.log import (
    CannotFold,
    DeltaLog,
    Heartbeat,
    fold_versions,
    follower_lags,
    live_heartbeats,
    open_log,
    read_heartbeats,
    remove_heartbeat,
    route,
    verify_version,
    write_heartbeat,
)
from engine_ext.log.catalog import DONE, MAX_DONE_BYTES, REFUSED
from engine_ext.log.folder_store import FolderDraft
from engine_ext.log.heartbeats import FOLDER
from engine_ext.log.object_store import ObjectDraft
from engine_ext.log.writer import begin
from engine_ext.settings import HMAC_KEY_ENVIRONMENT
from tests.support.cases import case
from tests.support.folder_writer import write_checkpoint, write_version
from tests.unit.log.places import FolderPlace, Place, decoded, part, versions, write
from tests.unit.log.test_foreign import step

FIRST = "weight_v000001"


def named(place: Place, end: str) -> str:
    """Return the only file whose name ends so."""
    [name] = [name for name in place.names() if name.endswith(end)]
    return name


# Writing ---------------------------------------------------------------------------------------


def test_version_has_its_parts_and_done(log: DeltaLog, place: Place) -> None:
    bodies = [part(12, 11, part=k, num_parts=2, sync_id="sync") for k in range(2)]
    folder = write(log, 12, *bodies)
    parts = [place.part_name(k, "sync") for k in range(2)]
    assert place.names() == sorted(f"weight_v000012/{name}" for name in (DONE, *parts))
    assert [place.read(f"weight_v000012/{name}") for name in parts] == bodies
    [entry] = log.listing().entries
    assert (entry.version, entry.base_version, entry.full) == (12, 11, False)
    assert (entry.folder, entry.nbytes) == (folder, sum(map(len, bodies)))
    assert abs(entry.written_at - time.time()) < 60
    with log.fetched(entry):
        entry.require_files()
        assert [path.read_bytes() for path in entry.paths] == bodies
        assert len(decoded(entry)) == 2


def test_readers_see_nothing_before_the_end(log: DeltaLog, place: Place) -> None:
    writer = log.writer()
    assert writer.last_number == -1
    draft = writer.begin(1)
    draft.add(part(1, 0))
    assert (versions(place.open()), log.listing().damaged) == ([], {})
    assert not draft.may_be_visible
    draft.drop()
    assert place.names() == []
    draft = writer.begin(1)
    draft.add(part(1, 0))
    draft.finish()
    assert draft.may_be_visible
    draft.drop()
    assert (versions(log), writer.last_number) == ([(0, 1)], 1)


def test_number_is_used_once(log: DeltaLog) -> None:
    write(log, 1)
    with log.writer() as writer, pytest.raises(FileExistsError, match=FIRST):
        writer.begin(1)


@pytest.mark.parametrize("is_published", [False, True])
def test_unanswered_version_is_settled(
    log: DeltaLog, place: Place, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """Whoever has to know gets to know whether readers see it, now and later."""
    with log.writer() as writer:
        draft = writer.begin(1)
        draft.add(part(1, 0))
        kind: Any = FolderDraft if isinstance(place, FolderPlace) else ObjectDraft
        publish = kind.publish

        def lost(one: Any, mark: str, data: bytes) -> None:
            if is_published:
                publish(one, mark, data)
            raise OSError("no answer")

        with monkeypatch.context() as broken:
            broken.setattr(kind, "publish", lost)
            with pytest.raises(OSError, match="no answer"):
                draft.finish()
        assert (draft.settle() is not None) == is_published
        draft.drop()
    assert versions(place.open()) == ([(0, 1)] if is_published else [])


def test_refused_version_keeps_its_number(log: DeltaLog, place: Place) -> None:
    write(log, 1)
    with log.writer() as writer:
        writer.refuse(1)
        assert place.names() == [f"{FIRST}/{REFUSED}"]
        assert (versions(log), writer.last_number) == ([], 1)
        with pytest.raises(FileExistsError, match=FIRST):
            writer.begin(1)
    listing = log.listing()
    assert ([folder.name for folder in listing.refused], listing.newest) == ([FIRST], None)


def test_second_writer_never_writes_at_the_same_time(log: DeltaLog, place: Place) -> None:
    """It is refused, or the first one is out; what that one had begun is never published then."""
    old = log.writer()
    draft = old.begin(1)
    draft.add(part(1, 0))
    if not place.takes_over:
        with pytest.raises(BlockingIOError, match="another sender"):
            place.open().writer()
        draft.finish()
        old.close()
        assert (versions(log), place.open().writer().last_number) == ([(0, 1)], 1)
        return
    new = place.open().writer()
    for use in (draft.finish, lambda: old.begin(2), lambda: old.refuse(1)):
        with pytest.raises(BlockingIOError, match="another sender"):
            use()
    assert (new.last_number, versions(log)) == (1, [])
    assert [folder.name for folder in log.listing().refused] == [FIRST]
    draft = new.begin(2)
    draft.add(part(2, 0))
    draft.finish()
    with pytest.raises(BlockingIOError, match="another sender"):
        old.begin(2)  # its number is used, but not by this one


def test_finished_version_stays_for_the_next_writer(log: DeltaLog, place: Place) -> None:
    write(log, 1)
    assert (place.open().writer().last_number, versions(log)) == (1, [(0, 1)])


def test_full_part_has_no_base(log: DeltaLog) -> None:
    write(log, 4, part(4, full=True))
    assert versions(log) == [(None, 4)]


def test_part_without_base_follows_its_predecessor(log: DeltaLog) -> None:
    write(log, 4, part(4))
    assert versions(log) == [(3, 4)]


def test_signatures_come_along(
    log: DeltaLog, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, "key")
    body = part(1, 0)
    with log.writer() as writer:
        draft = writer.begin(1)
        draft.add(body, sign("key", body))
        draft.finish()
    [entry] = log.listing().entries
    with log.fetched(entry):
        assert len(decoded(entry)) == 1
    place.put(named(place, SIGNATURE_SUFFIX), b"00")
    log.listing()
    with log.fetched(entry), pytest.raises(LogDamaged, match="signature"):
        verify_version(entry)


# Deleting --------------------------------------------------------------------------------------


def test_discarded_versions_leave_nothing(log: DeltaLog, place: Place) -> None:
    for version in (1, 2, 3):
        write(log, version)
    log.store.delete([FIRST, "weight_v000003"])
    assert versions(log) == [(1, 2)]
    assert {name.partition("/")[0] for name in place.names()} == {"weight_v000002"}


def test_tidying_keeps_the_highest_number(log: DeltaLog, place: Place) -> None:
    write(log, 1)
    with log.writer() as writer:
        writer.refuse(1)
    log.tidy(log.listing())
    assert log.writer().last_number == 1
    write(log, 2, part(2, 0))
    log.tidy(log.listing())
    # In a store the mark stays: the sender that it keeps out can live.
    assert ([f"{FIRST}/{REFUSED}"] if place.takes_over else []) == [
        name for name in place.names() if FIRST in name
    ]
    assert versions(log) == [(0, 2)]


# Reading ---------------------------------------------------------------------------------------


def test_other_names_are_left_alone(log: DeltaLog, place: Place) -> None:
    write(log, 1)
    for name in (".weight_v000002.partial", "weight_vx", "weight_v1_from_v", "checkpoint"):
        place.put(f"{name}/{DONE}", b"")
    place.put("latest", b"1")
    listing = log.listing()
    assert (listing.newest, listing.damaged, versions(log)) == (1, {}, [(0, 1)])


def test_empty_done_of_another_sender(log: DeltaLog, place: Place) -> None:
    """The version follows its predecessor, and its parts are the files that are there."""
    for name in ("b.safetensors", "a.safetensors", "notes.txt"):
        place.put(f"weight_v000007/{name}", part(7, 6))
    place.put(f"weight_v000007/{DONE}", b"\n")
    [entry] = log.listing().entries
    assert (entry.base_version, entry.version, entry.nbytes) == (6, 7, 2 * len(part(7, 6)))
    assert [path.name for path in entry.paths] == ["a.safetensors", "b.safetensors"]
    assert set(entry.files.values()) == {None}


HASH = "0123456789abcdef" * 2


def done_of_file(name: str, size: int, content: str) -> str:
    files = {name: {"bytes": size, "xxh3_128": content}}
    return json.dumps({"version": 1, "base_version": 0, "files": files})


IMPOSSIBLE = [
    "{", "[]", '{"version": 1}', '{"a":' * 20_000, " " * (MAX_DONE_BYTES + 1),
    '{"version": 2, "base_version": 0, "files": {}}',
    '{"version": 1, "base_version": 0, "files": {"\udcff": null}}',  # no UTF-8
    '{"version": 1, "base_version": 1, "files": {}}',
    *(done_of_file(name, 1, HASH) for name in (
        "../x.safetensors", "..", ".", "", "\0.safetensors", "/x.safetensors", "x",
        "x.safetensors.sig",
    )),
    *(done_of_file("x.safetensors", 1, bad) for bad in (
        "", "../x", HASH.upper(), HASH + "\n", HASH + "0",
    )),
    done_of_file("x.safetensors", -1, HASH),
]  # fmt: skip


@pytest.mark.parametrize("place", ["folder", "memory"], indirect=True)
def test_impossible_done_is_damage(log: DeltaLog, place: Place) -> None:
    write(log, 1)
    for done in IMPOSSIBLE:
        with case(done[:60]):
            place.put(f"{FIRST}/{DONE}", done.encode(errors="surrogateescape"))
            listing = place.open().listing()
            assert (listing.entries, listing.newest) == ([], 1)
            assert DONE in listing.damaged[FIRST]


@pytest.mark.parametrize("damage", ["flip", "short", "gone", "none"])
def test_damaged_part_is_seen_when_it_is_read(log: DeltaLog, place: Place, damage: str) -> None:
    body = part(1, 0)
    write(log, 1, body)
    name = named(place, ".safetensors")
    if damage == "flip":
        place.put(name, body[:-1] + bytes([body[-1] ^ 1]))
    elif damage == "short":
        place.put(name, body[:-1])
    elif damage == "gone":
        place.remove(name)
    else:
        done = json.loads(place.read(f"{FIRST}/{DONE}"))
        place.put(f"{FIRST}/{DONE}", json.dumps({**done, "files": {}}).encode())
    [entry] = log.listing().entries
    with pytest.raises(LogDamaged) as caught, log.fetched(entry):
        verify_version(entry)
    assert (caught.value.operands["version"], caught.value.operands["folder"]) == (1, FIRST)
    if damage != "none":
        assert caught.value.operands["file"] == name.partition("/")[2]


def test_repaired_version_is_read(log: DeltaLog, place: Place) -> None:
    write(log, 1)
    good = place.read(f"{FIRST}/{DONE}")
    place.put(f"{FIRST}/{DONE}", b"{")
    assert versions(log) == []
    place.put(f"{FIRST}/{DONE}", good)
    assert [entry.version for entry in log.listing(anew=True).entries] == [1]


@pytest.mark.parametrize("end", ["", "index"])
def test_folders_of_another_trainer(log: DeltaLog, place: Place, tmp_path: Path, end: str) -> None:
    """With an index in place of ``DONE``, or with an empty ``DONE`` too."""
    source = tmp_path / "source"
    write_version(source, 1, step(0), step(1))
    write_version(source, 2, step(1), step(1))
    write_checkpoint(source, 3, step(3))
    for path in source.rglob("*.*"):
        place.put(path.relative_to(source).as_posix(), path.read_bytes())
    if end:
        place.put(f"{FIRST}/{DONE}", b"")
    entries = log.listing().entries
    facts = [(e.version, e.base_version, e.full, e.foreign) for e in entries]
    assert facts == [(1, 0, False, True), (2, 1, False, True), (3, None, True, True)]
    weights = [*source.rglob("*.safetensors")]
    sizes = [
        sum(p.stat().st_size for p in weights if p.parent.name == e.folder.name) for e in entries
    ]
    assert [entry.nbytes for entry in entries] == sizes
    for entry in entries:
        with log.fetched(entry):
            verify_version(entry)
            assert entry.paths == [entry.folder]
    place.put(f"{FIRST}/{INDEX}", b"{")
    assert FIRST in log.listing().damaged


# Folding ---------------------------------------------------------------------------------------


def test_fold_is_a_version_of_the_log(log: DeltaLog, place: Place, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write(log, version)
    listing = log.listing()
    folder = fold_versions(log, route(listing.entries, 0), 0)
    assert folder.name == "weight_v000003_from_v000000"
    steps = route(log.listing().entries, 0)
    assert [step.folder for step in steps] == [folder]
    with log.fetched(steps[0]):
        [found] = decoded(steps[0])
    assert found.deltas[0].values.tolist() == [3, 2]
    with pytest.raises(FileExistsError):
        fold_versions(log, route(listing.entries, 0), 0)
    (tmp_path / "local").mkdir()
    local = open_log(tmp_path / "local")
    fold_versions(local, route(listing.entries, 0), 0, source=log)
    assert versions(local) == [(0, 3)]
    with pytest.raises(CannotFold):
        fold_versions(log, [], 0)


def test_fold_that_is_being_written_stays_for_a_day(
    log: DeltaLog, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the number of a version that is there."""
    write(log, 1)
    write(log, 2)
    draft = begin(log.store, "weight_v000001_from_v000000")
    draft.add(part(1, 0))
    log.tidy(log.listing())
    draft.finish()
    [fold] = [entry for entry in log.listing().entries if "_from_" in entry.folder.name]
    with log.fetched(fold):
        verify_version(fold)
    log.store.delete([fold.folder.name])
    draft = begin(log.store, "weight_v000001_from_v000000")
    draft.add(part(1, 0))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 86400)
    log.tidy(log.listing())
    if place.takes_over:
        assert not any("_from_" in name for name in place.names())
    draft.drop()
    assert versions(log) == [(0, 1), (1, 2)]


# Heartbeats ------------------------------------------------------------------------------------


def heartbeat(name: str = "host-1-a", **changes: Any) -> Heartbeat:
    facts: dict[str, Any] = {"engine": "vllm", "version": 7, "newest": 9, "behind": 2}
    more = {"state": "following", "failures": 0, "at": time.time(), "expires_s": 60.0}
    return Heartbeat(name=name, **{**facts, **more, **changes})


def test_each_engine_has_one_heartbeat(log: DeltaLog, place: Place) -> None:
    assert read_heartbeats(log) == []
    write_heartbeat(log, heartbeat())
    write_heartbeat(log, heartbeat(version=8, at=0.0))
    write_heartbeat(log, heartbeat("host-2-b", expires_s=-1.0))
    found = read_heartbeats(place.open())
    assert [(one.name, one.version) for one, _ in found] == [("host-1-a", 8), ("host-2-b", 7)]
    assert all(age < 30 for _, age in found)
    assert [one.name for one in live_heartbeats(log)] == ["host-1-a"]
    remove_heartbeat(log, "host-1-a")
    remove_heartbeat(log, "host-1-a")
    assert [one.name for one, _ in read_heartbeats(log)] == ["host-2-b"]
    assert place.names() == [f"{FOLDER}/host-2-b.json"]
    assert log.listing().damaged == {}


def test_what_is_no_heartbeat_is_left_out(log: DeltaLog, place: Place) -> None:
    write_heartbeat(log, heartbeat())
    good = place.read(f"{FOLDER}/host-1-a.json")
    bad = {"torn.json": good[:-5], "other.json": b"[]", "half.tmp": good}
    bad |= {"text.json": good.replace(b"-a", b"-\xff"), "deep.json": b'{"a":' * 10_000}
    for name, text in bad.items():
        place.put(f"{FOLDER}/{name}", text)
    place.put(f"{FOLDER}/large.json", good + bytes(1 << 17))
    assert [one.name for one, _ in read_heartbeats(log)] == ["host-1-a"]
    assert [one.name for one in live_heartbeats(log)] == ["host-1-a"]


@pytest.mark.parametrize(
    "content",
    [b"[]", b'{"name": "host-2-b", "state": "of a later release"}', bytes(1 << 17)],
    ids=["no heartbeat", "another release", "large"],
)
def test_who_must_know_all_followers_learns_of_damage(
    log: DeltaLog, place: Place, content: bytes
) -> None:
    write_heartbeat(log, heartbeat())
    place.put(f"{FOLDER}/host-2-b.json", content)
    with pytest.raises(LogDamaged, match=r"followers/host-2-b.json .*remove it if"):
        live_heartbeats(log, strict=True)
    place.remove(f"{FOLDER}/host-2-b.json")
    assert len(live_heartbeats(log, strict=True)) == 1


def test_a_long_error_does_not_hide_a_follower(log: DeltaLog) -> None:
    write_heartbeat(log, heartbeat(error="LogDamaged: " + "weight_v000001, " * 10_000))
    [found] = live_heartbeats(log, strict=True)
    assert (found.error or "").startswith("LogDamaged: weight_v000001, weight_v000001")
    assert len(found.error or "") == 2000


def test_uncertain_ages_are_no_answer(log: DeltaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of a host that is fast, every heartbeat is old."""
    write_heartbeat(log, heartbeat())
    put = log.store.put

    def fail(name: str, data: bytes, *, durable: bool = False) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(log.store, "put", fail)
    assert len(read_heartbeats(log)) == 1
    with pytest.raises(OSError, match="no space"):
        read_heartbeats(log, strict=True)
    monkeypatch.setattr(log.store, "put", lambda name, data: None)  # it is not listed
    with pytest.raises(OSError, match="does not list"):
        live_heartbeats(log, strict=True)
    monkeypatch.setattr(log.store, "put", put)
    assert len(live_heartbeats(log, strict=True)) == 1


def test_a_heartbeat_replaced_meanwhile_is_read_again(
    log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file that another host has replaced is not found."""
    for name in ("host-1-a", "host-2-b"):
        write_heartbeat(log, heartbeat(name))
    read, lost, gone = log.store.read, [1], [False]

    def reading(name: str, most: int) -> bytes:
        if "host-1" in name and lost[0] > 0:
            lost[0] -= 1
            if gone[0]:
                remove_heartbeat(log, "host-1-a")
            raise FileNotFoundError(errno.ESTALE, "stale")
        return read(name, most)

    monkeypatch.setattr(log.store, "read", reading)
    for strict in (False, True):
        lost[0] = 1
        found = live_heartbeats(log, strict=strict)
        assert [one.name for one in found] == ["host-1-a", "host-2-b"]
    lost[0] = 100
    assert [one.name for one in live_heartbeats(log)] == ["host-2-b"]
    with pytest.raises(OSError, match="is listed, but not found"):
        live_heartbeats(log, strict=True)
    gone[0] = True
    assert [one.name for one in live_heartbeats(log, strict=True)] == ["host-2-b"]


def test_lag_counts_what_a_follower_lacks(log: DeltaLog) -> None:
    for version in (1, 2, 3):
        write(log, version)
    fold_versions(log, route(log.listing().entries, 0), 0)
    write_heartbeat(log, heartbeat(version=1))
    [lag] = follower_lags(log)
    nbytes = [entry.nbytes for entry in log.listing().entries if "_from_" not in entry.folder.name]
    assert (lag.versions, lag.nbytes, lag.expired) == (2, sum(nbytes[1:]), False)
    assert lag.seconds < 60


# Stores that cannot be read --------------------------------------------------------------------


def test_missing_folder_is_not_an_empty_log(tmp_path: Path) -> None:
    with pytest.raises(LogDamaged, match="cannot read the delta log: No such file"):
        open_log(tmp_path / "log").listing()


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_what_was_not_listed_is_not_fetched(log: DeltaLog, place: Place) -> None:
    write(log, 1)
    [entry] = place.open().listing().entries
    with pytest.raises((LogDamaged, PartUnavailable)), log.fetched(entry):
        pass
