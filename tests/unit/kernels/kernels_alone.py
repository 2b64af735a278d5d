"""The Triton kernels against PyTorch's and numpy's operators; run as `test_kernels` says.

Under Triton's interpreter on the CPU (``TRITON_INTERPRET=1``), else on the CUDA device.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delta_sender.diff import device as diff_device
from delta_sender.diff import device_batch as diff_batch
from delta_sender.diff import listed
from delta_sender.diff import snapshot as sender_snapshot
from delta_sender.diff.change import Change, Elements, EncodedElements
from delta_sender.diff.observations import count_nonfinite
from delta_sender.diff.snapshot import Changes, Snapshot
from engine_ext.conformance.toy_models import ColumnShard, FusedQkv, RowShard, ToyModel
from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.dtypes import torch_bits_dtype
from engine_ext.errors import BaseMismatch
from engine_ext.format import (
    ChangedElements,
    Digest,
    decode_part,
    device_digest,
    digest_on_device,
    encode_on_device,
    encode_part,
    streams_on_device,
    tensor_digest,
)
from engine_ext.format.ulp_differences import encode_differences
from engine_ext.kernels import bits_of
from engine_ext.kernels import gather_scatter as host_gather_scatter
from engine_ext.kernels import triton as device
from engine_ext.kernels.triton import (
    block_sums,
    compact,
    encode_changes,
    gap_expand,
    gather_scatter,
    self_test,
)
from engine_ext.placement import (
    DeviceBatch,
    DeviceElements,
    DeviceMemory,
    HostElements,
    WholeBox,
    are_as_read,
    device_batch,
    device_memory,
    overwrite,
    targets,
)
from engine_ext.sync import writes
from engine_ext.sync.staged import Write
from engine_ext.sync.thread_pool import ThreadPool
from engine_ext.sync.writes import PartWrites, batch_unread, put_all, read_old, undo_all
from tests.support.served_models import (
    attempt,
    base_checkpoint,
    changed,
    delta_between,
    dense_delta,
    load,
    memory,
    on_a_device,
    parts_of,
    replan,
    serve,
    stage,
)
from tests.support.staged_writes import writes_of

BLOCK = 16
QUICK = settings(deadline=None, database=None, max_examples=10)
BITS = [torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """Borders of blocks in little data; and the kernels, whatever the tensors are on.

    The host's loops are numpy's: they are not what is tested, and numba takes its time to start.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        for module in (compact, encode_changes, gather_scatter):
            patch.setattr(module, "BLOCK", BLOCK)
        for module in (device, device_batch, device_memory, targets, digest_on_device):
            patch.setattr(module, "runs_kernels", lambda device: True)
        for module in (diff_batch, listed, sender_snapshot, streams_on_device):
            patch.setattr(module, "runs_change_kernels", lambda device: True)
        yield


@contextmanager
def blocks(size: int) -> Iterator[None]:
    """The interpreter takes its time for each."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (compact, encode_changes, gather_scatter):
            patch.setattr(module, "BLOCK", size)
        yield


def random_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, (size + 1) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype)[:size].to(DEVICE)


# --- compare ---


def found(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], kept_on: str) -> Changes:
    """Compare them, by the kernels."""
    with mock.patch.object(sender_snapshot, "is_on_device", return_value=True):
        read = Snapshot(old.items(), "gap8_exp", kept_on).read([*new.items()])
        return {key: change for key, change in read if change is not None}


def in_host_memory(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> Changes:
    with mock.patch.object(sender_snapshot, "is_on_device", return_value=False):
        read = Snapshot(((n, t.cpu()) for n, t in old.items()), "gap8_exp").read(
            [(name, tensor.cpu()) for name, tensor in new.items()]
        )
        return {key: change for key, change in read if change is not None}


def plain(changes: Changes) -> Any:
    def shown(array: Any) -> Any:
        return None if array is None else (array.dtype, array.tolist())

    return {
        key: (
            change.digest,
            count_nonfinite(change),
            *map(shown, (one.indices, one.old, one.new, one.stream)),
            encoded(change, one),
        )
        for key, change in changes.items()
        for one in [change.decoded()]
    }


def encoded(change: Change, elements: Elements) -> Any:
    """Return the bytes of its differences, of the device's own where it has encoded them."""
    differences = elements.new - elements.old
    if isinstance(change.elements, EncodedElements):
        return encode_differences([change.elements.differences]).tolist()
    return encode_differences([differences]).tolist()


