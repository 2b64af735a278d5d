"""Parts have one identity only if they write the same elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from engine_ext.format import Limits, ParamDelta, encode_part, read_container
from engine_ext.format.container import write_container
from engine_ext.format.identity import part_identity

DELTA = ParamDelta(
    "w", "bfloat16", (200_000,), np.array([65536, 65540]), np.array([1, 2], np.uint16)
)


def identity(container: bytes) -> str:
    header, _, _ = read_container(container, Limits())
    return part_identity(header, container)


def encoded(delta: ParamDelta, **options: Any) -> bytes:
    settings: dict[str, Any] = {"encoding": "indices", "current_version": 3, **options}
    return encode_part([delta], **settings)


def test_sending_again_keeps_it() -> None:
    first = encoded(DELTA, sync_id="a", part=0, num_parts=2)
    again = encoded(DELTA, sync_id="b", part=1, num_parts=2)
    assert identity(first) == identity(again)


def test_another_tensor_changes_it() -> None:
    other = ParamDelta("v", *(getattr(DELTA, f) for f in ("dtype", "shape", "indices", "values")))
    assert identity(encoded(DELTA)) != identity(encoded(other))


def test_another_encoding_of_the_same_bytes_changes_it() -> None:
    """The bytes of two int32 indices are also those of two uint32 gaps."""
    part = encoded(DELTA, with_manifest_checksum=False)
    header, positions, values = read_container(part, Limits())
    metadata = {**header.metadata, "encoding": "deltas"}
    assert identity(part) != identity(write_container(positions, [values], "bfloat16", metadata))


def test_other_old_values_change_it_for_differences_only() -> None:
    """The same differences to other values are other elements; a digest is no part of others."""
    digests = ("0" * 32, "1" * 32)
    added = replace(DELTA, differences=True)
    one, other = (identity(encoded(added, encoding="gap8_ulp", digest_part=d)) for d in digests)
    assert one != other
    one, other = (identity(encoded(DELTA, encoding="gap8_exp", digest_part=d)) for d in digests)
    assert one == other
