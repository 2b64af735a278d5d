"""The sender of a check, in a process of its own, so that its memory is its own.

Reads one JSON object from stdin. Writes lines of JSON to stdout: its resident memory without
weights, each sync, and the digests of its weights after the last one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from safetensors import safe_open

from delta_sender import DeltaSender
from engine_ext.format import tensor_digest
from scripts.bench import synthetic_weights
from scripts.bench.scaling.processes import cpu_seconds
from scripts.bench.scaling.timing import wait_until_idle, write_free_pages
from scripts.process_memory import peak_of, reset_peak, reset_peak_of

_FREE_BYTES = 1 << 30  # about what sender and ranks take for the largest model


class Task(msgspec.Struct, frozen=True):
    """What to send, and which processes to watch.

    Attributes:
        options: keyword arguments of `DeltaSender`.
        watched: process ids by name.
        engine: process ids of the whole engine.
    """

    checkpoint: str
    url: str
    density: float
    syncs: int
    options: dict[str, Any]
    watched: dict[str, int]
    engine: list[int]


class Sync(msgspec.Struct, frozen=True):
    """One sync, as it was measured.

    Attributes:
        nnz, parts, wire_bytes, timings_ms: of its report.
        seconds: from the weights to the answer.
        others: CPU seconds that processes which have no part in the sync took.
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
    others: float
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
    pids = {"sender": os.getpid(), **task.watched}
    engine = [psutil.Process(pid) for pid in task.engine]
    with DeltaSender(task.url, tensors.items(), **task.options) as sender:
        sender.sync(tensors.items())  # gets the plan and digests every tensor
        for _ in range(task.syncs):
            _perturb(tensors, task.density, rng)
            wait_until_idle()
            write_free_pages(_FREE_BYTES)
            sync = _timed(sender, tensors, pids, engine)
            print(msgspec.json.encode(sync).decode(), flush=True)
    digests = {
        name: tensor_digest(name, _bits(tensor), threads=2).hex()
        for name, tensor in tensors.items()
    }
    print(json.dumps(digests), flush=True)


def _timed(
    sender: DeltaSender,
    tensors: Mapping[str, torch.Tensor],
    pids: Mapping[str, int],
    engine: Sequence[psutil.Process],
) -> Sync:
    resident = {name: reset_peak_of(pid) for name, pid in pids.items()}
    watched = {name: pid for name, pid in pids.items() if name != "sender"}
    cpu, others = cpu_seconds(watched), _others(engine)
    start = time.perf_counter()
    report = sender.sync(tensors.items())
    seconds = time.perf_counter() - start
    used, others = cpu_seconds(watched), _others(engine) - others
    return Sync(
        seconds=seconds,
        nnz=report.nnz,
        parts=report.parts,
        wire_bytes=report.wire_bytes,
        digest=report.digest,
        timings_ms=report.engine["timings_ms"],
        others=others,
        cpu={name: used[name] - cpu[name] for name in used},
        resident=resident,
        peak={name: peak_of(pid) - resident[name] for name, pid in pids.items()},
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


def _others(engine: Sequence[psutil.Process]) -> float:
    """Return CPU seconds of all processes of the machine but this one and the engine's."""
    machine = psutil.cpu_times()
    busy = machine.user + machine.nice + machine.system + machine.irq + machine.softirq
    own = sum(sum(one.cpu_times()[:2]) for one in (psutil.Process(), *engine))
    return float(busy - own)


if __name__ == "__main__":
    main()
