"""Weights of a device: staged and written together, with what a host would find and leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_ext.conformance.toy_models import FusedQkv, Narrowed, PlainCopy, ToyModel
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.format import Digest, change_digest, decode_part, encode_part
from engine_ext.kernels import gather_scatter
from engine_ext.placement import DeviceMemory
from engine_ext.sync.device_table import GatherRequest, gather
from engine_ext.sync.thread_pool import ThreadPool
from tests.support.served_models import (
    PROPERTY,
    Served,
    as_on_a_device,
    attempt,
    base_checkpoint,
    bits,
    delta_between,
    load,
    memory,
    parts_of,
    serve,
    stage,
    target_checkpoint,
)
from tests.support.staged_writes import writes_of


def served_on(model: type[ToyModel], on_device: bool) -> Served:
    served = serve(model, base_checkpoint(model), apply="scatter", threads=2)
    if on_device:
        as_on_a_device(served)
    return served


@pytest.mark.parametrize("model", [PlainCopy, FusedQkv])
def test_differences_are_added_to_what_is_read(model: type[ToyModel]) -> None:
    base = base_checkpoint(model)
    names = [name for name in base if base[name].dtype == torch.bfloat16]
    target = target_checkpoint(base, names)
    deltas, change = [], Digest.ZERO
    for name in names:
        delta, old = delta_between(name, base[name], target[name]), bits(base[name])
        before = old[delta.indices]
        change += change_digest(name, delta.indices, before, delta.values)
        deltas.append(replace(delta, values=delta.values - before, differences=True))
    body = encode_part(deltas, encoding="gap8_ulp", current_version=1, digest_part=change.hex())
    served = served_on(model, True)
    assert attempt(served, [decode_part(body)]) is None
    assert memory(served.model) == memory(load(model, target))


def test_two_parts_of_one_tensor() -> None:
    base = base_checkpoint(PlainCopy)
    target = target_checkpoint(base, ["weight"])
    delta = delta_between("weight", base["weight"], target["weight"])
    assert delta.indices is not None
    halves = [
        replace(delta, indices=delta.indices[half], values=delta.values[half])
        for half in (slice(0, 1), slice(1, None))
    ]
    served = served_on(PlainCopy, True)
    assert attempt(served, [part for half in halves for part in parts_of([half])]) is None
    assert memory(served.model)["weight"] == memory(load(PlainCopy, target))["weight"]
    served = served_on(PlainCopy, True)
    refusal = attempt(served, [part for _ in halves for part in parts_of([halves[0]])])
    assert isinstance(refusal, NotUpdatable)
    assert "same elements" in str(refusal)


def test_a_weight_that_changed_after_staging_is_seen() -> None:
    """All of the old values are compared before the write; a host compares a sample of them."""
    base = base_checkpoint(FusedQkv)
    target = target_checkpoint(base, base)
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    served = served_on(FusedQkv, True)
    staged = [served.applier.stage(part) for part in parts_of(deltas)]
    writes: list[Any] = writes_of(*staged)
    places = [(write, n) for write in writes for n in range(write.elements.offsets.numel())]
    assert len(places) == sum(delta.nnz for delta in deltas)
    for write, element in places:
        offset = write.elements.offsets[element].long()
        write.elements.flat[offset] ^= 1
        with pytest.raises(BaseMismatch, match="between staging and commit"):
            served.applier.check_base(staged)
        write.elements.flat[offset] ^= 1
        served.applier.check_base(staged)


@pytest.mark.host_memory  # by PyTorch's operators; `kernels_alone` has the kernels
def test_a_write_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a tensor whose old values are read only while it is written: no digest covers it."""
    monkeypatch.setattr("engine_ext.sync.stager._DEVICE_PIECE_ELEMENTS", 3)
    base = base_checkpoint(Narrowed)
    target = target_checkpoint(base, base)
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    exchange = gather_scatter.exchange
    served = served_on(Narrowed, True)
    writes = writes_of(*stage(served, parts_of(deltas)))
    unread = sum(write.old is None for write in writes)
    assert unread > 1
    for failing in range(unread):
        served = served_on(Narrowed, True)
        before = memory(served.model)
        staged = stage(served, parts_of(deltas))
        calls = iter(range(100))

        def fail(*arguments: Any, failing: int = failing, calls: Any = calls) -> Any:
            if next(calls) == failing:
                raise torch.OutOfMemoryError("no memory")
            return exchange(*arguments)

        with (
            mock.patch.object(gather_scatter, "exchange", fail),
            pytest.raises(torch.OutOfMemoryError),
        ):
            served.applier.write(staged)
        served.applier.undo(staged)
        assert memory(served.model) == before


def test_what_is_staged_is_one_array() -> None:
    """So that it crosses the bus at once, and the old values are compared as they came."""
    served = served_on(FusedQkv, True)
    base = base_checkpoint(FusedQkv)
    target = target_checkpoint(base, base)
    staged = stage(served, parts_of([delta_between(n, base[n], target[n]) for n in base]))
    writes: list[Any] = writes_of(*staged)
    assert len(writes) > 1
    for tensors in ([w.new for w in writes], [w.elements.offsets for w in writes]):
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


class Box:
    """As much of a `Locator` as staging asks for; its indices and offsets can be large."""

    def __init__(self, first: int, offset: int, *, is_run: bool) -> None:
        self._first, self._move = first, first - offset
        self.shift = self._move if is_run else None
        self.offset_dtype = np.int64 if offset + 50 > FAR else np.int32

    def within(self, indices: Any) -> slice:
        return slice(*np.searchsorted(indices, [self._first, self._first + 50]).tolist())

    def __call__(self, indices: Any) -> tuple[slice, Any]:
        assert indices.dtype == np.int64
        within = self.within(indices)
        return within, (indices[within] - self._move).astype(self.offset_dtype)


FAR = 1 << 31


@pytest.mark.slow
@PROPERTY
@given(
    boxes=st.lists(
        st.tuples(
            st.sampled_from([0, 5, 1 << 20, FAR - 60, FAR - 40, FAR, 3 << 31]),  # first index
            st.sampled_from([0, 7, FAR - 100, FAR + 9, 3 << 31]),  # first offset
            st.booleans(),  # whether it is one run
        ),
        min_size=1,
        max_size=4,
    )
)
def test_no_offset_overflows(boxes: list[tuple[int, int, bool]]) -> None:
    wanted, expected = [], []
    for first, offset, is_run in boxes:
        indices = np.arange(max(first - 3, 0), first + 60, 7)
        if indices[-1] < FAR:
            indices = indices.astype(np.int32)
        box: Any = Box(first, offset, is_run=is_run)
        target: Any = SimpleNamespace(locator=box, flat=torch.zeros(0, dtype=torch.int16))
        wanted.append(GatherRequest(target, indices, reads=False))
        expected.append([i - first + offset for i in indices.tolist() if 0 <= i - first < 50])
    found = gather(wanted, ThreadPool(2), DeviceMemory())
    assert [one.elements.offsets.tolist() for one in found] == expected
