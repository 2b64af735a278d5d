"""Measure a rank's costs: decode, locate, read old values, digest, check, write.

The rank is a module in this process that holds a slice of each tensor, as tensor parallelism cuts
them: two of three by rows, which are one run of memory, and one by columns. It is traced and
certified as an engine's model is. Staging runs in one thread, while the other cores are busy. It is
measured with half of every tensor and with an eighth, which tells an own element's cost from that
of one on another rank.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from delta_sender.diff.host import compare
from engine_ext.files import remove_beside
from engine_ext.format import (
    Limits,
    ParamDelta,
    Part,
    decode_part,
    encode_part,
    part_identity,
)
from engine_ext.model import StorageIndex
from engine_ext.placement import Plan, TensorSpec, certify_placement, make_plan
from engine_ext.resources import no_full_collections
from engine_ext.settings import Settings
from engine_ext.sync import DeltaApplier, ScatterWriter, StagedPart, shared_decoding
from engine_ext.tracing import trace_placement
from scripts.bench import synthetic_weights
from scripts.bench.scaling.encodings import ENCODINGS
from scripts.bench.scaling.measure_sender import SMALL, SMALLS, deltas_of
from scripts.bench.scaling.timing import ColdCaches, fastest, other_cores_busy
from scripts.bench.synthetic_weights import Bits

WIDTH = 4096  # of a tensor of `synthetic_weights.PARAM` elements
_PIECE = 1 << 16  # elements that staging takes at a time
_COLUMNS_EVERY = 3  # one tensor of three is cut by columns
_STAGED = "gap8_ulp"  # staging takes as long with all encodings
_SHARED_MEMORY = "/dev/shm"  # where an engine's spool is
SHARES = (2, 8)  # of how many ranks it is one


class Shards(nn.Module):
    """The slices of some tensors that rank 0 of several holds.

    Attributes:
        steps: by tensor, how far the next rank's slice is from this one's, in flat indices.
    """

    def __init__(self, specs: Iterable[TensorSpec], ranks: int) -> None:
        super().__init__()
        self._dims: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        for number, spec in enumerate(specs):
            dim = len(spec.shape) - 1 if number % _COLUMNS_EVERY == 0 else 0
            shape = [n // ranks if d == dim else n for d, n in enumerate(spec.shape)]
            value = nn.Parameter(torch.zeros(shape, dtype=spec.dtype), requires_grad=False)
            self.register_parameter(_attribute(spec.name), value)
            self._dims[spec.name] = dim
            self.steps[spec.name] = math.prod(spec.shape[dim:]) // ranks

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            own, dim = self.get_parameter(_attribute(name)), self._dims[name]
            own.data.copy_(tensor.narrow(dim, 0, own.shape[dim]))


def _attribute(name: str) -> str:
    return name.replace(".", "_")


class _Peers:
    """Rank 0 among ranks that hold the other slices; they are asked at start-up only."""

    rank = 0

    def __init__(self, steps: Mapping[str, int], ranks: int) -> None:
        self._steps, self._ranks, self._asked = steps, ranks, 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return what each rank would answer: first its boxes, then the status of each tensor."""
        self._asked += 1
        if self._asked > 1:
            return [value] * self._ranks
        return [
            {
                name: [(start + rank * self._steps[name], dims) for start, dims in boxes]
                for name, boxes in value.items()
            }
            for rank in range(self._ranks)
        ]


