"""Hash a tensor's bytes."""

from __future__ import annotations

from typing import Any

import torch
import xxhash


def fingerprint(tensor: torch.Tensor) -> str:
    """A hash of a tensor's shape, dtype and elements."""
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta or tensor.numel() == 0:
        return text
    raw: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{text} {xxhash.xxh3_128_hexdigest(raw)}"
