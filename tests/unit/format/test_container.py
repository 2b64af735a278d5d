from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from engine_ext.dtypes import TORCH_DTYPE, bits_dtype
from engine_ext.errors import ChecksumMismatch, DeltaError, MalformedPart, TooLarge
from engine_ext.format import Limits, PartGate, read_container
from engine_ext.format.container import Span, parse_header, write_container
from engine_ext.format.zstd_frames import compress_frame
from tests.support.cases import in_one_test
from tests.support.independent_encoder import (
    POSITIONS,
    PROPERTY,
    VALUES,
    good_metadata,
    hash_metadata,
    header_of,
    safetensors_file,
    with_entry,
    with_header,
)

LIMITS = Limits(max_header_bytes=4096, max_part_bytes=8192)
GOOD = safetensors_file(hash_metadata(good_metadata()))
HEADER, DATA = header_of(GOOD)


def changed(**tensors: Any) -> dict[str, Any]:
    """The good header with tensor entries updated, added, or (None) dropped."""
    header = json.loads(json.dumps(HEADER))
    for name, change in tensors.items():
        if change is None:
            del header[name]
        elif isinstance(change, dict):
            header[name] = {**header.get(name, {}), **change}
        else:
            header[name] = change
    return header


def gate(body: bytes, step: int) -> PartGate:
    part = PartGate(LIMITS)
    for at in range(0, len(body), step):
        part.feed(memoryview(body)[at : at + step])
    return part


def test_reads_what_safetensors_writes() -> None:
    header, positions, values = read_container(GOOD, LIMITS)
    begin = len(GOOD) - len(DATA)
    assert header.values == Span("bfloat16", (5,), begin, begin + 10)
    assert header.positions == Span("uint8", (20,), begin + 10, begin + 30)
    assert header.total_bytes == len(GOOD)
    assert header.metadata == HEADER["__metadata__"]
    assert header.manifest.params[1].name == "model.norm.weight"
    assert np.array_equal(positions, POSITIONS)
    assert np.array_equal(values.view("<u2"), VALUES)


@in_one_test("wrap", [bytes, bytearray, memoryview])
def test_reading_does_not_copy(wrap: Any) -> None:
    buffer = wrap(GOOD)
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    header, positions, values = read_container(buffer, LIMITS)
    assert positions.ctypes.data == address + header.positions.begin
    assert values.ctypes.data == address + header.values.begin


def test_positions_may_come_first() -> None:
    header = changed(__positions__={"data_offsets": [0, 20]}, __values__={"data_offsets": [20, 30]})
    _, positions, values = read_container(with_header(header, DATA[10:] + DATA[:10]), LIMITS)
    assert np.array_equal(positions, POSITIONS)
    assert np.array_equal(values.view("<u2"), VALUES)


@in_one_test("dtype", sorted(TORCH_DTYPE))
@in_one_test("nnz", [0, 1, 3])
def test_safetensors_reads_what_we_write(dtype: str, nnz: int, tmp_path: Any) -> None:
    values = (np.arange(nnz) % 2).astype(bits_dtype(dtype))
    body = write_container(POSITIONS[: 4 * nnz], [values], dtype, {"key": 'ü "\n', "b": ""})
    path = tmp_path / f"{dtype}{nnz}.safetensors"
    path.write_bytes(body)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"__positions__", "__values__"}
        assert file.metadata() == {"key": 'ü "\n', "b": ""}
        assert np.array_equal(file.get_tensor("__positions__").numpy(), POSITIONS[: 4 * nnz])
        got = file.get_tensor("__values__")
    assert got.dtype == TORCH_DTYPE[dtype]
    assert torch.equal(got.view(torch.uint8), torch.from_numpy(values.view(np.uint8)))
    assert int.from_bytes(body[:8], "little") % 8 == 0


