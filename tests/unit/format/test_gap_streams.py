from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.errors import MalformedPart, NotUpdatable
from engine_ext.format import gap_streams
from engine_ext.format.gap_streams import (
    byte_stream,
    check_streams,
    decode_gaps,
    decode_many_gaps,
    encode_gaps,
    join_streams,
    read_streams,
    stream_bytes,
)
from engine_ext.format.manifest import ParamEntry
from engine_ext.format.small_arrays import in_groups
from tests.support.cases import in_one_test
from tests.support.independent_encoder import PROPERTY

SKIP = "ff"
# (indices, stream, width): by hand
GOLDEN = [
    ([], "", 1),
    ([0], "00", 1),
    ([0, 1, 2], "000000", 1),
    ([3, 4, 70], "03 00 41", 1),
    ([254], "fe", 1),
    ([255], "ff 00", 1),
    ([0, 256, 257], "00 ff00 00", 1),
    ([509, 510], "ff fe 00", 1),
]
# too sparse for bytes: two planes of uint16
SPARSE = [
    ([65534], "fe ff", 2),
    ([65535], "ff00 ff00", 2),
    ([65536], "ff01 ff00", 2),
    ([70000, 140001], "ff 71 ff 71  ff 11 ff 11", 2),
]


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to do it; the tests run with numba installed."""
    if request.param == "numpy":
        monkeypatch.setattr(gap_streams, "_loops", lambda width: None)
        monkeypatch.setattr(gap_streams, "_match", lambda width: None)


def indices_of(values: list[int]) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


@in_one_test(("indices", "stream", "width"), GOLDEN + SPARSE)
@pytest.mark.usefixtures("loops")
def test_golden(indices: list[int], stream: str, width: int) -> None:
    raw, found = encode_gaps(indices_of(indices))
    assert (raw.tobytes(), raw.dtype, found) == (bytes.fromhex(stream), np.dtype(np.uint8), width)
    decoded = decode_gaps(raw, width, 2**40)
    assert decoded.tolist() == indices
    assert decoded.dtype == np.int64


@pytest.mark.usefixtures("loops")
def test_both_widths_of_one_row() -> None:
    for stream, width in (("ff" * 274 + "32", 1), ("ff 21 ff 11", 2)):
        raw = np.frombuffer(bytes.fromhex(stream), np.uint8)
        expected = 274 * 255 + 0x32 if width == 1 else 65535 + 0x1121
        assert decode_gaps(raw, width, 2**40).tolist() == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("far", [65536, 2**32, 2**32 + 5, 2**40 - 2])
@pytest.mark.usefixtures("loops")
def test_far_gaps_cost_no_memory_of_their_length(far: int) -> None:
    wanted = indices_of([0, far, far + 1])
    tracemalloc.start()
    raw, width = encode_gaps(wanted)
    assert width == 2
    assert raw.size == 2 * (3 + (far - 1) // 65535)
    assert decode_gaps(raw, width, far + 2).tolist() == wanted.tolist()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 + 40 * raw.size
    with pytest.raises(NotUpdatable, match="past the tensor"):
        decode_gaps(raw, width, far + 1)


def test_one_far_gap_among_near_ones_goes_in_bytes() -> None:
    near = np.arange(0, 200_000, 10)
    wanted = np.append(near, 2_000_000)
    raw, width = encode_gaps(wanted)
    assert width == 1
    assert np.array_equal(decode_gaps(raw, 1, 2_000_001), wanted)


@pytest.mark.parametrize(("density", "width"), [(0.0002, 2), (0.001, 2), (0.004, 1), (0.3, 1)])
def test_the_smaller_form_is_taken(density: float, width: int) -> None:
    chosen = np.flatnonzero(np.random.default_rng(0).random(4_000_000) < density)
    assert encode_gaps(chosen)[1] == width


@in_one_test(
    "indices", [[-1], [1, 1], [2, 1], [0, -5], [10**6, 5], [10**6, 10**6], [2**40], [5, 2**63 - 1]]
)
@pytest.mark.usefixtures("loops")
def test_what_cannot_be_encoded(indices: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ascending|at most"):
        encode_gaps(indices_of(indices))


@in_one_test(("stream", "width"), [("ff", 1), ("00ff", 1), ("ff ff", 2), ("00ff 00ff", 2)])
@pytest.mark.usefixtures("loops")
def test_a_gap_without_end(stream: str, width: int) -> None:
    with pytest.raises(MalformedPart, match="within a gap"):
        decode_gaps(np.frombuffer(bytes.fromhex(stream), np.uint8), width, 2**40)


@in_one_test(
    ("stream", "width", "numel"),
    [("05", 1, 5), ("02 02", 1, 5), ("ff00", 1, 255), ("00 01", 2, 256)],
)
@pytest.mark.usefixtures("loops")
def test_past_the_tensor(stream: str, width: int, numel: int) -> None:
    raw = np.frombuffer(bytes.fromhex(stream), np.uint8)
    decode_gaps(raw, width, numel + 1)
    with pytest.raises(NotUpdatable, match="past the tensor"):
        decode_gaps(raw, width, numel)


@in_one_test("last", [2**31 - 2, 2**31 - 1, 2**31])
@pytest.mark.usefixtures("loops")
def test_indices_are_narrow_if_they_fit(last: int) -> None:
    """One that does not fit is not taken for the negative one that it would wrap to."""
    raw, width = encode_gaps(indices_of([7, last]))
    for numel in (2**31, 2**31 + 1):
        if last >= numel:
            with pytest.raises(NotUpdatable, match="past the tensor"):
                decode_gaps(raw, width, numel)
            continue
        decoded = decode_gaps(raw, width, numel)
        assert decoded.tolist() == [7, last]
        assert decoded.dtype == (np.int32 if numel == 2**31 else np.int64)


@PROPERTY
@given(st.binary(max_size=64), st.sampled_from([1, 2]), st.integers(0, 2**18))
def test_any_bytes(raw: bytes, width: int, numel: int) -> None:
    stream = np.frombuffer(raw[: len(raw) // width * width], np.uint8)
    try:
        indices = decode_gaps(stream, width, numel)
    except (MalformedPart, NotUpdatable):
        return
    assert (np.diff(indices, prepend=-1) > 0).all()
    assert (indices < numel).all()
    assert np.array_equal(gap_streams._read_by_numpy(stream, 255), indices) or width == 2


@PROPERTY
@given(st.lists(st.integers(0, 2**20), max_size=80, unique=True).map(sorted), st.integers(0, 12))
def test_round_trip(values: list[int], shift: int) -> None:
    wanted = np.unique(indices_of(values) >> shift)
    raw, width = encode_gaps(wanted)
    numel = int(wanted[-1]) + 1 if wanted.size else 0
    assert np.array_equal(decode_gaps(raw, width, numel), wanted)
    assert stream_bytes(wanted) >= wanted.size


@pytest.mark.slow
@PROPERTY
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=6),
)
@pytest.mark.usefixtures("loops")
def test_pieces_are_joined_to_the_whole(gaps_between: list[int], cuts: list[int]) -> None:
    indices = np.cumsum(np.array(gaps_between, np.int64) + 1) - 1
    pieces = [
        (piece, byte_stream(piece[1:], int(piece[0]) + 1 if piece.size else 0))
        for piece in np.split(indices, sorted(cuts))
    ]
    stream = join_streams(pieces)
    raw, width = encode_gaps(indices)
    if stream is None:  # more skips than elements
        assert indices[-1] + 1 > 256 * indices.size
    else:
        assert (raw.tobytes(), width) == (stream.tobytes(), 1)
        check_streams([stream], [indices])
        check_streams([stream], [indices.astype(np.int32)])


def test_joined_streams_by_hand() -> None:
    empty = np.empty(0, np.uint8)
    assert join_streams([]).tobytes() == b""  # type: ignore[union-attr]
    first, later = indices_of([3, 4]), indices_of([600])
    pieces = [(first, byte_stream(first[1:], 4)), (indices_of([]), empty), (later, empty)]
    assert join_streams(pieces).tobytes() == bytes.fromhex("03 00 ffff55")  # type: ignore[union-attr]
    assert join_streams([(indices_of([256]), empty)]).tobytes() == b"\xff\x01"  # type: ignore[union-attr]
    assert join_streams([(indices_of([511]), empty)]) is None


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(
    "other", [[0, 1, 5], [1, 5, 6], [4, 5], [0, 1, 2, 5], [0, 5, 7], [1, 4, 7, 300]]
)
def test_the_stream_of_other_indices(other: list[int]) -> None:
    stream = encode_gaps(indices_of(other))[0]
    for dtype in (np.int32, np.int64):
        with pytest.raises(ValueError, match="of other indices"):
            check_streams([stream], [indices_of([1, 4, 7]).astype(dtype)])


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("stream", ["", "ff", "010202ff", "0102"])
def test_a_stream_that_ends_elsewhere(stream: str) -> None:
    raw = np.frombuffer(bytes.fromhex(stream), np.uint8)
    with pytest.raises(ValueError, match="of other indices"):
        check_streams([raw], [indices_of([1, 4, 7])])


@pytest.mark.slow
@PROPERTY
@given(
    params=st.lists(st.sets(st.integers(0, 600), max_size=8), min_size=1, max_size=6),
    wide=st.booleans(),
)
@pytest.mark.usefixtures("loops")
def test_the_streams_of_several_params(params: list[set[int]], wide: bool) -> None:
    """Each is that of its own indices; it does not suffice that all of them are right together."""
    indices = [indices_of(sorted(own)) for own in params]
    streams = [byte_stream(own, 0) for own in indices]
    check_streams(streams, [own if wide else own.astype(np.int32) for own in indices])
    for number, own in enumerate(indices):
        if own.size:
            moved = [*indices]
            moved[number] = np.append(own[:-1], own[-1] + 1)
            with pytest.raises(ValueError, match="of other indices"):
                check_streams(streams, moved)
    first, second = byte_stream(indices_of([0, 1, 2]), 0), byte_stream(indices_of([0]), 0)
    check_streams([first, second], [indices_of([0, 1, 2]), indices_of([0])])
    for other in ([2, 3], [0, 1]):
        with pytest.raises(ValueError, match="of other indices"):
            check_streams([first, second], [indices_of([0, 1]), indices_of(other)])


@pytest.mark.usefixtures("loops")
def test_a_piece_that_does_not_ascend() -> None:
    for indices, start in (
        ([5, 5], 0),
        ([3, 9], 4),
        ([9, 3], 0),
        ([90_000, 3], 0),
        ([5, -(2**63)], 0),
    ):
        with pytest.raises(ValueError, match="not ascending"):
            byte_stream(indices_of(indices), start)


MANY = st.lists(
    st.tuples(
        st.one_of(
            st.binary(max_size=12),
            st.lists(st.integers(0, 3000), max_size=9, unique=True).map(
                lambda values: encode_gaps(indices_of(sorted(values)))[0].tobytes()
            ),
        ),
        st.sampled_from([0, 0, 0, 1, -1]),
        st.sampled_from([3001, 3001, 300, (1 << 31) + 1]),
        st.sampled_from([1, 1, 1, 2]),
    ),
    max_size=9,
)


@pytest.mark.slow
@PROPERTY
@given(MANY, st.sampled_from([1, 20, 1 << 16]))
def test_many_at_once(params: list[tuple[bytes, int, int, int]], most: int) -> None:
    """The same as one by one, or left to that: what is refused takes none of the others along
    but those of its group."""
    streams = [np.frombuffer(raw, np.uint8) for raw, *_ in params]
    entries, wanted = [], []
    for (_, more, numel, width), stream in zip(params, streams, strict=True):
        indices = None
        nnz = int((stream != 255).sum())
        if width == 1:
            try:
                indices = decode_gaps(stream, 1, numel)
            except (MalformedPart, NotUpdatable):
                indices = None
        declared = max(0, nnz + more)
        if indices is not None and (declared != nnz or numel > 1 << 31):
            indices = None
        wanted.append(indices)
        slices = (0, stream.size, width, 0, declared)
        entries.append(ParamEntry("w", "bfloat16", (numel,), *slices))
    groups = partial(in_groups, most=most)
    with mock.patch.object(gap_streams, "in_groups", groups):
        found = decode_many_gaps(streams, entries)
    for own, one in zip(found, wanted, strict=True):
        assert own is None or (one is not None and own.tolist() == one.tolist())
    if all(one is not None for one in wanted):
        assert all(own is not None and own.dtype == np.int32 for own in found)


def test_a_wrong_stream_is_left_to_be_refused_by_itself() -> None:
    """With the group it is in; the next ones are decoded."""
    streams = [np.array(raw, np.uint8) for raw in ([1], [255], [2], [3])]
    entries = [ParamEntry("w", "bfloat16", (99,), 0, 1, 1, 0, 1) for _ in streams]
    groups = partial(in_groups, most=2)
    with mock.patch.object(gap_streams, "in_groups", groups):
        found = decode_many_gaps(streams, entries)
    assert found[:2] == [None, None]
    assert [own.tolist() for own in found[2:] if own is not None] == [[2], [3]]


def test_a_declared_number_takes_no_memory() -> None:
    """One index for each symbol at the most, whatever the manifest says."""
    entry = ParamEntry("w", "bfloat16", (1 << 31,), 0, 1, 1, 0, 1 << 31)
    tracemalloc.start()
    found = decode_many_gaps([np.zeros(1, np.uint8)], [entry])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [None]
    assert most < 1 << 20


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("hexes", "counts", "numels", "expected"),
    [
        (["00", "fe", "ff 00 03"], [1, 1, 2], [1, 255, 260], [0, 254, 255, 259]),
        (["00 00", "01"], [1, 1], [9, 9], None),
        (["00", "01"], [1, 2], [9, 9], None),
        (["00", "09"], [1, 1], [9, 9], None),
        (["00", "01 ff"], [1, 1], [9, 999], None),
        (["ff", "00 01"], [1, 2], [999, 999], None),
    ],
)
def test_streams_of_many_tensors_are_read(
    compiled: bool,
    hexes: list[str],
    counts: list[int],
    numels: list[int],
    expected: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        monkeypatch.setattr(gap_streams, "_read_many", lambda: None)
    raw = [bytes.fromhex(one) for one in hexes]
    symbols = np.frombuffer(b"".join(raw), np.uint8)
    sizes = (np.array(one, np.int64) for one in ([*map(len, raw)], counts, numels))
    if expected is None:
        with pytest.raises(ValueError, match="not those of as many"):
            read_streams(symbols, *sizes)
    else:
        found = read_streams(symbols, *sizes)
        assert (found.tolist(), found.dtype) == (expected, np.dtype(np.int32))
