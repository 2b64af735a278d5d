"""Convert bit patterns between the checkpoint dtype and the live dtype, as the loader casts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.kernels import Bits, bits_of, host_bits, typed


def live_bits(values: Bits, dtype: str, live: torch.dtype) -> Bits:
    """Return new values as the engine's loader would store them: cast as a copy would.

    Takes bit patterns of the checkpoint's `dtype`, given by its manifest name, and returns those of
    `live`, [n]; `values` itself if nothing is cast.
    """
    if TORCH_DTYPE[dtype] == live:
        return values
    return host_bits(bits_of(typed(values, TORCH_DTYPE[dtype]).to(live)))


def checkpoint_bits(bits: Bits, live: torch.dtype, dtype: str) -> Bits:
    """Invert `live_bits`, for a live dtype that represents every value of `dtype`.

    Takes bit patterns of `live` and returns those of `dtype`, [n]; `bits` itself if nothing was
    cast.
    """
    if TORCH_DTYPE[dtype] == live:
        return bits
    if (dtype, live) == ("bfloat16", torch.float32):
        # Widening appends zeros. A cast back would lose the payload of a NaN.
        return (bits.view(np.uint32) >> 16).astype(np.uint16)
    return host_bits(bits_of(typed(bits, live).to(TORCH_DTYPE[dtype])))


def appended_bits(bits: Bits, live: torch.dtype, dtype: str) -> Bits | None:
    """Return the bits that the cast appends to the checkpoint's; zero unless memory was changed.

    Arguments as for `checkpoint_bits`; None if the cast appends nothing.
    """
    if (dtype, live) == ("bfloat16", torch.float32):
        return bits.view(np.uint32).astype(np.uint16)
    return None


def has_nan(values: Bits, dtype: str) -> bool:
    """Return whether any of some bit patterns of a dtype, given by its manifest name, is a NaN."""
    found = typed(values, TORCH_DTYPE[dtype])
    if not found.dtype.is_floating_point:
        return False
    # torch has no isnan for the 8-bit floats; as float16 their NaNs, and nothing else, are NaN.
    return bool((found.half() if found.itemsize == 1 else found).isnan().any())


def as_host(bits: Any) -> Bits:
    """Return the result of `HostElements.read` or `DeviceElements.read` as an array."""
    return host_bits(bits) if isinstance(bits, torch.Tensor) else bits
