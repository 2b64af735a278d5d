from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from engine_ext.errors import ChecksumMismatch, MalformedPart, NotUpdatable, TooLarge
from engine_ext.format import (
    ENCODINGS,
    Limits,
    ParamDelta,
    decode_part,
    encode_part,
    read_container,
)
from engine_ext.format.checksum import slime_checksum
from tests.support.cases import in_one_test
from tests.support.independent_encoder import (
    BF16_PARAMS,
    EMBED,
    NORM,
    POSITIONS,
    VALUES,
    assert_same,
    assert_well_formed,
    bits16,
    good_metadata,
    hash_metadata,
    header_of,
    safetensors_file,
    sendable,
    unwrap,
    with_entry,
    with_header,
    xxh3,
)

# Golden bytes ------------------------------------------------------------------------------


GOLDEN_SPARSE = ParamDelta(
    "a.weight", "bfloat16", (2, 4), np.array([1, 2, 6]), np.array([0x3F80, 0x7FC1, 0x8000], "<u2")
)
GOLDEN_DENSE = ParamDelta("b", "bfloat16", (), None, np.array([0xC000], "<u2"))
GOLDEN_HEADS = {
    "indices": b"\x80\x02\0\0\0\0\0\0"
    rb'{"__metadata__":{"base_version":"7",'
    rb'"checksum":"xxh3_128:e66f513b3017336211db2c1b3f5a4152",'
    rb'"current_version":"8","encoding":"indices",'
    rb'"manifest_checksum":"xxh3_128:37fe26556d60714daad5301f26b7dd2f",'
    rb'"params":"[{\"name\":\"a.weight\",\"dtype\":\"bfloat16\",\"shape\":[2,4],'
    rb"\"pos_start\":0,\"pos_end\":12,\"pos_width\":4,\"val_start\":0,\"val_end\":3},"
    rb"{\"name\":\"b\",\"dtype\":\"bfloat16\",\"shape\":[],"
    rb'\"pos_start\":12,\"pos_end\":12,\"pos_width\":0,\"val_start\":3,\"val_end\":4}]",'
    rb'"part":"0","sync_id":"s"},'
    rb'"__positions__":{"data_offsets":[8,20],"dtype":"U8","shape":[12]},'
    rb'"__values__":{"data_offsets":[0,8],"dtype":"BF16","shape":[4]}}'
    b"   ",
    "deltas": b"\x78\x02\0\0\0\0\0\0"
    rb'{"__metadata__":{"base_version":"7",'
    rb'"checksum":"xxh3_128:ef66f3a6dfc387d26d1e5e65496c103f",'
    rb'"current_version":"8","encoding":"deltas",'
    rb'"manifest_checksum":"xxh3_128:8e946ab37a84bd91b619c0cf5d20a60a",'
    rb'"params":"[{\"name\":\"a.weight\",\"dtype\":\"bfloat16\",\"shape\":[2,4],'
    rb"\"pos_start\":0,\"pos_end\":6,\"pos_width\":2,\"val_start\":0,\"val_end\":3},"
    rb"{\"name\":\"b\",\"dtype\":\"bfloat16\",\"shape\":[],"
    rb'\"pos_start\":6,\"pos_end\":6,\"pos_width\":0,\"val_start\":3,\"val_end\":4}]",'
    rb'"part":"0","sync_id":"s"},'
    rb'"__positions__":{"data_offsets":[8,14],"dtype":"U8","shape":[6]},'
    rb'"__values__":{"data_offsets":[0,8],"dtype":"BF16","shape":[4]}}',
    "gap8_exp": b"\x80\x02\0\0\0\0\0\0"
    rb'{"__metadata__":{"base_version":"7",'
    rb'"checksum":"xxh3_128:83a47b2ef47b326fef6ad8f5de406479",'
    rb'"current_version":"8","encoding":"gap8_exp",'
    rb'"manifest_checksum":"xxh3_128:d239c13af5502245a5cc1ebde0f9dafe",'
    rb'"params":"[{\"name\":\"a.weight\",\"dtype\":\"bfloat16\",\"shape\":[2,4],'
    rb"\"pos_start\":0,\"pos_end\":3,\"pos_width\":1,\"val_start\":0,\"val_end\":3},"
    rb"{\"name\":\"b\",\"dtype\":\"bfloat16\",\"shape\":[],"
    rb'\"pos_start\":3,\"pos_end\":3,\"pos_width\":0,\"val_start\":3,\"val_end\":4}]",'
    rb'"part":"0","sync_id":"s"},'
    rb'"__positions__":{"data_offsets":[17,29],"dtype":"U8","shape":[12]},'
    rb'"__values__":{"data_offsets":[0,17],"dtype":"U8","shape":[17]}}'
    b"    ",
}
# four values, then the positions 1, 2, 6 of the sparse param
GOLDEN_DATA = {
    "indices": "803f c17f 0080 00c0  01000000 02000000 06000000",
    "deltas": "803f c17f 0080 00c0  0100 0000 0300",
    # mantissa and sign of the four values; frames of their exponents, and of the gaps
    "gap8_exp": "00 82 01  01  28b52ffd 20 04 210000 7f ff 00 80  28b52ffd 20 03 190000 01 00 03",
}
GOLDEN_ZSTD = """
28b52ffd60e400250a006695452c6047e21c30c016455114319c45d4236223edba7caaf6b1bbbbec74e50161329f450d
beed6eb32105413018b53a00370037009592f9d66942ccafcfd9a8351ca8a38c6120cdb18365a6650cd4d5668d599834
265d8380707808810dccdacc27e0a5ecdcb47385a47ca2282c08504f2d7ddd25b519d8eb76d0e76ca388e12642916730
873d2047cb8cab756e435fa7192390b8f353e9e10dae43a379ebd793c3dfc8c153d4e36af0b1c9d43978f091de6ac0c7
3c75c61247d2e35a8ed5946ef063b9a3c732d2814c1fd7636e0c9c7a10a01fe16385fa3e2694c3e30580a2280a094502
050212aa6a718f1118f09651114f53cb53e0d79302875f4b63eb29f038576c6d243b37c53772b2832349caafea4be59e
a69e0e1000421802843182504dc4d5161b26c80633b54600991bd5a931f33e331968030856748613903145027003
"""


