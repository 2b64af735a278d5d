"""Checkpoints, deltas between them, and toy models that an applier serves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from hypothesis import settings
from torch import nn

from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.conformance.toy_models import UNTOUCHED, Checkpoint, ToyModel
from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype, torch_bits_dtype
from engine_ext.errors import NotUpdatable
from engine_ext.format import DecodedPart, ParamDelta, decode_part, encode_part
from engine_ext.format.digest import Digest
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.certify import certify_placement
from engine_ext.placement.plan import Plan, make_plan
from engine_ext.placement.segments import Placed, Placement
from engine_ext.ranks import RankGroup, SingleRank
from engine_ext.startup import LoaderDryRun
from engine_ext.sync import host_table, stager
from engine_ext.sync.delta_applier import DeltaApplier
from engine_ext.sync.digest_table import DigestTable
from engine_ext.sync.masked import MaskedApplier
from engine_ext.sync.staged import StagedPart

# No example database: a test must leave nothing behind in the working tree.
PROPERTY = settings(deadline=None, database=None, max_examples=60)

CHUNK_BYTES = 1 << 20
UNDO_BYTES = 1 << 20

# Patterns that a careless copy or comparison loses: -0.0, inf, subnormal (as bfloat16 bits).
ODD_BITS = (0x8000, 0x7F80, 0xFF80, 0x0001)


# --- checkpoints and deltas ---


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of the tensor's bit patterns, flat, in checkpoint coordinates."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch_bits_dtype(tensor.dtype))
    return raw.numpy().copy().view(bits_dtype(NAME_OF_TORCH[tensor.dtype]))


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that are no NaN, and hardly ever equal to each other."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def base_checkpoint(model: type[ToyModel], seed: int = 0) -> Checkpoint:
    """The checkpoint that an engine is started with."""
    base = {
        spec.name: random_tensor(spec.shape, spec.dtype, seed + number)
        for number, spec in enumerate(model.specs())
    }
    model.adjust(base)
    return base


def delta_between(name: str, old: torch.Tensor, new: torch.Tensor) -> ParamDelta:
    """The sparse delta, by bits."""
    before, after = bits(old), bits(new)
    indices = np.flatnonzero(before != after)
    return ParamDelta(
        name, NAME_OF_TORCH[new.dtype], tuple(new.shape), indices, after[indices].copy()
    )


def dense_delta(name: str, new: torch.Tensor) -> ParamDelta:
    return ParamDelta(name, NAME_OF_TORCH[new.dtype], tuple(new.shape), None, bits(new))


def changed(tensor: torch.Tensor, seed: int, density: float = 0.4) -> torch.Tensor:
    """The tensor with some other elements: at least the first one, and odd patterns among them."""
    other = random_tensor(tensor.shape, tensor.dtype, seed + 1000).reshape(-1)
    if tensor.dtype == torch.bfloat16:
        odd = torch.tensor(ODD_BITS, dtype=torch.int32).to(torch.int16)[: other.numel()]
        last = tensor.reshape(-1).view(torch.int16)[-len(odd) :]
        odd = torch.where(odd == last, odd ^ 0x4000, odd)  # of a tensor that was changed before
        other[-len(odd) :] = odd.view(torch.bfloat16)
    chosen = torch.rand(other.numel(), generator=torch.Generator().manual_seed(seed)) < density
    chosen[0] = True
    flat = tensor.reshape(-1).clone()
    bit = torch_bits_dtype(tensor.dtype)
    flat.view(bit)[chosen] = other.view(bit)[chosen]
    return flat.reshape(tensor.shape)


def target_checkpoint(base: Checkpoint, names: Iterable[str], seed: int = 1) -> Checkpoint:
    """`base` with some elements of these tensors changed."""
    return {**base, **{n: changed(base[n], seed + i) for i, n in enumerate(sorted(names))}}


def one_part(deltas: Sequence[ParamDelta], **metadata: Any) -> bytes:
    """A container of deltas of one dtype."""
    return encode_part(deltas, encoding="deltas", **{"current_version": 1, **metadata})


def parts_of(deltas: Sequence[ParamDelta]) -> list[DecodedPart]:
    """Decoded parts, one for each dtype."""
    dtypes = sorted({delta.dtype for delta in deltas})
    return [decode_part(one_part([d for d in deltas if d.dtype == t])) for t in dtypes]


# --- models ---


def memory(model: nn.Module) -> dict[str, bytes]:
    """Every bit of the model: parameters, buffers, and tensors that hang on a module."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}"] = value
    return {
        name: b"on meta" if tensor.is_meta else bits(tensor).tobytes()
        for name, tensor in found.items()
    }


