"""The sender of a check, in a process of its own, so that its memory is its own.

Reads one JSON object from stdin. Writes lines of JSON to stdout: its resident memory without
weights, each sync, and the digests of its weights after the last one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from safetensors import safe_open

from delta_sender import DeltaSender
from engine_ext.wire import tensor_digest
from scripts.bench import synthetic_weights
from scripts.process_memory import peak_of, reset_peak, reset_peak_of


class Task(msgspec.Struct, frozen=True):
    """What to send, and which processes to watch.

    Attributes:
        options: keyword arguments of `DeltaSender`.
        watched: process ids by name.
    """

    checkpoint: str
    url: str
    density: float
    syncs: int
    options: dict[str, Any]
    watched: dict[str, int]


class Sync(msgspec.Struct, frozen=True):
    """One sync, as it was measured.

    Attributes:
        nnz, parts, wire_bytes, timings_ms: of its report.
        seconds: from the weights to the answer.
        cpu: CPU seconds, by process; of a rank without its main thread, in which the engine spins
            while it waits for a call.
        peak: bytes by which each process's resident memory grew at most, and `resident` before.
    """

    seconds: float
    nnz: int
    parts: int
    wire_bytes: int
    digest: str | None
    timings_ms: dict[str, float]
    cpu: dict[str, float]
    resident: dict[str, int]
    peak: dict[str, int]


def main() -> None:
    """Do one task."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    none = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    DeltaSender(task.url, none.items(), **task.options).close()  # loads the compiled loops
    print(json.dumps(reset_peak()), flush=True)
    tensors = _load(Path(task.checkpoint))
    rng = np.random.default_rng(1)
    watched = {"sender": psutil.Process(), **_processes(task.watched)}
    with DeltaSender(task.url, tensors.items(), **task.options) as sender:
        sender.sync(tensors.items())  # gets the plan and digests every tensor
        for _ in range(task.syncs):
            _perturb(tensors, task.density, rng)
            sync = _timed(sender, tensors, watched)
            print(msgspec.json.encode(sync).decode(), flush=True)
    digests = {
        name: tensor_digest(name, _bits(tensor), threads=2).hex()
        for name, tensor in tensors.items()
    }
    print(json.dumps(digests), flush=True)


def _timed(
    sender: DeltaSender,
    tensors: Mapping[str, torch.Tensor],
    watched: Mapping[str, psutil.Process],
) -> Sync:
    resident = {name: reset_peak_of(process.pid) for name, process in watched.items()}
    cpu = _cpu(watched)
    start = time.perf_counter()
    report = sender.sync(tensors.items())
    seconds = time.perf_counter() - start
    used = _cpu(watched)
    return Sync(
        seconds=seconds,
        nnz=report.nnz,
        parts=report.parts,
        wire_bytes=report.wire_bytes,
        digest=report.digest,
        timings_ms=report.engine["timings_ms"],
        cpu={name: used[name] - cpu[name] for name in watched},
        resident=resident,
        peak={name: peak_of(p.pid) - resident[name] for name, p in watched.items()},
    )


def _load(folder: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint into memory of this process, one copy of it."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensors[name] = opened.get_tensor(name).clone()
    return tensors


def _perturb(tensors: Mapping[str, torch.Tensor], density: float, rng: np.random.Generator) -> None:
    """Change some elements in place, as a training step does; see `synthetic_weights`."""
    for tensor in tensors.values():
        bits = _bits(tensor)
        for param in synthetic_weights.params(bits):
            bits[param] = synthetic_weights.change(bits[param], density, rng)


def _bits(tensor: torch.Tensor) -> synthetic_weights.Bits:
    return tensor.view(-1).view(torch.int16).numpy().view(np.uint16)


def _processes(pids: Mapping[str, int]) -> dict[str, psutil.Process]:
    return {name: psutil.Process(pid) for name, pid in pids.items()}


def _cpu(watched: Mapping[str, psutil.Process]) -> dict[str, float]:
    found = {}
    for name, process in watched.items():
        times = process.cpu_times()
        found[name] = times.user + times.system
        if name.startswith("rank"):  # threads that have ended are in the sum only
            [main] = [each for each in process.threads() if each.id == process.pid]
            found[name] -= main.user_time + main.system_time
    return found


if __name__ == "__main__":
    main()
