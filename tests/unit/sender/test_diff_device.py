"""Tensors compared where they are: what is found is what the comparison in host memory finds.

The tensors here are in host memory and taken for a device's; operators stand for the kernels, which
`tests/unit/kernels` puts in their place.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sender import DeltaSender, ShardedSender, SyncError
from delta_sender.diff import device as diff_device
from delta_sender.diff import device_batch
from delta_sender.diff import snapshot as sender_snapshot
from delta_sender.diff.change import Change, EncodedElements
from delta_sender.diff.copy_streams import CopyStreams
from delta_sender.diff.device import SNAPSHOT_ON, DeviceSide
from delta_sender.diff.device_batch import DeviceComparisons
from delta_sender.diff.listed import Listed, Lists
from delta_sender.diff.observations import count_nonfinite
from delta_sender.diff.refills import StableGenerator
from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode import part_builder
from engine_ext.format import (
    PACKED_ENCODINGS,
    DeviceEncoded,
    EncodedDelta,
    ParamDelta,
    change_digest,
    encode_on_device,
    encode_part,
)
from engine_ext.kernels import gather_scatter, upload_box
from tests.support.fake_engine import Engine, copied, error, model_of, sender_of, sends, train
from tests.support.served_models import changed, random_tensor
from tests.unit.sender.sharded.test_one_rank import whole

Tensors = dict[str, torch.Tensor]
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool]
CPU = torch.device("cpu")
FREE = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _elsewhere() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sender_snapshot, "is_on_device", lambda tensor: True)
        patch.setattr(diff_device, "free_bytes", lambda device: FREE)
        patch.setattr(device_batch, "_PIECE", 32)
        patch.setattr(device_batch, "_BATCH_BYTES", 256)
        patch.setattr(device_batch, "_COPIED_BYTES", 128)
        yield


def found(snapshot: Snapshot, tensors: Tensors, *, packed: bool = False) -> dict[str, Any]:
    """Return what differs; with the gap streams if their encodings are `packed`."""

    def plain(change: Change | None) -> Any:
        if change is None:
            return None
        one = change.decoded()
        arrays = one.indices, one.old, one.new, one.stream if packed else None
        shown = [None if a is None else (a.dtype, a.shape, a.tobytes()) for a in arrays]
        return change.dtype, change.shape, shown, change.digest, count_nonfinite(change)

    return {kept: plain(change) for kept, change in snapshot.read(tensors.items())}


def in_host_memory(old: Tensors, new: Tensors, encoding: str = "deltas") -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sender_snapshot, "is_on_device", lambda tensor: False)
        return found(Snapshot(old.items(), encoding), new, packed=encoding in PACKED_ENCODINGS)


@pytest.mark.parametrize("snapshot_on", ["device", "host"])
@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize(
    "context", [lambda: torch.device("meta"), torch.inference_mode], ids=["device", "inference"]
)
def test_a_callers_default_device_and_mode_change_nothing(
    context: Callable[[], Any], made: bool, snapshot_on: str
) -> None:
    model = model_of(torch.bfloat16, torch.float32, torch.int8, tensors=3, numel=100)
    engine, none = Engine.of(model), contextlib.nullcontext
    with context() if made else none():
        sender = sender_of(engine, model, snapshot_on=snapshot_on)
    for step in range(3):
        train(model, step, 0.2)
        with none() if made else context():
            (sender.sync_full if step == 1 else sender.sync)(model.items())
        assert engine.holds(model)


def model(size: int, seed: int, *, transposed: bool = False) -> Tensors:
    made = {f"w{n}": random_tensor((size, 3), d, seed + n) for n, d in enumerate(DTYPES)}
    return {name: tensor.T if transposed else tensor for name, tensor in made.items()}


def step(tensors: Tensors, seed: int, density: float) -> Tensors:
    return {name: changed(tensor, seed, density) for name, tensor in tensors.items()}


@pytest.mark.slow
@settings(deadline=None, database=None, max_examples=25)
@given(
    kept_on=st.sampled_from(SNAPSHOT_ON),
    size=st.sampled_from([1, 2, 11, 22, 43]),
    density=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    transposed=st.booleans(),
    encoding=st.sampled_from(["deltas", "gap8_ulp"]),
    listed=st.sampled_from([0, 0.5, 8]),
    seed=st.integers(0, 1 << 20),
)
def test_syncs_in_a_row(
    kept_on: str,
    size: int,
    density: float,
    transposed: bool,
    encoding: str,
    listed: float,
    seed: int,
) -> None:
    """Each finds what differs from the last that was acknowledged, and not from the last read."""
    held = model(size, seed, transposed=transposed)
    snapshot = Snapshot(held.items(), encoding, kept_on)
    for number in range(4):
        new = step(held, seed + number, density)
        packed = encoding in PACKED_ENCODINGS
        assert found(snapshot, new, packed=packed) == in_host_memory(held, new, encoding)
        with mock.patch.object(diff_device, "LISTED_SHARE", listed):
            changes = {k: c for k, c in snapshot.read(new.items()) if c is not None}
        if number % 2:
            snapshot.advance(changes)
            held = new


@pytest.mark.parametrize("piece", [32, 64, 1 << 24])
def test_gaps_of_several_symbols(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a piece and across its border; without a stream where two bytes might be smaller."""
    monkeypatch.setattr(device_batch, "_PIECE", piece)
    held, new = Tensors(), Tensors()
    for numel, place in itertools.product([600, 900, 2000], [0, 31, 32, 255, 256, 599]):
        for changed_places in ([0, place], [place]):
            name = f"{changed_places} of {numel}"
            held[name] = torch.zeros(numel, dtype=torch.bfloat16)
            new[name] = held[name].clone()
            new[name][changed_places] = 1
    for encoding in ("deltas", "gap8_ulp"):
        snapshot = Snapshot(held.items(), encoding, "device")
        packed = encoding in PACKED_ENCODINGS
        assert found(snapshot, new, packed=packed) == in_host_memory(held, new, encoding)


