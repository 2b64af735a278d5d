"""Accept the base of a sender as tensors or as the folder of a checkpoint."""

from __future__ import annotations

import os

from delta_sender.snapshot import NamedTensors
from engine_ext.files import checkpoint_entries, read_checkpoint, read_entries

__all__ = ["Base", "checkpoint_entries", "read_checkpoint", "read_entries", "tensors_of"]

Base = NamedTensors | str | os.PathLike[str]  # tensors, or the folder of a checkpoint


def tensors_of(base: Base) -> NamedTensors:
    """Return the tensors of a base."""
    return read_checkpoint(base) if isinstance(base, (str, os.PathLike)) else base
