"""Time the sender's passes on an accelerator, for `scripts.bench.sender --device cuda`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from delta_sender.diff.snapshot import Snapshot

Tensors = Mapping[str, torch.Tensor]


def missing_device(device: str) -> str | None:
    """Return why the device cannot be measured, and what to do; None if it can."""
    if device == "cpu" or torch.cuda.is_available():
        return None
    built = "has CUDA" if torch.version.cuda else "was built without CUDA"
    return (
        f"--device cuda: PyTorch {torch.__version__} {built} and finds no CUDA device; run this on "
        "a machine that has one, with a PyTorch built for it, or leave --device out"
    )


def measure(
    old: Tensors,
    new: Tensors,
    kept_on: str,
    nnz: int,
    fastest: Callable[[Callable[[], object]], float],
) -> dict[str, float]:
    """Return the seconds of each pass.

    Args:
        old, new: name -> tensor on the device.
        kept_on: where the snapshot is, one of `delta_sender.diff.device.SNAPSHOT_ON`.
        nnz: number of elements that differ.
        fastest: times a function.

    Raises:
        AssertionError: A pass gave a wrong result.
    """
    device = next(iter(old.values())).device
    words = [tensor.view(-1).view(torch.int16) for side in (old, new) for tensor in side.values()]
    snapshot = Snapshot(old.items(), "gap8_exp", kept_on)

    def read() -> None:
        for tensor in words:
            tensor.amax()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    read()
    times = {"read": fastest(read), "diff": fastest(lambda: list(snapshot.read(new.items())))}
    refreshes: list[float] = []

    def refresh(target: Tensors) -> float:
        # The device keeps what the last comparison has found: each refresh has its own.
        found = {key: change for key, change in snapshot.read(target.items()) if change is not None}
        if sum(change.nnz for change in found.values()) != nnz:
            raise AssertionError("the diff did not find every change")
        start = time.perf_counter()
        snapshot.advance(found)
        return time.perf_counter() - start

    fastest(lambda: refreshes.extend([refresh(new), refresh(old)]))
    if any(change is not None for _, change in snapshot.read(old.items())):
        raise AssertionError("the snapshot was not refreshed")
    return {**times, "refresh": min(refreshes)}
