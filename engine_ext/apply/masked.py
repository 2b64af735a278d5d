"""The masked apply: a NaN-masked overwrite through the engine's own loader.

Each param is made a full-shape tensor with NaN at unchanged positions and given to the model's
``load_weights``, while ``Tensor.copy_`` and ``Tensor.fill_`` are replaced: a copy into live
memory overwrites only where the source is not NaN. It is the base line of the field, and the
oracle for faster ways. What it cannot carry is found by `refusal` before anything is written:
values that are NaN, dtypes without NaN, loaders that write by other means, and every tensor whose
placement is not certified. After the write the applier reads the touched elements back.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from engine_ext.dtypes import TORCH_DTYPE, torch_bits_dtype
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.segments import Placed, Status
from engine_ext.tracing.trace import COPY_REPLACED, LoadWeights
from engine_ext.wire import ParamDelta

# torch compares and selects these for NaN; the 8-bit floats it does not.
_MASKABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def refusal(delta: ParamDelta, placed: Placed) -> str | None:
    """Why the masked apply cannot carry this delta exactly, or None if it can.

    Args:
        delta: the decoded param; shape and dtype agree with `placed`.
        placed: the tensor's certified placement.
    """
    if placed.status is not Status.EXACT:
        return placed.reason or f"its live copy is {placed.status.value}"
    if delta.differences:
        return "its values are differences, and the loader takes values; send new ones"
    if delta.indices is None:
        return None
    dtype = TORCH_DTYPE[delta.dtype]
    if not all(segment.python_copy for segment in placed.segments):
        return "the engine's loader does not write it through Tensor.copy_"
    if dtype not in _MASKABLE:
        return f"{delta.dtype} has no NaN that could mark unchanged elements"
    if bool(_bits_tensor(delta.values, torch_bits_dtype(dtype)).view(dtype).isnan().any()):
        return "a new value is NaN, which marks unchanged elements"
    return None


def densify(delta: ParamDelta) -> torch.Tensor:
    """The delta as a tensor of the checkpoint's shape and dtype, NaN at unchanged positions."""
    dtype = TORCH_DTYPE[delta.dtype]
    bits = torch_bits_dtype(dtype)
    if delta.indices is None:
        return _bits_tensor(delta.values, bits).view(dtype).reshape(delta.shape)
    flat = torch.full((delta.numel,), float("nan"), dtype=dtype)
    flat.view(bits)[torch.from_numpy(delta.indices)] = _bits_tensor(delta.values, bits)
    return flat.reshape(delta.shape)


def _bits_tensor(values: np.ndarray, bits: torch.dtype) -> torch.Tensor:
    # A copy, because the wire's buffers are read-only and torch has no read-only tensors.
    return torch.from_numpy(values.copy()).view(bits)


@torch.no_grad()
def apply_masked(
    load_weights: LoadWeights,
    index: StorageIndex,
    deltas: Sequence[ParamDelta],
    chunk_bytes: int,
) -> None:
    """Write the deltas into the live model.

    Args:
        load_weights: the model's own loader.
        index: the model's storage index.
        deltas: params that `refusal` has let through, each name once.
        chunk_bytes: as of `chunks`.

    Raises:
        Exception: whatever the loader raises; some elements may be written then.
    """
    for chunk in chunks(deltas, chunk_bytes):
        with masked_copies(index, dense=chunk[0].indices is None):
            load_weights(iter([(d.name, densify(d)) for d in chunk]))


def merge(deltas: Iterable[ParamDelta]) -> list[ParamDelta]:
    """The same elements with each name once: a loader may keep only the last tensor of a name.

    Args:
        deltas: sparse where a name comes more than once, and without an element in common.
    """
    by_name: dict[str, list[ParamDelta]] = defaultdict(list)
    for delta in deltas:
        by_name[delta.name].append(delta)
    return [found[0] if len(found) == 1 else _merged(found) for found in by_name.values()]


def _merged(deltas: Sequence[ParamDelta]) -> ParamDelta:
    indices = np.concatenate([d.indices for d in deltas if d.indices is not None])
    order = np.argsort(indices)
    values = np.concatenate([d.values for d in deltas])
    first = deltas[0]
    return ParamDelta(first.name, first.dtype, first.shape, indices[order], values[order])


def chunks(deltas: Sequence[ParamDelta], chunk_bytes: int) -> Iterator[list[ParamDelta]]:
    """What each call of the loader is given: sparse params first, then dense ones.

    Args:
        deltas: the params.
        chunk_bytes: bytes of full-shape tensors in one chunk at most; one tensor may exceed it.
    """
    yield from _cut([d for d in deltas if d.indices is not None], chunk_bytes)
    yield from _cut([d for d in deltas if d.indices is None], chunk_bytes)


def _cut(deltas: Sequence[ParamDelta], chunk_bytes: int) -> Iterator[list[ParamDelta]]:
    chunk: list[ParamDelta] = []
    size = 0
    for delta in deltas:
        nbytes = delta.numel * TORCH_DTYPE[delta.dtype].itemsize
        if chunk and size + nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(delta)
        size += nbytes
    if chunk:
        yield chunk


@contextmanager
def masked_copies(index: StorageIndex, *, dense: bool = False) -> Iterator[None]:
    """Replace ``Tensor.copy_`` and ``Tensor.fill_`` for this thread while the loader runs.

    A copy into live memory overwrites only where the source is not NaN, and a fill of live
    memory (padding, at load time) does nothing. Every other call, and every call of another
    thread, does what it always did.

    Args:
        index: what is live memory.
        dense: the loader is given whole tensors: their copies overwrite everything, NaNs too.
    """
    with COPY_REPLACED:
        owner = threading.get_ident()
        original_copy = torch.Tensor.copy_
        original_fill = torch.Tensor.fill_

        def copy_(
            self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False
        ) -> torch.Tensor:
            if dense or threading.get_ident() != owner or index.find(self) is None:
                return original_copy(self, src, non_blocking)
            source = src.to(device=self.device, dtype=self.dtype)
            live = self.detach()
            torch.where(source.isnan(), live, source, out=live)
            return self

        def fill_(self: torch.Tensor, value: float) -> torch.Tensor:
            if threading.get_ident() != owner or index.find(self) is None:
                return original_fill(self, value)
            return self

        torch.Tensor.copy_ = copy_  # type: ignore[method-assign, assignment]
        torch.Tensor.fill_ = fill_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.Tensor.copy_ = original_copy  # type: ignore[method-assign]
            torch.Tensor.fill_ = original_fill  # type: ignore[method-assign]
