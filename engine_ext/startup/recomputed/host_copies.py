"""Keep unprocessed weights in pinned host memory, and bring a module's to its device when needed.

On a GPU they would take twice the memory of fp8 weights. A sync writes to them in host memory; to
rebuild a module they are uploaded, a module at a time.
"""

from __future__ import annotations

from typing import Final

import torch

from engine_ext.model import extent

_CHUNK: Final = 1 << 28  # bytes that are pinned at once, at least
_ALIGNMENT: Final = 64


def belongs_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether a copy of a tensor is to be kept in host memory: it is on an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


class HostMemory:
    """Pinned host memory for copies that stay.

    PyTorch rounds what it pins up to a power of two, so that a tensor could take twice its size. So
    many share a chunk.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[torch.Tensor, int]] = []  # and how much of each is used

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor, with its layout but for the device.

        It is contiguous if elements of the tensor share memory, as those of an expanded one do.
        """
        layout = _writable(tensor)
        nbytes = extent(layout) * tensor.element_size()
        memory = self._take(nbytes)[:nbytes].view(tensor.dtype)
        return memory.as_strided(layout.shape, layout.stride()).copy_(tensor.detach())

    def _take(self, nbytes: int) -> torch.Tensor:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for number, (chunk, used) in enumerate(self._chunks):
            if used + size <= chunk.nbytes:
                self._chunks[number] = chunk, used + size
                return chunk[used:]
        chunk = _pinned(max(_CHUNK, 1 << max(size - 1, 0).bit_length()))
        self._chunks.append((chunk, size))
        return chunk


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout in host memory that is never written to.

    So the system gives it no memory; it has an address of its own all the same.
    """
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on a device, with the layout that `HostMemory.copy` gives it.

    `torch.Tensor.clone` would close the gaps of one that is not dense.
    """
    strides = _writable(tensor).stride()
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
    return copy.copy_(tensor.detach())


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data in whose layout each element has memory of its own."""
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    shared = any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return bare.contiguous() if shared else bare


def _pinned(nbytes: int) -> torch.Tensor:
    """Return pinned host memory, uint8 [nbytes]; pageable if the system limits what is pinned."""
    if torch.cuda.is_available():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            pass
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