@QUICK
@given(
    dtype=st.sampled_from(BITS),
    sizes=st.lists(st.sampled_from([0, 1, 15, 16, 17, 33, 70]), min_size=1, max_size=3),
    density=st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]),
    piece=st.sampled_from([48, 1 << 24]),
    batch=st.sampled_from([100, 1 << 24]),
    kept_on=st.sampled_from(["device", "host"]),
    seed=st.integers(0, 1 << 20),
)
@example(torch.int16, [600, 0, 33], 0.003, 48, 100, "device", 0)
@example(torch.int16, [70, 32], 1.0, 48, 1 << 24, "device", 0)
def test_the_host_finds_the_same_changes(
    dtype: torch.dtype,
    sizes: list[int],
    density: float,
    piece: int,
    batch: int,
    kept_on: str,
    seed: int,
) -> None:
    """To the byte of the gap streams, and in the digests, whatever is compared together."""
    random = np.random.default_rng(seed)
    old, new = {}, {}
    for number, size in enumerate(sizes):
        bits = random_bits(size + 1, dtype, seed + number)[1:]  # not aligned as allocations are
        chosen = torch.from_numpy(np.flatnonzero(random.random(size) < density)).to(DEVICE)
        flips = torch.from_numpy(random.integers(0, 8 * dtype.itemsize, chosen.numel())).to(DEVICE)
        after = bits.clone() if number % 2 else torch.cat([bits[:1], bits])[1:]
        after[chosen] ^= (torch.ones_like(flips) << flips).to(dtype)
        old[f"w{number}"], new[f"w{number}"] = bits, after
    with (
        mock.patch.object(diff_batch, "_PIECE", piece),
        mock.patch.object(diff_batch, "_BATCH_BYTES", batch),
        mock.patch.object(diff_batch, "_COPIED_BYTES", batch),
    ):
        assert plain(found(old, new, kept_on)) == plain(in_host_memory(old, new))


