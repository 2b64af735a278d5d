"""How params travel: in the encoding that was asked for, or with ``auto`` in what is fastest.

The time of a param is that of encoding it, of its bytes on the link, and of decoding and applying
it. The bytes follow from its density and dtype, and for differences from a sample of them; the
link's speed is what the sender's own posts have shown (see `sender_speed`); the rest is constants
of one core.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.wire.manifest import DIFFERENCES, ENCODINGS, PACKED_ENCODINGS

AUTO: Final = "auto"
CHOICES: Final = (*ENCODINGS, AUTO)

_SAMPLE: Final = 4096  # differences that are looked at
_NIBBLES: Final = 15  # zigzagged differences below it take a nibble

# Nanoseconds an element, of one core: encoding (without the gaps, which the comparison writes) and
# decoding as `bench_codec.py` times them, and applying as `bench_apply.py` does, as served.
_CODING: Final = {"deltas": 10.0, "gap8_exp": 14.0, "gap8_ulp": 15.0}
_APPLYING: Final = 20.0
_DENSE_CODING: Final = {"deltas": 2.5, "gap8_exp": 7.5}
_DENSE_APPLYING: Final = 3.0


class EncodingChoice(NamedTuple):
    """How one param travels."""

    encoding: str
    dense: bool

    def __str__(self) -> str:
        return f"{self.encoding}, dense" if self.dense else self.encoding


@dataclass(frozen=True, slots=True)
class ParamStats:
    """What a choice depends on.

    Attributes:
        numel, nnz: elements of the tensor, and those that changed.
        width: bytes of an element.
        floating: whether its elements are floats; their exponents compress.
        escaped: share of the differences that do not fit a nibble; None where differences are not
            to be sent.
        many: before compression all of the tensor is no longer than what changed, with its places.
    """

    numel: int
    nnz: int
    width: int
    floating: bool
    escaped: float | None = None
    many: bool = False


@dataclass(frozen=True, slots=True)
class EncodingPolicy:
    """What was asked for.

    Attributes:
        encoding: one of `CHOICES`.
        differences: whether the engine takes differences, as far as is known.
        heals: whether new values go whatever the old ones are, and of the digests only the one that
            they lead to.
    """

    encoding: str
    differences: bool = True
    heals: bool = False

    @property
    def may_differ(self) -> bool:
        """Whether differences may be sent."""
        return self.differences and self.encoding in (DIFFERENCES, AUTO)

    def of_values(self) -> EncodingPolicy:
        """The same without differences."""
        return replace(self, differences=False)

    def healing(self) -> EncodingPolicy:
        """For an engine whose old values were found to be others: values, right over any."""
        return replace(self, differences=False, heals=True)

    @property
    def empty(self) -> str:
        """The encoding of a sync of nothing."""
        return "gap8_exp" if self.encoding in (DIFFERENCES, AUTO) else self.encoding

    def pick(self, facts: ParamStats, dense: bool, speed: float) -> EncodingChoice:
        """How a param travels: with ``auto`` in the shortest time, else in the fewest bytes.

        Args:
            facts: about it.
            dense: whether it can only go dense.
            speed: the link's, bytes a second.
        """
        if not self.differences:
            facts = replace(facts, escaped=None)
        if self.encoding != AUTO:
            as_values = facts.escaped is None or not self.may_differ
            sparse, whole = (
                EncodingChoice(self.empty if as_values else self.encoding, False),
                self.empty,
            )
            if facts.many and whole not in PACKED_ENCODINGS:
                dense = True  # nothing is compressed: those were its bytes
            elif facts.many and not dense:
                sizes = dict(_sizes(facts))
                dense = sizes[sparse] >= sizes[EncodingChoice(whole, True)]
            return EncodingChoice(whole, True) if dense else sparse
        times = {pick: seconds for pick, seconds in _times(facts, speed) if pick.dense or not dense}
        return min(times, key=lambda pick: times[pick])


def sparse_encoding(encoding: str) -> str:
    """By whose bytes a change is kept sparse or dense."""
    return "gap8_exp" if encoding == AUTO else encoding


def escaped_share(old: NDArray[Any], new: NDArray[Any]) -> float:
    """The share of differences that do not fit a nibble, from a sample.

    Args:
        old, new: bit patterns, unsigned ints of one width, [n]; what is alike does not count.
    """
    step = max(1, new.size // _SAMPLE)
    differences = new[::step] - old[::step]
    differences = differences[differences != 0]
    zigzag = differences << 1 ^ (0 - (differences >> (8 * differences.itemsize - 1)))
    return float(np.mean(zigzag >= _NIBBLES)) if zigzag.size else 0.0


def _times(facts: ParamStats, speed: float) -> Iterator[tuple[EncodingChoice, float]]:
    """Seconds of every way in which a param can go."""
    for pick, nbytes in _sizes(facts):
        coding, applying = (_DENSE_CODING, _DENSE_APPLYING) if pick.dense else (_CODING, _APPLYING)
        elements = facts.numel if pick.dense else facts.nnz
        yield pick, nbytes / speed + elements * (coding[pick.encoding] + applying) / 1e9


def _sizes(facts: ParamStats) -> Iterator[tuple[EncodingChoice, float]]:
    """Bytes of every way in which a param can go, about."""
    width, nnz = facts.width, facts.nnz
    # Weights have few exponents, and a byte that is none hardly compresses.
    value = width - (0.65 if facts.floating and width > 1 else 0.1)
    yield EncodingChoice("deltas", True), facts.numel * width
    yield EncodingChoice("gap8_exp", True), facts.numel * value
    if not nnz:
        return
    density = nnz / facts.numel
    rest = 1 - density
    # Bits, of gaps between elements that change independently.
    gap = -math.log2(density) - (rest / density * math.log2(rest) if rest else 0.0)
    # A gap above 65535 somewhere, and the param's gaps are of four bytes.
    wide = nnz * rest**65536 > 0.5
    yield EncodingChoice("deltas", False), nnz * ((4 if wide else 2) + width)
    yield EncodingChoice("gap8_exp", False), nnz * (gap / 8 + value)
    if facts.escaped is not None:
        yield EncodingChoice("gap8_ulp", False), nnz * (gap / 8 + 0.25 + facts.escaped * width)
