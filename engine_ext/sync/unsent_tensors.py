"""Notice that something has replaced tensors which no sync writes to.

An engine that discards its weights' memory, or resets them, loses more than a checkpoint has: plain
tensors such as slopes of attention, and parameters that the checkpoint omits. A full sync would not
bring them back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from engine_ext.errors import NotUpdatable
from engine_ext.model import (
    StorageIndex,
    hash_memory,
    is_constant,
    location,
    reachable_tensors,
)
from engine_ext.placement import Placement, uncertified
from engine_ext.sync.post_load import PostLoad


class UnsentTensors:
    """The tensors of the live model that no sync writes to, as they are when this is made.

    Tables that an engine restores or makes anew, and those that it changes while it generates, are
    left out.

    Args:
        index: of the traced model, with the tensors of `placement`.
    """

    def __init__(self, index: StorageIndex, placement: Placement, post_load: PostLoad) -> None:
        refused = uncertified(placement)
        written = {
            segment.live.name
            for name, placed in placement.items()
            if name not in refused
            for segment in placed.segments
        }
        recomputed = {path for one in post_load.recomputed for path in one.paths}
        tensors = [
            (f"{module}.{attribute}".lstrip("."), tensor)
            for module, _, attribute, tensor in reachable_tensors(post_load.model)
            if tensor.layout == torch.strided and not tensor.is_meta
        ]
        # By memory: other modules can have what is recomputed or rebuilt, too.
        computed = {
            tensor.untyped_storage().data_ptr()
            for path, tensor in tensors
            if path in recomputed or post_load.contains(path)
        }

        def is_sent(tensor: torch.Tensor) -> bool:
            around = (entry.name for entry in index.overlapping(tensor))
            return tensor.untyped_storage().data_ptr() in computed or any(
                name in written for name in around
            )

        self._known: dict[str, tuple[weakref.ref[torch.Tensor], tuple[object, ...], str]] = {
            path: (weakref.ref(tensor), location(tensor), hash_memory(tensor))
            for path, tensor in tensors
            if not is_constant(path, tensor) and not is_sent(tensor)
        }
        self._steady: frozenset[str] | None = None

    def expect_change(self) -> None:
        """Learn that something else than a sync is about to replace weights."""
        if self._steady is None:
            self._steady = frozenset(self._unchanged())

    def check(self) -> None:
        """Check that what has replaced weights has left these tensors as they are.

        Raises:
            NotUpdatable: it has not. Nothing was written.
        """
        lost = sorted((self._steady or frozenset()).difference(self._unchanged()))
        if lost:
            raise NotUpdatable(
                f"what has changed the weights outside of delta sync has also changed {lost[:8]}, "
                "which no sync writes to; restart the engine",
                tensors=lost,
            )

    def settle(self) -> None:
        """Learn that a full sync has been written."""
        self._steady = None

    def _unchanged(self) -> Iterator[str]:
        """Yield the paths of those that are as they were, or have been replaced by others."""
        for path, (reference, place, content) in self._known.items():
            tensor = reference()
            if tensor is None or location(tensor) != place or hash_memory(tensor) == content:
                yield path