@pytest.mark.parametrize("encoding", sorted(GOLDEN_HEADS))
def test_golden(encoding: str) -> None:
    body = GOLDEN_HEADS[encoding] + bytes.fromhex(GOLDEN_DATA[encoding])
    deltas = [GOLDEN_SPARSE, GOLDEN_DENSE]
    written = encode_part(
        deltas, encoding=encoding, current_version=8, base_version=7, sync_id="s", part=0
    )
    assert written == body
    assert_same(decode_part(body), deltas)


def test_golden_zstd() -> None:
    body = bytes.fromhex(GOLDEN_ZSTD)
    part = decode_part(unwrap(body))
    assert part.manifest.encoding == "deltas_zstd"
    assert part.manifest.current_version == 8
    assert_same(part, [GOLDEN_SPARSE])
    again = encode_part([GOLDEN_SPARSE], encoding="deltas_zstd", current_version=8)
    assert unwrap(again) == unwrap(body)


# Containers of another make ----------------------------------------------------------------


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("kind", ["xxh3", "slime"])
def test_container_built_without_our_encoder(hashed: bool, kind: str) -> None:
    metadata = good_metadata(current_version=None)
    if kind == "slime":
        tensor = torch.from_numpy(VALUES.view(np.int16)).view(torch.bfloat16)
        p = int(np.bitwise_xor.reduce(POSITIONS))
        v = int(np.bitwise_xor.reduce(tensor.double().view(torch.int64).numpy().view(np.uint64)))
        metadata["checksum"] = str(p ^ (v << 1))
    if hashed:
        metadata = hash_metadata({**metadata, "sync_id": "x", "base_version": "7"})
    assert_same(decode_part(safetensors_file(metadata)), [EMBED, NORM])