@dataclass(frozen=True)
class Rank:
    """One rank: its model and its applier."""

    model: Shards
    plan: Plan
    applier: DeltaApplier

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], ranks: int) -> Rank:
        """Load, trace and certify the slices that one of some ranks holds."""
        specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
        model = Shards(specs, ranks)
        with torch.no_grad():
            model.load_weights(tensors.items())
            index = StorageIndex(model)
            placement = trace_placement(model, model.load_weights, specs, index)
        certify_placement(placement, tensors.items())
        plan = make_plan(placement, _Peers(model.steps, ranks))
        undo_bytes = Settings().undo_bytes
        applier = DeltaApplier(
            model, index, plan, ScatterWriter(), undo_bytes=undo_bytes, threads=1
        )
        return cls(model, plan, applier)

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go back to the weights that the rank was made with."""
        with torch.no_grad():
            self.model.load_weights(tensors.items())


def own_elements(staged: StagedPart) -> int:
    """Return how many elements a rank writes."""
    return sum(int(write.new.size) for write in staged.writes)


def staged_bytes(staged: StagedPart) -> int:
    """Return the bytes that a rank keeps of a part until the commit."""
    kept = (w.elements.nbytes + w.new.nbytes + w.old.nbytes for w in staged.writes)
    return int(sum(kept))


def undo_bytes(log: Any) -> int:
    """Return the bytes that a rank keeps to restore the version before."""
    return int(sum(elements.nbytes + old.nbytes for elements, old in log.writes))


class SpooledPart:
    """A part in the spool, decoded once for all ranks."""

    def __init__(self, path: Path, body: bytes) -> None:
        path.write_bytes(body)
        self._path, self._identity = path, part_identity(decode_part(body).header, body)

    def decode(self) -> None:
        """Decode it and leave the result to all ranks, as the first of them does."""
        remove_beside(self._path)
        self.read()

    def read(self, *, shared: bool = True) -> Part:
        """Return it decoded, in new mappings; as another rank does if it was decoded.

        Args:
            shared: whether there are other ranks.
        """
        return shared_decoding.read_part(str(self._path), self._identity, Limits(), shared=shared)


@contextlib.contextmanager
def _spooled(
    old: Bits, new: Bits, encodings: Iterable[str]
) -> Iterator[tuple[dict[str, SpooledPart], dict[str, torch.Tensor], int]]:
    """Yield the changes in the spool, by encoding, the tensors that change, and how many do."""
    params = list(synthetic_weights.params(old))
    changed = [compare(old[p], new[p], streams=True) for p in params]
    shape = (synthetic_weights.PARAM // WIDTH, WIDTH)
    tensors = {
        f"model.layers.{n}.weight": torch.from_numpy(old[p].view(np.int16))
        .view(torch.bfloat16)
        .view(shape)
        for n, p in enumerate(params)
    }
    bodies = {
        encoding: encode_part(
            [_with_shape(delta, shape) for delta in deltas_of(changed, encoding)],
            encoding=encoding,
            current_version=1,
            digest_part="0" * 32,
        )
        for encoding in encodings
    }
    nnz = sum(one.indices.size for one in changed)
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY) as folder:
        yield {e: SpooledPart(Path(folder) / e, body) for e, body in bodies.items()}, tensors, nnz


def decoding(old: Bits, new: Bits, repeats: int) -> dict[str, Any]:
    """Return the fields of `Constants` that concern decoding; `new` has the changes of a sync."""
    with _spooled(old, new, ENCODINGS) as (files, _, nnz), other_cores_busy():
        calls = {encoding: file.decode for encoding, file in files.items()}
        times = fastest(calls, repeats, ColdCaches())
    return {"decode_ns": {encoding: times[encoding] / nnz * 1e9 for encoding in ENCODINGS}}


def alone(old: Bits, new: Bits, repeats: int) -> dict[str, Any]:
    """Return the field of `Constants` for an engine of one rank; `new` has a sync's changes."""
    with _spooled(old, new, ENCODINGS) as (files, tensors, nnz), other_cores_busy():
        applier = Rank.of(tensors, 1).applier

        def staging(file: SpooledPart) -> Callable[[], StagedPart]:
            return lambda: applier.stage(file.read(shared=False))

        calls = {encoding: staging(file) for encoding, file in files.items()}
        times = fastest(calls, repeats, ColdCaches())
    return {"alone_ns": {encoding: times[encoding] / nnz * 1e9 for encoding in ENCODINGS}}


def measure(old: Bits, new: Bits, repeats: int) -> dict[str, Any]:
    """Return the other fields of `Constants` that concern a rank; `new` has a sync's changes."""
    with _spooled(old, new, [_STAGED]) as (files, tensors, nnz), other_cores_busy():
        cold, spooled = ColdCaches(), files[_STAGED]
        steps = {ranks: _steps(tensors, spooled, ranks, repeats, cold) for ranks in SHARES}
    found: dict[str, Any] = {}
    for what in ("stage", "locate"):
        own, other = _split({r: steps[r][what] / nnz * 1e9 for r in SHARES})
        found |= {f"{what}_own_ns": own, f"{what}_other_ns": other}
    half = steps[2]
    for what in ("read", "check", "scatter", "finish"):
        found[f"{what}_ns"] = half[what] / half["own"] * 1e9
    found |= {what: half[what] / half["own"] for what in ("staged_bytes", "undo_bytes")}
    found |= _small_tensors(repeats)
    return found