def load(model: type[ToyModel], checkpoint: Checkpoint) -> ToyModel:
    """A model as the engine starts it; the loader gets tensors of its own."""
    fresh = model()
    with torch.no_grad():
        fresh.load_weights((name, tensor.clone()) for name, tensor in checkpoint.items())
        fresh.after_loading()
        getattr(fresh, UNTOUCHED).copy_(torch.arange(5) + 0.5)
    return fresh


class Peer:
    """Rank 0's view of a second rank, which holds exactly what rank 0 does not.

    The missing elements are found from the segments' views, not with the code under test.

    Args:
        placement: of rank 0.
        elsewhere: tensors that only the second rank holds, all of them.
    """

    rank = 0

    def __init__(self, placement: Placement, elsewhere: Iterable[str] = ()) -> None:
        chosen = {n for n, p in placement.items() if p.segments and not p.reason} | set(elsewhere)
        self.missing = {
            name: indices for name in chosen if (indices := _not_held(placement[name])).size
        }
        boxes = {
            name: [(int(run[0]), ((len(run), 1),) if len(run) > 1 else ()) for run in _runs(found)]
            for name, found in self.missing.items()
        }
        status = {
            name: ("exact" if name in self.missing else "not on this rank", True)
            for name in placement
        }
        self._answers: list[Any] = [boxes, status]

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self._answers.pop(0)] if self.missing else [value]

    def rank_summary(self, parts: Sequence[DecodedPart]) -> dict[str, Any]:
        """The second rank's summary of a sync."""
        none = np.empty(0, np.int64)
        counted = 0
        for delta in (d for part in parts for d in part.deltas):
            indices = np.arange(delta.numel) if delta.indices is None else delta.indices
            counted += int(np.isin(indices, self.missing.get(delta.name, none)).sum())
        zero = Digest.ZERO.hex()
        changes = {"changes": [zero] * len(parts), "added": zero}
        return {"counted": counted, **changes, "replicas": [], "digest": zero}


def _not_held(placed: Placed) -> np.ndarray[Any, Any]:
    flat = torch.arange(placed.spec.numel)
    held = [segment.source_view(flat).reshape(-1).numpy() for segment in placed.segments]
    return np.setdiff1d(flat.numpy(), np.concatenate([np.empty(0, np.int64), *held]))


def _runs(indices: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)


APPLIES = ("masked", "scatter")


@dataclass
class Served:
    """A loaded model and all that the receiver knows of it."""

    model: ToyModel
    index: StorageIndex
    applier: DeltaApplier
    peer: Peer | None = None

    @property
    def placement(self) -> Placement:
        return self.applier.plan.placement


def placed(model: type[ToyModel], base: Checkpoint) -> tuple[ToyModel, StorageIndex, Placement]:
    """Load, trace and certify."""
    live = load(model, base)
    index = StorageIndex(live)
    placement = LoaderDryRun(live, live.load_weights, index).trace(model.specs())
    certify_placement(placement, base.items())
    return live, index, placement


def make_applier(
    live: ToyModel,
    index: StorageIndex,
    plan: Plan,
    *,
    apply: str = "masked",
    chunk_bytes: int = CHUNK_BYTES,
    undo_bytes: int = UNDO_BYTES,
    threads: int = 1,
    ranks: RankGroup | None = None,
) -> DeltaApplier:
    options: Any = {"undo_bytes": undo_bytes, "threads": threads, "ranks": ranks}
    if apply == "masked":
        dry_run = LoaderDryRun(live, live.load_weights, index)
        return MaskedApplier(dry_run, plan, chunk_bytes=chunk_bytes, **options)
    return DeltaApplier(live, index, plan, **options)


def serve(
    model: type[ToyModel], base: Checkpoint, *, elsewhere: Iterable[str] = (), **options: Any
) -> Served:
    """Load, trace, certify and plan.

    Args:
        elsewhere: as of `Peer`.
        options: of `make_applier`.
    """
    live, index, placement = placed(model, base)
    peer = Peer(placement, elsewhere)
    if not peer.missing:
        plan = make_plan(placement, SingleRank())
        return Served(live, index, make_applier(live, index, plan, **options))
    plan = make_plan(placement, peer)
    return Served(live, index, make_applier(live, index, plan, **options), peer)


