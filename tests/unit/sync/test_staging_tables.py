"""The contract of the staging tables: what they stage of a part is what numpy says.

The host table is tested with its compiled loops and without numba, and the device table by
PyTorch's operators; `tests/unit/kernels` runs its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import Checkpoint, FusedQkv, PlainCopy, Replicated, ToyModel
from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.format import (
    DecodedPart,
    Digest,
    ParamDelta,
    change_digest,
    decode_part,
    encode_part,
)
from engine_ext.kernels import AHEAD
from engine_ext.placement import DeviceElements, DeviceRows, HostElements, WholeBox
from engine_ext.sync import host_table
from engine_ext.sync.staged import StagedParam, StagedPart, Write
from tests.support.served_models import (
    PROPERTY,
    Served,
    as_on_a_device,
    attempt,
    base_checkpoint,
    bits,
    changed,
    delta_between,
    dense_delta,
    load,
    memory,
    parts_of,
    replan,
    serve,
    serve_ranks,
    small_pieces,
    target_checkpoint,
)
from tests.support.staged_writes import writes_of
from tests.support.thread_ranks import Shard, shards
from tests.unit.sync.applier_cases import EVERY_MODEL, deltas_for, each_sync

pytestmark = pytest.mark.host_memory

TABLES = ("host", "without numba", "device")
EACH_TABLE = pytest.mark.parametrize("table", TABLES)
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64)


def use(served: Served, table: str) -> Served:
    """Let a rank stage by one of the tables."""
    if table == "device":
        as_on_a_device(served)
    elif table == "without numba":
        with mock.patch.object(host_table, "_gather_loop", return_value=None):
            replan(served, served.applier.plan)
    return served


def part_between(base: Checkpoint, target: Checkpoint, encoding: str = "gap8_exp") -> DecodedPart:
    """The change of all tensors, which have one dtype, as it is decoded."""
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    if encoding == "gap8_ulp":
        deltas = [
            msgspec.structs.replace(
                delta,
                values=delta.values - bits(base[delta.name])[delta.indices],
                differences=True,
            )
            for delta in deltas
        ]
    return decode_part(
        encode_part(deltas, encoding=encoding, current_version=1, digest_part="0" * 32)
    )


Elements = dict[tuple[str, int], tuple[int, int]]
"""Old and new bits by the live tensor's name and the offset in it."""


def elements_of(writes: Sequence[Write]) -> Elements:
    """What writes change, each element once."""
    found: Elements = {}
    for write in writes:
        places, old, new = _arrays(write)
        for place, before, after in zip(places, old.tolist(), new.tolist(), strict=True):
            if before != after:
                assert place not in found
                found[place] = before, after
    return found


def _arrays(write: Write) -> tuple[list[tuple[str, int]], Any, Any]:
    """The live tensor and the offset of each element, its old and its new bits."""
    elements = write.elements
    if isinstance(elements, DeviceRows):
        names = np.repeat(
            np.array(elements.tensors.names)[elements.numbers], elements.counts
        ).tolist()
        places = [*zip(names, elements.offsets.tolist(), strict=True)]
        return places, _unsigned(write.old), _unsigned(write.new)
    if isinstance(elements, WholeBox):
        segment = elements.segment
        flat = torch.arange(segment.live.flat().numel())
        offsets = flat.as_strided(segment.sizes, segment.strides, segment.offset)
    else:
        assert isinstance(elements, HostElements | DeviceElements)
        offsets = torch.as_tensor(elements.offsets)
    old = elements.read() if write.old is None else write.old
    places = [(write.live, offset) for offset in offsets.reshape(-1).tolist()]
    return places, _unsigned(old), _unsigned(write.new)


def _unsigned(values: Any) -> Any:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
    return array.reshape(-1).view(f"u{array.itemsize}")


def digests_of(params: Sequence[StagedParam]) -> list[Any]:
    return [(p.name, p.nnz, p.dense, p.counted, p.change, p.replicas) for p in params]


@pytest.mark.slow
@PROPERTY
@given(
    table=st.sampled_from(TABLES),
    shard=shards(),
    number=st.sampled_from([1, 2, 5]),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 1 << 20),
    piece=st.sampled_from([1, 7, 1 << 16]),
    cut=st.sampled_from([0, 5, 1 << 12]),
    encoding=st.sampled_from(["gap8_exp", "gap8_ulp", "deltas"]),
    wide=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
