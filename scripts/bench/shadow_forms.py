"""Part of `scripts.bench.rebuild`: two forms of the shadow, and what each takes.

A module is rebuilt from its weights before processing. They can be kept as the loader left them,
fused and sharded, on every rank: then a rebuild copies them. Or the checkpoint's files are mapped
read-only, and what has changed since start-up is kept beside them as positions and values: then a
rebuild puts both together, and the loader fuses and shards the result.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open

from engine_ext.kernels import bits_of, host_bits
from engine_ext.startup import ModuleCopy

CHANGED: Final = (0.02, 0.1, 0.33, 1.0)
_POSITION: Final = np.dtype(np.int32)

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]
Overlay = dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


class ShadowForms:
    """The modules that a vLLM on one rank rebuilds, and its checkpoint's files.

    Args:
        folder: of the checkpoint.
        modules: before processing, each with the names of its checkpoint tensors.
        load: vLLM's loader of the model as it was before processing.
    """

    def __init__(
        self, folder: Path, modules: list[tuple[torch.nn.Module, Collection[str]]], load: Load
    ) -> None:
        self._files = sorted(folder.glob("*.safetensors"))
        self._modules, self._load = modules, load
        self._names = {name for _, names in modules for name in names}

    def figures(self, runs: int) -> dict[str, Any]:
        """Return the shortest times of `runs` in ms, and bytes for each weight, of both forms."""
        self._copy()
        layout = min(self._timed(self._copy) for _ in range(runs))
        mapped = []
        for share in CHANGED:
            overlay = self._overlay(share)
            kept = sum(p.nbytes + v.nbytes for p, v in overlay.values())
            load = functools.partial(self._put_together, overlay)
            load()
            warm = min(self._timed(load) for _ in range(runs))
            for file in self._files:
                _drop_from_page_cache(file)
            row = {"changed": share, "ms": warm, "overlay": kept / self._numel()}
            mapped.append(row | {"cold_ms": self._timed(load)})
        return {"layout_ms": layout, "mapped": mapped}

    def _timed(self, run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    def _copy(self) -> None:
        for module, _ in self._modules:
            ModuleCopy(module, {}).release()

    def _put_together(self, overlay: Overlay) -> None:
        mapped = self._mapped()

        def changed(name: str) -> torch.Tensor:
            tensor = mapped[name].clone()
            positions, values = overlay[name]
            host_bits(bits_of(tensor.view(-1)))[positions] = values
            return tensor

        for _, names in self._modules:
            self._load((name, changed(name)) for name in names)

    def _overlay(self, share: float) -> Overlay:
        rng = np.random.default_rng(0)
        found = {}
        for name, tensor in self._mapped().items():
            bits = host_bits(bits_of(tensor.view(-1)))
            positions = np.flatnonzero(rng.random(len(bits)) < share).astype(_POSITION)
            found[name] = (positions, bits[positions] ^ 1)
        return found

    def _mapped(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for file in self._files:
            with safe_open(file, framework="pt") as tensors:
                of_modules = self._names.intersection(tensors.keys())
                found |= {name: tensors.get_tensor(name) for name in of_modules}
        return found

    def _numel(self) -> int:
        return sum(tensor.numel() for tensor in self._mapped().values())


def _drop_from_page_cache(file: Path) -> None:
    """Let the next read of a file come from the disk; nothing may have it mapped."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
