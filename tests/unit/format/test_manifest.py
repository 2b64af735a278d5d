from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from engine_ext.errors import ChecksumMismatch, DeltaError, MalformedPart, TooLarge
from engine_ext.format import Limits, encode_part
from engine_ext.format.manifest import manifest_checksum, parse_manifest, parse_version
from tests.support.cases import in_one_test
from tests.support.independent_encoder import (
    BF16_PARAMS,
    good_metadata,
    hash_metadata,
    with_entry,
)

LIMITS = Limits(max_params=8, max_parts=16, max_name_bytes=64, max_ndim=3, max_numel=1000)


def entry(name: str = "a", **changes: Any) -> dict[str, Any]:
    dense = {
        "name": name,
        "dtype": "uint8",
        "shape": [],
        "pos_start": 0,
        "pos_end": 0,
        "pos_width": 0,
        "val_start": 0,
        "val_end": 1,
    }
    return {**dense, **changes}


def test_required_keys_are_enough() -> None:
    manifest = parse_manifest(good_metadata(current_version=None), LIMITS)
    assert manifest.encoding == "indices"
    assert [(p.name, p.shape, p.numel, p.nnz) for p in manifest.params] == [
        ("model.embed.weight", (4, 5), 20, 3),
        ("model.norm.weight", (7,), 7, 2),
    ]
    assert not any(p.is_dense for p in manifest.params)
    assert manifest.full is False
    for absent in (
        *("manifest_checksum", "current_version", "base_version", "part", "num_parts"),
        *("sync_id", "digest_algorithm", "digest_part", "digest_before", "digest_after"),
        *("run", "run_epoch", "run_owner"),
    ):
        assert getattr(manifest, absent) is None


def test_every_optional_key() -> None:
    metadata = hash_metadata(
        good_metadata(
            params=json.dumps([entry("a"), entry("b", val_start=1, val_end=2)]),
            base_version="0",
            part="2",
            num_parts="3",
            sync_id="run 7 / step 12",
            full="true",
            digest_algorithm="multilinear-1",
            digest_part="0" * 32,
            digest_before="1" * 32,
            digest_after="abcdef0123456789" * 2,
            run="run_7.a-b",
            run_epoch="3",
            run_owner="host.example:4711",
        )
    )
    manifest = parse_manifest(metadata, LIMITS)
    assert (manifest.current_version, manifest.base_version) == (8, 0)
    assert (manifest.part, manifest.num_parts) == (2, 3)
    assert (manifest.sync_id, manifest.full) == ("run 7 / step 12", True)
    assert manifest.digest_after == "abcdef0123456789" * 2
    assert (manifest.run, manifest.run_epoch) == ("run_7.a-b", 3)
    assert manifest.run_owner == "host.example:4711"
    assert manifest.manifest_checksum == metadata["manifest_checksum"]
    assert all(p.is_dense for p in manifest.params)


def test_a_run_alone_is_its_first_opening() -> None:
    manifest = parse_manifest(good_metadata(run="r" * 64), LIMITS)
    assert (manifest.run, manifest.run_epoch, manifest.run_owner) == ("r" * 64, 1, None)


@in_one_test(
    "metadata",
    [
        *({"run": run} for run in ("", "a b", "r" * 65, "anonymous-1", "a:b", "a\n")),
        *({"run": "r", "run_epoch": epoch} for epoch in ("0", "01", "-1", "one")),
        *(
            {"run": "r", "run_owner": owner}
            for owner in ("", "host", ":1", "host:", "a b:1", "h:x")
        ),
        {"run_epoch": "1"},
        {"run_owner": "host:1"},
    ],
)
def test_a_broken_run_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(MalformedPart, match="run"):
        parse_manifest(good_metadata(**metadata), LIMITS)


def test_unknown_keys_are_ignored() -> None:
    params = [{**BF16_PARAMS[0], "color": {"deep": [1, None]}}, BF16_PARAMS[1]]
    metadata = good_metadata(params=json.dumps(params), prev_version="default", format="pt")
    assert parse_manifest(metadata, LIMITS) == parse_manifest(good_metadata(), LIMITS)


@pytest.mark.parametrize(
    ("shape", "width", "nnz", "dense"),
    [
        ([], 0, 1, True),
        ([], 4, 1, False),
        ([], 4, 0, False),
        ([0, 3], 0, 0, True),
        ([0, 3], 4, 0, False),
        ([2, 3], 0, 6, True),
        ([2, 3], 4, 6, False),
    ],
)
def test_dense_is_pos_width_0(shape: list[int], width: int, nnz: int, dense: bool) -> None:
    one = entry(shape=shape, pos_width=width, pos_end=nnz * width, val_end=nnz)
    (parsed,) = parse_manifest(good_metadata(params=json.dumps([one])), LIMITS).params
    assert parsed.is_dense is dense


