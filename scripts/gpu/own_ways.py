"""Time the ways in which a stock vLLM takes new weights from a trainer on its GPU."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from scripts.gpu.engine import GpuVllm, on_cpu
from scripts.gpu.sparse_apply import EXTENSION
from scripts.gpu.stream import Stream

ENVIRONMENT: Final = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for handles of GPU memory
_TIMES: Final = 2  # each way; the first time can take longer

Facts = dict[str, Any]


def flags() -> tuple[str, ...]:
    """Return the arguments of a stock engine whose ways are timed."""
    transfer = ("--weight-transfer-config", '{"backend":"ipc"}')
    return ("--worker-extension-cls", EXTENSION, *(() if on_cpu() else transfer))


def time_files(stock: GpuVllm, target: Path, density: float) -> list[Facts]:
    """Time the sparse apply, and a reload of a checkpoint, whose weights the engine has in the end.

    Args:
        stock: started with `flags` and `ENVIRONMENT`.
        target: the checkpoint.
        density: the share of the elements that the sparse apply changes.
    """
    ways: dict[str, Callable[[], float | None]] = {
        "sparse_nccl, apply alone": lambda: _sparse_apply(stock, target, density),
        "reload_weights": lambda: _reload(stock, target),
    }
    return [one for way, run in ways.items() for one in _timed(stock, way, run)]


def time_ipc(stock: GpuVllm, weights: dict[str, torch.Tensor]) -> list[Facts]:
    """Time a transfer of weights on the engine's GPU by handles of their memory."""
    with contextlib.suppress(Exception):  # seconds, which are not the transfer's
        importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
    return _timed(stock, "ipc", lambda: _send_by_ipc(stock, weights))


def _timed(stock: GpuVllm, way: str, run: Callable[[], float | None]) -> list[Facts]:
    """Return the milliseconds, and the client's token gaps, of each time; or why it failed."""
    found: list[Facts] = []
    with Stream(stock) as stream:
        for _ in range(_TIMES):
            began = time.monotonic()
            try:
                own_ms = run()
            except Exception as error:  # the other figures stay
                return [*found, {"way": way, "error": f"{type(error).__name__}: {error}"[-500:]}]
            ended = time.monotonic()
            wall = round(1e3 * (ended - began), 1) if own_ms is None else own_ms
            gaps = stream.gaps(began - 0.5, ended + 0.5)
            found.append({"way": way, "wall_ms": wall, "token_gap_ms": gaps})
    return found


def _reload(stock: GpuVllm, target: Path) -> None:
    _call(stock, "reload_weights", weights_path=str(target))


def _sparse_apply(stock: GpuVllm, target: Path, density: float) -> float:
    """Return the milliseconds without those in which the patches are made."""
    [[spent]] = _call(stock, "time_sparse_apply", checkpoint=str(target), density=density)
    return float(spent)


def _send_by_ipc(stock: GpuVllm, weights: dict[str, torch.Tensor]) -> None:
    """Pause generation and send all weights, by vLLM's own trainer."""
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    source: Any = [*weights.items()]
    trainer = ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
        ipc_engine.IPCTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(stock.url),
        source=source,
    )
    stock.post("/pause", params={"mode": "keep"}, timeout=60).raise_for_status()
    try:
        trainer.send_weights()
    finally:
        stock.post("/resume", timeout=60).raise_for_status()


def _call(stock: GpuVllm, method: str, **arguments: Any) -> Any:
    """Return the results of a method of all workers."""
    body = {"method": method, "kwargs": arguments}
    answer = stock.post("/collective_rpc", json=body, timeout=180)
    answer.raise_for_status()
    return answer.json()["results"]
