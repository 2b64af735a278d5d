"""Fingerprint tensors: their layout, their location, and hashes of their content."""

from __future__ import annotations

from typing import Any, Final

import torch
import xxhash

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.model.storage_index import extent, layout

_CHUNK: Final = 1 << 24  # elements


def location(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's address (None on meta) and layout; equal for two views of the same bits."""
    return (None if tensor.is_meta else tensor.data_ptr(), *layout(tensor))


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype, shape and the xxh3_128 of its elements, as text.

    The elements are hashed in row-major order, whatever the strides, so two tensors with equal
    content have equal hashes. A meta or empty tensor has no hash. Device memory is copied.
    """
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta or tensor.numel() == 0:
        return text
    raw: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{text} {xxhash.xxh3_128_hexdigest(raw)}"


def hash_memory(tensor: torch.Tensor) -> str:
    """Hash all memory from a tensor's first to its last element, on its device."""
    bits = torch.int64 if tensor.itemsize > 8 else torch_bits_dtype(tensor.dtype)
    memory = tensor.as_strided((extent(tensor),), (1,)).view(bits)
    if memory.device.type != "cpu":
        return weighted_sum(memory)
    raw: Any = memory.view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(raw)


def weighted_sum(memory: torch.Tensor) -> str:
    """Hash integers [n] on any device: the sum modulo 2**64 of each times a weight of its own.

    Temporaries take 16 bytes per element of a chunk, 256 MiB at most.
    """
    size = min(_CHUNK, len(memory))
    random = torch.Generator(memory.device).manual_seed(1)
    weights = torch.randint(
        -(1 << 62), 1 << 62, (size,), generator=random, dtype=torch.int64, device=memory.device
    )
    parts = (memory[start : start + _CHUNK] for start in range(0, len(memory), _CHUNK))
    sums = [int((part.long() * weights[: len(part)]).sum()) for part in parts]
    return xxhash.xxh3_128_hexdigest(str(sums).encode())
