"""What a delta log holds, and which way leads through it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.errors import LogDamaged, MalformedPart
from engine_ext.format import ParamDelta, encode_part
from engine_ext.log.catalog import (
    DONE,
    REFUSED,
    Entry,
    FileFacts,
    folder_name,
    list_log,
    route,
    version_of,
    why_not_newer,
)
from engine_ext.log.folder_log import discard
from engine_ext.log.writer import LogWriter, manifest_of
from tests.support.served_models import PROPERTY


def part(version: int, base: int | None = None, **metadata: Any) -> bytes:
    delta = ParamDelta(
        "w", "bfloat16", (9,), np.array([1, 7], np.int64), np.array([version, 2], np.uint16)
    )
    if metadata.get("full"):
        delta = ParamDelta("w", "bfloat16", (9,), None, np.full(9, version, np.uint16))
    metadata.setdefault("encoding", "deltas_zstd")
    return encode_part([delta], current_version=version, base_version=base, **metadata)


def write(log: Path, version: int, *parts: bytes) -> Path:
    with LogWriter(log) as writer:
        draft = writer.begin(version)
        for body in parts or (part(version, version - 1),):
            draft.add(body)
        return draft.finish()


def versions(log: Path) -> list[tuple[int | None, int]]:
    return [(entry.base_version, entry.version) for entry in list_log(log).entries]


# Writing ---------------------------------------------------------------------------------------


def test_what_a_version_is_on_disk(tmp_path: Path) -> None:
    bodies = [part(12, 11, part=k, num_parts=2, sync_id="x") for k in range(2)]
    folder = write(tmp_path / "log", 12, *bodies)
    assert folder == tmp_path / "log/weight_v000012"
    names = ["rank0_flush000.safetensors", "rank0_flush001.safetensors"]
    assert sorted(os.listdir(folder)) == [DONE, *names]
    assert [(folder / name).read_bytes() for name in names] == bodies
    [entry] = list_log(tmp_path / "log").entries
    assert (entry.version, entry.base_version, entry.full) == (12, 11, False)
    assert entry.paths == [folder / name for name in names]
    assert entry.nbytes == sum(map(len, bodies))
    entry.require_files()


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        draft = writer.begin(1)
        draft.add(part(1, 0))
        assert list_log(tmp_path).entries == []
        draft.drop()
        assert os.listdir(tmp_path) == []
        draft = writer.begin(1)
        draft.add(part(1, 0))
    # As a killed writer leaves it.
    assert write(tmp_path, 1).exists()
    assert os.listdir(tmp_path) == ["weight_v000001"]


def test_everything_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        synced.append(f"-> {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    write(tmp_path, 3)
    assert synced == [
        "rank0_flush000.safetensors", DONE, ".weight_v000003.partial", "-> weight_v000003",
        tmp_path.name,
    ]  # fmt: skip


def test_a_number_is_used_once(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with LogWriter(tmp_path) as writer:
        with pytest.raises(FileExistsError):
            writer.begin(1)
        assert writer.last_number == 1
        writer.refuse(1)
        assert os.listdir(tmp_path / "weight_v000001") == [REFUSED]
        with pytest.raises(FileExistsError):
            writer.begin(1)
        assert writer.last_number == 1
    assert versions(tmp_path) == []
    assert list_log(tmp_path).refused == [tmp_path / "weight_v000001"]
    assert list_log(tmp_path).newest is None


def test_one_writer(tmp_path: Path) -> None:
    with LogWriter(tmp_path):
        with pytest.raises(BlockingIOError):
            LogWriter(tmp_path)
    LogWriter(tmp_path).close()


def test_a_full_part_has_no_base(tmp_path: Path) -> None:
    write(tmp_path, 4, part(4, full=True))
    assert versions(tmp_path) == [(None, 4)]


def test_a_part_without_a_base_follows_the_version_before(tmp_path: Path) -> None:
    write(tmp_path, 4, part(4))
    assert versions(tmp_path) == [(3, 4)]


def test_discarding(tmp_path: Path) -> None:
    discard(tmp_path, [write(tmp_path, 4).name])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("encoding", ["deltas", "deltas_zstd", "gap8_exp"])
def test_the_manifest_of_a_part(encoding: str) -> None:
    body = part(5, 4, sync_id="x", encoding=encoding)
    assert manifest_of(body).sync_id == "x"
    with pytest.raises(MalformedPart):
        manifest_of(body[:20])


# Reading ---------------------------------------------------------------------------------------


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in (".weight_v000001.partial", "weight_vx", "weight_v1_from_v", "checkpoint"):
        (tmp_path / name).mkdir()
        assert version_of(name) is None
    (tmp_path / "latest").write_text("1")
    assert list_log(tmp_path).newest is None


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LogDamaged, match="cannot read"):
        list_log(tmp_path / "log")


HASH = "0123456789abcdef" * 2


def done_of_file(name: str, size: int, content: str) -> str:
    files = {name: {"bytes": size, "xxh3_128": content}}
    return json.dumps({"version": 1, "base_version": 0, "files": files})


@pytest.mark.parametrize(
    "done",
    [
        "{", "[]", '{"version": 1}', '{"a":' * 20_000,
        '{"version": 2, "base_version": 0, "files": {}}',
        '{"version": 1, "base_version": 1, "files": {}}',
        *(done_of_file(name, 1, HASH) for name in ("../x", "..", ".", "", "a\0", "/x")),
        *(done_of_file("x", 1, bad) for bad in ("", "../x", HASH.upper(), HASH + "\n", HASH + "0")),
        done_of_file("x", -1, HASH),
    ],
    ids=lambda done: done[:30],
)  # fmt: skip
def test_a_done_that_cannot_be(tmp_path: Path, done: str) -> None:
    (write(tmp_path, 1) / DONE).write_text(done)
    listing = list_log(tmp_path)
    assert listing.entries == []
    assert DONE in listing.damaged["weight_v000001"]
    assert listing.newest == 1


def test_a_done_that_is_no_file(tmp_path: Path) -> None:
    done = write(tmp_path, 1) / DONE
    done.unlink()
    os.mkfifo(done)
    assert "not a regular file" in list_log(tmp_path).damaged["weight_v000001"]


def test_a_done_that_is_a_link(tmp_path: Path) -> None:
    done = write(tmp_path, 1) / DONE
    done.rename(tmp_path / "elsewhere")
    done.symlink_to(tmp_path / "elsewhere")
    assert "cannot be read" in list_log(tmp_path).damaged["weight_v000001"]


def test_a_folder_without_done(tmp_path: Path) -> None:
    (write(tmp_path, 1) / DONE).unlink()
    assert "no DONE" in list_log(tmp_path).damaged["weight_v000001"]


@pytest.mark.parametrize("damage", ["missing", "short", "none"])
def test_files_that_are_not_there(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path, 1)
    [path] = list_log(tmp_path).entries[0].paths
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        done = json.loads((folder / DONE).read_bytes())
        (folder / DONE).write_text(json.dumps({**done, "files": {}}))
    with pytest.raises(LogDamaged) as caught:
        list_log(tmp_path).entries[0].require_files()
    assert caught.value.operands["version"] == 1


# The way ---------------------------------------------------------------------------------------


def entry(base: int | None, version: int, nbytes: int = 1) -> Entry:
    name = folder_name(version, base)
    return Entry(Path(name), version, base, {"a": FileFacts(nbytes, "")}, nbytes)


def way(entries: list[Entry], version: int | None) -> list[tuple[int | None, int]]:
    return [(step.base_version, step.version) for step in route(entries, version)]


def test_the_way_leads_version_by_version() -> None:
    chain = [entry(k, k + 1) for k in range(5)]
    assert way(chain, 2) == [(2, 3), (3, 4), (4, 5)]
    assert way(chain, 5) == []
    assert way([], 0) == []


def test_the_way_ends_before_a_gap() -> None:
    assert way([entry(0, 1), entry(2, 3)], 0) == [(0, 1)]
    assert way([entry(0, 1), entry(2, 3)], 1) == []


def test_the_lightest_way_is_taken() -> None:
    chain = [entry(k, k + 1, 10) for k in range(3)]
    assert way([*chain, entry(0, 2, 15)], 0) == [(0, 2), (2, 3)]
    assert way([*chain, entry(0, 2, 25)], 0) == [(0, 1), (1, 2), (2, 3)]
    assert way([*chain, entry(None, 3, 29)], 0) == [(None, 3)]
    assert way([*chain, entry(None, 3, 31)], 0) == [(0, 1), (1, 2), (2, 3)]


def test_a_full_version_bridges_a_gap() -> None:
    entries = [entry(0, 1), entry(None, 5), entry(5, 6)]
    assert way(entries, 3) == [(None, 5), (5, 6)]
    assert way(entries, 0) == [(None, 5), (5, 6)]
    assert way(entries, None) == [(None, 5), (5, 6)]
    assert way(entries[:1], None) == []


def test_of_two_ways_that_part_the_newer_counts() -> None:
    assert way([entry(0, 1), entry(1, 2), entry(1, 3)], 0) == [(0, 1), (1, 3)]


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 8), st.integers(1, 9)), max_size=12),
    st.none() | st.integers(0, 9),
)
@PROPERTY
def test_every_way_holds_together(pairs: list[tuple[int | None, int]], version: int | None) -> None:
    entries = [entry(base, to) for base, to in pairs if base is None or base < to]
    at = version
    for step in route(entries, version):
        assert step.full or step.base_version == at
        assert at is None or step.version > at
        at = step.version
    reachable = {version} - {None}
    for step in sorted(entries, key=lambda step: step.version):
        newer = version is None or step.version > version
        if newer and (step.full or step.base_version in reachable):
            reachable.add(step.version)
    assert at == max(reachable, default=None)


def test_why_there_is_nothing_newer(tmp_path: Path) -> None:
    assert why_not_newer(list_log(tmp_path), 0) is None
    for version in (1, 2, 3):
        write(tmp_path, version)
    assert why_not_newer(list_log(tmp_path), 3) is None
    (tmp_path / "weight_v000002" / DONE).unlink()
    why = why_not_newer(list_log(tmp_path), 1) or ""
    assert "leads on from version 1" in why
    assert "weight_v000002" in why