@settings(QUICK, max_examples=5)
@given(
    dtype=st.sampled_from(BITS),
    sizes=st.lists(st.sampled_from([1, 16, 33, 70]), min_size=1, max_size=4),
    density=st.sampled_from([0.02, 0.5, 1.0]),
    piece=st.sampled_from([48, 1 << 24]),
    wide=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_the_copy_there_follows_from_lists(
    dtype: torch.dtype, sizes: list[int], density: float, piece: int, wide: bool, seed: int
) -> None:
    """Several tensors of two dtypes in one launch each, and nothing is uploaded."""
    random = np.random.default_rng(seed)
    held = {f"w{n}": random_bits(size, dtype, seed + n) for n, size in enumerate(sizes)}
    held["other"] = random_bits(40, torch.float32, seed)
    keep = listed.Lists.keep

    def kept(*arguments: Any, **options: Any) -> Any:
        return keep(*arguments, **{**options, "wide": wide})

    with (
        mock.patch.object(sender_snapshot, "is_on_device", return_value=True),
        mock.patch.object(diff_batch, "_PIECE", piece),
        mock.patch.object(diff_device, "LISTED_SHARE", 16),
        mock.patch.object(diff_device, "upload_box", side_effect=AssertionError),
        mock.patch.object(listed.Lists, "keep", kept),
    ):
        snapshot = Snapshot(held.items(), "gap8_exp", "device")
        new = {name: tensor.clone() for name, tensor in held.items()}
        for tensor in new.values():
            chosen = torch.from_numpy(random.random(tensor.numel()) < density).to(DEVICE)
            tensor.view(torch_bits_dtype(tensor.dtype))[chosen] ^= 1
        snapshot.advance({key: one for key, one in snapshot.read([*new.items()]) if one})
        assert [one for _, one in snapshot.read([*new.items()])] == [None] * len(new)


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        # -0.0 is not 0.0, a NaN is itself and no other NaN, subnormals are not flushed.
        (torch.bfloat16, [(0, 0x8000), (0x7FC0, 0x7FC0), (0x7FC0, 0x7FC1), (0, 1)]),
        (torch.float16, [(0, 0x8000), (0x7E00, 0x7E00), (0x7E00, 0xFE00), (0, 1)]),
        (torch.float32, [(0, 1 << 31), (0x7FC00000, 0x7FC00000), (0x7F800001, 0x7FC00001), (0, 1)]),
        (torch.float64, [(0, 1 << 63), (0x7FF8 << 48, 0x7FF8 << 48), (0x7FF8 << 48, 0xFFF8 << 48)]),
        (torch.float8_e4m3fn, [(0, 0x80), (0x7F, 0x7F), (0x7F, 0xFF), (0, 1)]),
        (torch.bool, [(0, 1), (1, 1)]),
    ],
)
def test_values_are_bits(dtype: torch.dtype, patterns: list[tuple[int, int]]) -> None:
    # Over the border of a block, and few enough to be sent with indices.
    pairs = np.array(patterns * 5 + [patterns[0][:1] * 2] * 60, f"u{dtype.itemsize}")
    old, new = (
        torch.from_numpy(np.ascontiguousarray(side).view(np.uint8)).view(dtype).to(DEVICE)
        for side in pairs.T
    )
    change = found({"w": old}, {"w": new}, "device")["w"]
    expected = np.flatnonzero(pairs[:, 0] != pairs[:, 1])
    elements = change.decoded()
    assert elements.indices is not None
    assert elements.indices.tolist() == expected.tolist()
    assert elements.old.tolist() == pairs[expected, 0].tolist()
    assert elements.new.tolist() == pairs[expected, 1].tolist()


def test_places_beyond_int32() -> None:
    start = 1 << 32
    old = torch.zeros(600, dtype=torch.int16, device=DEVICE)
    new = old.clone()
    new[[0, 19, 599]] = 1

    def send(arrays: Any) -> Any:
        return [torch.from_numpy(array).to(DEVICE) for array in arrays]

    pairs = compact.Pairs([old], [new], [start], send)
    assert pairs.ends.tolist() == [3]
    places, was, now = pairs.write(range(1), 0, 3)
    assert pairs.changed.tolist() == [0]
    assert places.tolist() == [start, start + 19, start + 599]
    counts = np.array([3])
    elements = ChangedElements(places, was, now, counts, [start], ["w"], [0], 600)
    symbols, nibbles, _, totals = encode_on_device(elements, send)
    count, *lanes, escaped, nonfinite, last = totals[0].tolist()
    assert symbols[:count].tolist() == [0, 18, 255, 255, 69]
    assert (nibbles.tolist(), escaped, nonfinite, last) == ([0x22, 0x02], 0, 0, start + 599)
    digests = (device_digest("w", bits, places) for bits in (now, was))
    assert Digest(*lanes) == next(digests) - next(digests)


