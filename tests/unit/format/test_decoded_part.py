"""What a rank leaves to the others is what each would have decoded."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.format import (
    ENCODINGS,
    Limits,
    ParamDelta,
    decode_part,
    encode_part,
    is_decoded,
    read_decoded,
    write_decoded,
)
from tests.support.independent_encoder import EMBED, NORM, PROPERTY, assert_same, sendable, unwrap
from tests.unit.format.test_properties import DENSE, parts

KEY = "k" * 32


def left_by(body: bytes, key: str = KEY) -> bytes:
    """What the rank that decodes a body writes."""
    file = io.BytesIO()
    write_decoded(file, decode_part(body), key)
    return file.getvalue()


@PROPERTY
@given(parts(), st.sampled_from(ENCODINGS))
def test_the_others_read_what_one_has_decoded(deltas: list[ParamDelta], encoding: str) -> None:
    deltas, extra = sendable(encoding, deltas)
    body = unwrap(encode_part(deltas, encoding=encoding, current_version=1, **extra))
    left = left_by(body)
    assert is_decoded(left, KEY)
    found, part = read_decoded(body, left, Limits()), decode_part(body)
    assert found.header == part.header
    assert_same(found, part.deltas)
    assert all(one.values.flags.aligned for one in found.deltas)


@pytest.mark.parametrize(("rows", "width"), [((1 << 31), 4), ((1 << 31) + 1, 8)])
@pytest.mark.parametrize("encoding", ["deltas", "gap8_exp"])
def test_indices_are_as_wide_as_the_tensor_needs(rows: int, width: int, encoding: str) -> None:
    indices = np.array([0, rows - 1])
    delta = ParamDelta("w", "bfloat16", (rows,), indices, np.array([1, 2], np.uint16))
    body = encode_part([delta], encoding=encoding, current_version=1)
    found = read_decoded(body, left_by(body), Limits()).deltas[0].indices
    assert found is not None
    assert (found.itemsize, found.tolist()) == (width, indices.tolist())


@pytest.mark.parametrize("encoding", ["deltas", "gap8_exp"])
def test_only_a_whole_file_of_this_part_counts(encoding: str) -> None:
    body = encode_part([EMBED, NORM, DENSE], encoding=encoding, current_version=1)
    left = left_by(body)
    assert is_decoded(left, KEY)
    assert not is_decoded(left, "o" * 32)
    assert not is_decoded(left + b"\0", KEY)
    assert not any(is_decoded(left[:size], KEY) for size in range(len(left)))


def test_what_is_plain_in_the_part_is_not_repeated() -> None:
    dense = ParamDelta("w", "bfloat16", (1000,), None, np.arange(1000, dtype=np.uint16))
    plain = encode_part([dense], encoding="deltas", current_version=1)
    assert len(left_by(plain)) == 64
    packed = encode_part([dense], encoding="gap8_exp", current_version=1)
    assert 2000 <= len(left_by(packed)) < 2200
