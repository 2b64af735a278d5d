"""Weights of a small model, deltas of them, and the bodies that carry these, broken ones too."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from engine_ext.format import ParamDelta, encode_part

VERSION = 7
SHAPES = {"embed.weight": (4, 6), "layer.weight": (6, 2), "norm.weight": (8,)}

Weights = dict[str, NDArray[np.uint16]]
Changes = Mapping[str, Mapping[int, int]]

# New bits by flat index, on both ranks' halves of the tensors.
STEP: Changes = {"embed.weight": {0: 0x1111, 13: 0x7FC1}, "norm.weight": {7: 0x3333}}
OTHER_STEP: Changes = {"embed.weight": {0: 0x4444}, "layer.weight": {1: 0x5555, 11: 0x6666}}


def fresh_weights() -> Weights:
    """The bf16 bits of every tensor, flat, as they are loaded."""
    return {
        name: (np.arange(np.prod(shape)) + 1000 * i).astype(np.uint16)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def after(weights: Weights, *steps: Changes) -> Weights:
    """A copy of `weights` with some changes."""
    result = {name: bits.copy() for name, bits in weights.items()}
    for step in steps:
        for name, elements in step.items():
            result[name][list(elements)] = list(elements.values())
    return result


# Weights that an engine has loaded, and after one of the steps. Only compared, never changed.
BASE = fresh_weights()
NEXT = after(BASE, STEP)
RESYNCED = after(BASE, OTHER_STEP)


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def sparse(name: str, elements: Mapping[int, int], **changes: Any) -> ParamDelta:
    """One tensor's changed elements; `changes` are other fields of the delta."""
    fields = {
        "name": name,
        "dtype": "bfloat16",
        "shape": SHAPES.get(name, (8,)),
        "indices": np.array(sorted(elements), np.int64),
        "values": np.array([elements[i] for i in sorted(elements)], np.uint16),
    }
    return ParamDelta(**(fields | changes))


def part_of(*deltas: ParamDelta, version: int | None = VERSION + 1, **metadata: Any) -> bytes:
    """One part with these deltas."""
    metadata.setdefault("encoding", "indices")
    return encode_part(deltas, current_version=version, **metadata)


def delta_part(
    changes: Changes = STEP, version: int | None = VERSION + 1, **metadata: Any
) -> bytes:
    """One part that makes these changes."""
    return part_of(*(sparse(n, e) for n, e in changes.items()), version=version, **metadata)


def full_part(weights: Weights, version: int, names: Any = None, **metadata: Any) -> bytes:
    """One part with every element of these tensors."""
    deltas = [
        ParamDelta(name, "bfloat16", SHAPES[name], None, weights[name])
        for name in (names or weights)
    ]
    return part_of(*deltas, version=version, full=True, **metadata)


def bare(body: bytes) -> bytes:
    """The part without any metadata that the wire format does not require."""
    optional = ("current_version", "base_version", "part", "num_parts", "sync_id")
    return forged(body, **dict.fromkeys(optional))


def forged(body: bytes, **metadata: str | None) -> bytes:
    """The part with other metadata, and no manifest checksum; None drops a key."""
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    changed = {**header["__metadata__"], "manifest_checksum": None, **metadata}
    header["__metadata__"] = {k: v for k, v in changed.items() if v is not None}
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body[end:]


def forged_params(body: bytes, **changes: Any) -> bytes:
    """The part with its first param's entry changed."""
    end = 8 + int.from_bytes(body[:8], "little")
    params = json.loads(json.loads(body[8:end])["__metadata__"]["params"])
    params[0].update(changes)
    return forged(body, params=json.dumps(params))


def zstd_declaring(content_size: int, body: bytes) -> bytes:
    """A zstd frame that holds `body` and declares that it holds `content_size` bytes."""
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    parameters = zstandard.get_frame_parameters(frame)
    assert parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN
    # Descriptor: 8-byte content size, single segment, and the checksum flag as it was.
    blocks = frame[zstandard.frame_header_size(frame) :]
    descriptor = 0b1110_0000 | (frame[4] & 0b0000_0100)
    return frame[:4] + bytes([descriptor]) + content_size.to_bytes(8, "little") + blocks


async def pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    """The body in chunks, without a Content-Length."""
    for start in range(0, len(body), size):
        yield body[start : start + size]
