"""Params that are staged together are staged as each would be alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.format import DecodedPart, Digest, decode_part, encode_part
from engine_ext.placement import HostElements, fits_table
from engine_ext.sync import param_batch
from engine_ext.sync.param_batch import Batcher
from engine_ext.sync.staged import StagedParam, StagedPart
from tests.support import served_models
from tests.support.served_models import (
    PROPERTY,
    Served,
    as_on_a_device,
    base_checkpoint,
    changed,
    delta_between,
    dense_delta,
    load,
    memory,
    parts_of,
    serve,
    serve_ranks,
)
from tests.support.thread_ranks import Shard, shards
from tests.support.toy_models import (
    Broadcast,
    CastBefore,
    Checkpoint,
    ColumnShard,
    FusedQkv,
    PlainCopy,
    Replicated,
    RowShard,
    Tied,
    ToyModel,
    Widened,
)

# Those of an accelerator are staged together anyway.
pytestmark = pytest.mark.host_memory


def part_between(base: Checkpoint, target: Checkpoint, encoding: str = "gap8_exp") -> DecodedPart:
    """The change of all tensors, which have one dtype, as it is decoded."""
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    if encoding == "gap8_ulp":
        deltas = [
            msgspec.structs.replace(
                delta,
                values=delta.values - served_models.bits(base[delta.name])[delta.indices],
                differences=True,
            )
            for delta in deltas
        ]
    return decode_part(
        encode_part(deltas, encoding=encoding, current_version=1, digest_part="0" * 32)
    )


def numbers_in_batches(served: Served, part: DecodedPart) -> list[list[int]]:
    return [*served.applier._batcher.chosen(part)]


def one_by_one(served: Served, part: DecodedPart) -> StagedPart:
    with mock.patch.object(Batcher, "chosen", return_value=iter(())):
        return served.applier.stage(part)


def content(params: Sequence[StagedParam]) -> list[Any]:
    found = []
    for param in params:
        writes = []
        for write in param.writes:
            assert isinstance(write.elements, HostElements)
            arrays = write.elements.offsets, write.old, write.new
            where = write.elements.flat.__array_interface__["data"], write.live, write.keep
            writes.append((where, [(a.dtype, a.tolist()) for a in arrays]))
        counted = param.counted, param.change, param.replaced, param.replicas
        found.append((param.name, param.nnz, param.dense, writes, counted))
    return found


@PROPERTY
@given(
    shard=shards(),
    number=st.sampled_from([1, 2, 5]),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 1 << 20),
    group=st.sampled_from([1, 30, 1 << 17]),
    cut=st.sampled_from([0, 5, 1 << 12]),
    encoding=st.sampled_from(["gap8_exp", "gap8_ulp", "deltas"]),
    threads=st.sampled_from([1, 3]),
)
def test_the_same_as_one_by_one(
    shard: Shard,
    number: int,
    density: float,
    seed: int,
    group: int,
    cut: int,
    encoding: str,
    threads: int,
) -> None:
    model = shard.model(number)
    base = base_checkpoint(model, seed)
    served = serve(model, base, apply="scatter", threads=threads)
    target = {name: changed(base[name], seed + n, density) for n, name in enumerate(base)}
    part = part_between(base, target, encoding)
    before = memory(served.model)
    with mock.patch.multiple(param_batch, _GROUP=group, _CUT=cut):
        staged = served.applier.stage(part)
    assert content(staged.params) == content(one_by_one(served, part).params)
    assert memory(served.model) == before


@pytest.mark.parametrize("model", [PlainCopy, RowShard, ColumnShard])
def test_what_is_one_box_is_in_a_batch(model: type[ToyModel]) -> None:
    """Also a column shard, which is not a run: the tests above would pass without any batch."""
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    part = part_between(base, {name: changed(base[name], 7) for name in base})
    assert numbers_in_batches(served, part) == [[*range(len(base))]]


@pytest.mark.parametrize("model", [FusedQkv, Broadcast, Replicated, CastBefore, Widened, Tied])
def test_all_others_are_staged_as_before(model: type[ToyModel]) -> None:
    """Those with several segments, copies, and a cast, if they are; the rest may be in a batch."""
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    part = part_between(base, {name: changed(base[name], 7) for name in base})
    for number in (number for group in numbers_in_batches(served, part) for number in group):
        name = part.deltas[number].name
        [target] = served.applier.plan.targets[name]
        assert target.dtype == base[name].dtype
        assert target.locator.copies == 1
    assert content(served.applier.stage(part).params) == content(one_by_one(served, part).params)


class ThreeTensors(ToyModel):
    shapes: ClassVar = {"a": (4, 6), "b": (3,), "c": (1, 1)}


@pytest.mark.parametrize("encoding", ["gap8_exp", "gap8_ulp", "deltas"])
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_elements_of_each_width(dtype: torch.dtype, encoding: str) -> None:
    model = type("OfOneDtype", (ThreeTensors,), {"dtypes": dict.fromkeys("abc", dtype)})
    generator = torch.Generator().manual_seed(2)
    width = torch.empty(0, dtype=dtype).itemsize
    base, target = (
        {
            name: torch.randint(0, 256, (*shape, width), generator=generator, dtype=torch.uint8)
            .view(dtype)
            .reshape(shape)
            for name, shape in ThreeTensors.shapes.items()
        }
        for _ in range(2)
    )
    served = serve(model, base, apply="scatter")
    part = part_between(base, target, encoding)
    assert numbers_in_batches(served, part) == [[0, 1, 2]]
    staged = served.applier.stage(part)
    assert content(staged.params) == content(one_by_one(served, part).params)
    served.applier.write([staged])
    live = {name: getattr(served.model, name) for name in base}
    assert all(torch.equal(live[n].view(torch.uint8), target[n].view(torch.uint8)) for n in base)


@pytest.mark.parametrize("group", [1, 1 << 17])
def test_a_part_of_several_dtypes(group: int) -> None:
    """As a foreign trainer may send it; those of each width are in a batch of their own."""
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    model = type("OfSeveral", (ThreeTensors,), {"dtypes": dtypes})
    base = base_checkpoint(model)
    target = {name: changed(base[name], n + 1, 1.0) for n, name in enumerate(base)}
    served = serve(model, base, apply="scatter")
    parts = parts_of([delta_between(name, base[name], target[name]) for name in base])
    deltas = {delta.name: delta for part in parts for delta in part.deltas}
    part = DecodedPart(parts[0].manifest, tuple(deltas[name] for name in base))
    with mock.patch.object(param_batch, "_GROUP", group):
        groups = numbers_in_batches(served, part)
        staged = served.applier.stage(part)
    assert sorted(groups) == ([[0], [1], [2]] if group == 1 else [[0, 2], [1]])
    assert content(staged.params) == content(one_by_one(served, part).params)
    served.applier.check_base([staged])
    served.applier.write([staged])
    assert memory(served.model) == memory(load(model, target))


ROWS, COLUMNS, RANKS = 12, 8, 4


def shard_of(rank: int) -> type[ToyModel]:
    """A rank's share: of one tensor by rows, of one by columns; and one that all ranks have."""

    class Sharded(ToyModel):
        shapes: ClassVar = dict.fromkeys(("rows", "columns", "all"), (ROWS, COLUMNS))

        def build(self) -> None:
            for name in self.shapes:
                dim, size = _share(name)
                shape = [size if d == dim else n for d, n in enumerate((ROWS, COLUMNS))]
                setattr(self, name, torch.nn.Parameter(torch.zeros(shape).bfloat16(), False))

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            dim, size = _share(name)
            start = 0 if name == "all" else rank * size
            getattr(self, name).copy_(weight.narrow(dim, start, size))

    return Sharded


