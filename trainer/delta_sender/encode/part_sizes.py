"""How large a part of a sync may be: the first ones are small, so that the engine begins early."""

from __future__ import annotations

from typing import Final

_FIRST: Final = 8 << 20  # bytes


def most_bytes(bucket_bytes: int, before: int) -> int:
    """Return the most bytes of positions and values in a part, before compression.

    Twice as many as in the part before it, from 8 MiB up to `bucket_bytes`.

    Args:
        before: How many parts of the sync come before it.
    """
    return min(bucket_bytes, _FIRST << min(before, 16))
