"""The stream table's kernels against the host's staging; run as `test_triton` says.

Under Triton's interpreter on the CPU (``TRITON_INTERPRET=1``), else on the CUDA device.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine_ext.conformance.toy_models import Checkpoint, FusedQkv, PlainCopy, ToyModel
from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.conformance.verified_file import verified_file
from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype
from engine_ext.errors import BaseMismatch, DeltaError, MalformedPart, NotUpdatable
from engine_ext.format import (
    Digest,
    UnpackedPart,
    change_digest,
    decode_part,
    digest_on_device,
    encode_part,
    read_unpacked,
)
from engine_ext.format.gap_streams import index_dtype
from engine_ext.format.part_arrays import PartArrays
from engine_ext.kernels import StagingStream
from engine_ext.kernels import triton as device
from engine_ext.kernels.triton import gap_expand, gather_scatter
from engine_ext.placement import (
    DeviceBatch,
    DeviceElements,
    DeviceMemory,
    DeviceRows,
    LiveTensors,
    are_as_read,
    device_batch,
    device_memory,
    overwrite,
    targets,
)
from engine_ext.sync import staged as sync_staged
from engine_ext.sync import stream_table
from engine_ext.sync.staged import StagedPart
from tests.support.served_models import (
    Served,
    assert_digests,
    base_checkpoint,
    bits,
    changed,
    delta_between,
    load,
    memory,
    on_a_device,
    replan,
    serve,
    serve_ranks,
)
from tests.support.staged_writes import writes_of
from tests.support.thread_ranks import Shard, shards
from tests.unit.sync.test_staging_tables import OneRank, elements_of, shard_of

# Each failure would be made smaller in minutes of the interpreter.
PHASES = (Phase.explicit, Phase.generate)
QUICK = settings(deadline=None, database=None, max_examples=10, phases=PHASES)
ENCODINGS = ("gap8_exp", "gap8_ulp", "deltas")


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """Borders of blocks in little data; and the kernels, whatever the tensors are on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        patch.setattr(gap_expand, "BLOCK", 16)
        patch.setattr(gather_scatter, "BLOCK", 64)
        for module in (
            *(device, device_batch, device_memory, targets, digest_on_device, stream_table),
        ):
            patch.setattr(module, "runs_kernels", lambda device: True)
        yield


def body_between(base: Checkpoint, target: Checkpoint, encoding: str, digest: str = "") -> bytes:
    """The change of all tensors, which have one dtype."""
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
    return encode_part(deltas, encoding=encoding, current_version=1, digest_part=digest or "0" * 32)


def unpacked(body: bytes) -> UnpackedPart:
    """A part as intake leaves it for the ranks."""
    identity, file = verified_file(body)
    part = read_unpacked(file, identity)
    assert part is not None
    return part


def by_name(staged: StagedPart) -> list[Any]:
    """What a part stages for each tensor, but for the writes."""
    found = [(p.name, p.nnz, p.dense, p.counted, p.change, p.replicas) for p in staged.params_of()]
    return sorted(found, key=lambda one: one[0])


def on_device(served: Served) -> Served:
    replan(served, on_a_device(served.applier.plan))
    return served


def assert_alike(served: Served, body: bytes) -> StagedPart:
    """Stage a part by the host and from its streams; all that the rank learns must be the same."""
    expected = served.applier.stage(decode_part(body))
    before = memory(served.model)
    staged = on_device(served).applier.stage_unpacked(unpacked(body))
    assert memory(served.model) == before
    assert by_name(staged) == by_name(expected)
    assert elements_of(writes_of(staged)) == elements_of(writes_of(expected))
    return staged


def rows_of(staged: StagedPart) -> int:
    """How many tensors' elements the stream table has staged."""
    many = [write.elements for write in writes_of(staged) if isinstance(write.elements, DeviceRows)]
    return sum(one.numbers.size for one in many)


