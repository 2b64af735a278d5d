"""Compare the model with real syncs: a live engine and a sender, both on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from engine_ext.resources import usable_cores
from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.memory import memory
from scripts.bench.scaling.model import predict
from scripts.bench.scaling.processes import roles
from scripts.bench.scaling.sender_process import Sync, Task
from scripts.bench.scaling.setups import Model, Setup
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.live_engine.registry import ENGINES
from scripts.live_engine.tiny_models import build

# Of a Qwen3, by name; in the largest one layers and widths are those of Qwen2.5-1.5B.
_SMALL: Final = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}
SIZES: Final[dict[str, dict[str, int]]] = {
    "0.1B": {**_SMALL, "num_hidden_layers": 3},
    "0.5B": {**_SMALL, "num_hidden_layers": 34},
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 64000,
        "num_hidden_layers": 28,
    },
}
# Between those that are checked; `measure_one_host` measures it.
BETWEEN: Final = "0.8B"
_BETWEEN_SIZES: Final = {**SIZES["1.5B"], "num_hidden_layers": 13}
# GiB that must be free: model and snapshot, the ranks' shards, their caches, and the processes.
NEEDED: Final = {"0.1B": 5, "0.5B": 7, BETWEEN: 9, "1.5B": 13}
# A cache of 16 blocks is enough, as nothing is generated; vLLM would take 1 GiB on each rank.
_SMALL_CACHE: Final = {"vllm": ("--num-gpu-blocks-override", "16"), "sglang": ()}
BUCKET_BYTES: Final = 8 << 20
SYNCS: Final = 10  # of each size, of which the least of each time is taken


@dataclass(frozen=True)
class Checked:
    """What was measured of one model, and what the model says of it.

    Attributes:
        base: resident bytes of the sender without weights.
        wrong: checkpoint tensors whose live bytes are not the sender's, by name.
    """

    setup: Setup
    base: int
    syncs: Sequence[Sync]
    wrong: list[str]

    def rows(self, costs: Constants) -> list[tuple[str, float, float]]:
        """Return what is compared, and its measured and predicted seconds or bytes.

        Times are the least of all syncs, each by itself, as the model's costs are; memory is that
        of the middle one. The model has the cores that other processes left to the fastest one.
        """
        said, needed = predict(self.setup, costs), memory(self.setup, costs)
        beside_others = predict(replace(self.setup, taken=self.others), costs)
        rank_names = [name for name in self.syncs[0].cpu if name.startswith("rank")]
        pause = min(sync.timings_ms["pause_ms"] for sync in self.syncs)
        sender_cpu = min(sync.cpu["sender"] for sync in self.syncs)
        rank_cpu = min(sum(sync.cpu[name] for name in rank_names) for sync in self.syncs)
        found = [
            ("sync, s", self.fastest.seconds, beside_others.seconds),
            ("generation paused, s", pause / 1e3, said.pause_s),
            ("bytes sent", float(self.fastest.wire_bytes), said.wire_bytes),
            ("sender, CPU s", sender_cpu, said.cpu["sender"]),
            ("rank staging, CPU s", rank_cpu / len(rank_names), said.cpu["rank"]),
        ]
        weights = 2 * self.setup.model.nbytes  # the trainer's, and the snapshot
        growth = needed.changes + needed.parts
        sender = self._peak(["sender"])
        found.append(("sender, peak memory", sender, self.base + weights + growth))
        for what, names, grows in (
            ("HTTP process", ["server"], needed.spool),
            ("rank", rank_names, needed.staged + needed.decoded),
        ):
            before = self._resident(names)
            found.append((f"{what}, peak memory", self._peak(names), before + grows))
        return found

    @property
    def fastest(self) -> Sync:
        """The sync whose time counts."""
        return min(self.syncs, key=lambda sync: sync.seconds)

    @property
    def others(self) -> float:
        """Cores that other processes had in that sync."""
        return max(0.0, self.fastest.others / self.fastest.seconds)

    def _resident(self, names: Sequence[str]) -> float:
        """Return the middle sync's mean of some processes, before it."""
        values = sorted(sum(sync.resident[n] for n in names) / len(names) for sync in self.syncs)
        return float(values[len(values) // 2])

    def _peak(self, names: Sequence[str]) -> float:
        values = sorted(
            max(sync.resident[name] + sync.peak[name] for name in names) for sync in self.syncs
        )
        return float(values[len(values) // 2])


def free_gib() -> float:
    """Return the memory of this machine that is available, in GiB."""
    return float(psutil.virtual_memory().available) / (1 << 30)


def check(
    name: str,
    scratch: Path,
    *,
    engine: str,
    density: float,
    syncs: int,
    ranks: int,
    posts_in_flight: int,
    encoding: str,
    step: Callable[[str], None],
) -> Checked:
    """Sync one of `SIZES` or `BETWEEN` several times, and compare all live bytes with the sender's.

    Args:
        engine: of `scripts.live_engine.registry`.
        ranks, posts_in_flight, encoding: see `Setup`.
        step: called before each step, with what it does.

    Raises:
        EngineError: The engine did not start, or the sender failed.
        MemoryError: Too little memory is free.
    """
    if (free := free_gib()) < NEEDED[name]:
        raise MemoryError(f"{name} needs {NEEDED[name]} GiB of free memory, {free:.1f} are free")
    step(f"{name}: writing the checkpoint")
    kind = ENGINES[engine]
    folder = scratch / name
    _write(name, folder)
    try:
        step(f"{name}: starting the engine")
        log = scratch / f"{name}.log"
        with kind(
            folder, tp=ranks, enable_delta=True, extra_args=_SMALL_CACHE[engine], log_path=log
        ) as process:
            step(f"{name}: {syncs} syncs")
            options = {
                "encoding": encoding,
                "bucket_bytes": BUCKET_BYTES,
                "posts_in_flight": posts_in_flight,
            }
            base, measured, digests = _send(process, folder, density, syncs, options)
            step(f"{name}: comparing all live bytes")
            live = process.get("/delta_digest", params={"scan": "true"}).json()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = live["tensors"]
    wrong = sorted(set(live["corrupted"]) | {n for n in digests if digests[n] != found.get(n)})
    numel = elements(sizes_of(name))
    shares = [sync.nnz / numel for sync in measured]
    setup = Setup(
        Model(name, numel, len(digests)),
        sum(shares) / len(shares),
        encoding,
        posts_in_flight=posts_in_flight,
        encoders=8,
        trainer_cores=usable_cores(),
        ranks=ranks,
        rank_threads=max(1, usable_cores() // ranks),
        bucket_bytes=BUCKET_BYTES,
        one_host=True,
        waiting=ranks if kind.waits_in_loop else 0,
    )
    return Checked(setup, base, measured, wrong)


def sizes_of(name: str) -> dict[str, int]:
    """Return the sizes of one of `SIZES` or of `BETWEEN`."""
    return SIZES.get(name) or _BETWEEN_SIZES


def elements(sizes: Mapping[str, int]) -> int:
    """Return the number of elements of a Qwen3 whose embeddings are not tied."""
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    query, value = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    attention = hidden * (2 * query + 2 * value) + 2 * head
    layer = attention + 3 * hidden * sizes["intermediate_size"] + 2 * hidden
    return sizes["num_hidden_layers"] * layer + 2 * sizes["vocab_size"] * hidden + hidden


def _write(name: str, folder: Path) -> None:
    """Write the checkpoint in a process of its own, which gives its memory back."""
    code = (
        "import sys; from pathlib import Path; "
        "from scripts.bench.scaling.check import write_checkpoint; "
        "write_checkpoint(sys.argv[1], Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, name, str(folder)], env=_environment(), check=True)


def write_checkpoint(name: str, folder: Path) -> None:
    """Write a random checkpoint of one of `SIZES` or `BETWEEN`."""
    build("qwen3", folder, **sizes_of(name))


def _send(
    engine: EngineProcess, folder: Path, density: float, syncs: int, options: Mapping[str, Any]
) -> tuple[int, list[Sync], dict[str, str]]:
    """Run the sender; return its memory without weights, the syncs, and its digests by tensor."""
    task = Task(
        checkpoint=str(folder),
        url=engine.url,
        density=density,
        syncs=syncs,
        options=dict(options),
        watched=roles(engine),
        engine=engine.pids(),
    )
    process = subprocess.run(
        [sys.executable, "-m", "scripts.bench.scaling.sender_process"],
        input=msgspec.json.encode(task),
        stdout=subprocess.PIPE,
        env=_environment(),
        check=False,
    )
    if process.returncode:
        raise EngineError(f"the sender ended with status {process.returncode}")
    base, *lines, digests = process.stdout.splitlines()
    return (
        json.loads(base),
        [msgspec.json.decode(line, type=Sync) for line in lines],
        json.loads(digests),
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
