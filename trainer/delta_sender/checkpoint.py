"""Accept the base of a sender as tensors or as the folder of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from delta_sender.arguments import named_pairs
from delta_sender.diff.snapshot import NamedTensors
from engine_ext.files import checkpoint_entries, read_checkpoint, read_entries

__all__ = ["Base", "checkpoint_entries", "read_checkpoint", "read_entries", "tensors_of"]

# Tensors, also by name, or the folder of a checkpoint.
Base = NamedTensors | Mapping[str, torch.Tensor] | str | os.PathLike[str]


def tensors_of(base: Base) -> NamedTensors:
    """Return the tensors of a base.

    Raises:
        TypeError: It is something else.
        FileNotFoundError, ValueError: The folder cannot be read.
    """
    if isinstance(base, (str, os.PathLike)):
        return read_checkpoint(base)
    return named_pairs(base)
