"""Choose how params travel: in the encoding that was asked for, or with ``auto`` in the fastest.

The time of a param is that of encoding it, of sending its bytes, and of decoding and applying it.
Its size follows from density and dtype, and for differences from a sample of them. The link's
speed is measured on the sender's own posts (see `bandwidth`). The costs per element are constants,
measured on one core.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_sender.diff.change import Change
from engine_ext.format import DIFFERENCES, PACKED_ENCODINGS

AUTO: Final = "auto"

# Elements of a tensor whose indices, or gaps between them, an encoding can hold.
REACH: Final = {"indices": (1 << 31) - 1, "deltas": 1 << 32, "deltas_zstd": 1 << 32}
_FARTHEST: Final = "gap8_exp"  # reaches as far as any tensor

_SAMPLE: Final = 4096  # differences that are looked at
_NIBBLES: Final = 15  # zigzagged differences below it take a nibble

# Bytes/s from which frames are not compressed: a link of 25 Gbit/s is faster than zstd.
_STORED_FROM: Final = 25e9 / 8

# Nanoseconds per element on one core: encoding (without the gaps, which the comparison writes) and
# decoding as `scripts/bench/codec.py` times them, and applying as `scripts/bench/apply.py` does.
_CODING: Final = {"deltas": 10.0, "gap8_exp": 14.0, "gap8_ulp": 15.0}
_STORED_CODING: Final = {"gap8_exp": 7.0, "gap8_ulp": 7.0}  # half of that with zstd, in one run
_APPLYING: Final = 20.0
_DENSE_CODING: Final = {"deltas": 2.5, "gap8_exp": 7.5}
_DENSE_APPLYING: Final = 3.0


class EncodingChoice(NamedTuple):
    """How one param travels."""

    encoding: str
    dense: bool
    stored: bool = False  # the frames of a gap8 encoding are not compressed

    def __str__(self) -> str:
        how = ", dense" if self.dense else ", stored" if self.stored else ""
        return f"{self.encoding}{how}"


@dataclass(frozen=True, slots=True)
class ParamStats:
    """What a choice depends on."""

    numel: int
    nnz: int  # elements that changed
    width: int  # bytes of an element
    floating: bool  # exponents compress
    escaped: float | None = None  # share of differences that fit no nibble; None: do not send any
    is_large: bool = False  # before compression, sparse takes no fewer bytes than dense


@dataclass(frozen=True, slots=True)
class EncodingPolicy:
    """The encoding that was asked for, and the ones that the engine takes.

    With `any_base`, new values are sent that are right over any old ones, and of the digests only
    ``digest_after``.
    """

    encoding: str
    differences: bool = True  # the engine takes them, as far as is known
    any_base: bool = False

    @property
    def may_send_differences(self) -> bool:
        """Whether differences can be sent."""
        return self.differences and self.encoding in (DIFFERENCES, AUTO)

    def values_only(self) -> EncodingPolicy:
        """Return the policy without differences."""
        return replace(self, differences=False)

    def over_any_base(self) -> EncodingPolicy:
        """Return the policy for an engine whose old values turned out not to be the snapshot's."""
        return replace(self, differences=False, any_base=True)

    @property
    def empty(self) -> str:
        """The encoding of a sync without changes."""
        return "gap8_exp" if self.encoding in (DIFFERENCES, AUTO) else self.encoding

    @property
    def is_fixed(self) -> bool:
        """Whether a small change is sent in the same way whatever its size."""
        return self.encoding != AUTO

    def sparsely(self, *, proven: bool, numel: int = 0) -> EncodingChoice:
        """Return how a small change travels if `is_fixed`; as differences only if `proven`.

        Args:
            numel: Elements of the tensor.
        """
        as_differences = proven and self.may_send_differences
        encoding = self.encoding if as_differences else self.empty
        return EncodingChoice(encoding if numel <= REACH.get(encoding, numel) else _FARTHEST, False)

    def choose(
        self, stats: ParamStats, dense: bool, speed: float, *, sparse: bool = False
    ) -> EncodingChoice:
        """Return how a param travels: with ``auto`` in the shortest time, else in fewest bytes.

        If `dense`, it can only travel dense; if `sparse`, not. The link's speed is in bytes/s.
        """
        if not self.differences:
            stats = replace(stats, escaped=None)
        if self.encoding == AUTO:
            ways = _times(stats, speed)
            times = {c: s for c, s in ways if (c.dense or not dense) and not (c.dense and sparse)}
            return min(times, key=lambda choice: times[choice])
        sparsely = self.sparsely(proven=stats.escaped is not None, numel=stats.numel)
        whole = EncodingChoice(self.empty, True)
        if sparse:
            return sparsely
        if stats.is_large and whole.encoding not in PACKED_ENCODINGS:
            dense = True  # without compression, those are the sizes on the wire
        elif stats.is_large and not dense:
            sizes = dict(_sizes(stats))
            dense = sizes[sparsely] >= sizes[whole]
        return whole if dense else sparsely


