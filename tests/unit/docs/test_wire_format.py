"""The schema of the metadata and the test vectors, against what the encoder writes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from jsonschema import Draft202012Validator

from engine_ext.dtypes import TORCH_DTYPE, bits_dtype
from engine_ext.format import (
    BIT_CHANGES,
    ENCODINGS,
    Limits,
    ParamDelta,
    encode_part,
    read_container,
)
from engine_ext.format.manifest import Manifest, ParamEntry
from engine_ext.format.zstd_frames import FrameReader
from scripts.doc_tables.__main__ import DOCS
from tests.support.cases import in_one_test

SCHEMA: dict[str, Any] = json.loads((DOCS / "wire-metadata.schema.json").read_text())
METADATA = Draft202012Validator(SCHEMA)
PARAMS = Draft202012Validator({**SCHEMA["$defs"]["params"], "$defs": SCHEMA["$defs"]})


def metadata_of(body: bytes) -> dict[str, str]:
    container = b"".join(FrameReader(1 << 20).feed(body))
    return read_container(container, Limits())[0].metadata


def part(encoding: str, dtype: str = "bfloat16", **metadata: Any) -> dict[str, str]:
    """The metadata of a part with a sparse param, and a dense one if the encoding has it."""
    differences = encoding == "gap8_ulp"
    values = np.arange(3).astype(bits_dtype(dtype))
    deltas = [ParamDelta("a.weight", dtype, (2, 4), np.array([1, 2, 6]), values, differences)]
    if not differences:
        deltas.append(ParamDelta("b", dtype, (), None, values[:1]))
    else:
        metadata.setdefault("digest_part", "0" * 32)
    return metadata_of(encode_part(deltas, encoding=encoding, current_version=8, **metadata))


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_written_fits(encoding: str) -> None:
    metadata = part(
        encoding,
        base_version=7,
        sync_id="x",
        part=0,
        num_parts=2,
        digest_part="0" * 32,
        digest_before="1" * 32,
        digest_after="f" * 32,
        run="a-run",
        run_epoch=2,
        run_owner="host:1",
    )
    METADATA.validate(metadata)
    PARAMS.validate(json.loads(metadata["params"]))
    # Only a full part has this key, and all of its params are dense.
    assert metadata.keys() | {"full"} == SCHEMA["properties"].keys()


@in_one_test("dtype", TORCH_DTYPE)
def test_every_dtype_fits(dtype: str) -> None:
    PARAMS.validate(json.loads(part("deltas", dtype)["params"]))


def test_a_full_part_and_an_empty_one_fit() -> None:
    dense = ParamDelta("b", "bfloat16", (2,), None, np.zeros(2, np.uint16))
    for deltas in ([dense], []):
        body = encode_part(deltas, encoding="deltas", current_version=8, full=True)
        METADATA.validate(metadata_of(body))


def test_it_has_the_names_of_the_code() -> None:
    assert SCHEMA["properties"].keys() == set(Manifest.__struct_fields__)
    assert tuple(SCHEMA["properties"]["encoding"]["enum"]) == (*ENCODINGS, BIT_CHANGES)
    entry = SCHEMA["$defs"]["params"]["items"]
    assert entry["properties"].keys() == set(ParamEntry.__struct_fields__)
    assert entry["properties"].keys() - {"new_checksum"} == set(entry["required"])
    assert set(entry["properties"]["dtype"]["enum"]) == TORCH_DTYPE.keys()


@in_one_test(
    "change",
    [
        {"encoding": "gap8"},
        {"checksum": "xxh3_128:00"},
        {"checksum": None},
        {"current_version": "08"},
        {"base_version": "-1"},
        {"num_parts": "0"},
        {"full": "yes"},
        {"digest_algorithm": "multilinear-1", "digest_part": "0" * 31},
        {"digest_part": "0" * 32},
        {"digest_algorithm": "another", "digest_part": "0" * 32},
        {"encoding": "gap8_ulp"},
        {
            "encoding": "gap8_ulp",
            "digest_algorithm": "multilinear-1",
            "digest_part": "0" * 32,
            "full": "true",
        },
        {"sync_id": ""},
        {"sync_id": "a\tb"},
        {"encoding": "gap8_xor", "full": "true"},
        {"another": 1},
        {"run": ""},
        {"run": "a run"},
        {"run": "r" * 65},
        {"run": "anonymous-1"},
        {"run": "r", "run_epoch": "0"},
        {"run": "r", "run_owner": "host"},
        {"run_epoch": "1"},
        {"run_owner": "host:1"},
    ],
)
def test_what_is_refused_does_not_fit(change: dict[str, Any]) -> None:
    metadata = {k: v for k, v in {**part("deltas"), **change}.items() if v is not None}
    assert not METADATA.is_valid(metadata)


@in_one_test(
    "change",
    [{"dtype": "bf16"}, {"shape": [-1]}, {"pos_width": 3}, {"new_checksum": "adler32:0"}],
)
def test_params_that_do_not_fit(change: dict[str, Any]) -> None:
    entries = json.loads(part("deltas")["params"])
    assert not PARAMS.is_valid([{**entries[0], **change}])
    assert not PARAMS.is_valid([{k: v for k, v in entries[0].items() if k != "name"}])


def test_the_part_on_the_page_is_one() -> None:
    """Read with safetensors and torch alone."""
    page = (DOCS / "wire-format.md").read_text()
    rows = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?){1,16}) ", page, re.MULTILINE)
    body = bytes.fromhex("".join(rows))
    tensors = safetensors.torch.load(body)
    gaps = tensors["__positions__"].view(torch.int16)
    assert ((gaps + 1).cumsum(0) - 1).tolist() == [1, 2, 6]
    values = tensors["__values__"].view(torch.int16)
    assert [value & 0xFFFF for value in values.tolist()] == [0x3F80, 0x7FC1, 0x8000]
    METADATA.validate(metadata_of(body))
