"""Every thread of a rank uses the rank's device: another one would get a context of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engine_ext.adapters.vllm import transfer_group
from engine_ext.adapters.vllm.transfer_group import JoinGroup, Transfer
from engine_ext.conformance.toy_models import PlainCopy
from engine_ext.format import PartId
from engine_ext.kernels import same_device
from engine_ext.model import ModelStateGuard, hash_memory, state_guard
from engine_ext.ranks.operations import BeginPart, encode_request
from engine_ext.sync.background_staging import BackgroundStaging
from engine_ext.sync.disposer import Disposer
from engine_ext.sync.scrubber import Scrubber
from engine_ext.sync.staged import UndoLog
from engine_ext.sync.thread_pool import ThreadPool
from tests.support.served_models import base_checkpoint, serve

pytestmark = pytest.mark.host_memory

OWN = 3


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By thread, the CUDA device that it uses; this thread uses number 3."""
    found = {threading.get_ident(): OWN}

    def set_device(device: int) -> None:
        found[threading.get_ident()] = device

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found[threading.get_ident()])
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Mock())
    return found


class Seen:
    """Remembers which device each thread used that has called it, and waits for two."""

    def __init__(self, chosen: dict[int, int]) -> None:
        self._chosen, self.by_thread = chosen, dict[int, int]()
        self.called = threading.Event()

    def __call__(self, *_: Any) -> Any:
        own = threading.get_ident()
        self.by_thread[own] = self._chosen.get(own, 0)
        self.called.set()


def in_a_pool(seen: Seen, folder: Path) -> None:
    together = threading.Barrier(3)

    def work(number: int) -> None:
        together.wait(10)
        seen()

    ThreadPool(3).map(work, range(3))
    assert len(seen.by_thread) == 3


def in_staging(seen: Seen, folder: Path) -> None:
    staging = BackgroundStaging(1, lambda path, source: seen())
    identity = PartId(version=1, base_version=0, identity="0" * 64, part=0, num_parts=1)
    staging.start(BeginPart(part=identity, path=str(folder / "part"), now=0.0), seen)
    staging.wait()


def in_scrubbing(seen: Seen, folder: Path) -> None:
    class Owner:
        def current(self) -> Any:
            return seen()

    owner = Owner()
    Scrubber(weakref.WeakMethod(owner.current), 0).start(60.0)
    assert seen.called.wait(10)


def in_scans(seen: Seen, folder: Path) -> None:
    plan = serve(PlainCopy, base_checkpoint(PlainCopy)).applier.plan
    with pytest.MonkeyPatch.context() as patch:
        digest = type(plan).piece_digest
        patch.setattr(type(plan), "piece_digest", lambda *a, **k: (seen(), digest(*a, **k))[1])
        plan.scan(2)


def in_hashing(seen: Seen, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_guard, "hash_memory", lambda one: (seen(), hash_memory(one))[1])
        ModelStateGuard(torch.nn.Linear(3, 3), bits=True)


def in_freeing(seen: Seen, folder: Path) -> None:
    pairs: list[Any] = [(Seen(seen.by_thread), None) for _ in range(100)]
    for elements, _ in pairs:
        weakref.finalize(elements, seen)
    del elements
    Disposer().dispose([], [UndoLog(pairs)])
    assert seen.called.wait(10)


def in_transfers(seen: Seen, folder: Path) -> None:
    joined = JoinGroup(master_address="localhost", master_port=1, backend="gloo", timeout=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_group, "join_group", seen)
        group = transfer_group.TransferGroup(torch.device("cpu"), receives=True)
        group.handle(*encode_request(Transfer(step=joined)))
        assert seen.called.wait(10)


@pytest.mark.parametrize(
    "use",
    [in_a_pool, in_staging, in_scrubbing, in_scans, in_hashing, in_freeing, in_transfers],
)
def test_a_thread_uses_its_ranks_device(
    use: Callable[[Seen, Path], None], chosen: dict[int, int], tmp_path: Path
) -> None:
    seen = Seen(chosen)
    use(seen, tmp_path)
    assert set(seen.by_thread.values()) == {OWN}


def test_a_thread_begins_after_what_its_maker_has_queued(
    chosen: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = {OWN: Mock()}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    same_device()
    streams[OWN].synchronize.assert_called_once_with()