BROKEN_METADATA: list[tuple[Mapping[str, str | None], type[DeltaError], str]] = [
    ({"encoding": None}, MalformedPart, "no 'encoding'"),
    ({"params": None}, MalformedPart, "no 'params'"),
    ({"checksum": None}, MalformedPart, "no 'checksum'"),
    ({"encoding": "Indices"}, MalformedPart, "unknown encoding"),
    ({"params": ""}, MalformedPart, "params: "),
    ({"params": "[" * 100_000}, MalformedPart, "params: "),
    ({"params": '[{"x":' + "[" * 100_000}, MalformedPart, "params: "),
    ({"params": "{}"}, MalformedPart, "Expected `array`"),
    ({"params": "null"}, MalformedPart, "Expected `array`"),
    ({"params": "[[]]"}, MalformedPart, "Expected `object`"),
    ({"params": "[{}]"}, MalformedPart, "missing required field"),
    ({"params": "[] []"}, MalformedPart, "trailing characters"),
    ({"params": "[NaN]"}, MalformedPart, "params: "),
    ({"params": with_entry(name=3)}, MalformedPart, "Expected `str`"),
    ({"params": with_entry(name="")}, MalformedPart, "name in params is empty"),
    ({"params": with_entry(name="x" * 65)}, MalformedPart, "over 64 bytes"),
    ({"params": with_entry(name="ü" * 33)}, MalformedPart, "over 64 bytes"),
    ({"params": with_entry(name="\ud800")}, MalformedPart, "params: "),
    ({"params": with_entry(1, name="model.embed.weight")}, MalformedPart, "twice"),
    ({"params": with_entry(dtype="BF16")}, MalformedPart, "unknown dtype"),
    ({"params": with_entry(dtype="torch.bfloat16")}, MalformedPart, "unknown dtype"),
    ({"params": with_entry(shape=20)}, MalformedPart, "Expected `array`"),
    ({"params": with_entry(shape=[20.0])}, MalformedPart, "Expected `int`"),
    ({"params": with_entry(shape=[True])}, MalformedPart, "Expected `int`"),
    ({"params": with_entry(shape=["20"])}, MalformedPart, "Expected `int`"),
    ({"params": with_entry(shape=[-4, -5])}, MalformedPart, ">= 0"),
    ({"params": with_entry(shape=[1, 1, 4, 5])}, MalformedPart, "dimensions"),
    # Whose product would take minutes to compute.
    ({"params": with_entry(shape=[2**63 - 1] * 200_000)}, MalformedPart, "dimensions"),
    ({"params": with_entry(shape=[100, 11])}, TooLarge, "more than 1000 elements"),
    ({"params": with_entry(shape=[0, 1001])}, TooLarge, "more than 1000 elements"),
    ({"params": with_entry(shape=[2**62, 2**62])}, TooLarge, "more than 1000 elements"),
    ({"params": with_entry(shape=[2**64])}, MalformedPart, "params: "),
    ({"params": with_entry(shape=[2])}, MalformedPart, "more values than elements"),
    ({"params": with_entry(pos_width=2)}, MalformedPart, "lengths"),
    ({"params": with_entry(pos_width=2, pos_end=6)}, MalformedPart, "pos_width 2"),
    ({"params": with_entry(pos_width=0, pos_end=0)}, MalformedPart, "pos_width 0"),
    ({"params": with_entry(pos_width=0)}, MalformedPart, "lengths"),
    ({"params": with_entry(pos_end=16)}, MalformedPart, "lengths"),
    ({"params": with_entry(pos_start=4)}, MalformedPart, "lengths"),
    ({"params": with_entry(pos_start=4, pos_end=16)}, MalformedPart, "gap or overlap"),
    ({"params": with_entry(val_start=1, val_end=4)}, MalformedPart, "gap or overlap"),
    ({"params": with_entry(1, pos_start=8, pos_end=16)}, MalformedPart, "gap or overlap"),
    ({"params": with_entry(1, val_start=2, val_end=4)}, MalformedPart, "gap or overlap"),
    ({"params": with_entry(1, val_start=5, val_end=3)}, MalformedPart, "lengths"),
    ({"params": with_entry(1, val_end=2, pos_end=8)}, MalformedPart, "lengths"),
    ({"params": with_entry(val_start=-3)}, MalformedPart, ">= 0"),
    ({"params": json.dumps(BF16_PARAMS[::-1])}, MalformedPart, "gap or overlap"),
    (
        {"params": json.dumps([entry(f"{i}", val_start=i, val_end=i + 1) for i in range(9)])},
        TooLarge,
        "over 8 entries",
    ),
    ({"full": "yes"}, MalformedPart, "full is neither"),
    ({"full": "True"}, MalformedPart, "full is neither"),
    ({"digest_algorithm": "sum-of-mixes"}, MalformedPart, "computes 'multilinear-1'"),
    ({"digest_algorithm": ""}, MalformedPart, "the digest is of ''"),
    ({"digest_after": "0" * 32}, MalformedPart, "digest_after is without a digest_algorithm"),
    (
        {"digest_part": "0" * 32, "digest_algorithm": "sum-of-mixes"},
        MalformedPart,
        "digest_part is of 'sum-of-mixes'; this version computes 'multilinear-1'",
    ),
    *(
        ({"digest_algorithm": "multilinear-1", key: value}, MalformedPart, f"{key} is not 32")
        for key, value in (("digest_part", "0"), ("digest_before", "G" * 32), ("digest_after", ""))
    ),
    ({"manifest_checksum": ""}, ChecksumMismatch, "metadata"),
    ({"manifest_checksum": "xxh3_128:" + "0" * 32}, ChecksumMismatch, "metadata"),
    ({"manifest_checksum": "x", "sync_id": "a\nz=1"}, MalformedPart, "ambiguous"),
    ({"manifest_checksum": "x", "a=b": "c"}, MalformedPart, "ambiguous"),
    ({"manifest_checksum": "x", "a\nb": "c"}, MalformedPart, "ambiguous"),
]


