"""The digest of a part of a tensor."""

from __future__ import annotations

from typing import Final

import numpy as np

from delta_sender.diff.loop import Bits
from delta_sender.sharded.box import Box
from engine_ext.format import Digest, tensor_digest
from engine_ext.resources import usable_cores

_CHUNK: Final = 1 << 20  # elements whose indices are made at a time


def box_digest(name: str, values: Bits, box: Box) -> Digest:
    """Return the digest of a part of a tensor, given its bits [n]."""
    if box.is_run:
        return tensor_digest(name, values, start=box.start, threads=usable_cores())
    digest = Digest.ZERO
    for first in range(0, values.size, _CHUNK):
        chunk = values[first : first + _CHUNK]
        where = box.to_global(np.arange(first, first + chunk.size))
        digest += tensor_digest(name, chunk, where)
    return digest