def _share(name: str) -> tuple[int, int]:
    return {"rows": (0, ROWS // RANKS), "columns": (1, COLUMNS // RANKS), "all": (0, ROWS)}[name]


@pytest.mark.parametrize("cut", [0, 1 << 12])
def test_ranks_that_share_a_tensor(cut: int) -> None:
    base = base_checkpoint(shard_of(0))
    part = part_between(base, {name: changed(base[name], 7) for name in base})
    ranks = serve_ranks([shard_of(rank) for rank in range(RANKS)], base, apply="scatter")
    total = Digest.ZERO
    for number, served in enumerate(ranks):
        assert numbers_in_batches(served, part) == [[0, 1, 2]]
        with mock.patch.object(param_batch, "_CUT", cut):
            params = served.applier.stage(part).params
        assert content(params) == content(one_by_one(served, part).params)
        assert [bool(p.replicas) for p in params] == [p.name == "all" for p in params]
        assert params[2].name == "all"
        assert (params[2].counted > 0) == (number == 0)
        total += Digest.total(param.change for param in params)
    alone = serve(OneRank, base, apply="scatter")
    assert total == Digest.total(p.change for p in alone.applier.stage(part).params)


class OneRank(ToyModel):
    """All of what the ranks above share."""

    shapes: ClassVar = dict.fromkeys(("rows", "columns", "all"), (ROWS, COLUMNS))


def test_what_no_batch_has() -> None:
    """Dense params, wide indices, changes of bits, large params, and those without an element."""
    base = base_checkpoint(OneRank)
    served = serve(OneRank, base, apply="scatter")
    target = {name: changed(base[name], 7) for name in base}
    part = part_between(base, target)
    delta = part.deltas[0]
    assert delta.indices is not None
    none = np.empty(0, np.int32), np.empty(0, np.uint16)
    for other in (
        dense_delta("rows", target["rows"]),
        msgspec.structs.replace(delta, indices=delta.indices.astype(np.int64)),
        msgspec.structs.replace(delta, cleared=delta.values),
        msgspec.structs.replace(delta, indices=none[0], values=none[1]),
        msgspec.structs.replace(delta, name="unknown"),
    ):
        with_other = DecodedPart(part.manifest, (other, *part.deltas[1:]))
        assert numbers_in_batches(served, with_other) == [[1, 2]]
    with mock.patch("engine_ext.sync.pieces._HOST_SPAN", delta.nnz - 1):
        assert 0 not in chain.from_iterable(numbers_in_batches(served, part))
    as_on_a_device(served)
    assert numbers_in_batches(served, part) == []


def test_no_batch_of_a_full_sync() -> None:
    """Its old values are not read, but for a digest."""
    base = base_checkpoint(OneRank)
    served = serve(OneRank, base, apply="scatter")
    deltas = [dense_delta(name, base[name]) for name in base]
    body = encode_part(deltas, encoding="indices", current_version=1, full=True)
    assert numbers_in_batches(served, decode_part(body)) == []


def test_without_numba() -> None:
    base = base_checkpoint(OneRank)
    [part] = parts_of([delta_between(n, base[n], changed(base[n], 7)) for n in base])
    with mock.patch.object(param_batch, "_loop", return_value=None):
        served = serve(OneRank, base, apply="scatter")
    assert numbers_in_batches(served, part) == []
    other = serve(OneRank, base, apply="scatter")
    assert [len(p.writes) for p in served.applier.stage(part).params] == [1, 1, 1]
    found, wanted = (content(one.applier.stage(part).params) for one in (served, other))
    assert [p[-1] for p in found] == [p[-1] for p in wanted]


def test_nothing_of_the_part_is_kept() -> None:
    """What a write has are views of memory that only this rank's elements are in."""
    base = base_checkpoint(OneRank)
    served = serve(OneRank, base, apply="scatter")
    part = part_between(base, {name: changed(base[name], 7) for name in base})
    writes = served.applier.stage(part).writes
    kept = {id(base): base for write in writes for base in (write.old.base, write.new.base)}
    assert len(kept) == 2
    elements = sum(write.new.size for write in writes)
    assert sum(each.nbytes for each in kept.values()) <= 8 * elements + 3 * 64


def test_an_odd_address_is_left_to_numpy() -> None:
    """Elements that are not aligned, as a tensor of a checkpoint file in place may be."""
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base, apply="scatter")
    [target] = served.applier.plan.targets["weight"]
    raw = np.zeros(target.flat.nbytes + 1, np.uint8)[1:].view(np.uint16)
    assert not raw.flags.aligned
    assert fits_table(target)
    assert not fits_table(replace(target, host=raw))


def test_a_delta_of_another_order_of_names() -> None:
    """The rows are those of the names, whatever their order in the part."""
    base = base_checkpoint(OneRank)
    served = serve(OneRank, base, apply="scatter")
    part = part_between(base, {name: changed(base[name], 7) for name in base})
    backwards = DecodedPart(part.manifest, tuple(reversed(part.deltas)))
    found = content(served.applier.stage(backwards).params)
    assert found == content(served.applier.stage(part).params)[::-1]