def sparse_encoding(encoding: str) -> str:
    """Return the encoding whose sizes decide whether a change is kept sparse or dense."""
    return "gap8_exp" if encoding == AUTO else encoding


def escaped_share(old: NDArray[Any], new: NDArray[Any]) -> float:
    """Return the share of differences that do not fit a nibble, from a sample.

    The bit patterns are unsigned ints of one width, [n]; equal elements do not count.
    """
    stride = max(1, new.size // _SAMPLE)
    differences = new[::stride] - old[::stride]
    differences = differences[differences != 0]
    zigzag = differences << 1 ^ (0 - (differences >> (8 * differences.itemsize - 1)))
    return np.count_nonzero(zigzag >= _NIBBLES) / zigzag.size if zigzag.size else 0.0


def escaped_of(change: Change) -> float:
    """Return the share of a change's differences that do not fit a nibble; see `escaped_share`."""
    if change.escaped is not None:
        return change.escaped
    elements = change.decoded()
    return escaped_share(elements.old, elements.new)


def _times(stats: ParamStats, speed: float) -> Iterator[tuple[EncodingChoice, float]]:
    """Yield every way in which a param can travel, and its seconds."""
    for choice, nbytes in _sizes(stats):
        coding, applying, elements = _CODING, _APPLYING, stats.nnz
        if choice.stored:
            if speed < _STORED_FROM:
                continue
            coding = _STORED_CODING
        elif choice.dense:
            coding, applying, elements = _DENSE_CODING, _DENSE_APPLYING, stats.numel
        yield choice, nbytes / speed + elements * (coding[choice.encoding] + applying) / 1e9


def _sizes(stats: ParamStats) -> Iterator[tuple[EncodingChoice, float]]:
    """Yield every way in which a param can travel, and its approximate bytes."""
    width, nnz = stats.width, stats.nnz
    # Weights have few exponents; the other bytes hardly compress.
    value = width - (0.65 if stats.floating and width > 1 else 0.1)
    yield EncodingChoice("deltas", True), stats.numel * width
    yield EncodingChoice("gap8_exp", True), stats.numel * value
    if not nnz:
        return
    density = nnz / stats.numel
    rest = 1 - density
    # Entropy in bits of the gap between elements that change independently.
    gap = -math.log2(density) - (rest / density * math.log2(rest) if rest else 0.0)
    # One gap above 65535 makes all gaps of the param four bytes wide.
    wide = nnz * rest**65536 > 0.5
    if stats.numel <= REACH["deltas"]:
        yield EncodingChoice("deltas", False), nnz * ((4 if wide else 2) + width)
    yield EncodingChoice("gap8_exp", False), nnz * (gap / 8 + value)
    # Symbols of one byte or of two, with those that skip.
    symbol = min(size / (1 - rest**skip) for size, skip in ((1, 255), (2, 65535)))
    yield EncodingChoice("gap8_exp", False, stored=True), nnz * (symbol + width)
    if stats.escaped is not None:
        escaped = stats.escaped * width
        yield EncodingChoice("gap8_ulp", False), nnz * (gap / 8 + 0.25 + escaped)
        yield EncodingChoice("gap8_ulp", False, stored=True), nnz * (symbol + 0.5 + escaped)
