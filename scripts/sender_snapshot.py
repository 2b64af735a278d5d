"""What the reference sender knows of the weights that engines hold, and how new ones differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine_ext.compare import compare
from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype, torch_bits_dtype
from engine_ext.wire.part import ParamDelta
from engine_ext.wire.positions import position_bytes

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Changes = dict[str, ParamDelta]  # by name in the snapshot; private copies


class Snapshot:
    """A model, kept as bit patterns on the CPU.

    Args:
        base: Tensors in checkpoint coordinates; copied. Of tied ones (one storage, several names)
            one copy is kept, under the first name.
        encoding: One of `engine_ext.wire.positions.ENCODINGS`; where a sparse param would take
            more bytes than a dense one, it is dense.

    Attributes:
        tied: further name -> name in the snapshot.
    """

    def __init__(self, base: NamedTensors, encoding: str) -> None:
        self._encoding = encoding
        self._dense: dict[str, ParamDelta] = {}
        self.tied: dict[str, str] = {}
        for name, tensor, first in _with_ties(base):
            if first is None:
                self._dense[name] = self._keep(_to_bits(name, tensor))
            else:
                self.tied[name] = first

    def __iter__(self) -> Iterator[str]:
        return iter(self._dense)

    def __contains__(self, name: object) -> bool:
        return name in self._dense

    @property
    def nbytes(self) -> int:
        return sum(dense.values.nbytes for dense in self._dense.values())

    def kept(self, name: str) -> str:
        """The name in the snapshot of what is sent under `name`."""
        return self.tied.get(name, name)

    def read(self, tensors: NamedTensors) -> Changes:
        """Find out what is not as in the snapshot.

        Raises:
            ValueError: Names, shapes or dtypes are not the base's, or tied tensors differ.
        """
        changes: Changes = {}
        seen: set[str] = set()
        for name, tensor, first in _with_ties(tensors):
            known = name in self._dense or name in self.tied
            kept = self.kept(name if known else first or name)
            if kept not in self._dense:
                raise ValueError(f"{name}: not in the base")
            old, new = self._dense[kept], replace(_to_bits(name, tensor), name=kept)
            if (new.dtype, new.shape) != (old.dtype, old.shape):
                raise ValueError(
                    f"{name}: {new.dtype} {new.shape}, but {old.dtype} {old.shape} in the base"
                )
            if kept in seen:
                if not np.array_equal(new.values, self.image(kept, changes).values):
                    raise ValueError(f"{name}: differs from {kept}, which it is tied to or repeats")
                continue
            seen.add(kept)
            if change := self._difference(old, new):
                changes[kept] = change
        if missing := self._dense.keys() - seen:
            raise ValueError(f"missing, but in the base: {', '.join(sorted(missing))}")
        return changes

    def image(self, kept: str, changes: Changes) -> ParamDelta:
        """A tensor of the snapshot with `changes` made, dense; to read only, it may be no copy."""
        old, change = self._dense[kept], changes.get(kept)
        if change is None or change.indices is None:
            return change or old
        values = old.values.copy()
        values[change.indices] = change.values
        return replace(old, values=values)

    def between(self, before: Changes, after: Changes) -> Changes:
        """What turns the snapshot with `before` made into the snapshot with `after` made."""
        if not before:
            return after
        found = {kept: change for kept, change in after.items() if kept not in before}
        for kept in before:
            change = self._difference(self.image(kept, before), self.image(kept, after))
            if change is not None:
                found[kept] = change
        return found

    def payload_bytes(self, delta: ParamDelta) -> int:
        """Bytes of a param's positions and values, before compression."""
        if delta.indices is None:
            return delta.values.nbytes
        return position_bytes(self._encoding, delta.indices) + delta.values.nbytes

    def advance(self, changes: Changes) -> None:
        """Make the committed `changes`."""
        for kept, change in changes.items():
            where = slice(None) if change.indices is None else change.indices
            self._dense[kept].values[where] = change.values

    def _keep(self, dense: ParamDelta) -> ParamDelta:
        return replace(dense, values=dense.values.copy())

    def _difference(self, old: ParamDelta, new: ParamDelta) -> ParamDelta | None:
        """The elements of `new` that are not as in `old`, copied; both are dense."""
        found = compare(old.values, new.values)
        if not found.indices.size:
            return None
        sparse = replace(new, indices=found.indices, values=found.new)
        dense = self.payload_bytes(sparse) >= new.values.nbytes
        return replace(new, values=new.values.copy()) if dense else sparse


class MappedSnapshot(Snapshot):
    """For one sync: what is mapped from files is neither copied nor changed."""

    def advance(self, changes: Changes) -> None:
        pass

    def _keep(self, dense: ParamDelta) -> ParamDelta:
        return dense


def values_at(dense: np.ndarray[Any, Any], change: ParamDelta) -> np.ndarray[Any, Any]:
    """The values of a tensor where a change of it is made."""
    return dense if change.indices is None else dense[change.indices]


def _with_ties(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Yield (name, tensor, earlier name of the same storage and view, if any).

    A weak reference keeps a freed storage's identity, not its memory, from being reused.
    """
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        first = names.setdefault((storage, *view), name)
        yield name, tensor, first if first != name and tensor.numel() else None


def _to_bits(name: str, tensor: torch.Tensor) -> ParamDelta:
    """The tensor as a dense param: unsigned ints of its dtype's width, [numel], row-major.

    A contiguous CPU tensor is not copied.
    """
    dtype = NAME_OF_TORCH.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{name}: deltas do not carry {tensor.dtype}")
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch_bits_dtype(tensor.dtype))
    return ParamDelta(name, dtype, tuple(tensor.shape), None, bits.numpy().view(bits_dtype(dtype)))
