"""The masked apply: a NaN-masked overwrite through the engine's own loader.

Each param becomes a full-shape tensor with NaN at the unchanged positions and is passed to the
model's ``load_weights``, while ``Tensor.copy_`` and ``Tensor.fill_`` are replaced: a copy into live
memory overwrites only where the source is not NaN. This is how other projects apply sparse
updates; here it is the baseline of the benchmarks and the oracle of the scatter apply's tests.

`refusal` refuses what it cannot carry before anything is written: values that are NaN, dtypes
without NaN, loaders that write by other means, and tensors that are not certified as exact. After
the write, every touched element is read back.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine_ext.dtypes import TORCH_DTYPE, torch_bits_dtype
from engine_ext.errors import NotUpdatable
from engine_ext.format import DecodedPart, ParamDelta, UnpackedPart, expand_part
from engine_ext.kernels import typed
from engine_ext.model import StorageIndex, TracingError
from engine_ext.placement import Placed, Plan, Status
from engine_ext.startup import COPY_REPLACED, LoaderDryRun, LoadWeights
from engine_ext.sync.delta_applier import DeltaApplier
from engine_ext.sync.staged import StagedPart, Write
from engine_ext.sync.stream_table import NO_STREAMS, StagedStreams

# torch compares and selects these for NaN, but not the 8-bit floats.
_MASKABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class MaskedApplier(DeltaApplier):
    """Writes through the model's own loader; stages, votes and undoes as `DeltaApplier` does.

    Args:
        dry_run: of the loader, and of the model that is written to.
        chunk_bytes: see `chunks`.
        options: those of `DeltaApplier`.
    """

    name = "masked"

    def __init__(
        self, dry_run: LoaderDryRun, plan: Plan, *, chunk_bytes: int, **options: Any
    ) -> None:
        super().__init__(dry_run.model, dry_run.index, plan, **options)
        self._dry_run = dry_run
        self._chunk_bytes = chunk_bytes
        self._rehearsed: list[list[str]] = []

    def refusal(self, delta: ParamDelta, placed: Placed, digested: bool) -> str | None:
        """Return why the loader cannot write a delta exactly, or None if it can."""
        return refusal(delta, placed) if placed.segments else None

    def stage(self, part: DecodedPart, streams: StagedStreams = NO_STREAMS) -> StagedPart:
        """Stage a part, and keep it: the loader gets its params as they were sent."""
        staged = super().stage(part, streams)
        sent = [delta for delta in part.deltas if delta.name not in staged.skipped]
        for param, delta in zip(staged.params, sent, strict=True):
            param.delta = delta
        return staged

    def stage_unpacked(self, part: UnpackedPart) -> StagedPart:
        """See `DeltaApplier.stage_unpacked`; the stream table takes nothing."""
        return self.stage(expand_part(part, self.threads.size))

    def place_again(self) -> None:
        """See `DeltaApplier.place_again`; the loader's writes are recognised there from now on."""
        super().place_again()
        self._dry_run = self._dry_run.at(self.index)
        self._rehearsed = []

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        """Check also that the loader treats these tensors as it treated the whole checkpoint.

        Raises:
            NotUpdatable: names the tensors that it treats differently, or the loader cannot be run
                dry now. Nothing was written.
            TracingError: the dry run has changed the model.
        """
        super().check_sync(staged, full=full)
        deltas = self._deltas(staged)
        calls = [[delta.name for delta in chunk] for chunk in chunks(deltas, self._chunk_bytes)]
        if calls == self._rehearsed:
            return
        for names in calls:
            try:
                reasons = self._dry_run.rehearse(names, self.plan.placement)
            except TracingError:
                raise
            except RuntimeError as error:
                raise NotUpdatable(str(error), tensors=names) from error
            if reasons:
                raise NotUpdatable(
                    f"this engine cannot update these exactly: {reasons}",
                    tensors=sorted(reasons),
                    reasons=reasons,
                )
        self._rehearsed = calls

    def compares_while_writing(self, staged: Sequence[StagedPart]) -> bool:
        """Return False: the loader compares nothing."""
        return False

    def put(self, staged: Sequence[StagedPart], *, compares: bool) -> None:
        """Write the new values and read them back.

        Raises:
            Exception: the loader's own, or RuntimeError if an element does not have its new bits
                afterwards. Some elements might have been written.
        """
        params = [param for part in staged for param in part.params if not param.tied]
        for write in (write for param in params for write in param.writes):
            write.read_old()
            write.written = True
        loader = self._dry_run
        apply_masked(loader.load_weights, loader.index, self._deltas(staged), self._chunk_bytes)
        self._synchronize()  # the threads that read have streams of their own
        for param in params:
            if not all(self.threads.map(Write.holds, param.writes)):
                raise RuntimeError(f"{param.name} does not hold its new bits after the write")

    def _deltas(self, staged: Sequence[StagedPart]) -> list[ParamDelta]:
        """Return the deltas that this rank's loader gets: of tensors that it holds elements of."""
        params = [param for part in staged for param in part.params if param.nnz and not param.tied]
        deltas = [param.delta for param in params if param.delta is not None]
        return merge(delta for delta in deltas if self.plan.placement[delta.name].segments)


