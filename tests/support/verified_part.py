"""Read a part back from the file that intake makes of it."""

from __future__ import annotations

from engine_ext.format import DecodedPart, expand_part, read_unpacked


def read_verified(file: bytes | memoryview, identity: str) -> DecodedPart | None:
    """Return the part, expanded; None if the file is not whole, or of another identity."""
    unpacked = read_unpacked(file, identity)
    return None if unpacked is None else expand_part(unpacked)
