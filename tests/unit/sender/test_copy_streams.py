"""The order of copies, on streams that only record their calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from delta_sender.diff.copy_streams import CopyStreams


class Event:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told = name, told

    def synchronize(self) -> None:
        self._told.append(f"the host waits for {self.name}")


class FakeStream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told, self._events = name, told, 0

    def record_event(self) -> Event:
        self._events += 1
        self._told.append(f"{self.name} records {self._events}")
        return Event(f"{self.name} {self._events}", self._told)

    def wait_event(self, event: Event) -> None:
        self._told.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self._told.append(f"the host waits for {self.name}")


class Cuda:
    """A stand-in for `torch.cuda` that records the calls of its streams."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._names = iter(["up", "down"])
        self._current = [FakeStream("main", self.told)]

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(next(self._names), self.told)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()


class Memory:
    """A tensor, as far as copying goes."""

    shape, dtype = torch.Size([3]), torch.int16

    def __init__(self, name: str, cuda: Cuda) -> None:
        self._name, self._cuda = name, cuda

    def _on(self) -> str:
        return self._cuda.current_stream(torch.device("cuda")).name

    def to(self, device: torch.device, *, non_blocking: bool) -> Memory:
        assert non_blocking
        self._cuda.told.append(f"{self._on()} copies {self._name} to {device}")
        return Memory(f"{self._name} there", self._cuda)

    def copy_(self, other: Memory, *, non_blocking: bool) -> None:
        assert non_blocking
        self._cuda.told.append(f"{self._on()} copies {other._name} to {self._name}")

    def record_stream(self, stream: FakeStream) -> None:
        self._cuda.told.append(f"{self._name} is in use by {stream.name}")


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


def pinned(cuda: Cuda) -> AbstractContextManager[Any]:
    def empty(shape: torch.Size, *, dtype: torch.dtype, device: str, pin_memory: bool) -> Memory:
        assert (device, pin_memory) == ("cpu", True)  # whatever the default device is
        return Memory("pinned", cuda)

    return mock.patch.object(torch, "empty", empty)


def test_what_is_fetched_is_waited_for_by_the_device_only(cuda: Cuda) -> None:
    copies = CopyStreams(torch.device("cuda:1"), cuda)
    first, second = (copies.upload(Memory(name, cuda)) for name in ("a", "b"))  # type: ignore[arg-type]
    assert cuda.told == [
        "up copies a to cuda:1",
        "up records 1",
        "up copies b to cuda:1",
        "up records 2",
    ]
    cuda.told.clear()
    second()
    first()
    assert cuda.told == [
        "main waits for up 2",
        "b there is in use by main",
        "main waits for up 1",
        "a there is in use by main",
    ]


def test_download_is_complete_and_stays_until_copied(cuda: Cuda) -> None:
    copies = CopyStreams(torch.device("cuda:0"), cuda)
    with pinned(cuda):
        use = copies.download(Memory("found", cuda))  # type: ignore[arg-type]
    assert cuda.told == [
        "main records 1",
        "down waits for main 1",
        "down copies found to pinned",
        "found is in use by down",
        "down records 1",
    ]
    cuda.told.clear()
    use()
    assert cuda.told == ["the host waits for down 1"]


def test_settling_waits_for_the_callers_stream(cuda: Cuda) -> None:
    CopyStreams(torch.device("cuda:0"), cuda).synchronize()
    assert cuda.told == ["the host waits for main"]


def test_on_the_cpu_nothing_is_copied() -> None:
    copies, tensor = CopyStreams(torch.device("cpu")), torch.arange(3)
    assert copies.upload(tensor)() is tensor
    assert copies.download(tensor)() is tensor
    sent = copies.send([np.arange(6).reshape(3, 2), np.array([7])])
    assert [one.tolist() for one in sent] == [[[0, 1], [2, 3], [4, 5]], [7]]
    copies.synchronize()