@pytest.mark.parametrize("late", [0, 1])
def test_a_tensor_that_changes_late_writes_into_no_other(late: int) -> None:
    old = torch.zeros(2 * compact.BLOCK, dtype=torch.int16, device=DEVICE)
    new = old.clone()
    new[[5, compact.BLOCK]] = 1

    def send(arrays: Any) -> Any:
        return [torch.from_numpy(array).to(DEVICE) for array in arrays]

    pairs = compact.Pairs([old, old], [new, old.clone()], [0, 0], send)
    new[:] = late
    rooms = []

    def room(size: int, **kind: Any) -> torch.Tensor:
        rooms.append(torch.full((size + 2 * compact.BLOCK,), 7, **kind))
        return rooms[-1][:size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", room)
        pairs.write(range(2), 0, 2)
    assert pairs.changed.tolist() == [1]
    assert len(rooms) == 3
    assert all(bool((one[2:] == 7).all()) for one in rooms)


# --- elements ---


@QUICK
@given(
    dtype=st.sampled_from(BITS),
    offsets=st.sampled_from([torch.int32, torch.int64]),
    counts=st.lists(st.sampled_from([0, 1, 15, 16, 17, 40]), min_size=1, max_size=4),
    kernels=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_elements_are_exchanged(
    dtype: torch.dtype, offsets: torch.dtype, counts: list[int], kernels: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    flats = [random_bits(61, dtype, seed + number)[1:] for number in range(len(counts))]
    new = [random_bits(count, dtype, seed + 10 + n) for n, count in enumerate(counts)]
    where = [torch.from_numpy(random.permutation(60)[:count]).to(DEVICE) for count in counts]
    expected = [flat.clone() for flat in flats]
    old = [flat[places].cpu() for flat, places in zip(flats, where, strict=True)]
    for flat, places, bits in zip(expected, where, new, strict=True):
        flat[places] = bits
    with mock.patch.object(device_batch, "runs_kernels", return_value=kernels):
        batch = DeviceBatch(
            [DeviceElements(f, p.to(offsets)) for f, p in zip(flats, where, strict=True)]
        )
        assert all(map(torch.equal, batch.read(), old))
        batch.make_ready(dict(enumerate(new)), reads=True)
        assert are_as_read([batch])
        swapped = dict(batch.swap())
        arrive()
        assert all(torch.equal(swapped[number], bits) for number, bits in enumerate(old))
        assert all(map(torch.equal, flats, expected))
        assert all(map(torch.equal, batch.read(), (bits.cpu() for bits in new)))
        batch.make_ready(dict(enumerate(new)))
        assert are_as_read([batch])
        for number, flat in enumerate(flats):
            if where[number].numel():
                flat[where[number][-1]] ^= 1
                assert not are_as_read([batch])
                flat[where[number][-1]] ^= 1
        assert are_as_read([batch])
        overwrite(batch.elements, old)  # in host memory, as a rollback has them
        assert all(map(torch.equal, DeviceBatch(batch.elements).read(), old))
        overwrite(batch.elements, new)
    assert all(map(torch.equal, flats, expected))


@QUICK
@given(
    counts=st.lists(st.sampled_from([0, 1, 16, 17, 40]), min_size=2, max_size=4),
    written=st.sets(st.integers(0, 3)),
    most=st.sampled_from([1, 30, 1 << 24]),
    seed=st.integers(0, 1 << 20),
)
def test_one_table_serves_check_write_and_undo(
    counts: list[int], written: set[int], most: int, seed: int
) -> None:
    """Elements without new bits are compared, and nothing else."""
    random = np.random.default_rng(seed)
    flats = [random_bits(60, torch.int16, seed + number) for number in range(len(counts))]
    before = [flat.clone() for flat in flats]
    where = [torch.from_numpy(random.permutation(60)[:count]).to(DEVICE) for count in counts]
    new = {number: flats[number][where[number]] ^ 1 for number in written if number < len(counts)}
    with mock.patch.object(device_batch, "_MOST", most):
        batch = DeviceBatch([DeviceElements(f, p) for f, p in zip(flats, where, strict=True)])
    batch.read()
    batch.make_ready(new)
    with mock.patch.object(gather_scatter, "rows", side_effect=AssertionError("a table is made")):
        for _ in range(2):
            assert are_as_read([batch])
            assert sorted(batch.put()) == sorted(new)
            for number, flat in enumerate(flats):
                expected = before[number].clone()
                if number in new:
                    expected[where[number]] = new[number]
                assert torch.equal(flat, expected)
            assert are_as_read([batch]) == (not any(bits.numel() for bits in new.values()))
            assert sorted(batch.undo()) == sorted(new)
            assert all(map(torch.equal, flats, before))
        assert not list(batch.undo())


def test_tensors_that_change_places_are_seen() -> None:
    """Though the sum of both digests would be the same, were they of the same numbers."""
    for together in (True, False):
        flats = [random_bits(20, torch.int16, seed) for seed in (1, 2)]
        elements = [DeviceElements(flat, torch.arange(20, device=DEVICE)) for flat in flats]
        batches = [DeviceBatch(elements)] if together else [DeviceBatch([one]) for one in elements]
        for batch in batches:
            batch.read()
        assert are_as_read(batches)
        first = flats[0].clone()
        flats[0].copy_(flats[1])
        flats[1].copy_(first)
        assert not are_as_read(batches)


@pytest.mark.parametrize("method", ["put", "swap"])
def test_what_is_sent_stays_until_it_is_written(method: str) -> None:
    """A launch knows its address only: memory freed before is another thread's by then."""
    flat = random_bits(30, torch.int16, 1)
    batch = DeviceBatch([DeviceElements(flat, torch.arange(0, 20, 2, device=DEVICE))])
    sent = random_bits(10, torch.int16, 2)
    is_there = weakref.ref(sent)
    batch.make_ready({0: sent}, reads=method == "swap")
    del sent
    list(getattr(batch, method)())
    assert is_there() is not None


@pytest.mark.parametrize(("most", "groups"), [(1, 3), (12, 3), (1 << 24, 2)])
def test_a_write_that_fails_half_way_is_undone(
    most: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure before the first launch has written nothing; a later one is reported as such."""
    monkeypatch.setattr(device_batch, "_MOST", most)
    visit = gather_scatter.visit
    for failing in range(groups):
        flats, own = unread()
        before = [flat.clone() for flat in flats]
        launches = iter(range(100))

        def fail(*arguments: Any, failing: int = failing, **modes: Any) -> None:
            if next(launches) == failing:  # noqa: B023
                raise torch.OutOfMemoryError("no memory")
            visit(*arguments, **modes)

        part = PartWrites(own)
        with (
            mock.patch.object(gather_scatter, "visit", fail),
            pytest.raises(torch.OutOfMemoryError),
        ):
            put_all([part], ThreadPool(1), DeviceMemory(), compares=False)
        assert any(write.written for write in own) == (failing > 0)
        undo_all([part], ThreadPool(1))
        assert not any(write.written for write in own)
        assert all(map(torch.equal, flats, before))


@pytest.mark.parametrize("known", [True, False])
def test_an_undo_allocates_nothing(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the write, whether the old bits were read at staging or come with it."""
    flats, own = unread(known=known)
    before = [flat.clone() for flat in flats]
    part = PartWrites(own)
    visit, launching = gather_scatter.visit, list[bool]()

    def launch(*arguments: Any, **modes: Any) -> None:
        launching.append(True)
        visit(*arguments, **modes)  # the interpreter copies what a kernel gets
        launching.pop()

    def full(original: Any) -> Any:
        def allocate(*arguments: Any, **options: Any) -> Any:
            if not launching:
                raise torch.OutOfMemoryError("no memory")
            return original(*arguments, **options)

        return allocate

    monkeypatch.setattr(gather_scatter, "visit", launch)
    for owner, name in (
        *((torch, name) for name in ("empty", "empty_like", "zeros", "cat", "from_numpy")),
        *((torch.Tensor, name) for name in ("to", "cpu", "cuda", "clone", "copy_")),
    ):
        monkeypatch.setattr(owner, name, full(getattr(owner, name)))
    put_all([part], ThreadPool(1), DeviceMemory(), compares=False)
    assert all(write.written for write in own)
    undo_all([part], ThreadPool(1))
    monkeypatch.undo()
    assert not any(write.written for write in own)
    arrive()
    assert all(map(torch.equal, flats, before))


@pytest.mark.parametrize("most", [1, 1 << 24])
def test_an_undo_that_fails_undoes_the_others(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of the batch, other batches and writes to host memory; the first error is raised."""
    monkeypatch.setattr(device_batch, "_MOST", most)
    visit = gather_scatter.visit
    (flats, own), (others, more) = unread(known=True), unread()
    flat = np.arange(30, dtype=np.int16)
    old, host = flat.copy(), HostElements(flat, np.arange(3, dtype=np.int32))
    alone = Write(host, np.array([7, 8, 9], np.int16), "live", True, flat[:3].copy())
    parts = [*map(PartWrites, (own, more, [alone]))]
    before = [one.clone() for one in (*flats, *others)]
    put_all(parts, ThreadPool(1), DeviceMemory(), compares=False)
    assert not np.array_equal(flat, old)
    failures = [torch.OutOfMemoryError("first")]

    def fail(*arguments: Any, **modes: Any) -> None:
        if failures:
            raise failures.pop()
        visit(*arguments, **modes)

    second = torch.OutOfMemoryError("second")
    with (
        mock.patch.object(gather_scatter, "visit", fail),
        mock.patch.object(writes, "overwrite", side_effect=second),  # which tries again
        pytest.raises(torch.OutOfMemoryError, match="first"),
    ):
        undo_all(parts, ThreadPool(1))
    arrive()
    failed = [
        number
        for number, (one, was) in enumerate(zip((*flats, *others), before, strict=True))
        if not torch.equal(one, was)
    ]
    assert failed == ([0] if most == 1 else [0, 2])
    assert np.array_equal(flat, old)


def test_elements_of_a_batch_that_are_not_written() -> None:
    """As those of a tied tensor, which another write has; also if their old bits are read."""
    flats, own = unread()
    before = [flat.clone() for flat in flats]
    part = PartWrites(own[1:])
    put_all([part], ThreadPool(1), DeviceMemory(), compares=False)
    assert [write.written for write in own] == [False, True, True]
    arrive()
    changed = [not torch.equal(flat, was) for flat, was in zip(flats, before, strict=True)]
    assert changed == [False, True, True]
    undo_all([part], ThreadPool(1))
    arrive()
    assert all(map(torch.equal, flats, before))


def unread(*, known: bool = False) -> tuple[list[torch.Tensor], list[Write]]:
    """Live tensors of two dtypes, and writes to them; `known`: their old bits are read."""
    flats = [random_bits(30, dtype, 1) for dtype in (torch.int16, torch.int32, torch.int16)]
    where = torch.arange(0, 20, 2, device=DEVICE)
    own = [
        Write(DeviceElements(flat, where), random_bits(10, flat.dtype, 50), "live")
        for flat in flats
    ]
    if known:
        read_old(own, DeviceMemory())
    batch_unread(own, DeviceMemory())
    return flats, own


def arrive() -> None:
    """Wait for what kernels write to pinned memory."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def one_element(write: Write) -> torch.Tensor:
    """One of the live elements that it overwrites, a view."""
    elements: Any = write.elements
    if isinstance(elements, WholeBox):
        return bits_of(elements.segment.live_view()).view(-1)[:1]
    place = elements.offsets[-1].long()
    return elements.flat[place : place + 1]


@pytest.mark.parametrize("dense", [False, True])
def test_a_commit_only_launches(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is compared by its digest, and tables are there: both grow with the change."""
    base = base_checkpoint(FusedQkv)
    served = serve(FusedQkv, base, apply="scatter")
    replan(served, on_a_device(served.applier.plan))
    target = {name: changed(tensor, 7, 0.6) for name, tensor in base.items()}
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    if dense:
        deltas[0] = dense_delta(deltas[0].name, target[deltas[0].name])
    before = memory(served.model)
    here = served.applier.plan.targets[next(iter(base))][0].flat.device
    reserved = DeviceMemory(1 << 20, [here])
    monkeypatch.setattr(served.applier, "_memory", reserved)
    staged = [served.applier.stage(part) for part in parts_of(deltas)]
    served.applier.check_sync(staged, full=False)
    boxes = [write for write in writes_of(*staged) if isinstance(write.elements, WholeBox)]
    assert len(boxes) == dense
    assert all(write.lease for write in boxes)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("what could be there before is made in the pause")

    for module, name in (
        *((device_batch, "joined"), (device_batch, "upload"), (gather_scatter, "rows")),
        *((DeviceMemory, "keep"), (DeviceMemory, "room"), (WholeBox, "holds")),
    ):
        monkeypatch.setattr(module, name, refuse)
    served.applier.check_base(staged)
    for one in map(one_element, writes_of(*staged)):
        one ^= 1
        with pytest.raises(BaseMismatch, match="between staging and commit"):
            served.applier.check_base(staged)
        one ^= 1
    served.applier.check_base(staged)
    served.applier.write(staged)
    assert memory(served.model) == memory(load(FusedQkv, target))
    served.applier.undo(staged)
    assert memory(served.model) == before
    served.applier.write(staged)
    log = served.applier.finish(staged)
    assert log is not None
    boxes.clear()
    staged.clear()
    kept = reserved.free(here)
    served.applier.check_rollback([log])
    served.applier.roll_back(log)  # by the tables of the write
    assert memory(served.model) == before
    del log
    assert kept < reserved.free(here) == 1 << 20


# --- digests ---


@QUICK
@given(
    dtype=st.sampled_from(BITS),
    size=st.sampled_from([0, 1, 1000, 1024, 1025, 3000, 9000]),
    start=st.sampled_from([0, 1, 1023, 1024, (1 << 33) + 1000]),
    step=st.sampled_from([1, 2]),
    kernels=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@example(dtype=torch.int16, size=40_000, start=7, step=1, kernels=True, seed=0)
@example(dtype=torch.int16, size=40_000, start=7, step=1, kernels=False, seed=0)
@example(dtype=torch.int16, size=3, start=0, step=2, kernels=True, seed=0)
def test_a_device_digests_what_the_host_does(
    dtype: torch.dtype, size: int, start: int, step: int, kernels: bool, seed: int
) -> None:
    """Also elements that are not next to each other, as a column's are."""
    values = random_bits(step * size + 1, dtype, seed)[1::step]
    with mock.patch.object(digest_on_device, "runs_kernels", return_value=kernels):
        found = device_digest("größe.重み", values, start=start)
    host = host_gather_scatter.host_bits(values.cpu().contiguous())
    expected = tensor_digest("größe.重み", host, start=start)
    assert found == expected


# --- the trial ---


def test_the_trial_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_SIZE", 150)
    with blocks(64):
        assert {name: test(DEVICE) for name, test in self_test.TESTS.items()} == {
            "elements": [],
            "changes": [],
        }


@pytest.mark.parametrize(
    ("module", "function", "result", "named"),
    [
        (compact.Pairs, "write", None, "compare of"),
        (encode_changes, "write", None, "compare of"),
        (gather_scatter, "visit", "old", "exchange of"),
        (gather_scatter, "visit", "sums", "exchange of"),
        (block_sums, "dense", None, "digest"),
        (gap_expand, "stage", None, "staging of"),
    ],
)
def test_the_trial_sees_what_is_wrong(
    module: Any, function: str, result: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what a function returns, or in an argument that it writes to."""
    whole = getattr(module, function)

    def off_by_one_bit(*arguments: Any, **options: Any) -> Any:
        found = whole(*arguments, **options)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # a launch can still write to pinned memory
        wrong: Any = found if result is None else options.get(result)
        wrong = wrong if isinstance(wrong, torch.Tensor) or wrong is None else wrong[-1]
        if wrong is not None and wrong.numel() and not options.get("stored"):
            wrong[-1] ^= 1
        return found

    monkeypatch.setattr(module, function, off_by_one_bit)
    monkeypatch.setattr(self_test, "_SIZE", 50)
    with blocks(64):
        found = [one for test in self_test.TESTS.values() for one in test(DEVICE)]
    assert found
    assert all(one.startswith(named) for one in found)


# --- as a receiver uses them ---


@pytest.mark.parametrize("digested", [True, False])
@pytest.mark.parametrize(
    ("model", "encoding"),
    [(RowShard, "gap8_exp"), (RowShard, "indices"), (ColumnShard, "deltas"), (FusedQkv, "deltas")],
)
def test_applied_and_taken_back(model: type[ToyModel], encoding: str, digested: bool) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    plan = served.applier.plan
    covered = plan.digested if digested else frozenset()
    replan(served, replace(on_a_device(plan), digested=covered))
    target = {name: changed(tensor, 7, 0.6) for name, tensor in base.items()}
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    body = encode_part(deltas, encoding=encoding, current_version=1)
    with mock.patch.object(gather_scatter, "visit", wraps=gather_scatter.visit) as visit:
        assert attempt(served, [decode_part(body)]) is None
    assert memory(served.model) == memory(load(model, target))
    assert visit.called


@pytest.mark.parametrize("reserved", [0, 600, 1 << 20])
def test_applied_from_reserved_memory(reserved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if some or all of it is in pinned memory; and after the next sync nothing is held."""
    pinned: list[torch.Tensor] = []

    make = device_memory.host_room

    def pin(*given: Any) -> torch.Tensor:
        pinned.append(make(*given))
        return pinned[-1]

    monkeypatch.setattr(device_memory, "host_room", pin)
    base = base_checkpoint(FusedQkv)
    served = serve(FusedQkv, base, apply="scatter")
    replan(served, on_a_device(served.applier.plan))
    here = served.applier.plan.targets[next(iter(base))][0].flat.device
    memory_of_device = DeviceMemory(reserved, [here])
    monkeypatch.setattr(served.applier, "_memory", memory_of_device)
    old, undo = base, None
    for seed in (7, 8):
        target = {name: changed(tensor, seed, 0.6) for name, tensor in old.items()}
        deltas = [delta_between(name, old[name], target[name]) for name in old]
        staged = stage(served, parts_of(deltas))
        assert (memory_of_device.free(here) < reserved) == (reserved > 0)
        held = memory_of_device.free(here)
        replaced = stage(served, parts_of(deltas))
        del replaced  # as of a sync that is aborted
        assert memory_of_device.free(here) == held
        served.applier.write(staged)
        undo = served.applier.finish(staged)
        del staged
        old = target
    assert memory(served.model) == memory(load(FusedQkv, old))
    assert undo is not None
    served.applier.roll_back(undo)
    assert memory(served.model) != memory(load(FusedQkv, old))
    assert bool(pinned) == (reserved <= 600)
    del undo
    assert memory_of_device.free(here) == reserved


@pytest.mark.parametrize("kept_on", ["device", "host"])
def test_as_a_sender_uses_them(kept_on: str) -> None:
    held = {"w": torch.arange(99, dtype=torch.int32, device=DEVICE).to(torch.bfloat16)}
    snapshot = Snapshot(held.items(), "gap8_exp", kept_on)
    with (
        mock.patch.object(sender_snapshot, "is_on_device", return_value=True),
        mock.patch.object(diff_batch, "_PIECE", 32),
    ):
        for places in ([0, 31, 32, 50, 98], [1, 31, 97]):
            new = held["w"].clone()
            new[places] = -1 - new[places]
            new[50] = float("nan")  # the second time it stays
            ((_, change),) = snapshot.read([("w", new)])
            assert change is not None
            elements = change.decoded()
            assert elements.indices is not None
            assert elements.indices.tolist() == places
            snapshot.advance({"w": change})
            held = {"w": new}
        assert list(snapshot.read(held.items())) == [("w", None)]
