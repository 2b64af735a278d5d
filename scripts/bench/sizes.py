"""One row of the codec benchmark, which `codec` measures and `plot` draws."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Size and speed of one encoding at one density.

    Attributes:
        encoding: its name.
        density: changed elements / elements.
        nbytes: bytes of the whole part per changed element.
        floor: the least possible bytes per changed element.
        encode_ms, decode_ms: milliseconds of encoding and decoding the part.
        scatter_ms: milliseconds of writing the decoded elements into weights, without checks.
        read_ms: milliseconds of reading both copies of all weights once; NaN if the weights are
            too few to time it.
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
        """Return the time of decoding and scattering over that of scattering."""
        return (self.decode_ms + self.scatter_ms) / self.scatter_ms