def test_more_has_changed_than_is_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_batch, "_BATCH_BYTES", 1 << 20)
    held = {f"w{n}": random_tensor((20 + n,), torch.bfloat16, n) for n in range(12)}
    new = {name: changed(tensor, 1, 0.02 + n % 2) for n, (name, tensor) in enumerate(held.items())}
    snapshot = Snapshot(held.items(), "gap8_exp", "device")
    assert found(snapshot, new, packed=True) == in_host_memory(held, new, "gap8_exp")


def test_a_stream_of_other_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a device had computed wrongly: the values would get to wrong places."""

    def skip_more(*arguments: Any) -> DeviceEncoded:
        encoded = encode_on_device(*arguments)
        encoded.symbols[3] = 255
        return encoded

    monkeypatch.setattr(device_batch, "encode_on_device", skip_more)
    held = {"w": torch.zeros(40, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="not those of as many elements"):
        found(Snapshot(held.items(), "gap8_ulp", "device"), step(held, 1, 0.3))


@pytest.mark.parametrize("encoding", ["deltas", "indices", "gap8_exp"])
def test_a_change_is_dense_as_in_host_memory(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows have changed, or a gap takes more than two bytes."""
    monkeypatch.setattr(device_batch, "_PIECE", 1 << 23)
    gaps = (1 << 16) - 1, 1 << 16
    held = {"rows": torch.zeros(100, 3000), **{str(gap): torch.zeros(2 * gap) for gap in gaps}}
    held = {name: tensor.to(torch.bfloat16) for name, tensor in held.items()}
    for share in (0.2, 0.4, 0.6):
        new = copied(held)
        new["rows"][:: round(1 / share)] += 1
        for gap in gaps:
            new[str(gap)][: int(share * gap)] += 1
            new[str(gap)][int(share * gap) + gap] += 1
        snapshot, packed = Snapshot(held.items(), encoding, "device"), encoding in PACKED_ENCODINGS
        assert found(snapshot, new, packed=packed) == in_host_memory(held, new, encoding)