def refusal(delta: ParamDelta, placed: Placed) -> str | None:
    """Return why the masked apply cannot carry a delta exactly, or None if it can."""
    if placed.status is not Status.EXACT:
        return placed.reason or f"its live copy is {placed.status.value}"
    if delta.needs_old:
        return "it is sent as differences, but the loader needs values; send new values"
    if delta.indices is None:
        return None
    dtype = TORCH_DTYPE[delta.dtype]
    if not all(segment.python_copy for segment in placed.segments):
        return "the engine's loader does not write it with Tensor.copy_"
    if dtype not in _MASKABLE:
        return f"{delta.dtype} has no NaN that could mark unchanged elements"
    if bool(typed(delta.values, dtype).isnan().any()):
        return "a new value is NaN, which marks unchanged elements"
    return None


def densify(delta: ParamDelta) -> torch.Tensor:
    """Return a delta as a new tensor of the checkpoint's shape and dtype, NaN where unchanged."""
    dtype = TORCH_DTYPE[delta.dtype]
    if delta.indices is None:
        return typed(delta.values.copy(), dtype).reshape(delta.shape)
    flat = torch.full((delta.numel,), float("nan"), dtype=dtype)
    bits = torch_bits_dtype(dtype)
    flat.view(bits)[torch.from_numpy(delta.indices).long()] = typed(delta.values, bits)
    return flat.reshape(delta.shape)


@torch.no_grad()
def apply_masked(
    load_weights: LoadWeights, index: StorageIndex, deltas: Sequence[ParamDelta], chunk_bytes: int
) -> None:
    """Write deltas that `refusal` accepts, each name once, into the live model.

    Raises:
        Exception: whatever the loader raises. Some elements might have been written.
    """
    for chunk in chunks(deltas, chunk_bytes):
        with masked_copies(index, dense=chunk[0].indices is None):
            load_weights(iter([(d.name, densify(d)) for d in chunk]))


def merge(deltas: Iterable[ParamDelta]) -> list[ParamDelta]:
    """Merge the deltas of each name into one: a loader might keep only the last tensor of a name.

    The deltas of a name that occurs more than once must be sparse and disjoint.
    """
    by_name: dict[str, list[ParamDelta]] = defaultdict(list)
    for delta in deltas:
        by_name[delta.name].append(delta)
    for name, (first, *others) in by_name.items():
        if others:
            found = by_name[name]
            indices = np.concatenate([d.indices for d in found if d.indices is not None])
            values, order = np.concatenate([d.values for d in found]), np.argsort(indices)
            merged = ParamDelta(name, first.dtype, first.shape, indices[order], values[order])
            by_name[name] = [merged]
    return [delta for (delta,) in by_name.values()]


def chunks(deltas: Sequence[ParamDelta], chunk_bytes: int) -> Iterator[list[ParamDelta]]:
    """Yield what each call of the loader gets: sparse params first, then dense ones.

    The full-shape tensors in one chunk take at most `chunk_bytes`; a single larger tensor is a
    chunk of its own.
    """
    for dense in (False, True):
        chunk: list[ParamDelta] = []
        size = 0
        for delta in (d for d in deltas if (d.indices is None) is dense):
            nbytes = delta.numel * TORCH_DTYPE[delta.dtype].itemsize
            if chunk and size + nbytes > chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(delta)
            size += nbytes
        if chunk:
            yield chunk


@contextmanager
def masked_copies(index: StorageIndex, *, dense: bool = False) -> Iterator[None]:
    """Replace ``Tensor.copy_`` and ``Tensor.fill_`` for this thread while the loader runs.

    A copy into live memory overwrites only where the source is not NaN, and a fill of live
    memory (padding, at load time) does nothing. Calls on other memory, and all calls of other
    threads, are unchanged. If `dense`, the loader gets whole tensors, whose copies overwrite
    everything, NaNs too.
    """
    with COPY_REPLACED:
        owner = threading.get_ident()
        original_copy, original_fill = torch.Tensor.copy_, torch.Tensor.fill_

        def is_ours(tensor: torch.Tensor) -> bool:
            return threading.get_ident() == owner and index.find(tensor) is not None

        def copy_(
            self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False
        ) -> torch.Tensor:
            if dense or not is_ours(self):
                return original_copy(self, src, non_blocking)
            source = src.to(device=self.device, dtype=self.dtype)
            live = self.detach()
            torch.where(source.isnan(), live, source, out=live)
            return self

        def fill_(self: torch.Tensor, value: float) -> torch.Tensor:
            return self if is_ours(self) else original_fill(self, value)

        torch.Tensor.copy_ = copy_  # type: ignore[method-assign, assignment]
        torch.Tensor.fill_ = fill_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.Tensor.copy_ = original_copy  # type: ignore[method-assign]
            torch.Tensor.fill_ = original_fill  # type: ignore[method-assign]
