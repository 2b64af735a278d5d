"""What must hold for every part, and for every way to break one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.conformance.verified_file import verified_file
from engine_ext.dtypes import TORCH_DTYPE, bits_dtype, itemsize
from engine_ext.errors import DeltaError
from engine_ext.format import (
    ENCODINGS,
    DecodedPart,
    Limits,
    ParamDelta,
    PartGate,
    decode_part,
    encode_part,
)
from engine_ext.format.manifest import parse_manifest
from tests.support.independent_encoder import (
    EMBED,
    NORM,
    PROPERTY,
    assert_same,
    assert_well_formed,
    bits16,
    header_of,
    sendable,
    unwrap,
)
from tests.support.mutations import byte_mutants, mutants
from tests.support.verified_part import read_verified

DENSE = ParamDelta("bias", "bfloat16", (3,), None, bits16(0x7FC1, 0, 0x8000))
FUZZED = ("deltas", "gap8_exp", "gap8_ulp")
PARTS = {encoding: sendable(encoding, [EMBED, NORM, DENSE])[0] for encoding in FUZZED}
HASHED, UNHASHED = (
    {
        encoding: encode_part(
            PARTS[encoding],
            encoding=encoding,
            current_version=8,
            base_version=7,
            sync_id="s",
            part=0,
            num_parts=2,
            digest_part="0" * 32,
            with_manifest_checksum=hashed,
        )
        for encoding in FUZZED
    }
    for hashed in (True, False)
)
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def param_deltas(draw: st.DrawFn, name: str, dtype: str) -> ParamDelta:
    shape = draw(SHAPES)
    numel = int(np.prod(shape, dtype=np.int64))
    indices = None
    nnz = numel
    if draw(st.booleans()):
        density = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        seed = draw(st.integers(0, 2**32 - 1))
        indices = np.flatnonzero(np.random.default_rng(seed).random(numel) < density)
        nnz = indices.size
    if dtype == "bool":
        raw = bytes(draw(st.lists(st.integers(0, 1), min_size=nnz, max_size=nnz)))
    else:
        raw = draw(st.binary(min_size=nnz * itemsize(dtype), max_size=nnz * itemsize(dtype)))
    return ParamDelta(name, dtype, shape, indices, np.frombuffer(raw, bits_dtype(dtype)))


@st.composite
def parts(draw: st.DrawFn) -> list[ParamDelta]:
    dtype = draw(st.sampled_from(sorted(TORCH_DTYPE)))
    names = draw(
        st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=4, unique=True)
    )
    return [draw(param_deltas(name, dtype)) for name in names]


@pytest.mark.slow
@PROPERTY
@given(parts(), st.sampled_from(ENCODINGS), st.booleans(), st.booleans())
def test_decode_of_encode(
    deltas: list[ParamDelta], encoding: str, hashed: bool, stored: bool
) -> None:
    deltas, extra = sendable(encoding, deltas)
    body = encode_part(
        deltas,
        encoding=encoding,
        current_version=1,
        stored=stored,
        with_manifest_checksum=hashed,
        **extra,
    )
    part = decode_part(unwrap(body))
    assert_same(part, deltas)
    assert_well_formed(part)


def every_pattern(dtype: str) -> np.ndarray[Any, Any]:
    return np.arange(256 ** itemsize(dtype)).astype(bits_dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int16"])
def test_every_bit_pattern_is_a_value(dtype: str) -> None:
    values = every_pattern(dtype)
    dense = ParamDelta("w", dtype, values.shape, None, values)
    assert_same(decode_part(encode_part([dense], encoding="deltas", current_version=1)), [dense])


def test_the_mutants_start_from_a_good_part() -> None:
    for bodies in (HASHED, UNHASHED):
        for encoding, body in bodies.items():
            assert_same(decode_part(body), PARTS[encoding])


def decode_or_none(body: bytes) -> DecodedPart | None:
    """The part, or None if it is refused; the gate must come to the same answer."""
    gate = PartGate(Limits())
    try:
        gate.feed(body)
        header = gate.finish()
    except DeltaError:
        with pytest.raises(DeltaError):
            decode_part(body)
        return None
    try:
        part = decode_part(body)
    except DeltaError:
        return None
    assert part.manifest == header.manifest
    identity, file = verified_file(body)
    mapped = read_verified(file, identity)
    assert mapped is not None
    assert mapped.manifest == header.manifest
    assert_same(mapped, part.deltas)
    return part


@pytest.mark.parametrize("encoding", FUZZED)
def test_damaged_verified_file_is_no_part(encoding: str) -> None:
    identity, file = verified_file(HASHED[encoding])
    damaged = file.replace(b"bfloat16", b"bfloat1\xff")
    assert damaged != file
    assert read_verified(damaged, identity) is None


@pytest.mark.slow
@PROPERTY
@given(st.data(), st.sampled_from(FUZZED))
def test_a_mutant_that_is_hashed_is_refused_or_the_same(data: st.DataObject, encoding: str) -> None:
    part = decode_or_none(data.draw(mutants(HASHED[encoding])))
    if part is not None:
        assert_same(part, PARTS[encoding])
        wanted = parse_manifest(header_of(HASHED[encoding])[0]["__metadata__"], Limits())
        for field in wanted.__struct_fields__:
            # Dropping the hash itself is the one change that the hash cannot see.
            if field != "manifest_checksum":
                assert getattr(part.manifest, field) == getattr(wanted, field)


@PROPERTY
@given(st.data(), st.sampled_from(FUZZED))
def test_a_mutant_that_is_not_hashed_is_refused_or_well_formed(
    data: st.DataObject, encoding: str
) -> None:
    part = decode_or_none(data.draw(mutants(UNHASHED[encoding])))
    if part is not None:
        assert_well_formed(part)


@PROPERTY
@given(st.data())
def test_a_wrapped_mutant_is_refused_or_well_formed(data: st.DataObject) -> None:
    body = encode_part([EMBED, NORM], encoding="deltas_zstd", current_version=8)
    try:
        part = decode_part(unwrap(data.draw(byte_mutants(body)), max_bytes=1 << 20))
    except DeltaError:
        return
    assert_well_formed(part)
