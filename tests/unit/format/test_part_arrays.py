"""What the manifest says of params as columns, and their arrays in one: the same as one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_ext.conformance.verified_file import verified_file
from engine_ext.errors import MalformedPart
from engine_ext.format import ENCODINGS, ParamDelta, encode_part, read_unpacked
from engine_ext.format.part_arrays import PartArrays
from tests.support.independent_encoder import sendable
from tests.support.served_models import PROPERTY

WIDTHS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 4, 8])), max_size=6)


@PROPERTY
@given(WIDTHS, st.integers(0, 1 << 16))
def test_arrays_come_back(shapes: list[tuple[int, int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays: list[NDArray[Any]] = [
        random.integers(0, 256, size * width, np.uint8).view(f"u{width}") for size, width in shapes
    ]
    found = PartArrays.joined(arrays)
    assert [(one.dtype, one.tolist()) for one in found] == [
        (one.dtype, one.tolist()) for one in arrays
    ]
    assert found.whole.tobytes() == b"".join(one.tobytes() for one in arrays)
    some = range(0, len(arrays), 2)
    assert [one.tolist() for one in found.views(some)] == [arrays[n].tolist() for n in some]


@pytest.mark.parametrize("width", [2, 8])
def test_unaligned_memory_is_copied(width: int) -> None:
    values = np.arange(3, dtype=f"u{width}")
    memory = np.concatenate([np.zeros(1, np.uint8), values.view(np.uint8)])
    whole = memory[1:] if memory[1:].ctypes.data % width else np.append(memory[:1], memory)[2:]
    own = PartArrays(whole, np.array([1, 2]), np.array([width, width]))
    assert [one.tolist() for one in own] == [[0], [1, 2]]
    assert all(one.flags.aligned for one in own)


@pytest.mark.parametrize("missing", [1, 4])
def test_arrays_longer_than_their_bytes_are_refused(missing: int) -> None:
    counts, widths = np.array([3, 1]), np.array([2, 4])
    assert len(PartArrays(np.zeros(10, np.uint8), counts, widths)) == 2
    with pytest.raises(MalformedPart, match="params take 10"):
        PartArrays(np.zeros(10 - missing, np.uint8), counts, widths)


def deltas(seed: int, numels: list[int]) -> list[ParamDelta]:
    """Some need symbols of two bytes, as their elements are far apart."""
    random, found = np.random.default_rng(seed), list[ParamDelta]()
    for number, numel in enumerate(numels):
        count = int(random.integers(0, min(numel, 9) + 1))
        indices = np.sort(random.choice(numel, count, replace=False)).astype(np.int64)
        values = random.integers(0, 1 << 16, count, np.uint16)
        found.append(ParamDelta(f"w{number}", "bfloat16", (numel,), indices, values))
    return found


@PROPERTY
@given(
    st.integers(0, 1 << 16),
    st.lists(st.sampled_from([3, 40, 90_000]), max_size=5),
    st.sampled_from(ENCODINGS),
)
def test_a_file_has_the_columns(seed: int, numels: list[int], encoding: str) -> None:
    """Those of the manifest; and the streams and values of each param are where they say."""
    sent, _ = sendable(encoding, deltas(seed, numels))
    body = encode_part(sent, encoding=encoding, current_version=1, digest_part="0" * 32)
    identity, file = verified_file(body)
    part = read_unpacked(file, identity)
    assert part is not None
    entries, columns = part.manifest.params, part.columns
    assert columns.numel.tolist() == [entry.numel for entry in entries]
    assert columns.nnz.tolist() == [entry.nnz for entry in entries]
    assert columns.pos_width.tolist() == [entry.pos_width for entry in entries]
    assert columns.pos_size.tolist() == [entry.pos_end - entry.pos_start for entry in entries]
    assert columns.width.tolist() == [2] * len(entries)
    assert [own.tolist() for own in part.values] == [one.values.tolist() for one in sent]
    assert part.streams.begins.tolist() == [entry.pos_start for entry in entries]
    assert part.streams.whole.size == sum(columns.pos_size)