def test_slime_flush_of_mixed_dtypes() -> None:
    """As slime builds it: int32 or gap bytes, promoted values, a hash of the values tensor."""
    names = {"a": torch.bfloat16, "b": torch.float32, "c": torch.float16, "d": torch.bfloat16}
    pieces = {name: torch.randn(50).to(dtype) for name, dtype in names.items()}
    indices = {name: np.arange(50) * 7 for name in names}
    indices["c"][-1] += 100_000
    params, raws = [], []
    pos = val = 0
    for name, dtype in names.items():
        gaps = np.diff(indices[name], prepend=-1) - 1
        width = 2 if gaps.max() <= 65535 else 4
        raw = gaps.astype(f"<u{width}").tobytes()
        params.append(
            {
                "name": name,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": [500, 600],
                "pos_start": pos,
                "pos_end": pos + len(raw),
                "pos_width": width,
                "val_start": val,
                "val_end": val + 50,
            }
        )
        raws.append(raw)
        pos, val = pos + len(raw), val + 50
    assert [p["pos_width"] for p in params] == [2, 2, 4, 2]
    positions = np.frombuffer(b"".join(raws), np.uint8)
    values = torch.cat(list(pieces.values()))
    assert values.dtype == torch.float32
    metadata = {
        "encoding": "deltas",
        "params": json.dumps(params),
        "current_version": "3",
        "checksum": str(slime_checksum(positions, values)),
    }
    part = decode_part(safetensors_file(metadata, positions, values.numpy(), torch.float32))
    assert_well_formed(part)
    for delta, (name, piece) in zip(part.deltas, pieces.items(), strict=True):
        assert delta.indices is not None
        assert np.array_equal(delta.indices, indices[name])
        assert np.array_equal(
            delta.values, piece.view(torch.uint8).numpy().view(delta.values.dtype)
        )


def test_uint8_values_are_the_bytes_of_one_byte_dtypes() -> None:
    params = with_entry(dtype="float8_e4m3fn"), with_entry(dtype="bfloat16")
    values = np.array([0x7F, 0x80, 0x01, 0xFF, 0x00], np.uint8)
    first, second = (json.loads(text)[0] for text in params)
    for entry, good in ((first, True), (second, False)):
        metadata = good_metadata(
            params=json.dumps([entry]),
            checksum=xxh3(POSITIONS[:12].tobytes(), values[:3].tobytes()),
        )
        body = safetensors_file(metadata, POSITIONS[:12], values[:3], torch.uint8)
        if good:
            assert decode_part(body).deltas[0].values.tolist() == [0x7F, 0x80, 0x01]
        else:
            with pytest.raises(MalformedPart, match="cannot carry"):
                decode_part(body)


@in_one_test("shift", range(1, 8))
def test_values_are_aligned_wherever_they_lie(shift: int) -> None:
    header, data = header_of(safetensors_file(good_metadata()))
    header["__positions__"]["data_offsets"] = [0, 20]
    header["__values__"]["data_offsets"] = [20, 30]
    body = with_header(header, data[10:] + data[:10])
    part = decode_part(memoryview(b"\0" * shift + body)[shift:])
    assert_well_formed(part)
    assert_same(part, [EMBED, NORM])


def test_decoding_does_not_copy_the_values() -> None:
    body = bytearray(safetensors_file(good_metadata()))
    part = decode_part(body)
    begin = np.frombuffer(body, np.uint8).ctypes.data
    header, *_ = read_container(body, Limits())
    assert part.deltas[0].values.ctypes.data == begin + header.values.begin


# Refusals ----------------------------------------------------------------------------------


def test_flipped_data_is_a_checksum_mismatch() -> None:
    body = bytearray(safetensors_file(good_metadata()))
    for at in range(len(body) - 30, len(body)):
        body[at] ^= 0x10
        with pytest.raises(ChecksumMismatch):
            decode_part(body)
        body[at] ^= 0x10


