"""Read a live torch model as its checkpoint: names, shapes and dtypes, one tensor at a time.

Modules, in the order of the data's way:

- `model_state`: the tensors of a model, ties and wrappers.
- `adapters`: merges PEFT adapters into copies.
- `checkpoint_class`: which class of transformers a checkpoint is of.
- `plan`: which tensors of the model each tensor of the checkpoint is made from.
- `ranks`, `reader`: gather and convert them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from delta_sender.arguments import named_pairs
from delta_sender.diff.refills import StableGenerator
from delta_sender.diff.snapshot import NamedTensors
from delta_sender.models.checkpoint_class import empty_model
from delta_sender.models.model_state import unwrapped
from delta_sender.models.plan import Plan
from delta_sender.models.ranks import any_rank, world_failure
from delta_sender.models.reader import ModelTensors, from_stream
from engine_ext.files import read_checkpoint

__all__ = [
    "ModelTensors",
    "any_rank",
    "checkpoint_names",
    "empty_model",
    "named_tensors",
    "read_base",
    "world_failure",
]

Checkpoint = str | os.PathLike[str] | Mapping[str, torch.Tensor]


def named_tensors(
    model: nn.Module,
    base: Checkpoint | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
) -> ModelTensors:
    """Return the model's tensors as `save_pretrained` would write them, as an iterator.

    - DTensors (FSDP2, tensor parallel) are gathered one by one, on all ranks; see `ModelTensors`.
    - The fused experts of transformers 5 become the checkpoint's experts again.
    - Active PEFT adapters are merged as `merge_and_unload` does; the model is not changed.
    - Tied tensors come once, under the name that `save_pretrained` keeps; with a base, under every
      name that it has.

    Args:
        model: A transformers model, a PEFT model, or any module; DDP and torch.compile around it
            are looked through.
        base: The checkpoint that the engine was started with, as a folder or by name. Names and
            shapes must be its; tensors are cast to its dtypes, round to nearest even. Tensors that
            the model's class ignores when it loads (MTP layers) are given as the base has them.
        dtype: Without a base, cast floating-point tensors to this.
        quantize: How to quantise those tensors that the base has quantised, one of
            `delta_sender.diff.quantize.FORMS`. They are quantised in the model's own precision:
            float32 masters are not rounded first.

    Raises:
        ValueError: The model cannot be read, or names or shapes are not the base's. Nothing was
            gathered.
    """
    return ModelTensors(_plan(model, base, dtype, quantize))


def checkpoint_names(
    tensors: NamedTensors,
    model: nn.Module,
    base: Checkpoint | None = None,
    *,
    dtype: torch.dtype | None = None,
    frozen: bool | Iterable[str] = False,
    live: nn.Module | None = None,
    quantize: str | None = None,
) -> StableGenerator:
    """Return tensors that a framework gathers as the checkpoint's; see `named_tensors`.

    Args:
        tensors: The model's tensors, whole, under their names in the model, adapters merged. Each
            is copied, since many frameworks free it on the next step, and all are read, even if
            the iterator is closed early. Persistent buffers can be left out if `model` or `live`
            has their values: they are read there, last.
        model: The model, or one like it on the meta device. Names and shapes are taken, and the
            values of buffers that `tensors` leaves out.
        base: See `named_tensors`.
        dtype: See `named_tensors`.
        frozen: Which tensors can be left out, because they are not trained: they are then the
            base's. True: all parameters, but no buffer, as a buffer can be trained without a
            gradient (`e_score_correction_bias`). Otherwise patterns of names in the model, as of
            `fnmatch`; these name buffers, too.
        live: The model that is trained, to read buffers from, if `model` is on the meta device.
        quantize: See `named_tensors`; the precision is that of the given tensors.

    Raises:
        ValueError: Names or shapes are not the model's or the base's, or a tensor is left out.
    """
    plan = _plan(model, base, dtype, quantize)
    held = model if live is None else live
    return StableGenerator(from_stream(plan, tensors, frozen=frozen, live=held))


def _plan(
    model: nn.Module, base: Checkpoint | None, dtype: torch.dtype | None, quantize: str | None
) -> Plan:
    folder = Path(base) if isinstance(base, (str, os.PathLike)) else None
    return Plan(unwrapped(model), read_base(base), dtype, quantize, folder)


def read_base(base: Checkpoint | NamedTensors | None) -> Mapping[str, torch.Tensor] | None:
    """Return a checkpoint's tensors by name; those of a folder are mapped, and not read."""
    if isinstance(base, (str, os.PathLike)):
        return dict(read_checkpoint(Path(base)))
    return base if base is None or isinstance(base, Mapping) else dict(named_pairs(base))
