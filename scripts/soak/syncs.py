"""The syncs of the soak: a simulated trainer, the sender, and the checks."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import torch

from delta_sender import DeltaSender, SyncReport
from delta_sender.options import CHOICES
from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.kernels import bits_of, host_bits
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.soak.load import Load
from scripts.soak.memory import Sample

PAUSE_MODES: Final = ("keep", "wait", "abort")
CHECK_EVERY: Final = 10
_SAMPLE_EVERY: Final = 2
_ROUND: Final = 3  # syncs of one sender
_FULL_EVERY: Final = 50
_TIMEOUT_S: Final = 120.0
_BUCKET_BYTES: Final = 128 << 10  # most syncs have several parts, a full one of this model about 80
# Shares of elements that change, in turn; one sync in seven is empty. Seven has no factor in common
# with the other cycles.
_DENSITIES: Final = (0.02, 0.005, 0.0, 0.1, 0.02, 0.3, 0.001)
# Chosen so that the first six of all ways already have every encoding and pause mode.
_STRIDE: Final = 7


class SoakFailed(Exception):
    """The engine's weights or version are wrong; the soak ends."""


@dataclass(frozen=True)
class Way:
    """Options of one sender's syncs."""

    encoding: str
    pause_mode: str
    flush_cache: bool


def ways() -> Iterator[Way]:
    """Cycle through every encoding and pause mode, with and without a cache flush, endlessly."""
    every = [Way(*way) for way in itertools.product(CHOICES, PAUSE_MODES, (True, False))]
    return (every[number * _STRIDE % len(every)] for number in itertools.count())


class Trainer:
    """Checkpoint tensors; every step changes some elements by a few units in the last place.

    Args:
        tensors: name -> tensor; copied.
        seed: of the changes.

    Attributes:
        tensors: name -> tensor after the last step.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], seed: int) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._rng = np.random.default_rng(seed)

    @property
    def dtypes(self) -> set[str]:
        """Return the manifest names of the tensors' dtypes."""
        return {NAME_OF_TORCH[tensor.dtype] for tensor in self.tensors.values()}

    def step(self, density: float) -> None:
        """Change this share of every tensor's elements."""
        for tensor in self.tensors.values():
            bits = host_bits(bits_of(tensor.view(-1)))
            indices = np.flatnonzero(self._rng.random(bits.size, np.float32) < density)
            bits[indices] ^= self._rng.integers(1, 4, indices.size, bits.dtype)


@dataclass
class Record:
    """Figures of the syncs.

    Attributes:
        syncs: number of committed syncs.
        elements, wire_bytes: totals that they sent.
        parts: in how many parts each was sent.
        pauses_ms: how long each paused generation.
        by_way: number of syncs by encoding, pause mode and so on.
        checks: how often the engine's live memory was compared with the trainer's.
        samples: of the resources that the engine's processes use.
        seconds: time of all syncs.
    """

    syncs: int = 0
    elements: int = 0
    wire_bytes: int = 0
    parts: list[int] = field(default_factory=list)
    pauses_ms: list[float] = field(default_factory=list)
    by_way: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, report: SyncReport, way: Way) -> None:
        """Count one committed sync."""
        self.syncs += 1
        self.elements += report.nnz
        self.wire_bytes += report.wire_bytes
        self.parts.append(report.parts)
        self.pauses_ms.append(float(report.engine["timings_ms"]["pause_ms"]))
        flush = "flushed" if way.flush_cache else "not flushed"
        kinds = [way.encoding, way.pause_mode, flush]
        self.by_way.update(kinds + ["full"] * report.full + ["empty"] * (report.nnz == 0))


@dataclass
class Syncs:
    """Syncs of one engine under load.

    Args:
        engine: live, at `version`, with the trainer's weights.
        trainer: whose steps are sent.
        load: requests that run at the same time.
        spool: the engine's spool folder.
        version: of the engine's weights.
    """

    engine: EngineProcess
    trainer: Trainer
    load: Load
    spool: Path
    version: int = 0

    def run(self, count: int, done: Callable[[Record], None]) -> Record:
        """Do `count` syncs, and call `done` after each.

        Raises:
            SoakFailed: The engine's weights or version are wrong.
            SyncError: The engine refused a sync.
            EngineError: One of the engine's own routes failed.
        """
        record, start = Record(), time.perf_counter()
        next_way = ways()
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            while record.syncs < count:
                way = next(next_way)
                tensors = self.trainer.tensors.items()
                options = {
                    "base_version": self.version,
                    "bucket_bytes": _BUCKET_BYTES,
                    "client": client,
                    **asdict(way),
                }
                with DeltaSender(self.engine.url, tensors, **options) as sender:
                    for _ in range(min(_ROUND, count - record.syncs)):
                        record.add(self._sync(sender, way, record.syncs + 1), way)
                        record.seconds = time.perf_counter() - start
                        self._measure(record)
                        done(record)
        return record

    def check(self, digest: str | None = None) -> None:
        """Compare the engine's live memory and versions with the trainer's.

        Args:
            digest: the sender's, if it has one.

        Raises:
            SoakFailed: They differ.
        """
        expected = tiny_models.digest(self.trainer.tensors)
        scan = self.engine.get("/delta_digest", params={"scan": "true"}).json()
        status = self.engine.delta_status()
        found = {
            "digest of live memory": (scan["digest"], expected),
            "tensors that something else changed": (scan["corrupted"], []),
            "digest in /delta_status": (status.version.digest, expected),
            "the sender's digest": (digest or expected, expected),
            "version in /delta_status": (status.version.number, self.version),
            "the engine's own weight version": (self.engine.weight_version(), str(self.version)),
        }
        wrong = [f"{what}: {a}, not {b}" for what, (a, b) in found.items() if a != b]
        if wrong:
            raise SoakFailed(f"after the sync to version {self.version}: {'; '.join(wrong)}")

    def _sync(self, sender: DeltaSender, way: Way, number: int) -> SyncReport:
        full = number % _FULL_EVERY == CHECK_EVERY
        self.trainer.step(_DENSITIES[number % len(_DENSITIES)])
        send = sender.sync_full if full else sender.sync
        aborting = way.pause_mode == "abort"
        with self.load.policy.aborting() if aborting else contextlib.nullcontext():
            report = send(self.trainer.tensors.items())
        self.version += 1
        if (report.status, report.version, report.full) != ("committed", self.version, full):
            raise SoakFailed(
                f"the sync to version {self.version} was {report.status} at {report.version}"
                f"{', and full' if report.full else ''}: the engine was not at the base version"
            )
        if number % CHECK_EVERY == 0:
            self.check(report.digest)
        return report

    def _measure(self, record: Record) -> None:
        record.checks = record.syncs // CHECK_EVERY
        if record.syncs % _SAMPLE_EVERY == 0:
            record.samples.append(Sample.take(record.syncs, self.engine.pids(), self.spool))