BROKEN_HEADERS: list[tuple[str, Any, type[DeltaError], str]] = [
    ("not JSON", b"{", MalformedPart, "safetensors header"),
    ("not UTF-8", b'{"\xff":1}', MalformedPart, "safetensors header"),
    ("a lone surrogate", b'{"\\ud800":1}', MalformedPart, "safetensors header"),
    ("deep nesting", b'{"x":' + b"[" * 4000, MalformedPart, "safetensors header"),
    ("empty", b"", MalformedPart, "safetensors header"),
    ("not an object", [], MalformedPart, "Expected `object`"),
    ("no metadata", changed(__metadata__=None), MalformedPart, "__metadata__"),
    ("no positions", changed(__positions__=None), MalformedPart, "__positions__"),
    ("no values", changed(__values__=None), MalformedPart, "__values__"),
    ("another tensor", changed(other=HEADER["__values__"]), MalformedPart, "unknown field"),
    ("a checkpoint", {"lm_head.weight": HEADER["__values__"]}, MalformedPart, "checkpoint's file"),
    ("an unknown key", changed(__values__={"strides": [1]}), MalformedPart, "unknown field"),
    ("metadata no strings", changed(__metadata__={"part": 0}), MalformedPart, "Expected `str`"),
    ("metadata null", changed(__metadata__={"part": None}), MalformedPart, "Expected `str`"),
    ("a bad manifest", changed(__metadata__={"encoding": "x"}), ChecksumMismatch, "metadata"),
    ("an unknown dtype", changed(__values__={"dtype": "F4"}), MalformedPart, "unknown dtype"),
    ("a dtype in lower case", changed(__values__={"dtype": "bf16"}), MalformedPart, "unknown"),
    ("signed positions", changed(__positions__={"dtype": "I8"}), MalformedPart, "not uint8"),
    ("a float shape", changed(__values__={"shape": [5.0]}), MalformedPart, "Expected `int`"),
    ("a negative shape", changed(__values__={"shape": [-5]}), MalformedPart, ">= 0"),
    ("two dimensions", changed(__values__={"shape": [1, 5]}), MalformedPart, "is not 10 bytes"),
    ("no dimension", changed(__values__={"shape": []}), MalformedPart, "is not 10 bytes"),
    ("a wrong length", changed(__values__={"shape": [4]}), MalformedPart, "is not 10 bytes"),
    ("a wider dtype", changed(__values__={"dtype": "F32"}), MalformedPart, "is not 10 bytes"),
    (
        "half as many, twice as wide",
        changed(__values__={"dtype": "U8", "shape": [10]}),
        MalformedPart,
        "does not cover",
    ),
    (
        "three offsets",
        changed(__values__={"data_offsets": [0, 10, 10]}),
        MalformedPart,
        "length 2",
    ),
    ("offsets backwards", changed(__values__={"data_offsets": [10, 0]}), MalformedPart, "bytes"),
    (
        "huge offsets",
        changed(__values__={"data_offsets": [2**64, 2**64 + 10]}),
        MalformedPart,
        "safetensors header",
    ),
    (
        "an overlap",
        changed(__positions__={"data_offsets": [8, 28]}),
        MalformedPart,
        "gap in the data, or overlap",
    ),
    (
        "the same place",
        changed(__positions__={"data_offsets": [0, 20]}),
        MalformedPart,
        "gap in the data, or overlap",
    ),
    (
        "a gap between",
        changed(__positions__={"data_offsets": [12, 32]}),
        MalformedPart,
        "gap in the data, or overlap",
    ),
    (
        "a gap before",
        changed(__positions__={"data_offsets": [12, 32]}, __values__={"data_offsets": [2, 12]}),
        MalformedPart,
        "gap in the data, or overlap",
    ),
    (
        "positions shorter than params",
        changed(__positions__={"data_offsets": [10, 29], "shape": [19]}),
        MalformedPart,
        "does not cover",
    ),
    (
        "positions longer than params",
        changed(__positions__={"data_offsets": [10, 31], "shape": [21]}),
        MalformedPart,
        "does not cover",
    ),
    (
        "params is empty and the tensors are not",
        changed(__metadata__=None) | {"__metadata__": good_metadata(params="[]")},
        MalformedPart,
        "does not cover",
    ),
    (
        "a broken param",
        changed(__metadata__=None) | {"__metadata__": good_metadata(params=with_entry(dtype="x"))},
        MalformedPart,
        "unknown dtype",
    ),
    (
        "more than the limit",
        changed(__values__={"shape": [8192], "data_offsets": [20, 20 + 16384]})
        | {"__positions__": {"dtype": "U8", "shape": [20], "data_offsets": [0, 20]}},
        TooLarge,
        "the limit is 8192; send smaller parts",
    ),
]