def serve_ranks(models: Sequence[type[ToyModel]], base: Checkpoint, **options: Any) -> list[Served]:
    """As `serve`, for all ranks of an engine."""
    found = [placed(model, base) for model in models]
    group = Group(len(models))
    with ThreadPoolExecutor(len(models)) as threads:
        plans = list(
            threads.map(
                lambda rank: make_plan(found[rank][2], ThreadRanks(group, rank)),
                range(len(models)),
            )
        )
    return [
        Served(
            live, index, make_applier(live, index, plan, ranks=ThreadRanks(group, rank), **options)
        )
        for rank, ((live, index, _), plan) in enumerate(zip(found, plans, strict=True))
    ]


@contextmanager
def small_pieces(elements: int) -> Iterator[None]:
    """Let params with more elements be staged in pieces of so many."""
    of_stager: dict[str, Any] = dict.fromkeys(
        ("_HOST_PIECE_ELEMENTS", "_DEVICE_PIECE_ELEMENTS", "_RUN_PIECE_ELEMENTS"), elements
    )
    of_table: dict[str, Any] = dict.fromkeys(("_COPIED_ELEMENTS", "_BATCH_ELEMENTS"), elements)
    with mock.patch.multiple(stager, **of_stager), mock.patch.multiple(host_table, **of_table):
        yield


def as_on_a_device(served: Served) -> None:
    """Let the applier take its weights for those of a device, where operators digest them."""
    replan(served, on_a_device(served.applier.plan))


def on_a_device(plan: Plan) -> Plan:
    """Return a plan whose weights are taken for those of a device."""
    targets = {n: tuple(replace(t, host=None) for t in ts) for n, ts in plan.targets.items()}
    return replace(plan, targets=targets)


def replan(served: Served, plan: Plan) -> None:
    """Give the applier another plan of the same model."""
    served.applier.adopt(plan)
    served.applier.digests = DigestTable(plan.scan())


def named_in(error: NotUpdatable) -> set[str]:
    """The tensors that a refusal names, for a program."""
    return (
        {error.operands["tensor"]} if "tensor" in error.operands else set(error.operands["tensors"])
    )


def attempt(served: Served, parts: list[DecodedPart], *, full: bool = False) -> NotUpdatable | None:
    """Stage and commit as the ranks of an engine do, and go every way back in between.

    Returns:
        The refusal, in which case nothing was written, or None once everything was.

    Raises:
        Exception: anything else, and that is the third outcome, which there must not be.
    """
    before, applier = memory(served.model), served.applier
    digests = dict(applier.digests)
    try:
        staged = stage(served, parts, full=full)
    except NotUpdatable as refusal:
        assert memory(served.model) == before, "a refused sync changed the model"
        return refusal
    assert memory(served.model) == before, "checking a sync changed the model"
    try:
        applier.write(staged)
    except Exception:
        applier.undo(staged)
        assert memory(served.model) == before, "a failed write was not undone"
        raise
    written = memory(served.model)
    log = applier.finish(staged)
    assert_digests(applier)
    if log is None:
        return None
    applier.roll_back(log)
    assert memory(served.model) == before, "a rollback does not restore the model"
    assert applier.digests == digests
    if full:  # its old values take the log's memory
        staged = stage(served, parts, full=True)
    applier.write(staged, [log])
    applier.undo(staged)
    assert memory(served.model) == before, "an undo does not restore the model"
    applier.write(staged)
    applier.finish(staged)
    assert memory(served.model) == written
    assert_digests(applier)
    return None


def stage(served: Served, parts: list[DecodedPart], *, full: bool = False) -> list[StagedPart]:
    """All that comes before the write."""
    applier = served.applier
    if full:
        parts = [as_full(part) for part in parts]
    staged = [applier.stage(part) for part in parts]
    applier.check_sync(staged, full=full)
    applier.check_base(staged)
    summaries = [json.loads(json.dumps(applier.rank_summary(staged)))]
    applier.agree(staged, summaries + ([served.peer.rank_summary(parts)] if served.peer else []))
    return staged


def as_full(part: DecodedPart) -> DecodedPart:
    manifest = msgspec.structs.replace(part.manifest, full=True)
    return replace(part, manifest=manifest)


def assert_digests(applier: DeltaApplier) -> None:
    """The tracked digests are those of live memory, for the same tensors."""
    assert applier.digests == applier.plan.scan()
