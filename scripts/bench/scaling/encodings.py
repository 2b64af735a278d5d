"""Sizes of the packed encodings, as far as the model needs them."""

from __future__ import annotations

import math
from typing import Final

ENCODINGS: Final = ("gap8_exp", "gap8_ulp")


def gap_bytes(density: float) -> float:
    """Return the entropy, in bytes, of the gap between elements that change independently."""
    rest = 1 - density
    return (-math.log2(density) - rest / density * math.log2(rest)) / 8 if rest else 0.0