@in_one_test(("changes", "error", "message"), BROKEN_METADATA)
def test_broken_metadata_is_refused(
    changes: dict[str, str | None], error: type[DeltaError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        parse_manifest(good_metadata(**changes), LIMITS)
    assert type(caught.value) is error
    assert len(caught.value.message) < 400


# What the reader refuses in the metadata, the writer refuses to write.
BROKEN_FOR_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"current_version": -1}, "current_version"),
    ({"current_version": 2**63}, "current_version"),
    ({"base_version": -1}, "base_version"),
    ({"part": -1}, "part"),
    ({"part": 2, "num_parts": 2}, "parts count from 0"),
    ({"num_parts": 0}, "at least one part"),
    ({"num_parts": 2}, "no part number"),
    ({"part": 1 << 16}, "more than 65536 parts"),
    ({"part": 0, "num_parts": (1 << 16) + 1}, "more than 65536 parts"),
    ({"sync_id": ""}, "sync_id"),
    ({"sync_id": "a\tb"}, "sync_id"),
    ({"sync_id": "x" * 4097}, "sync_id"),
    ({"digest_part": "0"}, "digest_part"),
    ({"digest_before": "G" * 32}, "digest_before"),
    ({"digest_after": "A" * 32}, "digest_after"),
    ({"encoding": "gzip"}, "unknown encoding"),
]


@in_one_test(("arguments", "message"), BROKEN_FOR_BOTH)
def test_reader_and_writer_refuse_the_same(arguments: dict[str, Any], message: str) -> None:
    strings = {key: str(value) for key, value in arguments.items()}
    with pytest.raises((MalformedPart, TooLarge), match=message):
        parse_manifest(good_metadata(**strings), Limits())
    with pytest.raises(ValueError, match=message):
        encode_part([], **{"encoding": "indices", "current_version": 1, **arguments})


def test_full_wants_every_param_dense() -> None:
    with pytest.raises(MalformedPart, match="not dense") as caught:
        parse_manifest(good_metadata(full="true"), LIMITS)
    assert caught.value.operands == {"tensor": "model.embed.weight"}
    assert parse_manifest(good_metadata(full="false"), LIMITS).full is False


@pytest.mark.parametrize("numel_ok", [True, False])
def test_indices_are_for_tensors_below_2_31_elements(numel_ok: bool) -> None:
    shape = [2**31 - numel_ok]
    for encoding, width, fits in (("indices", 4, numel_ok), ("deltas", 2, True)):
        one = entry(shape=shape, pos_width=width, pos_end=width)
        metadata = good_metadata(encoding=encoding, params=json.dumps([one]))
        if fits:
            assert parse_manifest(metadata, Limits()).params[0].nnz == 1
        else:
            with pytest.raises(MalformedPart, match="too large for int32"):
                parse_manifest(metadata, Limits())


@in_one_test("version", [0, 1, 10, 2**63 - 1])
def test_version(version: int) -> None:
    assert parse_version(str(version), "version") == version


@in_one_test(
    "text",
    [
        *("", "-1", "+1", " 1", "1 ", "1\n", "01", "00", "1_0", "1.0", "0x1", "default"),
        *("٣", "²", str(2**63), "9" * 19, "9" * 5000),
    ],
)
def test_not_a_version(text: str) -> None:
    with pytest.raises(MalformedPart, match="base_version"):
        parse_version(text, "base_version")


def test_manifest_checksum_golden() -> None:
    # xxh3_128(b"a=\xc3\xa9\nb=2\n"), sorted, without the checksum itself
    expected = "xxh3_128:032fda32b05679cbcbefad9d9b89720c"
    assert manifest_checksum({"b": "2", "a": "é", "manifest_checksum": "no"}) == expected


@in_one_test("key", [*good_metadata(), "note"])
def test_manifest_checksum_covers_every_key(key: str) -> None:
    metadata = hash_metadata(good_metadata(note="ignored, yet hashed"))
    parse_manifest(metadata, LIMITS)
    for changed in (
        {**metadata, key: metadata[key] + " "},
        {name: value for name, value in metadata.items() if name != key},
    ):
        with pytest.raises(ChecksumMismatch):
            parse_manifest(changed, LIMITS)
