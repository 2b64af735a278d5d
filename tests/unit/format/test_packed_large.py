"""Large parts, whose positions and values are unpacked by several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine_ext.errors import MalformedPart
from engine_ext.format import ZSTD_MAGIC, ParamDelta, decode_part, encode_part, part
from tests.support.independent_encoder import (
    assert_same,
    assert_well_formed,
    good_metadata,
    header_of,
    safetensors_file,
    with_header,
    xxh3,
)

ENCODINGS = ["gap8_exp", "gap8_ulp"]
PLANES = "gap8_exp", "__values__"  # where a byte of each value stands before the frame


def large(encoding: str) -> tuple[bytes, list[ParamDelta]]:
    """A part of weights that were made at random, and what it says."""
    generator = np.random.default_rng(3)
    indices = np.flatnonzero(generator.random(1 << 20) < 0.25)
    weights = generator.normal(0, 0.02, indices.size).astype(np.float32)
    values = (weights.view(np.uint32) >> 16).astype(np.uint16)
    shape, ulp = (1 << 10, 1 << 10), encoding == "gap8_ulp"
    deltas = [
        ParamDelta(name, "bfloat16", shape, indices, own, ulp)
        for name, own in (("a.weight", values), ("b.weight", values[::-1]))
    ]
    proof = "0" * 32 if ulp else None
    body = encode_part(
        deltas,
        encoding=encoding,
        current_version=8,
        digest_part=proof,
        with_manifest_checksum=False,
    )
    assert len(body) > part._WORTH_THREADS
    return body, deltas


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [
        one
        for one in threading.enumerate()
        if one.name.startswith(("delta-decode", "delta-encode"))
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_comes_back(encoding: str) -> None:
    body, deltas = large(encoding)
    found = decode_part(body)
    assert_same(found, deltas)
    assert_well_formed(found)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("broken", ["__positions__", "__values__", "both"])
def test_what_is_broken_is_refused(encoding: str, broken: str) -> None:
    """Under a right checksum: the frame of either tensor begins with another byte."""
    body, deltas = large(encoding)
    header, data = header_of(body)
    changed, pieces = bytearray(data), []
    for name in ("__positions__", "__values__"):
        start, end = header[name]["data_offsets"]
        if broken in (name, "both"):
            before = sum(d.nnz for d in deltas) if (encoding, name) == PLANES else 0
            assert changed[start + before : start + before + 4] == ZSTD_MAGIC
            changed[start + before] ^= 1
        pieces.append(bytes(changed[start:end]))
    header["__metadata__"]["checksum"] = xxh3(*pieces)
    with pytest.raises(MalformedPart):
        decode_part(with_header(header, bytes(changed)))


@pytest.mark.parametrize("of", ["positions", "values"])
def test_bytes_for_no_params_are_refused(of: str) -> None:
    junk, none = np.zeros(part._WORTH_THREADS, np.uint8), np.empty(0, np.uint8)
    positions, values = (junk, none) if of == "positions" else (none, junk)
    checksum = xxh3(positions.tobytes(), values.tobytes())
    metadata = good_metadata(params="[]", encoding="gap8_exp", checksum=checksum)
    with pytest.raises(MalformedPart):
        decode_part(safetensors_file(metadata, positions, values, torch.uint8))