@in_one_test(
    ("header", "error", "message"),
    [case[1:] for case in BROKEN_HEADERS],
    ids=[case[0] for case in BROKEN_HEADERS],
)
def test_broken_header(header: Any, error: type[DeltaError], message: str) -> None:
    body = with_header(header, DATA)
    for refuse in (
        lambda: read_container(body, LIMITS),
        lambda: gate(body, 1),
        lambda: gate(body, len(body)),
        lambda: parse_header(body[: len(body) - len(DATA)], LIMITS),
    ):
        with pytest.raises(error, match=message) as caught:
            refuse()
        assert type(caught.value) is error


@in_one_test(
    ("body", "error", "message"),
    [
        (b"", MalformedPart, "before its header"),
        (GOOD[:7], MalformedPart, "before its header"),
        (GOOD[:8], MalformedPart, "has 8 bytes of"),
        (GOOD[:40], MalformedPart, "has 40 bytes of"),
        (GOOD[:-1], MalformedPart, "bytes, not its"),
        (GOOD + b"\0", MalformedPart, "bytes, not its"),
        ((4097).to_bytes(8, "little") + b"{" * 5000, TooLarge, "a header of 4097 bytes"),
        (b"\x80\x04pickled tensors", TooLarge, "is it a safetensors file"),
        (compress_frame(GOOD), MalformedPart, "zstd"),
    ],
)
def test_broken_file(body: bytes, error: type[DeltaError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_container(body, LIMITS)


def test_message_quotes_little_of_a_header() -> None:
    body = with_header(changed(**{"x\n" + "y" * 2000: HEADER["__values__"]}), DATA)
    with pytest.raises(MalformedPart, match=r"unknown field `x\\ny+\.\.\.") as caught:
        read_container(body, LIMITS)
    assert len(caught.value.message) < 300


def test_header_alone() -> None:
    end = len(GOOD) - len(DATA)
    assert parse_header(GOOD[:end], LIMITS) == read_container(GOOD, LIMITS)[0]
    for raw in (GOOD[: end - 1], GOOD[: end + 1]):
        with pytest.raises(MalformedPart):
            parse_header(raw, LIMITS)


@in_one_test("step", [1, 7, 8, 9, 1000, len(GOOD)])
def test_gate_agrees_with_reading_at_once(step: int) -> None:
    assert gate(GOOD, step).finish() == read_container(GOOD, LIMITS)[0]


def test_gate_knows_the_header_as_soon_as_it_is_complete() -> None:
    end = len(GOOD) - len(DATA)
    part = gate(GOOD[: end - 1], 5)
    assert part.header is None
    part.feed(GOOD[end - 1 : end])
    assert part.header == read_container(GOOD, LIMITS)[0]


@in_one_test("end", [0, 1, 7, 8, 9, 200, len(GOOD) - len(DATA), len(GOOD) - 1])
def test_gate_refuses_a_truncated_stream(end: int) -> None:
    part = gate(GOOD[:end], 16)
    with pytest.raises(MalformedPart, match="the part ends"):
        part.finish()


def test_gate_refuses_the_first_byte_too_many() -> None:
    part = gate(GOOD, 64)
    with pytest.raises(MalformedPart, match="has more than"):
        part.feed(b"\0")
    with pytest.raises(MalformedPart, match="has more than"):
        gate(GOOD + b"\0", len(GOOD) + 1)


@pytest.mark.parametrize("prefix", [(4097).to_bytes(8, "little"), b"\xff" * 8])
def test_gate_refuses_a_long_header_from_its_length(prefix: bytes) -> None:
    with pytest.raises(TooLarge):
        PartGate(LIMITS).feed(prefix)


def test_empty_part() -> None:
    metadata = good_metadata(params="[]")
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        body = safetensors_file(metadata, POSITIONS[:0], VALUES[:0], dtype)
        header, positions, values = read_container(body, LIMITS)
        assert header.manifest.params == ()
        assert positions.size == values.size == 0
        assert gate(body, 3).finish() == header


@PROPERTY
@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes(tail: bytes, step: int) -> None:
    for body in (tail, len(tail).to_bytes(8, "little") + tail):
        with pytest.raises(DeltaError):
            read_container(body, LIMITS)
        with pytest.raises(DeltaError):
            gate(body, step).finish()
