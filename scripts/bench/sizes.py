"""Bytes of one encoded delta."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """One encoding at one density: bytes per changed element, and milliseconds.

    `scatter_ms` is for writing the decoded elements into flat weights, without a single check;
    `read_ms` for reading both copies of all weights once, NaN where they are too few to time.
    """

    encoding: str
    density: float
    nbytes: float
    floor: float
    encode_ms: float
    decode_ms: float
    scatter_ms: float
    read_ms: float

    @property
    def apply_ratio(self) -> float:
        """Decoding and scattering in times of scattering."""
        return (self.decode_ms + self.scatter_ms) / self.scatter_ms
