"""Sync a live model on all ranks of a training job: `sync_model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch import nn

from delta_sender.models import Checkpoint, named_tensors
from delta_sender.models.ranks import job_group, world_failure
from delta_sender.publish.multi_sender import MultiSender
from delta_sender.publish.sender import DeltaSender
from delta_sender.results import SyncReport

_Result = TypeVar("_Result")


@overload
def sync_model(
    sender: DeltaSender,
    model: nn.Module,
    base: Checkpoint | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
) -> SyncReport: ...


@overload
def sync_model(
    sender: MultiSender,
    model: nn.Module,
    base: Checkpoint | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
) -> dict[str, SyncReport]: ...


@overload
def sync_model(
    sender: None,
    model: nn.Module,
    base: Checkpoint | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
) -> None: ...


def sync_model(
    sender: DeltaSender | MultiSender | None,
    model: nn.Module,
    base: Checkpoint | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
) -> SyncReport | dict[str, SyncReport] | None:
    """Send what changed in a live model; to be called on every rank, at the same step.

    One rank gives the sender, the others None; they take part in gathering sharded parameters.
    If one rank fails, all raise. Only if gathering itself fails on a rank, or a rank dies then, do
    the others wait until torch.distributed notices. Those that have gathered wait up to two hours
    for the sender, whatever the timeout of the training's group is.

    Args:
        sender: The sender, on the rank that has it.
        model: See `named_tensors`.
        base: See `named_tensors`.
        dtype: See `named_tensors`.
        quantize: See `named_tensors`; ranks without a sender need no base for it.

    Returns:
        What the sender's `sync` returns; None without a sender.

    Raises:
        SyncError: On the sender's rank, see `DeltaSender.sync`.
        ValueError: The model cannot be read, or is not the base's.
        RuntimeError: Another rank has failed.
    """
    form = quantize if sender is not None or base is not None else None
    tensors = on_all_ranks(lambda: named_tensors(model, base, dtype=dtype, quantize=form))

    def run() -> SyncReport | dict[str, SyncReport] | None:
        if sender is None:
            tensors.take_part()
            return None
        try:
            return sender.sync(tensors)
        finally:
            tensors.close()

    return on_all_ranks(run, lambda: not tensors.is_broken)


def on_all_ranks(
    action: Callable[[], _Result], can_agree: Callable[[], bool] = lambda: True
) -> _Result:
    """Run `action` on every rank; raise on every rank if it raises on one.

    The ranks that are done wait for the others in a group of their own, see `job_group`.

    Args:
        action: What to run.
        can_agree: Asked after an error: whether the other ranks wait for no other collective.
    """
    job_group()
    try:
        result = action()
    except Exception:
        if can_agree():
            world_failure(failed=True)
        raise
    rank = world_failure(failed=False)
    if rank is not None:
        raise RuntimeError(f"the sync failed on rank {rank}; see the error there")
    return result
