"""The measurements of `scripts.bench.rebuild`: the rebuilt modules of a vLLM in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config

from engine_ext.adapters.vllm.worker import checkpoint
from engine_ext.kernels import bits_of, host_bits
from engine_ext.placement import HostElements
from scripts.bench.shadow_forms import ShadowForms
from scripts.process_memory import peak_resident, reset_peak


@dataclass(frozen=True)
class Change:
    """Elements of a tensor of a shadow, and other bits for them."""

    elements: HostElements
    new: np.ndarray[Any, Any]


class Modules:
    """The rebuilt modules of a worker, and a random change of each.

    Raises:
        RuntimeError: no module is rebuilt, because vLLM packs none on this machine.
    """

    def __init__(self, worker: Any, density: float) -> None:
        self._worker = worker
        model, config = worker.model_runner.get_model(), worker.vllm_config
        self._checkpoint = [(name, t.clone()) for name, t in checkpoint(model, config)]
        self._rebuilds = list(worker.delta_receiver._applier._rebuilds._by_path.values())
        if not self._rebuilds:
            raise RuntimeError("no module is rebuilt on this machine")
        rng = np.random.default_rng(0)
        self._changes = [
            {name: [_change(tensor, density, rng)] for name, tensor in one.shadow()}
            for one in self._rebuilds
        ]

    def figures(self, runs: int) -> dict[str, float]:
        """Rebuild every module `runs` times; return the columns of the table, times in ms."""
        pairs = list(zip(self._rebuilds, self._changes, strict=True))
        total, scratch = 0.0, 0.0
        largest = max(_shadow_bytes(one) for one in self._rebuilds)
        for one, changes in pairs:
            best = float("inf")
            for _ in range(runs):
                before = reset_peak()
                start = time.perf_counter()
                one.rebuild(changes)
                best = min(best, time.perf_counter() - start)
                if _shadow_bytes(one) == largest:
                    scratch = max(scratch, (peak_resident() - before) / largest)
            total += best
        full = sum(tensor.nbytes for _, tensor in self._checkpoint)
        kept = sum(
            tensor.nbytes
            for one in self._rebuilds
            for name, tensor in one.shadow()
            if name not in one.in_place
        )
        return {
            "modules": len(pairs),
            "ms": total * 1e3,
            "scratch": scratch,
            "shadow": kept / full,
            "parameters": sum(tensor.numel() for _, tensor in self._checkpoint),
        }

    def shadow_forms(self, folder: Path) -> ShadowForms:
        """Return what measures the shadow's forms, given the checkpoint's folder."""
        applier, config = self._worker.delta_receiver._applier, self._worker.vllm_config
        of_modules = applier._rebuilds._order
        modules = [(one.state.before, of_modules[one.path][1]) for one in self._rebuilds]

        def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            with set_current_vllm_config(config):
                applier._model.load_weights(weights)

        return ShadowForms(folder, modules, load)

    def reload(self) -> None:
        """Load the checkpoint with vLLM's own reload."""
        type(self._worker).reload_weights(self._worker, weights_iterator=iter(self._checkpoint))


def _shadow_bytes(one: Any) -> int:
    return sum(tensor.nbytes for _, tensor in one.shadow())


def _change(tensor: torch.Tensor, density: float, rng: np.random.Generator) -> Change:
    bits = host_bits(bits_of(tensor.detach().view(-1)))
    count = max(1, round(density * len(bits)))
    offsets = np.sort(rng.choice(len(bits), count, replace=False)).astype(np.int32)
    return Change(HostElements(bits, offsets), bits[offsets] ^ 1)
