"""Containers for tests, built with numpy, json, safetensors and xxhash: none of our encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from hypothesis import settings
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.torch import save

from engine_ext.dtypes import bits_dtype
from engine_ext.format import DecodedPart, FrameReader, ParamDelta

# No example database: a test must leave nothing behind in the working tree.
PROPERTY = settings(deadline=None, database=None, max_examples=80)

BF16_PARAMS: list[dict[str, Any]] = [
    {
        "name": "model.embed.weight",
        "dtype": "bfloat16",
        "shape": [4, 5],
        "pos_start": 0,
        "pos_end": 12,
        "pos_width": 4,
        "val_start": 0,
        "val_end": 3,
    },
    {
        "name": "model.norm.weight",
        "dtype": "bfloat16",
        "shape": [7],
        "pos_start": 12,
        "pos_end": 20,
        "pos_width": 4,
        "val_start": 3,
        "val_end": 5,
    },
]
POSITIONS = np.array([0, 7, 19, 2, 6], "<i4").view(np.uint8)
VALUES = np.array([0x3F80, 0xC000, 0x7FC1, 0x8000, 0x0001], "<u2")


def xxh3(*pieces: bytes) -> str:
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(b"".join(pieces))


def good_metadata(**changes: str | None) -> dict[str, str]:
    """The metadata of the container of `BF16_PARAMS`; a change to None drops the key."""
    metadata: dict[str, str | None] = {
        "encoding": "indices",
        "params": json.dumps(BF16_PARAMS),
        "checksum": xxh3(POSITIONS.tobytes(), VALUES.tobytes()),
        "current_version": "8",
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def hash_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """The same metadata with a ``manifest_checksum``."""
    lines = "".join(f"{key}={value}\n" for key, value in sorted(metadata.items()))
    return {**metadata, "manifest_checksum": xxh3(lines.encode())}


def with_entry(at: int = 0, **changes: Any) -> str:
    """``params`` with one entry changed."""
    params = [dict(entry) for entry in BF16_PARAMS]
    params[at].update(changes)
    return json.dumps(params)


def safetensors_file(
    metadata: dict[str, str],
    positions: np.ndarray[Any, Any] = POSITIONS,
    values: np.ndarray[Any, Any] = VALUES,
    dtype: torch.dtype = torch.bfloat16,
) -> bytes:
    """The file as the safetensors library writes it."""
    unsigned = np.dtype(f"<u{dtype.itemsize}")
    tensors = {
        "__positions__": torch.from_numpy(positions.copy()),
        "__values__": torch.from_numpy(values.view(unsigned).copy()).view(dtype),
    }
    return save(tensors, metadata)


def header_of(container: bytes) -> tuple[dict[str, Any], bytes]:
    """The header JSON of a container, and its data."""
    end = 8 + int.from_bytes(container[:8], "little")
    return json.loads(container[8:end]), container[end:]


def with_header(header: Any, data: bytes) -> bytes:
    """A container of any header (a JSON value, or the bytes) and any data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def unwrap(body: bytes, max_bytes: int = 1 << 30, step: int | None = None) -> bytes:
    """The result of `FrameReader` for a body in chunks of `step` bytes, or at once."""
    reader = FrameReader(max_bytes)
    step = step or max(len(body), 1)
    chunks = (body[at : at + step] for at in range(0, len(body), step))
    out = b"".join(piece for chunk in chunks for piece in reader.feed(chunk))
    reader.finish()
    return out


EMBED = ParamDelta(
    "model.embed.weight", "bfloat16", (4, 5), np.array([0, 7, 19]), VALUES[:3].copy()
)
NORM = ParamDelta("model.norm.weight", "bfloat16", (7,), np.array([2, 6]), VALUES[3:].copy())


def sendable(
    encoding: str, deltas: Sequence[ParamDelta]
) -> tuple[list[ParamDelta], dict[str, Any]]:
    """The deltas as an encoding takes them, and the metadata that it wants: ``gap8_ulp`` has
    no dense form, and wants a digest."""
    if encoding != "gap8_ulp":
        return list(deltas), {}
    indices = [np.arange(d.numel) if d.indices is None else d.indices for d in deltas]
    taken = [
        replace(delta, indices=where, differences=True)
        for delta, where in zip(deltas, indices, strict=True)
    ]
    return taken, {"digest_part": "0" * 32}


def _same_indices(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def same(one: ParamDelta, other: ParamDelta) -> bool:
    return (
        (one.name, one.dtype, one.shape) == (other.name, other.dtype, other.shape)
        and one.differences == other.differences
        and _same_indices(one.indices, other.indices)
        and one.values.dtype == other.values.dtype
        and np.array_equal(one.values, other.values)
    )


def assert_same(part: DecodedPart, deltas: list[ParamDelta] | tuple[ParamDelta, ...]) -> None:
    assert len(part.deltas) == len(deltas)
    assert all(map(same, part.deltas, deltas))


def assert_well_formed(part: DecodedPart) -> None:
    assert [(d.name, d.dtype, d.shape) for d in part.deltas] == [
        (p.name, p.dtype, p.shape) for p in part.manifest.params
    ]
    for delta in part.deltas:
        assert delta.values.dtype == bits_dtype(delta.dtype)
        assert delta.values.flags.aligned
        if delta.indices is None:
            assert delta.values.shape == (delta.numel,)
        else:
            assert delta.indices.dtype == (np.int32 if delta.numel <= 2**31 else np.int64)
            assert delta.values.shape == delta.indices.shape == (delta.nnz,)
            assert (np.diff(delta.indices, prepend=-1) > 0).all()
            assert (delta.indices < delta.numel).all()


def bits16(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint16)