@in_one_test("indices", [[0, 7, 20], [0, 7, 7], [7, 0, 19], [-1, 7, 19], [0, 2**31 - 1, 19]])
def test_bad_index_names_the_tensor(indices: list[int]) -> None:
    positions = np.array([*indices, 2, 6], "<i4").view(np.uint8)
    metadata = good_metadata(checksum=xxh3(positions.tobytes(), VALUES.tobytes()))
    with pytest.raises(NotUpdatable) as caught:
        decode_part(safetensors_file(metadata, positions))
    assert caught.value.operands == {"tensor": "model.embed.weight", "numel": 20}


def test_limits_are_the_callers() -> None:
    body = safetensors_file(good_metadata())
    with pytest.raises(TooLarge):
        decode_part(body, Limits(max_part_bytes=len(body) - 1))
    with pytest.raises(TooLarge):
        decode_part(body, Limits(max_params=1))
    decode_part(body, Limits(max_part_bytes=len(body), max_params=2))


def test_gaps_count_as_indices() -> None:
    """A part of gaps of two bytes is shorter than the indices that they expand to."""
    count = 10_000
    delta = ParamDelta("w", "int8", (count,), np.arange(count), np.zeros(count, np.uint8))
    body = encode_part([delta], encoding="deltas", current_version=1)
    assert len(body) < 4 * count
    with pytest.raises(TooLarge, match=f"{5 * count} bytes, unpacked"):
        decode_part(body, Limits(max_part_bytes=5 * count - 1))
    decode_part(body, Limits(max_part_bytes=5 * count))


@in_one_test(
    ("deltas", "message"),
    [
        ([EMBED, ParamDelta("f", "float16", (1,), None, bits16(0))], "one dtype"),
        ([ParamDelta("f", "BF16", (1,), None, bits16(0))], "unknown dtype"),
        ([EMBED, EMBED], "twice"),
        ([ParamDelta("", "bfloat16", (1,), None, bits16(0))], "empty"),
        ([ParamDelta("w", "bfloat16", (2,), None, bits16(0))], "1 values for 2 elements"),
        ([ParamDelta("w", "bfloat16", (2,), np.array([0, 1]), bits16(0))], "1 values for 2"),
        ([ParamDelta("w", "bfloat16", (2,), np.array([2]), bits16(0))], "beyond its 2 elements"),
        ([ParamDelta("w", "bfloat16", (2,), np.array([-1]), bits16(0))], "negative"),
        ([ParamDelta("w", "bfloat16", (2,), np.array([1, 0]), bits16(0, 0))], "not ascending"),
        ([ParamDelta("w", "bfloat16", (2,), np.array([1.0]), bits16(0))], "not int32"),
        ([ParamDelta("w", "bfloat16", (2,), np.array([1], np.uint64), bits16(0))], "not int32"),
        ([ParamDelta("w", "bfloat16", (1,), np.array([[0]]), bits16(0))], "one dimension"),
        ([ParamDelta("w", "bfloat16", (1,), None, np.zeros(1, np.int16))], "not the bits"),
        ([ParamDelta("w", "bfloat16", (1,), None, np.zeros((1, 1), np.uint16))], "not the bits"),
        ([ParamDelta("w", "bfloat16", (1,) * 17, None, bits16(0))], "dimensions"),
    ],
)
def test_what_cannot_be_encoded(deltas: list[ParamDelta], message: str) -> None:
    for encoding in ENCODINGS:
        taken, extra = sendable(encoding, deltas)
        with pytest.raises(ValueError, match=message):
            encode_part(taken, encoding=encoding, current_version=1, **extra)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_indices_of_either_width_are_encoded_alike(encoding: str) -> None:
    indices = np.array([0, 7, 300, 70_000])
    bodies = []
    for dtype in (np.int32, np.int64):
        own: Any = indices.astype(dtype)
        delta = ParamDelta("w", "bfloat16", (70_001,), own, bits16(1, 2, 3, 4))
        taken, extra = sendable(encoding, [delta])
        bodies.append(encode_part(taken, encoding=encoding, current_version=1, **extra))
    assert bodies[0] == bodies[1]


