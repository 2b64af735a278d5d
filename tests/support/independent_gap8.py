"""Encode gap8 containers for `plain_trainer`, by the table of the wire format.

Written for clarity with numpy and zstandard only, so that the engine's reader is not tested against
the project's own writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import zstandard

_LONGEST = {1: 255, 2: 65535}
_TWO_SKIPS = 2 * _LONGEST[1]  # a gap of this size or more makes two-byte symbols


def gap_stream(where: np.ndarray) -> tuple[int, bytes]:
    """Return (bytes per symbol, gap stream) of ascending flat indices; low bytes come first."""
    gaps = (np.diff(where, prepend=-1) - 1).tolist()
    width = 2 if max(gaps, default=0) >= _TWO_SKIPS else 1
    symbols: list[int] = []
    for gap in gaps:
        skips, rest = divmod(gap, _LONGEST[width])
        symbols += [_LONGEST[width]] * skips + [rest]
    low = bytes(symbol & 255 for symbol in symbols)
    return width, low + bytes(symbol >> 8 for symbol in symbols if width == 2)


def positions(streams: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the positions tensor from each param's (bytes per symbol, gap stream)."""
    low = b"".join(raw[: len(raw) // max(width, 1)] for width, raw in streams)
    high = b"".join(raw[len(raw) // max(width, 1) :] for width, raw in streams)
    return _frame(low + high)


def exponents(params: Iterable[np.ndarray]) -> bytes:
    """Return the values tensor of ``gap8_exp`` from each param's bit patterns."""
    lower = highest = b""
    for bits in params:
        width = 8 * bits.itemsize
        wide = bits.astype(object)  # Python's ints: no width to overflow
        rotated = wide << 1 & (1 << width) - 1 | wide >> width - 1
        planes = [(rotated >> at & 255).astype(np.uint8).tobytes() for at in range(0, width, 8)]
        highest += planes.pop()
        lower += b"".join(reversed(planes))
    return lower + _frame(highest)


def differences(params: Iterable[tuple[np.ndarray, np.ndarray]]) -> bytes:
    """Return the values tensor of ``gap8_ulp`` from each param's old and new bit patterns."""
    nibbles = escaped = b""
    for old, new in params:
        width = 8 * new.itemsize
        zigzag = []
        for before, after in zip(old.tolist(), new.tolist(), strict=True):
            step = (after - before + (1 << width - 1)) % (1 << width) - (1 << width - 1)
            zigzag.append(2 * step if step >= 0 else -2 * step - 1)
        small = [min(z, 15) for z in zigzag] + [0] * (len(zigzag) % 2)
        nibbles += bytes(a | b << 4 for a, b in zip(small[::2], small[1::2], strict=True))
        escaped += b"".join(z.to_bytes(new.itemsize, "little") for z in zigzag if z >= 15)
    return _frame(nibbles + escaped)


def _frame(content: bytes) -> bytes:
    return zstandard.compress(content, 1) if content else b""