@pytest.mark.parametrize("kept_on", SNAPSHOT_ON)
def test_nothing_and_a_tensor_without_elements(kept_on: str) -> None:
    held = {"empty": torch.empty(0, 3, dtype=torch.bfloat16), "w": torch.zeros(40)}
    snapshot = Snapshot(held.items(), "deltas", kept_on)
    assert found(snapshot, held) == {"empty": None, "w": None}


@pytest.mark.parametrize("kept_on", SNAPSHOT_ON)
def test_bits_and_not_values(kept_on: str) -> None:
    """A NaN that stays is no change, another NaN is one, and so is -0.0."""
    held = {"w": torch.tensor([0x7FC0, 0x7FC0, 0, 1], dtype=torch.int16).view(torch.bfloat16)}
    new = {"w": torch.tensor([0x7FC0, 0x7FC1, -32768, 1], dtype=torch.int16).view(torch.bfloat16)}
    ((_, change),) = Snapshot(held.items(), "indices", kept_on).read(new.items())
    assert change is not None
    elements = change.decoded()
    assert elements.new.tolist()[:3] == [0x7FC0, 0x7FC1, 0x8000]  # too much of it to be sparse
    assert elements.old.tolist() == [0x7FC0, 0x7FC0, 0, 1]


@pytest.mark.parametrize("kept_on", SNAPSHOT_ON)
def test_tied_tensors(kept_on: str) -> None:
    weight = random_tensor((40,), torch.bfloat16, 0)
    snapshot = Snapshot([("w", weight), ("head", weight)], "deltas", kept_on)
    new = changed(weight, 1, 0.1)
    assert found(snapshot, {"w": new, "head": new}) == in_host_memory({"w": weight}, {"w": new})
    with pytest.raises(ValueError, match="head: differs from w"):
        found(snapshot, {"w": new, "head": changed(new, 2, 0.1)})


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["deltas_zstd", "gap8_exp", "gap8_ulp", "auto"])
def test_an_engine_follows_what_was_found_there(encoding: str) -> None:
    """The engine proves the digests of the device, and the places of its gap streams."""
    model = model_of(torch.bfloat16, torch.float32, torch.int8, numel=900)
    engine = Engine.of(model)
    client = engine.client()
    sender = DeltaSender("http://engine/", model.items(), client=client, encoding=encoding)
    for number, density in enumerate([0.0, 0.002, 0.02, 0.4, 1.0, 0.02]):
        train(model, number, density)
        report = sender.sync(model.items())
        assert not report.full
        assert engine.holds(model)


# --- where the copy is ---


def made_ready(kept_on: str, nbytes: int) -> tuple[DeviceSide, np.ndarray[Any, Any]]:
    side, held = DeviceSide(kept_on), np.zeros(40, np.uint16)
    assert side.prepare("w", held, CPU, nbytes) is held
    return side, held


def compare(side: DeviceSide, held: np.ndarray[Any, Any], new: torch.Tensor) -> Change:
    with ThreadPoolExecutor(1) as pool:
        comparisons = DeviceComparisons(side, pool, copied=True)
        return comparisons.begin("w", ParamDelta("w", "bfloat16", held.shape, None, held), new)()


def places(change: Change) -> Any:
    elements = change.decoded()
    assert elements.indices is not None
    return elements.indices.tolist()


