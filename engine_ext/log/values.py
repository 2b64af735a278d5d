"""Follow the values of a model through the versions of a log, from its checkpoint on.

A version can send differences, new minus old bit patterns, or bits to flip. Only with the old
values they become values, which `ModelValues` keeps: those of the checkpoint, and of every element
changed since. The part's ``digest_part`` covers old and new values of all of its elements, so it
proves both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors import safe_open

from engine_ext.files import checkpoint_entries
from engine_ext.format import DecodedPart, Digest, ParamDelta, change_digest
from engine_ext.kernels import bits_of, host_bits
from engine_ext.log.catalog import CannotFold
from engine_ext.log.merged import MergedDelta, add_delta


class ModelValues:
    """The values of a model at one version of a log.

    Args:
        checkpoint: The folder of the checkpoint that the log starts from; its files are mapped.

    Raises:
        FileNotFoundError: It holds no checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._files = {name: path for path, name in checkpoint_entries(checkpoint)}
        self._changed: dict[str, MergedDelta] = {}

    def take(self, part: DecodedPart) -> list[ParamDelta]:
        """Advance by one part; return its deltas, all with values.

        Parts of one version name different tensors, so their order does not matter.

        Raises:
            CannotFold: It sends changes of other values, or without ``digest_part``, or of a tensor
                that is not in the checkpoint. The values are of no version then.
        """
        deltas, change = [], Digest.ZERO
        for delta in part.deltas:
            if delta.needs_old:
                assert delta.indices is not None
                indices = delta.indices.astype(np.int64)
                old = self._values(delta, indices)
                new = delta.new_bits(old, 0, delta.nnz, slice(None))
                change += change_digest(delta.name, indices, old, new)
                delta = replace(
                    delta, values=new, differences=False, cleared=None, new_checksum=None
                )
            deltas.append(delta)
        if any(delta.needs_old for delta in part.deltas):
            self._require(part, change)
        for delta in deltas:
            add_delta(self._changed, delta)
        return deltas

    def _require(self, part: DecodedPart, change: Digest) -> None:
        if part.manifest.digest_part != change.hex():
            raise CannotFold(
                f"version {part.manifest.current_version} sends changes of other values than "
                f"{self._checkpoint} and the versions since lead to; name the checkpoint that the "
                "log starts from"
            )

    def _values(self, delta: ParamDelta, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return the bit patterns of some elements, a new array [nnz]."""
        changed = self._changed.get(delta.name)
        if changed is None:
            return self._of_checkpoint(delta)[indices]
        values, known = changed.at(indices)
        return (
            values
            if known is None
            else np.where(known, values, self._of_checkpoint(delta)[indices])
        )

    def _of_checkpoint(self, delta: ParamDelta) -> NDArray[Any]:
        """Return the bit patterns of a tensor in the checkpoint, [numel], mapped."""
        path = self._files.get(delta.name)
        if path is None:
            raise CannotFold(f"{delta.name} is not in {self._checkpoint}")
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(delta.name)
        bits: NDArray[Any] = host_bits(bits_of(tensor.reshape(-1)))
        if (tuple(tensor.shape), bits.dtype) != (tuple(delta.shape), delta.values.dtype):
            raise CannotFold(f"{delta.name} has another shape or dtype in {self._checkpoint}")
        return bits
