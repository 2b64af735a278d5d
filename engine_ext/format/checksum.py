"""Compute and verify checksums: of a part's data (ours or slime's), and of a tensor's new state."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import ChecksumMismatch, MalformedPart, NotUpdatable
from engine_ext.kernels import typed

if TYPE_CHECKING:
    from typing_extensions import Buffer

_XXH3: Final = re.compile(r"xxh3_128:[0-9a-f]{32}")
# p ^ (v << 1) of two 64-bit hashes has at most 65 bits, 20 digits
_SLIME: Final = re.compile(r"0|[1-9][0-9]{0,19}")
_CHUNK: Final = 1 << 20  # elements widened at a time
# format of a checksum of a tensor's state -> hex digits
CHECKSUM_DIGITS: Final = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
_STATE: Final = re.compile(r"([a-z0-9-]+):([0-9a-f]+)")


def xxh3_checksum(positions: Buffer, *values: Buffer) -> str:
    """Return ``xxh3_128:<32 hex digits>`` of the bytes of `positions`, then of `values`."""
    digest = xxhash.xxh3_128()
    for piece in (positions, *values):
        digest.update(piece)
    return f"xxh3_128:{digest.hexdigest()}"


def slime_checksum(positions: NDArray[np.uint8], values: torch.Tensor) -> int:
    """Return slime's checksum: ``p ^ (v << 1)``, each the ``torch.hash_tensor`` of one tensor.

    That hash is the XOR of the elements, each widened to 64 bits (floats to the pattern of the
    float64, ints to an int64), as an unsigned number; it is 0 for an empty tensor. The shift is
    not truncated, so the result has up to 65 bits. It depends neither on the order nor on pairs of
    equal elements, so it is weaker than `xxh3_checksum`: it is verified, but never written.

    `positions` is uint8 [bytes], `values` 1-d in the dtype that the file declares.
    """
    p = int(np.bitwise_xor.reduce(positions)) if positions.size else 0
    # Older versions of torch have no torch.hash_tensor, and newer ones not for every dtype.
    wide = torch.float64 if values.dtype.is_floating_point else torch.int64
    v = 0
    for start in range(0, values.numel(), _CHUNK):
        bits = values[start : start + _CHUNK].to(wide).view(torch.int64).numpy().view(np.uint64)
        v ^= int(np.bitwise_xor.reduce(bits))
    return p ^ (v << 1)


def verify_checksum(
    declared: str, positions: NDArray[np.uint8], values: NDArray[Any], values_dtype: str
) -> str | None:
    """Verify the checksum that a part declares; return it if it is an `xxh3_checksum`.

    Args:
        declared: ``xxh3_128:<hex>``, or slime's decimal integer.
        positions: uint8 [bytes].
        values: The bytes of the values tensor, any dtype; can be read-only.
        values_dtype: Manifest name of the dtype that the file declares for it.

    Raises:
        ChecksumMismatch: The data has another checksum.
        MalformedPart: `declared` has neither form.
    """
    actual: str
    if _XXH3.fullmatch(declared):
        actual = xxh3_checksum(positions.data, values.data)
    elif _SLIME.fullmatch(declared):
        actual = str(slime_checksum(positions, typed(values, TORCH_DTYPE[values_dtype])))
    else:
        form = "neither 'xxh3_128:<hex>' nor a decimal"
        raise MalformedPart(f"checksum is {form}: {declared[:80]!r}")
    if actual != declared:
        raise ChecksumMismatch(
            "the data is not what the sender hashed", expected=declared, actual=actual
        )
    return declared if _XXH3.fullmatch(declared) else None


class StateHash(Protocol):
    """Hashes the bytes of a whole tensor, in order."""

    def update(self, data: Buffer, /) -> object:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """Return the checksum in lower-case hex."""


class _Adler32:
    def __init__(self) -> None:
        self._value = zlib.adler32(b"")

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def is_state_checksum(text: str) -> bool:
    """Return whether a text is a checksum of a tensor's state, ``<format>:<hex>``."""
    match = _STATE.fullmatch(text)
    return match is not None and len(match[2]) == CHECKSUM_DIGITS.get(match[1])


def state_hash(checksum_format: str) -> StateHash:
    """Return a new hash of one of the formats in `CHECKSUM_DIGITS`.

    Raises:
        NotUpdatable: the package that computes it is not installed.
    """
    if checksum_format == "xxh3-128":
        return xxhash.xxh3_128()
    if checksum_format == "adler32":
        return _Adler32()
    try:
        from blake3 import blake3
    except ImportError:
        raise NotUpdatable(
            "the checksums are blake3, and the package blake3 is not installed; install it where "
            "the engine runs, or let the trainer write xxh3-128"
        ) from None
    return blake3()
