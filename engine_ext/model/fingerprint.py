"""Fingerprint one tensor, to see later whether its content has changed."""

from __future__ import annotations

from typing import Any

import torch
import xxhash


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype, shape and the xxh3_128 of its elements, as text.

    The elements are hashed in row-major order, whatever the strides, so two tensors with equal
    content have equal fingerprints. A meta or empty tensor has no hash.

    Args:
        tensor: any dtype, shape and device; elements on another device are copied to the host.
    """
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta or tensor.numel() == 0:
        return text
    raw: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{text} {xxhash.xxh3_128_hexdigest(raw)}"