def test_a_full_part_is_dense() -> None:
    with pytest.raises(ValueError, match="not dense"):
        encode_part([EMBED], encoding="deltas", current_version=1, full=True)
    dense = ParamDelta("w", "bfloat16", (2, 2), None, bits16(1, 2, 3, 0x7FC0))
    part = decode_part(encode_part([dense], encoding="deltas", current_version=1, full=True))
    assert part.manifest.full is True
    assert_same(part, [dense])


def test_int32_indices_end_at_2_31_elements() -> None:
    for numel, fits in ((2**31 - 1, True), (2**31, False)):
        delta = ParamDelta("w", "bfloat16", (numel,), np.array([5]), bits16(1))
        if fits:
            body = encode_part([delta], encoding="indices", current_version=1)
            assert_same(decode_part(body), [delta])
        else:
            with pytest.raises(ValueError, match="int32"):
                encode_part([delta], encoding="indices", current_version=1)


@in_one_test(("last", "width"), [(65536, 2), (65537, 4), (2**32, 4)])
def test_a_large_gap_widens_its_param_only(last: int, width: int) -> None:
    far = ParamDelta("far", "bfloat16", (2**33,), np.array([0, last]), bits16(1, 2))
    part = decode_part(encode_part([NORM, far, EMBED], encoding="deltas", current_version=1))
    assert [entry.pos_width for entry in part.manifest.params] == [2, width, 2]
    assert_same(part, [NORM, far, EMBED])


def test_a_gap_of_2_32_is_an_error() -> None:
    far = ParamDelta("far", "bfloat16", (2**33,), np.array([0, 2**32 + 1]), bits16(1, 2))
    with pytest.raises(ValueError, match="gap of 4294967296"):
        encode_part([far], encoding="deltas", current_version=1)


@in_one_test("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@in_one_test("checksum", ["0", xxh3()])
def test_an_empty_values_tensor_of_any_dtype(dtype: torch.dtype, checksum: str) -> None:
    metadata = good_metadata(params="[]", checksum=checksum)
    body = safetensors_file(metadata, POSITIONS[:0], VALUES[:0], dtype)
    assert decode_part(body).deltas == ()
    params = json.dumps([{**BF16_PARAMS[0], "pos_end": 0, "val_end": 0}])
    body = safetensors_file({**metadata, "params": params}, POSITIONS[:0], VALUES[:0], dtype)
    if dtype is torch.uint8:
        with pytest.raises(MalformedPart, match="cannot carry"):
            decode_part(body)
    else:
        assert decode_part(body).deltas[0].nnz == 0


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_empty_part(encoding: str) -> None:
    extra = sendable(encoding, [])[1]
    body = encode_part([], encoding=encoding, current_version=2**63 - 1, base_version=0, **extra)
    part = decode_part(unwrap(body))
    assert part.deltas == ()
    assert read_container(unwrap(body), Limits())[0].values.dtype == "uint8"
    assert (part.manifest.current_version, part.manifest.base_version) == (2**63 - 1, 0)


def test_metadata_round_trip() -> None:
    arguments: dict[str, Any] = {
        "current_version": 5,
        "base_version": 3,
        "sync_id": "läuft = 7",
        "part": 1,
        "num_parts": 4,
        "digest_part": "0" * 31 + "1",
        "digest_before": "2" * 32,
        "digest_after": "f" * 32,
    }
    for hashed in (True, False):
        body = encode_part([NORM], encoding="indices", with_manifest_checksum=hashed, **arguments)
        manifest = decode_part(body).manifest
        assert {key: getattr(manifest, key) for key in arguments} == arguments
        assert (manifest.manifest_checksum is not None) is hashed
    bare = encode_part([], encoding="indices", current_version=None, with_manifest_checksum=False)
    assert set(header_of(bare)[0]["__metadata__"]) == {"encoding", "params", "checksum"}