def test_a_shard_is_staged_as_numpy_says(
    table: str,
    shard: Shard,
    number: int,
    density: float,
    seed: int,
    piece: int,
    cut: int,
    encoding: str,
    wide: bool,
    threads: int,
) -> None:
    """Runs, column shards, steps and permutations, in one piece and in many."""
    model = shard.model(number)
    base = base_checkpoint(model, seed)
    served = serve(model, base, apply="scatter", threads=threads)
    with int64_numbers(served) if wide else nullcontext():
        use(served, table)
        target = {name: changed(base[name], seed + n, density) for n, name in enumerate(base)}
        part = part_between(base, target, encoding)
        before = memory(served.model)
        with small_pieces(piece), mock.patch.object(host_table, "_CUT_ELEMENTS", cut):
            params = served.applier.stage(part).params
    assert memory(served.model) == before
    own = np.sort(shard.on_rank())
    where = np.zeros(shard.live_shape, np.int64)
    where[shard.live_index] = shard.on_rank().reshape(shard.sizes) + 1
    for param, delta in zip(params, part.deltas, strict=True):
        old, new = bits(base[param.name]), bits(target[param.name])
        held = own[old[own] != new[own]]
        change = change_digest(param.name, held, old[held], new[held])
        assert param.change == change
        assert (param.nnz, param.counted, param.replicas) == (delta.nnz, held.size, {})
        offsets = [int(np.flatnonzero(where.reshape(-1) == i + 1)[0]) for i in held]
        expected = {
            (param.name, offset): (int(old[i]), int(new[i]))
            for i, offset in zip(held, offsets, strict=True)
        }
        assert elements_of(param.writes) == expected


@contextmanager
def int64_numbers(served: Served) -> Iterator[None]:
    """Let the tables take every index and every offset for one that int32 does not hold."""
    for targets in served.applier.plan.targets.values():
        for target in targets:
            target.locator.offset_dtype = np.int64
    with mock.patch.object(host_table, "_INT32_ELEMENTS", 0):
        yield


@EVERY_MODEL
def test_every_loader_is_staged_alike_by_all_tables(model: type[ToyModel]) -> None:
    """Experts, permutations, casts, ties and copies, in one piece and in many; and written."""
    expected, *others = (outcomes(model, table) for table in TABLES)
    for table, found in zip(TABLES[1:], others, strict=True):
        for case, outcome in expected.items():
            assert found[case] == outcome, (table, case)


def outcomes(model: type[ToyModel], table: str) -> dict[tuple[tuple[str, ...], bool], Any]:
    """Return what a table stages of each sync and what is written; the syncs follow each other."""
    current = base_checkpoint(model)
    served = use(serve(model, current, apply="scatter", threads=2), table)
    found = {}
    for number, (names, dense) in enumerate(each_sync(model), start=1):
        target = target_checkpoint(current, names, number)
        parts = parts_of(deltas_for(current, target, names, dense))
        staged: list[Any] = []
        with suppress(NotUpdatable):
            for part in (served.applier.stage(part) for part in parts):
                staged += elements_of(writes_of(part)), digests_of(part.params)
        with small_pieces(3):
            refusal = attempt(served, parts)
        current = target if refusal is None else current
        written = str(refusal), memory(served.model), dict(served.applier.digests)
        found[names, dense] = staged, written
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("far", [False, True])
def test_elements_of_each_width(dtype: torch.dtype, far: bool) -> None:
    """Close to each other, and with more blocks of the digest than elements."""
    shapes = {"a": (40, 60), "b": (3,), "c": (1, 1)} | ({"a": (90_000,)} if far else {})
    dtypes = dict.fromkeys(shapes, dtype)
    model = type("OfOneDtype", (ToyModel,), {"shapes": shapes, "dtypes": dtypes})
    random, kind = np.random.default_rng(2), bits_dtype(NAME_OF_TORCH[dtype])
    base, target = {}, {}
    for name, shape in shapes.items():
        old = random.integers(0, 1 << 8 * kind.itemsize, shape, kind).reshape(-1)
        new = old.copy()
        new[:: 5000 if far else 1] ^= kind.type(3)
        base[name], target[name] = (
            torch.from_numpy(each.view(f"i{kind.itemsize}")).view(dtype).reshape(shape)
            for each in (old, new)
        )
    for table in TABLES:
        served, before, after = use(serve(model, base, apply="scatter"), table), base, target
        for encoding in ("gap8_exp", "gap8_ulp", "deltas"):
            staged = served.applier.stage(part_between(before, after, encoding))
            for param in staged.params:
                old, new = bits(before[param.name]), bits(after[param.name])
                places = np.flatnonzero(old != new)
                change = change_digest(param.name, places, old[places], new[places])
                assert param.change == change, (table, encoding, param.name)
            served.applier.write([staged])
            assert memory(served.model) == memory(load(model, after)), (table, encoding)
            before, after = after, before


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3000], ids=["close", "far"])
@pytest.mark.parametrize("count", [1, 2, AHEAD - 1, AHEAD, AHEAD + 1, 3 * AHEAD])
def test_counts_around_the_prefetch_distance(step: int, count: int) -> None:
    """The values are also neither aligned nor next to each other."""
    model = type("OfOneTensor", (ToyModel,), {"shapes": {"a": (count * step,)}})
    base = base_checkpoint(model)
    old, places = bits(base["a"]), np.arange(count) * step
    new = old[places] ^ 5
    [like] = parts_of([delta_between("a", base["a"], changed(base["a"], 7))])
    raw = np.zeros(2 * count + 1, np.uint8)[1:].view(np.uint16)
    strided = np.zeros((count, 2), np.uint16)[:, 0]
    served = serve(model, base, apply="scatter")
    for table in TABLES:
        use(served, table)
        for values in (raw, strided):
            values[:] = new
            delta = ParamDelta("a", "bfloat16", (count * step,), places, values)
            [param] = served.applier.stage(DecodedPart(like.manifest, (delta,))).params
            assert param.change == change_digest("a", places, old[places], new), table
            expected = {("a", int(i)): (int(old[i]), int(old[i] ^ 5)) for i in places}
            assert elements_of(param.writes) == expected, table