def _split(times: dict[int, float]) -> tuple[float, float]:
    """Return what an own element and another one take, given times per element by share."""
    (few, first), (many, second) = times.items()
    other = (many * second - few * first) / (many - few)
    return few * first - (few - 1) * other, max(other, 0.0)


def _with_shape(delta: ParamDelta, shape: tuple[int, ...]) -> ParamDelta:
    return ParamDelta(
        delta.name,
        delta.dtype,
        shape,
        delta.indices,
        delta.values,
        differences=delta.differences,
        stream=delta.stream,
    )


def _steps(
    tensors: dict[str, torch.Tensor],
    spooled: SpooledPart,
    ranks: int,
    repeats: int,
    cold: Callable[[], None],
) -> dict[str, float]:
    """Return CPU seconds of the steps of one sync on one of some ranks, and what it keeps."""
    rank = Rank.of(tensors, ranks)
    applier = rank.applier
    part = spooled.read()
    staged = [StagedPart(part.manifest, [])]
    logs: list[Any] = []
    steps: dict[str, Callable[[], Any]] = {
        "locate": lambda: _locate(rank, part),
        "stage": lambda: staged.__setitem__(0, applier.stage(spooled.read())),
        "read": lambda: [write.elements.read() for write in staged[0].writes],
        "agree": lambda: applier.check_sync(staged, full=False),
        "check": lambda: applier.check_base(staged),
        "scatter": lambda: applier.write(staged),
        "finish": lambda: logs.append(applier.finish(staged)),
    }
    found: dict[str, float] = {}
    for _ in range(repeats):
        rank.load(tensors)
        logs.clear()
        for name, step in steps.items():
            took = fastest({name: step}, 1, cold)[name]
            found[name] = min(found.get(name, took), took)
    found["own"] = own_elements(staged[0])
    found["staged_bytes"] = staged_bytes(staged[0])
    found["undo_bytes"] = undo_bytes(logs[0])
    found["finish"] += found.pop("agree")
    return found


def _locate(rank: Rank, part: Part) -> None:
    for delta in part.deltas:
        assert delta.indices is not None
        for target in rank.plan.targets[delta.name]:
            for start in range(0, delta.nnz, _PIECE):
                piece = delta.indices[start : start + _PIECE]
                target.find(piece.astype(np.int64, copy=False))


def _small_tensors(repeats: int) -> dict[str, float]:
    """Return nanoseconds of a rank's work on a small tensor with one change, which is its own."""
    generator = np.random.default_rng(0)
    shape = (16, SMALL // 16)
    bits = generator.integers(0, 1 << 14, (SMALLS, *shape), np.int16)
    tensors = {
        f"model.{number}.weight": torch.from_numpy(own).view(torch.bfloat16)
        for number, own in enumerate(bits)
    }
    place, one = np.array([shape[1]]), np.array([1], np.uint16)
    deltas = [ParamDelta(n, "bfloat16", shape, place, one, differences=True) for n in tensors]
    body = encode_part(deltas, encoding=_STAGED, current_version=1, digest_part="0" * 32)
    rank = Rank.of(tensors, 2)
    staged: list[StagedPart] = []

    def stage() -> None:
        staged[:] = [rank.applier.stage(decode_part(body))]

    def commit() -> None:
        rank.applier.check_sync(staged, full=False)
        rank.applier.check_base(staged)
        rank.applier.brief(staged)
        rank.applier.write(staged)
        rank.applier.finish(staged)

    found = {"stage": float("inf"), "commit": float("inf")}
    for _ in range(repeats):
        rank.load(tensors)
        with no_full_collections():  # as in a receiver
            for name, step in (("stage", stage), ("commit", commit)):
                found[name] = min(found[name], fastest({name: step}, 1)[name])
    return {
        "rank_param_ns": found["stage"] / SMALLS * 1e9,
        "commit_param_ns": found["commit"] / SMALLS * 1e9,
    }
