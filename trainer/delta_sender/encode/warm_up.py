"""Compile the numba loops of a sync before the first one.

That takes seconds once on a machine, and half a second in later processes, which load them from
numba's cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from delta_sender.diff.change import Bits, EncodedElements, Moment, decoded
from delta_sender.diff.compare import compare, compare_batch
from delta_sender.encode.encoding_policy import AUTO
from engine_ext.dtypes import bits_dtype
from engine_ext.format import (
    DIFFERENCES,
    EncodedDifferences,
    ParamDelta,
    encode_part,
    tensor_digest,
)
from engine_ext.kernels import gather_scatter

_NUMEL: Final = 1 << 20
# Near each other and far apart: gap symbols of one byte and of two.
_INDICES: Final = {"near": [1, 2], "far": [1, _NUMEL - 1]}


def warm_up(dtypes: Iterable[str], encoding: str) -> None:
    """Do all that a sync computes on this side, with a few elements of dtypes (manifest names)."""
    ways = {AUTO: ("deltas", "gap8_exp", DIFFERENCES), DIFFERENCES: ("gap8_exp", DIFFERENCES)}
    encodings = ways.get(encoding, (encoding,))
    for dtype in sorted(set(dtypes)):
        snapshot = np.zeros(2, bits_dtype(dtype))
        pair = snapshot, snapshot + snapshot.dtype.type(1), "weight"
        old, new = (gather_scatter.signed(bits) for bits in pair[:2])
        compare_batch([(old, new, "weight")], streams=True)
        empty = np.empty(0, np.int32)
        gather_scatter.write_many([old], [empty], [pair[0][:0]])
        found = compare(*pair, streams=True)
        gather_scatter.write(snapshot, found.indices, found.new)
        deque(decoded([_encoded(snapshot)]), 0)
        tensor_digest("weight", snapshot)
        for name in encodings:
            differences = name == DIFFERENCES
            params: list[Any] = [(n, (_NUMEL,), np.array(at), None) for n, at in _INDICES.items()]
            params.append(("found", (2,), found.indices, found.stream))
            deltas = [
                ParamDelta(param, dtype, shape, at, found.new, differences, stream=stream)
                for param, shape, at, stream in params
            ]
            encode_part(deltas, encoding=name, current_version=0, digest_part="0" * 32)


def _encoded(held: Bits) -> EncodedElements:
    """Return what a device sends of both of two elements that have become larger by 1."""
    differences = EncodedDifferences(np.array([0x22], np.uint8), held[:0], 2)
    return EncodedElements(np.zeros(2, np.uint8), 2, differences, held, Moment())