@EACH_TABLE
@pytest.mark.parametrize("piece", [1, 1 << 16])
def test_a_part_of_several_dtypes(table: str, piece: int) -> None:
    """As another trainer can send it."""
    shapes = {"a": (4, 6), "b": (3,), "c": (1, 1)}
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    model = type("OfSeveral", (ToyModel,), {"shapes": shapes, "dtypes": dtypes})
    base = base_checkpoint(model)
    target = {name: changed(base[name], n + 1, 1.0) for n, name in enumerate(base)}
    served = use(serve(model, base, apply="scatter"), table)
    parts = parts_of([delta_between(name, base[name], target[name]) for name in base])
    deltas = {delta.name: delta for part in parts for delta in part.deltas}
    with small_pieces(piece):
        staged = served.applier.stage(
            DecodedPart(parts[0].manifest, tuple(deltas[name] for name in base))
        )
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


class OneRank(ToyModel):
    """All of what the ranks above share."""

    shapes: ClassVar = dict.fromkeys(("rows", "columns", "all"), (ROWS, COLUMNS))


@EACH_TABLE
@pytest.mark.parametrize("cut", [0, 1 << 12])
@pytest.mark.parametrize("piece", [5, 1 << 16])
def test_ranks_that_share_a_tensor(table: str, cut: int, piece: int) -> None:
    base = base_checkpoint(shard_of(0))
    part = part_between(base, {name: changed(base[name], 7) for name in base})
    ranks = serve_ranks([shard_of(rank) for rank in range(RANKS)], base, apply="scatter")
    total = Digest.ZERO
    for number, served in enumerate(ranks):
        use(served, table)
        with small_pieces(piece), mock.patch.object(host_table, "_CUT_ELEMENTS", cut):
            params = served.applier.stage(part).params
        everyone = tuple(range(RANKS))
        assert [[*p.replicas] for p in params] == [[everyone] * (p.name == "all") for p in params]
        assert [p.counted > 0 for p in params] == [True, True, number == 0]
        total += Digest.total(param.change for param in params)
    alone = serve(OneRank, base, apply="scatter")
    assert total == Digest.total(p.change for p in alone.applier.stage(part).params)


@EACH_TABLE
@pytest.mark.parametrize("model", [Replicated, toy_models.Broadcast])
@pytest.mark.parametrize("piece", [2, 1 << 16])
def test_copies_that_differ_are_refused(table: str, model: type[ToyModel], piece: int) -> None:
    base = base_checkpoint(model)
    served = use(serve(model, base, apply="scatter"), table)
    name = next(name for name in served.placement if _has_copies(served, name))
    [part] = parts_of([delta_between(name, base[name], changed(base[name], 7, 1.0))])
    with small_pieces(piece):
        served.applier.stage(part)
        segment = served.placement[name].segments[-1]
        segment.live.flat()[segment.offset] += 1
        with pytest.raises(BaseMismatch, match="copies of it on this rank differ"):
            served.applier.stage(part)