@pytest.mark.parametrize(
    ("kept_on", "nbytes", "mirrored"),
    [
        ("device", 100 * FREE, True),
        ("host", 1, False),
        ("auto", FREE * 4 // 9, True),
        ("auto", FREE * 4 // 9 + 1, False),
    ],
)
def test_a_copy_is_kept_where_it_was_asked_for(kept_on: str, nbytes: int, mirrored: bool) -> None:
    side, held = made_ready(kept_on, nbytes)
    held[3] = 1  # seen only where the device looks at the snapshot itself
    difference = compare(side, held, torch.zeros(40, dtype=torch.int16))
    assert places(difference) == ([] if mirrored else [3])
    one = difference.decoded()
    assert difference.digest == change_digest("w", one.indices, one.old, one.new)


def refilling(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of one dtype in views of one buffer."""
    first, *_ = tensors.values()
    buffer = first.new_empty(max(tensor.numel() for tensor in tensors.values()))
    for name, tensor in tensors.items():
        yield name, buffer[: tensor.numel()].copy_(tensor)


@pytest.mark.parametrize("given", ["collection", "generator"])
@pytest.mark.parametrize("kept_on", ["auto", "device"])
def test_a_base_on_a_device_is_copied_there(
    kept_on: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the sender is made, and not from host memory: the first sync is as fast as others."""
    uploads: list[int] = []

    def counted(box: torch.Tensor, bits: torch.Tensor) -> None:
        uploads.append(bits.numel())
        upload_box(box, bits)

    monkeypatch.setattr(diff_device, "upload_box", counted)
    held = {f"w{n}": random_tensor((40,), torch.bfloat16, n) for n in range(5)}
    held["w5"] = held["w4"].clone()  # in a buffer, taken for the same tensor
    new = step(held, 1, 0.2)
    expected = in_host_memory(held, new)
    snapshot = Snapshot(
        held.items() if given == "collection" else refilling(held), "deltas", kept_on
    )
    for tensor in held.values():
        tensor.zero_()
    assert found(snapshot, new) == expected
    assert not uploads


def test_a_base_without_room_is_pinned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was copied to the device before that was known."""
    kept: list[int] = []
    whole = diff_device.pinned

    def pinned(held: np.ndarray[Any, Any], device: torch.device) -> np.ndarray[Any, Any]:
        kept.append(held.size)
        return whole(held, device)

    monkeypatch.setattr(diff_device, "pinned", pinned)
    monkeypatch.setattr(diff_device, "free_bytes", lambda device: 4 * 80)
    held = {f"w{n}": random_tensor((40,), torch.bfloat16, n) for n in range(3)}
    snapshot = Snapshot(refilling(held), "deltas", "auto")
    assert kept == [40] * 3
    new = step(held, 1, 0.2)
    assert found(snapshot, new) == in_host_memory(held, new)


def test_a_base_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"w": torch.zeros(40, dtype=torch.bfloat16)}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            Snapshot(held.items(), "deltas", "device")
        snapshot = Snapshot(held.items(), "deltas", "auto")
    new = step(held, 1, 0.2)
    assert found(snapshot, new) == in_host_memory(held, new)


def test_the_snapshot_moves_into_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[np.ndarray[Any, Any]] = []

    def pinned(held: np.ndarray[Any, Any], device: torch.device) -> np.ndarray[Any, Any]:
        if not any(held is one for one in moved):
            moved.append(held.copy())
        return moved[-1]

    monkeypatch.setattr(diff_device, "pinned", pinned)
    held = {"w": torch.zeros(40, dtype=torch.bfloat16)}
    snapshot = Snapshot(held.items(), "deltas", "host")
    for number in range(1, 4):
        new = held["w"].clone()
        new[number] = 1
        ((kept, change),) = snapshot.read([("w", new)])
        assert change is not None
        snapshot.advance({kept: change})
        assert snapshot.image("w").values is moved[0]
        held = {"w": new}
    assert len(moved) == 1


def out_of_memory(*arguments: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("no")


def test_a_device_that_is_full_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    held, new = np.zeros(40, np.uint16), torch.zeros(40, dtype=torch.int16)
    new[7] = 1
    sides = {kept_on: DeviceSide(kept_on) for kept_on in ("auto", "device")}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            sides["device"].prepare("w", held, CPU, 1)
        assert sides["auto"].prepare("w", held, CPU, 1) is held
    assert places(compare(sides["auto"], held, new)) == [7]
    for other in (new[1:], new.int(), new.view(5, 8)):
        with pytest.raises(ValueError, match="not of one size"):
            compare(sides["auto"], held, other)


@pytest.mark.parametrize("broken", ["_apply", "write_listed", "upload_box"])
def test_a_copy_that_could_not_follow_is_made_anew(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the snapshot was left half-way or its copy was, they are one again."""
    monkeypatch.setattr(sender_snapshot, "_WRITTEN", 1)  # each tensor alone
    held = {name: torch.zeros(40, dtype=torch.bfloat16) for name in ("a", "b")}
    snapshot = Snapshot(held.items(), "deltas", "device")
    monkeypatch.setattr(diff_device, "LISTED_SHARE", 0 if broken == "upload_box" else 8)
    new = step(held, 1, 0.2)
    changes = {kept: change for kept, change in snapshot.read(new.items()) if change is not None}
    where: Any = snapshot if broken == "_apply" else diff_device
    whole: Callable[..., None] = getattr(where, broken)
    calls: list[int] = []

    def second_fails(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("cut short")
        whole(*arguments)
        if broken == "write_listed":
            raise RuntimeError("cut short")

    with monkeypatch.context() as patch:
        patch.setattr(where, broken, second_fails)
        with pytest.raises(RuntimeError, match="cut short"):
            snapshot.advance(changes)
    images = {name: snapshot.image(name).values for name in held}
    for target in (held, new):
        for kept, change in snapshot.read(target.items()):
            bits = gather_scatter.host_bits(gather_scatter.bits_of(target[kept]))
            places = np.flatnonzero(images[kept] != bits)
            assert (change is None) == (not places.size)
            assert np.array_equal(snapshot.image(kept, change).values, bits)


def test_a_device_without_memory_for_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines have committed: the snapshot advances, and its copy is uploaded."""
    held = {name: torch.zeros(40, dtype=torch.bfloat16) for name in ("a", "b")}
    engine = Engine.of(held)
    with DeltaSender("http://engine/", held.items(), client=engine.client()) as sender:
        for seed in range(1, 4):
            held = step(held, seed, 0.02)
            with monkeypatch.context() as patch:
                if seed == 2:
                    patch.setattr(diff_device, "write_listed", out_of_memory)
                assert not sender.sync(held.items()).full
            assert engine.holds(held)


# --- what is kept of changes ---


@pytest.fixture
def refuses_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(box: torch.Tensor, bits: torch.Tensor) -> None:
        raise AssertionError("uploaded")

    monkeypatch.setattr(diff_device, "upload_box", refuse)


@pytest.mark.usefixtures("refuses_uploads")
@pytest.mark.parametrize("density", [0.01, 0.9])
@pytest.mark.parametrize("piece", [32, 1 << 24])
def test_a_copy_follows_from_what_is_there(
    piece: int, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is uploaded: of sparse changes, dense ones, and those in a file."""
    monkeypatch.setattr(device_batch, "_PIECE", piece)
    monkeypatch.setattr(diff_device, "LISTED_SHARE", 8)
    held = model(43, 0)
    snapshot = Snapshot(held.items(), "deltas", "device")
    for seed in range(1, 4):
        new = step(held, seed, density)
        assert found(snapshot, new) == in_host_memory(held, new)
        read = snapshot.read(new.items(), changes_in_memory=0)
        snapshot.advance({key: change for key, change in read if change is not None})
        held = new


def test_a_change_that_was_found_before_the_last_one() -> None:
    """Its list is gone, and is not taken for that of the last one."""
    held = {"w": torch.zeros(400, dtype=torch.bfloat16)}
    snapshot = Snapshot(held.items(), "deltas", "device")
    first, second = (step(held, seed, 0.01) for seed in (1, 2))
    changes, others = (
        {key: c for key, c in snapshot.read(new.items()) if c} for new in (first, second)
    )
    assert changes["w"].nnz
    assert others["w"].nnz
    snapshot.advance(changes)
    assert found(snapshot, second) == in_host_memory(first, second)


def test_lists_are_bounded_and_freed() -> None:
    lists = Lists()
    places, new = torch.arange(100), torch.zeros(100, dtype=torch.int16)

    def kept(*, wide: bool = False, most: float) -> Listed | None:
        return lists.keep(places, new, wide=wide, most=most)

    assert kept(most=599) is None
    first = kept(most=600)
    assert first is not None
    assert first.elements[0].tolist() == places.tolist()
    assert first.elements[0].dtype == torch.int32
    assert kept(most=1199) is None
    second = kept(wide=True, most=1600)
    assert second is not None
    assert second.elements[0].dtype == torch.int64
    del first  # with the last change that has it
    assert kept(most=1599) is None
    assert kept(most=1600) is not None
    lists.let_go()
    assert second.nbytes == 0
    assert kept(most=600) is not None


@pytest.mark.parametrize("kind", [DeltaSender, ShardedSender])
def test_a_sync_that_is_over_keeps_no_list(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its engine took or refused it; so the trainer has its memory back."""
    given: Any = whole if kind is ShardedSender else Tensors.items
    listed: list[weakref.ref[Listed]] = []

    class Watched(Listed):
        def __init__(self, *elements: torch.Tensor) -> None:
            super().__init__(*elements)
            listed.append(weakref.ref(self))

    monkeypatch.setattr("delta_sender.diff.listed.Listed", Watched)
    held = {name: torch.zeros(400, dtype=torch.bfloat16) for name in ("a", "b")}
    engine = Engine.of(held)
    with kind("http://engine/", given(held), client=engine.client()) as sender:
        for seed in range(1, 5):
            held = step(held, seed, 0.01)
            if seed % 2:
                engine.faults[len(engine.requests)] = sends(error(400, "DeltaError"))
                with contextlib.suppress(SyncError):
                    sender.sync(given(held))
            else:
                sender.sync(given(held))
                assert engine.holds(held)
            assert listed
            assert not any(one.nbytes for weak in listed if (one := weak()) is not None)
            listed.clear()


def test_refilled_views_are_compared_as_they_were_yielded() -> None:
    sizes = {"a": 9, "b": 40, "c": 20}
    held = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    snapshot = Snapshot(held.items(), "deltas", "device")
    new = {name: tensor + 1 + number for number, (name, tensor) in enumerate(held.items())}
    snapshot.advance({key: change for key, change in snapshot.read(refilling(new)) if change})
    assert [change for _, change in snapshot.read(new.items())] == [None] * 3


def test_an_unknown_place() -> None:
    with pytest.raises(ValueError, match="'gpu'; it is one of auto, device, host"):
        DeltaSender("http://nobody", [], snapshot_on="gpu")


# --- what crosses the bus ---


def one_unit(tensor: torch.Tensor, seed: int, share: float) -> torch.Tensor:
    """Move a share of the elements by one unit in the last place."""
    new = tensor.clone()
    chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < share
    gather_scatter.bits_of(new)[chosen] += 1
    return new


@pytest.mark.parametrize("encoding", ["gap8_ulp", "deltas"])
def test_a_byte_and_a_half_of_an_element_is_downloaded(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is sent as; and a sync of differences sends what was downloaded."""
    monkeypatch.setattr(device_batch, "_PIECE", 1 << 23)
    downloaded: list[int] = []
    download = CopyStreams.download

    def counted(streams: CopyStreams, data: torch.Tensor) -> Callable[[], torch.Tensor]:
        downloaded.append(data.nbytes)
        return download(streams, data)

    monkeypatch.setattr(CopyStreams, "download", counted)
    held = {"w": random_tensor((100_000,), torch.bfloat16, 0)}
    new = {"w": one_unit(held["w"], 1, 0.02)}
    engine = Engine.of(held)
    with DeltaSender(
        "http://engine/", held.items(), client=engine.client(), encoding=encoding
    ) as sender:
        with mock.patch.object(part_builder, "encode_part", wraps=encode_part) as called:
            report = sender.sync(new.items())
        assert engine.holds(new)
        assert report.nnz > 1900
        assert sum(downloaded) < 1.55 * report.nnz + 100
        [[delta]] = [call.args[0] for call in called.call_args_list]
        assert isinstance(delta, EncodedDelta) == (encoding == "gap8_ulp")


def test_a_snapshot_advances_once_by_what_was_encoded() -> None:
    """Differences are added: a second time they would lead to other bits."""
    held = {"w": torch.zeros(400, dtype=torch.bfloat16)}
    snapshot = Snapshot(held.items(), "gap8_ulp", "device")
    new = step(held, 1, 0.02)
    changes = {key: change for key, change in snapshot.read(new.items()) if change is not None}
    assert isinstance(changes["w"].elements, EncodedElements)
    missed = snapshot.without_old(changes)
    assert snapshot.without_old(changes) is missed  # for each engine that has failed
    snapshot.advance(changes)
    with pytest.raises(RuntimeError, match="has moved on"):
        snapshot.advance(changes)
    bits = gather_scatter.host_bits(gather_scatter.bits_of(new["w"]))
    assert np.array_equal(snapshot.image("w").values, bits)
    places = np.flatnonzero(bits)
    elements = missed["w"].decoded()
    assert elements.indices is not None
    assert np.array_equal(elements.indices, places)
    assert np.array_equal(elements.new, bits[places])
    with pytest.raises(RuntimeError, match="has moved on"):
        changes["w"].decoded()
    assert [change for _, change in snapshot.read(new.items())] == [None]


def test_a_tensor_that_changes_late_is_refused() -> None:
    """Between the pass that counts what differs and the one that lists it."""
    old = {name: torch.zeros(128).bfloat16() for name in "abc"}
    new = copied(old)
    for tensor in new.values():
        tensor[:3] = 1

    def yielded() -> Generator[tuple[str, torch.Tensor]]:
        yield "a", new["a"]
        yield "b", new["b"]
        new["b"][:2] = 0
        yield "c", new["c"]

    with pytest.raises(ValueError, match="have changed while they were compared"):
        deque(Snapshot(old.items(), "deltas", "device").read(StableGenerator(yielded())), 0)


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_a_copy_with_other_bits_is_noticed(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has written to the device's memory: no full sync sends what follows from it."""
    model = model_of(torch.bfloat16)
    engine = Engine.of(model)
    sender = sender_of(engine, model, snapshot_on="device")
    train(model, 1, density)
    held, old = engine.version, DeviceSide.old

    def other(*given: Any) -> Callable[[], torch.Tensor]:
        use = old(*given)
        return lambda: use() ^ 4

    with monkeypatch.context() as patch:
        patch.setattr(DeviceSide, "old", other)
        with pytest.raises(RuntimeError, match="had other bits than the snapshot"):
            sender.sync_full(model.items())
    assert engine.version == held
    sender.sync(model.items())
    assert engine.holds(model)


def test_closing_frees_the_copies() -> None:
    side = DeviceSide("device")
    side.copied("w", torch.zeros(4, dtype=torch.int16))
    assert side.is_mirrored("w")
    side.drop_copies()
    assert not side.is_mirrored("w")
    model = model_of(torch.bfloat16)
    with mock.patch.object(DeviceSide, "drop_copies") as dropped:
        sender_of(Engine.of(model), model).close()
    dropped.assert_called_once_with()


def test_freed_memory_is_refused() -> None:
    tensor = torch.zeros(8)[4:]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="w: the tensor's memory has been freed"):
        Snapshot([("w", tensor)], "deltas")
