"""Versions read back from a log, and several folded into one."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_ext.errors import LogDamaged
from engine_ext.format import ParamDelta, encode_part
from engine_ext.format.digest import Digest, change_digest
from engine_ext.format.signature import SIGNATURE_SUFFIX, sign
from engine_ext.log import (
    CannotFold,
    DeltaLog,
    fold_versions,
    open_log,
    read_manifests,
    spilled,
    verify_version,
)
from engine_ext.log import fold as delta_log_fold
from engine_ext.log.catalog import DONE, folder_name, route
from tests.support.served_models import PROPERTY
from tests.unit.log import places
from tests.unit.log.places import Place, decoded, folders

SIZES = {"a": 12, "b": 5, "c": 300}
DTYPES = {"a": ("bfloat16", np.uint16), "b": ("float32", np.uint32), "c": ("bfloat16", np.uint16)}

Model = dict[str, np.ndarray]


def model() -> Model:
    return {name: np.arange(size).astype(DTYPES[name][1]) for name, size in SIZES.items()}


def sparse(name: str, changes: dict[int, int]) -> ParamDelta:
    places = np.array(sorted(changes), np.int64)
    values = np.array([changes[place] for place in sorted(changes)], DTYPES[name][1])
    return ParamDelta(name, DTYPES[name][0], (SIZES[name],), places, values)


def dense(name: str, values: np.ndarray) -> ParamDelta:
    return ParamDelta(name, DTYPES[name][0], (SIZES[name],), None, values)


def bodies(version: int, *groups: list[ParamDelta], **metadata: Any) -> list[bytes]:
    metadata = {
        "encoding": "deltas_zstd",
        "base_version": None if metadata.get("full") else version - 1,
        "sync_id": f"sync {version}",
        "num_parts": len(groups),
        **metadata,
    }
    return [
        encode_part(group, current_version=version, part=number, **metadata)
        for number, group in enumerate(groups)
    ]


def write(log: Path, version: int, *groups: list[ParamDelta], **metadata: Any) -> Path:
    with open_log(log).writer() as writer:
        draft = writer.begin(version)
        for body in bodies(version, *groups, **metadata):
            draft.add(body)
        return draft.finish()


def entry_of(log: Path, folder: Path) -> Any:
    return next(entry for entry in open_log(log).listing().entries if entry.folder == folder)


def apply(weights: Model, log: Path, folders: list[Path]) -> Model:
    result = {name: values.copy() for name, values in weights.items()}
    for folder in folders:
        for part in decoded(entry_of(log, folder)):
            for delta in part.deltas:
                where: Any = slice(None) if delta.indices is None else delta.indices
                result[delta.name][where] = delta.values
    return result


def same(one: Model, other: Model) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in SIZES)


def folded(log: Path, base: int) -> Path:
    return fold_versions(open_log(log), route(open_log(log).listing().entries, base), base)


def test_what_is_folded_keeps_no_part_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[ParamDelta] = []

    def recorded(deltas: list[ParamDelta], **metadata: Any) -> bytes:
        sent.extend(deltas)
        return encode_part(deltas, **metadata)

    write(tmp_path, 1, [sparse("a", {1: 5}), sparse("c", {7: 1})])
    write(tmp_path, 2, [sparse("a", {2: 6})])
    monkeypatch.setattr(delta_log_fold, "encode_part", recorded)
    folded(tmp_path, 0)
    assert {delta.name for delta in sent} == {"a", "c"}


changes = st.dictionaries(
    st.sampled_from(sorted(SIZES)),
    st.none() | st.dictionaries(st.integers(0, 4), st.integers(0, 65535), max_size=5),
    max_size=3,
)


@pytest.mark.slow
@given(st.lists(changes, min_size=1, max_size=4), st.booleans())
@settings(PROPERTY, max_examples=20)
def test_a_fold_does_what_its_versions_do(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], full: bool
) -> None:
    log = tmp_path_factory.mktemp("log")
    folders = []
    for version, step in enumerate(steps, 1):
        if full and version == 1:
            step = dict.fromkeys(SIZES)
        deltas = [
            dense(name, (model()[name] + version).astype(DTYPES[name][1]))
            if found is None
            else sparse(name, found)
            for name, found in step.items()
        ]
        groups = [g for d in ("bfloat16", "float32") if (g := [x for x in deltas if x.dtype == d])]
        folders.append(write(log, version, *(groups or [[]]), full=full and version == 1))
    expected = apply(model(), log, folders)
    one = folded(log, 0)
    assert one.name == folder_name(len(steps), 0)
    assert same(apply(model(), log, [one]), expected)
    entry = entry_of(log, one)
    assert (entry.base_version, entry.version) == (None if full else 0, len(steps))


def test_the_digests_of_the_model_are_kept(tmp_path: Path) -> None:
    first, middle, last = "1" * 32, "2" * 32, "3" * 32
    write(tmp_path, 1, [sparse("a", {1: 2})], digest_before=first, digest_after=middle)
    write(tmp_path, 2, [sparse("b", {1: 2})], digest_before=middle, digest_after=last)
    entry = entry_of(tmp_path, folded(tmp_path, 0))
    parts = decoded(entry)
    assert read_manifests(entry) == [part.manifest for part in parts]
    found = verify_version(entry)
    assert (found.before, found.after) == (first, last)
    assert len({part.manifest.sync_id for part in parts}) == 1
    assert [part.manifest.digest_part for part in parts] == [None, None]


def test_a_fold_is_of_the_run_of_its_last_version(tmp_path: Path) -> None:
    for version, run in ((1, "a"), (2, "b")):
        sender = {"run": run, "run_epoch": version, "run_owner": f"{run}:1"}
        write(tmp_path, version, [sparse("a", {version: 5})], **sender)
    [part] = decoded(entry_of(tmp_path, folded(tmp_path, 0)))
    manifest = part.manifest
    assert (manifest.run, manifest.run_epoch, manifest.run_owner) == ("b", 2, "b:1")


def test_large_folds_have_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_log_fold, "BUCKET_BYTES", 8)
    folders = [
        write(tmp_path, 1, [sparse("a", {1: 2, 3: 4}), sparse("c", {7: 8, 9: 1})]),
        write(tmp_path, 2, [sparse("b", {1: 2})]),
    ]
    one = folded(tmp_path, 0)
    assert len(list(one.glob("*.safetensors"))) == 3
    assert same(apply(model(), tmp_path, [one]), apply(model(), tmp_path, folders))


@pytest.mark.slow
def test_a_fold_keeps_a_window_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many versions there are, and elements that these change."""
    window, versions, count = 1 << 20, 40, 100_000
    monkeypatch.setattr(spilled, "WINDOW_BYTES", window)
    monkeypatch.setattr(delta_log_fold, "BUCKET_BYTES", window)
    for version in range(1, versions + 1):
        places = np.arange(version - 1, count * versions, versions)
        values = np.full(count, version, np.uint16)
        one = ParamDelta(f"w{version}", "bfloat16", (count * versions,), places, values)
        write(tmp_path, version, [one])
    entries = open_log(tmp_path).listing().entries
    verify_version(entries[0])  # what decodes is compiled
    tracemalloc.start()
    try:
        target = fold_versions(open_log(tmp_path), entries, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    result = [delta for part in decoded(entry_of(tmp_path, target)) for delta in part.deltas]
    assert sum(delta.nnz for delta in result) == count * versions
    assert peak < 10 * window, peak  # all of them have 24 MB


def test_differences_cannot_be_folded(tmp_path: Path) -> None:
    delta = ParamDelta(
        "a", "bfloat16", (12,), np.array([3], np.int64), np.array([1], np.uint16), True
    )
    change = change_digest("a", delta.indices, np.array([3], np.uint16), np.array([4], np.uint16))
    write(tmp_path, 1, [delta], encoding="gap8_ulp", digest_part=(change + Digest.ZERO).hex())
    with pytest.raises(CannotFold, match="version 1 sends changes"):
        folded(tmp_path, 0)
    assert folders(tmp_path) == ["weight_v000001"]


def test_flipped_bits_cannot_be_folded(tmp_path: Path) -> None:
    write(tmp_path, 1, [sparse("a", {3: 0x4000})])
    checksum = "xxh3-128:" + "0" * 32
    flips = replace(sparse("a", {3: 1}), cleared=np.zeros(1, np.uint16), new_checksum=checksum)
    write(tmp_path, 2, [flips], encoding="gap8_xor")
    with pytest.raises(CannotFold, match="version 2 sends changes"):
        folded(tmp_path, 0)


def test_a_tensor_that_changed_its_shape_cannot_be_folded(tmp_path: Path) -> None:
    write(tmp_path, 1, [sparse("a", {1: 2})])
    other = ParamDelta("a", "bfloat16", (13,), np.array([3], np.int64), np.array([1], np.uint16))
    write(tmp_path, 2, [other])
    with pytest.raises(CannotFold, match="later"):
        folded(tmp_path, 0)


def test_nothing_cannot_be_folded(tmp_path: Path) -> None:
    with pytest.raises(CannotFold):
        fold_versions(open_log(tmp_path), [], 0)


def test_an_interrupted_fold_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, [sparse("a", {1: 2})])

    def interrupted(*arguments: object, **named: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(delta_log_fold, "encode_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folded(tmp_path, 0)
    assert folders(tmp_path) == ["weight_v000001"]


# What is read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [3, 40, -1])
def test_a_flipped_bit_is_seen(tmp_path: Path, position: int) -> None:
    folder = write(tmp_path, 1, [sparse("a", {1: 2})])
    [path] = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    with pytest.raises(LogDamaged) as caught:
        verify_version(entry_of(tmp_path, folder))
    assert caught.value.operands["file"] == path.name
    (folder / DONE).write_text("")  # without the hashes in it
    with pytest.raises(LogDamaged):
        verify_version(entry_of(tmp_path, folder))


def test_a_part_that_is_no_file_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, [sparse("a", {1: 2})])
    [path] = folder.glob("*.safetensors")
    path.unlink()
    os.mkfifo(path)
    (folder / DONE).write_text("")
    with pytest.raises(LogDamaged, match="not a regular file"):
        verify_version(entry_of(tmp_path, folder))


@pytest.mark.parametrize(
    "metadata",
    [{"num_parts": 3}, {"num_parts": None}, {"sync_id": None, "num_parts": 1, "part": 5}],
)
def test_parts_that_are_not_a_sync(tmp_path: Path, metadata: dict[str, Any]) -> None:
    with open_log(tmp_path).writer() as writer:
        draft = writer.begin(1)
        for number in range(2):
            metadata = {"part": number, **metadata}
            if metadata["num_parts"] == 1:
                metadata["num_parts"] = None
            draft.add(
                encode_part([sparse("a", {1: 2})], encoding="deltas", current_version=1, **metadata)
            )
        folder = draft.finish()
    with pytest.raises(LogDamaged):
        verify_version(entry_of(tmp_path, folder))


def test_parts_of_another_version(tmp_path: Path) -> None:
    folder = write(tmp_path, 4, [sparse("a", {1: 2})])
    done = (folder / DONE).read_text()
    (folder / DONE).write_text(done.replace('"base_version": 3', '"base_version": 2'))
    with pytest.raises(LogDamaged):
        verify_version(entry_of(tmp_path, folder))


def test_signatures_are_checked_where_there_is_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, 1, [sparse("a", {1: 2})])
    [path] = folder.glob("*.safetensors")
    monkeypatch.setenv("DELTA_HMAC_KEY", "key")
    with pytest.raises(LogDamaged, match="signed"):
        verify_version(entry_of(tmp_path, folder))
    beside = path.with_name(path.name + SIGNATURE_SUFFIX)
    beside.write_text(sign("key", path.read_bytes()))
    for signature in (b"\xff\xfe" * 32, b"0" * (1 << 20)):
        beside.write_bytes(signature)
        with pytest.raises(LogDamaged, match="does not have this signature"):
            verify_version(entry_of(tmp_path, folder))
    beside.write_text(sign("key", path.read_bytes()))
    one = folded(tmp_path, 0)
    [part] = one.glob("*.safetensors")
    assert part.with_name(part.name + SIGNATURE_SUFFIX).read_text() == sign(
        "key", part.read_bytes()
    )


def test_refused_version_hides_folds_of_it(log: DeltaLog, place: Place) -> None:
    """One can be written before its sender knows that no engine takes the version, or after."""
    for version in (1, 2):
        places.write(log, version)
    entries = log.listing().entries
    fold_versions(log, entries, 0)
    with log.writer() as writer:
        writer.refuse(2)
    assert places.versions(log) == [(0, 1)]
    places.write(log, 3, places.part(3, 1))
    assert route(log.listing().entries, 0)[-1].version == 3
    log.tidy(log.listing())
    assert places.versions(place.open()) == [(0, 1), (1, 3)]
    assert not any("_from_" in name for name in place.names())