def _has_copies(served: Served, name: str) -> bool:
    targets = served.applier.plan.targets.get(name, ())
    return sum(target.locator.copies for target in targets) > 1


@EACH_TABLE
def test_indices_wider_than_they_need_to_be(table: str) -> None:
    """And params without an element, dense ones, and changes of bits among the others."""
    base = base_checkpoint(OneRank)
    target = {name: changed(base[name], 7) for name in base}
    part = part_between(base, target)
    delta = part.deltas[0]
    assert delta.indices is not None
    none = msgspec.structs.replace(
        delta, indices=np.empty(0, np.int32), values=np.empty(0, np.uint16)
    )
    all_bits = np.full(delta.nnz, 0xFFFF, np.uint16)
    for other, written in (
        (dense_delta("rows", target["rows"]), True),
        (msgspec.structs.replace(delta, indices=delta.indices.astype(np.int64)), True),
        (msgspec.structs.replace(delta, cleared=all_bits), True),
        (none, False),
    ):
        served = use(serve(OneRank, base, apply="scatter"), table)
        staged = served.applier.stage(DecodedPart(part.manifest, (other, *part.deltas[1:])))
        served.applier.write([staged])
        expected = target if written else {**target, "rows": base["rows"]}
        assert memory(served.model) == memory(load(OneRank, expected))


def test_nothing_of_the_part_is_kept() -> None:
    """Writes have views of two blocks with this rank's elements; the undo needs one."""
    base = base_checkpoint(OneRank)
    served = serve(OneRank, base, apply="scatter")
    part = part_between(base, {name: changed(base[name], 7) for name in base})
    for piece in (5, 1 << 16):
        with small_pieces(piece):
            writes: Any = writes_of(served.applier.stage(part))
        old = {id(b): b for w in writes for b in (w.old.base, w.elements.offsets.base)}
        new = {id(b): b for w in writes for b in (w.new.base,)}
        assert len(old) == len(new) == 1
        assert not old.keys() & new.keys()
        elements = sum(write.new.size for write in writes)
        size = sum(each.nbytes for each in (*old.values(), *new.values()))
        assert size <= 8 * elements + 3 * 64 * len(writes)


def test_memory_that_is_not_aligned_is_left_to_numpy() -> None:
    """As a tensor of a checkpoint file in place can be."""
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base, apply="scatter")
    plan = served.applier.plan
    [target] = plan.targets["weight"]
    raw = np.zeros(target.flat.nbytes + 1, np.uint8)[1:].view(np.uint16)
    raw[:] = bits(target.flat)
    replan(served, replace(plan, targets={**plan.targets, "weight": (replace(target, host=raw),)}))
    delta = delta_between("weight", base["weight"], changed(base["weight"], 7))
    [part] = parts_of([delta])
    [param] = served.applier.stage(part).params
    [write] = param.writes
    assert isinstance(write.elements, HostElements)
    assert write.elements.flat is raw
    assert write.new.tolist() == delta.values.tolist()


@EACH_TABLE
def test_the_order_of_the_params_does_not_matter(table: str) -> None:
    base = base_checkpoint(OneRank)
    served = use(serve(OneRank, base, apply="scatter"), table)
    part = part_between(base, {name: changed(base[name], 7) for name in base})
    forwards = served.applier.stage(part)
    backwards = served.applier.stage(DecodedPart(part.manifest, tuple(reversed(part.deltas))))
    assert digests_of(forwards.params) == digests_of(backwards.params)[::-1]
    assert _by_param(forwards) == _by_param(backwards)[::-1]


def _by_param(staged: StagedPart) -> list[Elements]:
    return [elements_of(param.writes) for param in staged.params]


@EACH_TABLE
def test_tensors_of_several_segments_are_pieced(table: str) -> None:
    base = base_checkpoint(FusedQkv)
    target = target_checkpoint(base, base)
    found = []
    for piece in (1, 3, 1 << 16):
        served = use(serve(FusedQkv, base, apply="scatter", threads=3), table)
        parts = parts_of([delta_between(n, base[n], target[n]) for n in base])
        with small_pieces(piece):
            staged = [served.applier.stage(part) for part in parts]
        found.append([(_by_param(one), digests_of(one.params)) for one in staged])
        served.applier.write(staged)
        assert memory(served.model) == memory(load(FusedQkv, target))
    assert found[0] == found[1] == found[2]