@QUICK
@given(
    shard=shards(),
    number=st.sampled_from([1, 3]),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 1 << 20),
    batch=st.sampled_from([3, 40, 1 << 22]),
    encoding=st.sampled_from(ENCODINGS),
    wide=st.booleans(),
)
def test_a_shard_is_staged_as_by_the_host(
    shard: Shard, number: int, density: float, seed: int, batch: int, encoding: str, wide: bool
) -> None:
    """Runs, column shards, steps and permutations, in one batch and in many."""
    model = shard.model(number)
    base = base_checkpoint(model, seed)
    target = {name: changed(base[name], seed + n, density) for n, name in enumerate(base)}
    served = serve(model, base, apply="scatter")
    if wide:
        for own in served.applier.plan.targets.values():
            for one in own:
                one.locator.offset_dtype = np.int64
    with mock.patch.object(stream_table, "_BATCH_SYMBOLS", batch):
        staged = assert_alike(served, body_between(base, target, encoding))
    assert all(not param.nnz for param in staged.params)


@pytest.mark.parametrize(
    ("dtype", "encoding", "step"),
    [
        (torch.float8_e4m3fn, "gap8_exp", 300),
        (torch.bfloat16, "gap8_exp", 1),
        (torch.bfloat16, "gap8_ulp", 300),
        (torch.bfloat16, "gap8_exp", 1000),
        (torch.bfloat16, "gap8_ulp", 70_000),
        (torch.bfloat16, "deltas", 300),
        (torch.bfloat16, "deltas", 70_000),
        (torch.float32, "gap8_ulp", 1),
        (torch.float64, "gap8_ulp", 300),
    ],
)
def test_elements_of_each_width(dtype: torch.dtype, step: int, encoding: str) -> None:
    """With symbols of one byte and of two, and gaps of several symbols; written and taken back."""
    size = 20 * step if step < 2000 else step + 100
    shapes = {"a": (8, 5), "b": (3,), "c": (1, 1), "d": (size,)}
    dtypes = dict.fromkeys(shapes, dtype)
    model = type("OfOneDtype", (ToyModel,), {"shapes": shapes, "dtypes": dtypes})
    random, kind = np.random.default_rng(2), bits_dtype(NAME_OF_TORCH[dtype])
    base, target = {}, {}
    for name, shape in shapes.items():
        old = random.integers(0, 1 << 8 * kind.itemsize, shape, kind).reshape(-1)
        new = old.copy()
        count = -(-old.size // (step if name == "d" else 1))
        near = old.size if step < 2000 else min(old.size, 100)  # then the last gap is long
        places = random.choice(near, count, replace=False)
        places[-1] = old.size - 1
        new[places] ^= kind.type(3)
        base[name], target[name] = (
            torch.from_numpy(each.view(f"i{kind.itemsize}")).view(dtype).reshape(shape)
            for each in (old, new)
        )
    served = serve(model, base, apply="scatter")
    body = body_between(base, target, encoding)
    widths = {entry.pos_width for entry in decode_part(body).manifest.params}
    assert max(widths) == (2 + 2 * (step > 65_536) if encoding == "deltas" else 1 + (step >= 1000))
    staged = assert_alike(served, body)
    assert rows_of(staged) == 4
    commit_and_back(served, [staged], model, target)


def commit_and_back(
    served: Served, staged: Sequence[StagedPart], model: type[ToyModel], target: Checkpoint
) -> None:
    applier, before = served.applier, memory(served.model)
    applier.check_sync(staged, full=False)
    applier.check_base(staged)
    applier.write(staged)
    assert memory(served.model) == memory(load(model, target))
    applier.undo(staged)
    assert memory(served.model) == before
    applier.write(staged)
    log = applier.finish(staged)
    assert_digests(applier)
    assert log is not None
    assert log.nbytes
    applier.roll_back(log)
    assert memory(served.model) == before
    assert_digests(applier)


class Experts(ToyModel):
    """Small tensors that are rows of one, next to one that is turned."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        **{f"expert{n}": (3, 4) for n in range(8)},
        "turned": (5, 6),
    }

    def build(self) -> None:
        self.stacked = torch.nn.Parameter(
            torch.zeros(8, 3, 4, dtype=torch.bfloat16, device=DEVICE), False
        )
        self.turned = torch.nn.Parameter(
            torch.zeros(6, 5, dtype=torch.bfloat16, device=DEVICE), False
        )

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "turned":
            self.turned.copy_(weight.t())
        else:
            self.stacked[int(name.removeprefix("expert"))].copy_(weight)


@pytest.mark.parametrize("model", [PlainCopy, FusedQkv, Experts])
def test_one_launch_stages_all_tensors(model: type[ToyModel]) -> None:
    base = base_checkpoint(model)
    base = {name: tensor for name, tensor in base.items() if tensor.dtype == torch.bfloat16}
    target = {name: changed(tensor, n, 0.6) for n, (name, tensor) in enumerate(base.items())}
    whole = base_checkpoint(model)
    served = serve(model, whole, apply="scatter")
    with mock.patch.object(gap_expand, "stage", wraps=gap_expand.stage) as launched:
        staged = assert_alike(served, body_between(base, target, "gap8_exp"))
    assert launched.call_count == 1
    assert len(writes_of(staged)) == 1
    commit_and_back(served, [staged], model, {**whole, **target})


def test_no_object_is_made_of_a_streamed_param() -> None:
    """Up to the digests after the commit; and neighbours in the file are sent as one array."""
    base = base_checkpoint(Experts)
    target = {name: changed(tensor, n, 0.6) for n, (name, tensor) in enumerate(base.items())}
    served = serve(Experts, base, apply="scatter")
    by_host = served.applier.stage(decode_part(body_between(base, target, "gap8_exp")))
    digest = Digest.total(param.change for param in by_host.params).hex()
    part, sent = unpacked(body_between(base, target, "gap8_exp", digest)), list[int]()
    on_device(served)
    upload = StagingStream.upload

    def noted(stream: StagingStream, arrays: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        sent.append(len(arrays))
        return upload(stream, arrays, dtype)

    applier = served.applier
    with (
        mock.patch.object(StagingStream, "upload", noted),
        mock.patch.object(sync_staged, "StagedParam", side_effect=AssertionError),
        mock.patch.object(Digest, "__add__", wraps=Digest.__add__, autospec=True) as added,
    ):
        staged = [applier.stage_unpacked(part)]
        applier.check_sync(staged, full=False)
        applier.agree(staged, [applier.rank_summary(staged)])
        applier.write(staged)
        assert applier.finish(staged) is not None
    assert sent == [1, 1, 1, 1]  # symbols, programs, items, values
    assert added.call_count < len(base)
    assert memory(served.model) == memory(load(Experts, target))
    assert_digests(applier)


def test_rows_and_single_elements_are_one_batch() -> None:
    """In any order; each has its own bits."""
    live = [torch.arange(n, n + 90, dtype=torch.int16).to(DEVICE) for n in (0, 1000)]
    before = [one.clone() for one in live]
    addresses = np.array([one.data_ptr() for one in live], np.int64)
    tensors = LiveTensors(live, addresses, ["a", "b"])
    places = [torch.tensor(own, dtype=torch.int32).to(DEVICE) for own in ([3, 4], [5, 8, 0, 9])]
    many = torch.arange(20, 90, dtype=torch.int32).to(DEVICE)
    elements: list[DeviceElements | DeviceRows] = [
        DeviceElements(live[1], places[0]),
        DeviceRows(tensors, np.array([1, 0, 1]), np.array([1, 1, 2]), places[1]),
        DeviceElements(live[0], many),
    ]
    batch = DeviceBatch(elements)
    old = [[1003, 1004], [1005, 8, 1000, 1009], [*range(20, 90)]]
    assert [one.tolist() for one in batch.read()] == old
    new = [torch.arange(len(own), dtype=torch.int16) - 100 for own in old]
    overwrite(elements, new)
    assert not are_as_read([batch])
    assert [one.tolist() for one in batch.read()] == [one.tolist() for one in new]
    overwrite(elements, [torch.tensor(own, dtype=torch.int16) for own in old])
    assert all(map(torch.equal, live, before))


def test_ranks_that_share_a_tensor() -> None:
    base = base_checkpoint(OneRank)
    target = {name: changed(base[name], n, 0.6) for n, name in enumerate(base)}
    body = body_between(base, target, "gap8_exp")
    for served in serve_ranks([shard_of(rank) for rank in range(4)], base, apply="scatter"):
        staged = assert_alike(served, body)
        assert rows_of(staged) == 3


def holder(own: str) -> type[ToyModel]:
    """A rank that holds one of two tensors, as of experts."""

    class Holder(ToyModel):
        shapes: ClassVar = {"a": (4, 6), "b": (4, 6)}

        def build(self) -> None:
            setattr(
                self,
                own,
                torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16, device=DEVICE), False),
            )

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            if name == own:
                getattr(self, name).copy_(weight)

    return Holder


def test_what_is_on_other_ranks_is_not_expanded() -> None:
    base = base_checkpoint(Two)
    target = {name: changed(base[name], 1, 1.0) for name in base}
    body = body_between(base, target, "gap8_exp")
    for number, served in enumerate(serve_ranks([holder("a"), holder("b")], base, apply="scatter")):
        staged = assert_alike(served, body)
        assert [param.counted for param in staged.params_of()] == [24 * (1 - number), 24 * number]
        broken = with_streams(unpacked(body), 1 - number, [255] * 24)
        assert by_name(served.applier.stage_unpacked(broken)) == by_name(staged)


# --- what is wrong ---


def with_streams(part: UnpackedPart, number: int, symbols: Sequence[int]) -> UnpackedPart:
    streams = list(part.streams)
    streams[number] = np.array(symbols, np.uint8)
    return replace(part, streams=PartArrays.joined(streams))


class Two(ToyModel):
    shapes: ClassVar = {"a": (4, 6), "b": (4, 6)}


@pytest.mark.parametrize("batch", [2, 1 << 22])
def test_a_wrong_stream_is_refused_as_by_the_host(batch: int) -> None:
    """Nothing outside of the tensor is read or written, and the model stays as it was."""
    wrong: list[tuple[list[int], type[DeltaError]]] = [
        ([0, 0, 0, 0], MalformedPart),  # a gap too many
        ([0, 0], MalformedPart),  # and too few
        ([], MalformedPart),
        ([0, 255, 0], NotUpdatable),
        ([0, 0, 0, 255], MalformedPart),  # ends within a gap
        ([0, 0, 22], NotUpdatable),  # past the tensor
        ([0, 0, 255, 255, 255, 0], NotUpdatable),
    ]
    base = base_checkpoint(Two)
    target = {name: tensor.clone() for name, tensor in base.items()}
    for tensor in target.values():
        tensor.reshape(-1)[:3] += 1
    part = unpacked(body_between(base, target, "gap8_exp"))
    served = on_device(serve(Two, base, apply="scatter"))
    before = memory(served.model)
    with mock.patch.object(stream_table, "_BATCH_SYMBOLS", batch):
        for number, (symbols, error) in enumerate(wrong):
            with pytest.raises(error) as raised:
                served.applier.stage_unpacked(with_streams(part, number % 2, symbols))
            assert raised.value.operands["tensor"] == "ab"[number % 2]
        assert [*served.applier.stage_unpacked(part).streamed.names] == ["a", "b"]
    assert memory(served.model) == before


def test_two_batches_at_most_are_on_the_device_at_once() -> None:
    """However many parts are staged side by side: each takes memory that nobody has reserved.

    None is staged in the end: Triton's interpreter takes one thread.
    """
    base = base_checkpoint(Experts)
    target = {name: changed(base[name], n, 0.5) for n, name in enumerate(base)}
    plan = on_device(serve(Experts, base, apply="scatter")).applier.plan
    table, part = stream_table.StreamTable(plan), unpacked(body_between(base, target, "gap8_exp"))
    counting, two, inside, most = threading.Lock(), threading.Barrier(2), 0, 0

    def counted(*arguments: Any) -> Any:
        nonlocal inside, most
        with counting:
            inside += 1
            most = max(most, inside)
        two.wait(30)
        time.sleep(0.02)  # a third one would come
        with counting:
            inside -= 1
        raise RuntimeError("CUDA error: out of memory")

    with mock.patch.object(gap_expand, "locate", counted), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda memory: table.stage(part, memory), [DeviceMemory()] * 4))
    assert most == 2
    assert found == [stream_table.NO_STREAMS] * 4


def test_the_host_stages_what_finds_no_memory() -> None:
    base = base_checkpoint(Two)
    target = {name: changed(base[name], n, 0.5) for n, name in enumerate(base)}
    served, body = serve(Two, base, apply="scatter"), body_between(base, target, "gap8_exp")
    expected = by_name(served.applier.stage(decode_part(body)))
    begin, begun = StagingStream.begin_download, list[int]()

    def failing(stream: StagingStream, kept: torch.Tensor) -> torch.Tensor:
        begun.append(kept.numel())
        if len(begun) > 1:
            raise RuntimeError("CUDA error: out of memory")
        return begin(stream, kept)

    with (
        mock.patch.object(stream_table, "_BATCH_SYMBOLS", 4),
        mock.patch.object(StagingStream, "begin_download", failing),
    ):
        staged = on_device(served).applier.stage_unpacked(unpacked(body))
    assert (len(begun), rows_of(staged), by_name(staged)) == (2, 0, expected)


def test_a_tensor_that_cannot_be_updated_any_more_is_refused() -> None:
    """As one that the engine has copied since it was loaded; and one of another shape or dtype."""
    base = base_checkpoint(PlainCopy)
    served = on_device(serve(PlainCopy, base, apply="scatter"))
    for other in (base["weight"].reshape(-1), base["weight"].to(torch.float16)):
        body = body_between({"weight": other}, {"weight": changed(other, 1, 1.0)}, "gap8_exp")
        with pytest.raises(NotUpdatable, match="in the checkpoint, and"):
            served.applier.stage_unpacked(unpacked(body))
    target = {"weight": changed(base["weight"], 1, 1.0)}
    part = unpacked(body_between({"weight": base["weight"]}, target, "gap8_exp"))
    assert rows_of(served.applier.stage_unpacked(part)) == 1
    served.applier.plan.placement["weight"].refuse("the engine keeps a copy of it")
    with pytest.raises(NotUpdatable, match="keeps a copy"):
        served.applier.stage_unpacked(part)


def test_two_parts_that_send_the_same_elements_are_refused() -> None:
    base = base_checkpoint(PlainCopy)
    target = {"weight": changed(base["weight"], 1, 1.0)}
    part = unpacked(body_between({"weight": base["weight"]}, target, "gap8_exp"))
    served = on_device(serve(PlainCopy, base, apply="scatter"))
    staged = [served.applier.stage_unpacked(part) for _ in range(2)]
    served.applier.check_sync(staged[:1], full=False)
    with pytest.raises(NotUpdatable, match="same elements"):
        served.applier.check_sync(staged, full=False)


def test_a_weight_that_changed_after_staging_is_seen() -> None:
    base = base_checkpoint(FusedQkv)
    target = {name: changed(tensor, 7, 0.6) for name, tensor in base.items()}
    served = on_device(serve(FusedQkv, base, apply="scatter"))
    staged = served.applier.stage_unpacked(unpacked(body_between(base, target, "gap8_exp")))
    [write] = writes_of(staged)
    rows: Any = write.elements
    for number in range(rows.numbers.size):
        _, one = rows.of(number)
        one.flat[one.offsets[-1].long()] ^= 1
        with pytest.raises(BaseMismatch, match="between staging and commit"):
            served.applier.check_base([staged])
        one.flat[one.offsets[-1].long()] ^= 1
    served.applier.check_base([staged])


@pytest.mark.parametrize("reserved", [0, 700, 1 << 20])
def test_staged_in_reserved_memory(reserved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if some or all of it is in pinned memory; and all of it comes back."""
    pinned: list[int] = []
    make = device_memory.host_room

    def pin(size: int, *given: Any) -> torch.Tensor:
        pinned.append(size)
        return make(size, *given)

    monkeypatch.setattr(device_memory, "host_room", pin)
    base = base_checkpoint(FusedQkv)
    target = {name: changed(tensor, 7, 0.6) for name, tensor in base.items()}
    served = on_device(serve(FusedQkv, base, apply="scatter"))
    here = served.applier.plan.targets[next(iter(base))][0].flat.device
    reserve = DeviceMemory(reserved, [here])
    monkeypatch.setattr(served.applier, "_memory", reserve)
    staged = [served.applier.stage_unpacked(unpacked(body_between(base, target, "gap8_exp")))]
    assert (reserve.free(here) < reserved) == (reserved > 0)
    assert bool(pinned) == (reserved <= 700)
    commit_and_back(served, staged, FusedQkv, target)
    del staged
    assert reserve.free(here) == reserved


# --- large tensors ---


@pytest.mark.parametrize("numel", [1 << 31, (1 << 31) + 1, 3 << 33])
def test_numbers_beyond_int32(numel: int) -> None:
    """Nothing overflows in a box that begins far behind the first index, in memory as large."""
    start, size, far = numel - 1000, 1000, np.arange(0, 1000, 37)
    live = torch.arange(size, dtype=torch.int16).to(DEVICE)
    rows = np.array([[live.data_ptr(), start, numel, 0, 0, 1, 5, 6]], np.int64)
    dims = np.array([[size, 1, 1]], np.int64)
    boxes = gap_expand.Boxes(*(torch.from_numpy(t).to(live.device) for t in (rows, dims)))
    # One piece of a long stream: the index before its first symbol is large.
    symbols = np.diff(far, prepend=-1) - 1
    count = far.size
    programs = -(-count // gap_expand.BLOCK)
    done = np.arange(programs) * gap_expand.BLOCK
    each = np.stack([0 * done, done, np.minimum(count - done, gap_expand.BLOCK)], 1)
    item = np.array([[0, 0, -1, start, numel, 0, count, 0, programs - 1, 1, -1, 255]], np.int64)
    located = gap_expand.locate(
        boxes,
        *(
            torch.from_numpy(np.ascontiguousarray(t)).to(live.device)
            for t in (symbols.astype(np.uint8), each, item)
        ),
    )
    assert located.found.tolist() == [[count, int(far[-1]) + 1, count]]
    old, new = (torch.zeros(count, dtype=torch.int16, device=live.device) for _ in range(2))
    offsets = torch.zeros(count, dtype=torch.int64, device=live.device)
    values = torch.full((count,), 7, dtype=torch.int16, device=live.device)
    sums = gap_expand.stage(
        located, values, digest_on_device.device_factors(live.device), offsets, new, old, adds=True
    )
    assert offsets.tolist() == far.tolist()
    assert old.tolist() == far.tolist()
    assert new.tolist() == (far + 7).tolist()
    before, after = far.astype(np.uint16), (far + 7).astype(np.uint16)
    with mock.patch("engine_ext.format.digest._seeds", return_value=(5, 6)):
        expected = change_digest("", far.astype(np.int64) + start, before, after)
    assert Digest(*sums.tolist()[0]) == expected
    assert index_dtype(numel) == (np.int32 if numel <= 1 << 31 else np.int64)
