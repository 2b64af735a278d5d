"""Memory that is reserved on a device: nothing is given twice, and all of it comes back."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.placement import (
    DeviceElements,
    DeviceMemory,
    DeviceRows,
    LiveTensors,
    device_memory,
)
from tests.support.served_models import PROPERTY

pytestmark = pytest.mark.slow

HERE = torch.empty(0, device=DEVICE).device
DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def numbers(size: int, seed: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(0, 100, (size,), generator=torch.Generator().manual_seed(seed)).to(dtype)


@PROPERTY
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 700), st.sampled_from(DTYPES), st.integers(0, 9)), max_size=30
    )
)
def test_no_memory_is_given_twice(steps: list[tuple[int, torch.dtype, int]]) -> None:
    memory = DeviceMemory(8192, [HERE])
    held: list[tuple[torch.Tensor, Any]] = []
    for number, (size, dtype, dropped) in enumerate(steps):
        bits = numbers(size, number, dtype)
        held.append((bits, memory.keep(bits, HERE)))
        if dropped < len(held):
            held.pop(dropped)
        assert all(torch.equal(kept.bits.cpu(), expected) for expected, kept in held)
    leases = {id(kept.lease) for _, kept in held if kept.lease is not None}
    assert memory.free(HERE) <= 8192 - 512 * len(leases)
    held.clear()
    assert memory.free(HERE) == 8192


def test_reserved_memory_is_not_counted_again() -> None:
    """The undo has a limit of its own."""
    flat = numbers(100, 0)
    for memory, counted in ((DeviceMemory(8192, [HERE]), 0), (DeviceMemory(), 40)):
        offsets, lease = memory.keep(torch.arange(10, dtype=torch.int32), HERE)
        assert DeviceElements(flat, offsets, lease).nbytes == counted
        tensors = LiveTensors([flat], np.zeros(1, np.int64), ["w"])
        rows = DeviceRows(tensors, np.array([0]), np.array([10]), offsets, lease)
        assert rows.nbytes == counted


def test_what_does_not_fit_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned, where kernels can read it; on the device where only operators run."""
    pinned: list[int] = []
    make = device_memory.host_room

    def pin(size: int, *given: Any) -> torch.Tensor:
        pinned.append(size)
        return make(size, *given)

    monkeypatch.setattr(device_memory, "host_room", pin)
    for kernels in (True, False):
        monkeypatch.setattr(device_memory, "runs_kernels", lambda device, found=kernels: found)
        memory = DeviceMemory(1024, [HERE])
        first = memory.keep(numbers(200, 1), HERE)
        second = memory.keep(numbers(100, 2), HERE)
        assert (first.lease is None, second.lease is None) == (False, True)
        assert torch.equal(second.bits.cpu(), numbers(100, 2))
        del first
        assert memory.keep(numbers(200, 3), HERE).lease is not None
    assert pinned == [100]


@pytest.mark.usefixtures("quick_collections")
def test_threads_and_collections_return_memory() -> None:
    memory = DeviceMemory(1 << 20, [HERE])

    def work() -> None:
        for number in range(200):
            loop: list[Any] = [memory.keep(numbers(100, number), HERE)]
            loop.append(loop)  # only the garbage collector frees it

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert memory.free(HERE) == 1 << 20


def test_other_devices_are_not_kept_for() -> None:
    kept = DeviceMemory().keep(numbers(5, 1), HERE)
    assert kept.lease is None
    assert torch.equal(kept.bits.cpu(), numbers(5, 1))
