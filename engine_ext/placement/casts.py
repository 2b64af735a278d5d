"""Convert bit patterns between the checkpoint dtype and the live dtype, as the loader casts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.kernels.gather_scatter import Bits, bits_of, host_bits


def live_bits(values: Bits, dtype: str, live: torch.dtype) -> Bits:
    """New values as the engine's loader would store them.

    Args:
        values: [n], bit patterns of `dtype`.
        dtype: the checkpoint's, by its manifest name.
        live: the live tensor's; where it is another, the values are cast as a copy would.

    Returns:
        [n], of the live dtype's width; `values` itself where nothing is cast.
    """
    if TORCH_DTYPE[dtype] == live:
        return values
    return host_bits(bits_of(typed(values, TORCH_DTYPE[dtype]).to(live)))


def checkpoint_bits(bits: Bits, live: torch.dtype, dtype: str) -> Bits:
    """The reverse of `live_bits`, for a live dtype that holds every value of `dtype`."""
    if TORCH_DTYPE[dtype] == live:
        return bits
    if (dtype, live) == ("bfloat16", torch.float32):
        # Widening adds zeros; narrowing again would make every NaN the same one.
        return (bits.view(np.uint32) >> 16).astype(np.uint16)
    return host_bits(bits_of(typed(bits, live).to(TORCH_DTYPE[dtype])))


def typed(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    raw = bits.view(np.uint8)
    # torch has no read-only tensors.
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(dtype)


def as_host(bits: Any) -> Bits:
    """What a place of single elements reads, as an array."""
    return host_bits(bits) if isinstance(bits, torch.Tensor) else bits
