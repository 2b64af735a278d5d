"""Syncs to a live engine over a simulated link, beside a reload of the whole checkpoint."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import bench_codec
from engine_kinds import ENGINES
from engine_process import EngineError, EngineProcess
from reference_sender import DeltaSender
from tiny_models import build, load_tensors, save_checkpoint

_WIDTHS: Final = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_RUNS: Final = 3  # syncs of which the fastest is taken; each starts from the one before
_TIMEOUT_S: Final = 600.0

Tensors = dict[str, torch.Tensor]


class SlowTransport(httpx.HTTPTransport):
    """Lets a request through once its body would have crossed a link of so many bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        time.sleep(len(request.read()) / self._bytes_per_s)
        return super().handle_request(request)


def measure_engine(
    engine: str,
    layers: int,
    links: Mapping[str, float],
    encodings: Sequence[str],
    density: float,
    console: Console,
) -> dict[str, dict[str, float]]:
    """Milliseconds of a sync, by link and encoding; "reload" is the whole checkpoint.

    A reload is reckoned as the checkpoint's bytes on the link, and measured as the engine's own
    loading of it from the local disk.

    Raises:
        EngineError: The engine did not start or refused.
        SyncFailed: It refused a sync.
    """
    with tempfile.TemporaryDirectory() as scratch:
        base = build("qwen3", Path(scratch) / "base", num_hidden_layers=layers, **_WIDTHS)
        tensors = load_tensors(base)
        with ENGINES[engine](base, enable_delta=True) as process:
            found: dict[str, dict[str, float]] = {link: {} for link in links}
            version = 0
            for encoding in encodings:
                for link, speed in links.items():
                    milliseconds, tensors, version = _syncs(
                        process, tensors, version, encoding, speed, density
                    )
                    found[link][encoding] = milliseconds
            # Last, because the engine takes only full syncs afterwards.
            changed = save_checkpoint(base, Path(scratch) / "changed", tensors)
            reload_ms = _reload(process, engine, changed)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    for link, speed in links.items():
        found[link]["reload"] = round(reload_ms + nbytes / speed * 1e3, 1)
    table = Table("encoding", *links, box=box.MARKDOWN)
    console.print(f"{engine}, {nbytes:,} bytes, ms")
    for encoding in (*encodings, "reload"):
        table.add_row(encoding, *(f"{found[link][encoding]:.0f}" for link in links))
    console.print(table)
    return found


def _syncs(
    process: EngineProcess,
    tensors: Tensors,
    version: int,
    encoding: str,
    speed: float,
    density: float,
) -> tuple[float, Tensors, int]:
    """Milliseconds of the fastest of some syncs; what the engine holds then, and its version."""
    times = []
    with httpx.Client(transport=SlowTransport(speed), timeout=_TIMEOUT_S) as client:
        with DeltaSender(
            process.url,
            tensors.items(),
            base_version=version,
            encoding=encoding,
            client=client,
            bucket_bytes=16 << 20,
        ) as sender:
            sender.sync(tensors.items())  # asks for the plan, and digests all
            for run in range(_RUNS):
                tensors = _changed(tensors, density, np.random.default_rng([version, run]))
                start = time.perf_counter()
                report = sender.sync(tensors.items())
                times.append(time.perf_counter() - start)
                if report.full:
                    raise EngineError("the engine did not hold what it was sent")
            return round(min(times) * 1e3, 1), tensors, sender.version


def _changed(tensors: Tensors, density: float, rng: np.random.Generator) -> Tensors:
    """The tensors with some elements moved, as in `bench_codec`."""
    changed = {}
    for name, tensor in tensors.items():
        bits = tensor.contiguous().view(-1).view(torch.int16).numpy().view(np.uint16)
        moved = bench_codec.change(bits, density, rng).view(np.int16)
        changed[name] = torch.from_numpy(moved).view(torch.bfloat16).view(tensor.shape)
    return changed


def _reload(process: EngineProcess, engine: str, checkpoint: Path) -> float:
    """Milliseconds of the engine's own loading of a whole checkpoint."""
    path, body = _RELOADS[engine]
    start = time.perf_counter()
    answer = process.post(path, json=body(str(checkpoint)), timeout=_TIMEOUT_S)
    if answer.status_code != 200:
        raise EngineError(f"HTTP {answer.status_code}: {answer.text[:500]}")
    return (time.perf_counter() - start) * 1e3


_RELOADS: Final[dict[str, Any]] = {
    "vllm": (
        "/collective_rpc",
        lambda folder: {"method": "reload_weights", "kwargs": {"weights_path": folder}},
    ),
    "sglang": ("/update_weights_from_disk", lambda folder: {"model_path": folder}),
}
