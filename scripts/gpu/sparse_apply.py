"""Let a stock vLLM's worker time the apply of the ``sparse_nccl`` transfer backend.

The transfer itself needs a GPU for the trainer alone; what the worker does with the patches once
they are in its memory does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

EXTENSION: Final = f"{__name__}.SparseApply"  # for ``--worker-extension-cls``


class SparseApply:
    """Methods that each worker gets."""

    def time_sparse_apply(self, checkpoint: str, density: float) -> list[float]:
        """Overwrite random elements of all weights; return the milliseconds of the apply alone.

        Args:
            checkpoint: folder with the weights to take names, shapes and values from.
            density: share of the elements.
        """
        from vllm.model_executor.model_loader import checkpoint_weight_patch as own

        worker: Any = self
        model = worker.model_runner.get_model()
        device = next(model.parameters()).device
        patches = [
            own.CheckpointWeightPatch(name, shape, values.dtype, values, indices)
            for name, shape, values, indices in _random_elements(Path(checkpoint), density, device)
        ]
        _wait_for(device)
        began = time.perf_counter()
        own.load_checkpoint_weight_patches(model, patches)
        _wait_for(device)
        return [round(1e3 * (time.perf_counter() - began), 1)]


def _random_elements(
    checkpoint: Path, density: float, device: torch.device
) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """Yield the name and shape of each tensor with some elements and their flat indices, int32."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                whole = tensors.get_tensor(name)
                flat = whole.view(-1)
                chosen = torch.rand(flat.shape, device=device) < density
                indices = chosen.nonzero().view(-1).to(torch.int32)
                yield name, tuple(whole.shape), flat[indices], indices


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
