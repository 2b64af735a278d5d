"""Of what the reference sender makes a part."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_sender.encoding_policy import EncodingChoice
from delta_sender.snapshot import Change
from engine_ext.wire.digest import Digest, change_digest, tensor_digest
from engine_ext.wire.part import ParamDelta


@dataclass(frozen=True, slots=True)
class Piece:
    """What one param adds to a part.

    Attributes:
        name: that it is sent under.
        delta: what is sent; differences are made of it when it is encoded.
        change: from what the engine holds; None in a full sync that leaves the tensor as it is.
        own: whether `change` is of the name in the snapshot, so that its digest is.
        pick: how it travels.
    """

    name: str
    delta: ParamDelta
    change: Change | None
    own: bool
    pick: EncodingChoice

    @property
    def digest(self) -> Digest:
        """What it adds to the digest."""
        if self.change is None:
            return Digest.ZERO
        if self.own and self.change.digest is not None:
            return self.change.digest
        places = self.change.places
        indices = None if places is None else places.astype(np.int64)
        return change_digest(self.name, indices, self.change.old, self.change.new)


@dataclass(slots=True)
class Filling:
    """A part that params are still added to."""

    encoding: str
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True)
class Sent:
    """What was made of a step: the digest that it leads to, and what a report counts."""

    digest: Digest | None
    counts: dict[str, Any]


def digest_of(tensors: Iterable[tuple[str, NDArray[Any]]]) -> Digest:
    """Of whole tensors; bit patterns by name."""
    threads = os.cpu_count() or 1
    digests = (tensor_digest(name, values, threads=threads) for name, values in tensors)
    return sum(digests, start=Digest.ZERO)
