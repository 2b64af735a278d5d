"""Syncs of many small params: they are looked at before the pause, written and freed together."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ext.conformance.toy_models import Checkpoint, ToyModel
from engine_ext.format import decode_part
from engine_ext.placement import DeviceElements, HostElements
from engine_ext.sync import checks, delta_applier, writes
from engine_ext.sync.delta_applier import DeltaApplier
from engine_ext.sync.digest_table import DigestTable
from engine_ext.sync.disposer import Disposer
from engine_ext.sync.staged import StagedPart, Write
from tests.support.rank_engine import Engine, errors_of, part_id
from tests.support.served_models import (
    base_checkpoint,
    bits,
    changed,
    delta_between,
    load,
    memory,
    one_part,
    serve_ranks,
)

NAMES = [
    f"expert{number}" for number in range(48)
]  # 36 of one dtype: more than are freed at a time


class Experts(ToyModel):
    """Small tensors of two dtypes; every rank holds all of them."""

    shapes = dict.fromkeys(NAMES, (3, 5))
    dtypes = dict.fromkeys(NAMES[::4], torch.float32)


class Trained:
    """Two ranks, and what a trainer has made of their weights."""

    def __init__(self, folder: Path) -> None:
        self.base = base_checkpoint(Experts)
        self.served = serve_ranks([Experts, Experts], self.base, apply="scatter")
        self.engine = Engine([one.applier for one in self.served], folder)
        self.target = {n: changed(t, number) for number, (n, t) in enumerate(self.base.items())}

    def body(self, version: int, old: Checkpoint, new: Checkpoint) -> list[bytes]:
        """Return the parts of a sync, one for each dtype."""
        metadata: dict[str, Any] = {"current_version": version, "base_version": version - 1}
        dtypes = sorted({tensor.dtype for tensor in old.values()}, key=str)
        found = []
        for number, dtype in enumerate(dtypes):
            names = [name for name, tensor in old.items() if tensor.dtype == dtype]
            deltas = [delta_between(name, old[name], new[name]) for name in names]
            numbers = {"part": number, "num_parts": len(dtypes), "sync_id": str(version)}
            found.append(one_part(deltas, **metadata, **numbers))
        return found

    def stage(self, version: int, old: Checkpoint, new: Checkpoint) -> Any:
        """Stage a sync; return the id of one of its parts."""
        bodies = self.body(version, old, new)
        for body in bodies:
            errors_of(self.engine.stage(part_id(body), body), none=True)
        return part_id(bodies[0])

    def held(self) -> list[dict[str, bytes]]:
        return [memory(one.model) for one in self.served]


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


@pytest.mark.slow
def test_many_small_params_are_written(trained: Trained) -> None:
    one = trained.stage(1, trained.base, trained.target)
    [answer, other] = trained.engine.commit(one)
    assert answer["ok"]["tensors"] == len(NAMES)
    assert answer["ok"]["elements"] == 15 * len(NAMES)
    assert trained.held() == [memory(load(Experts, trained.target))] * 2
    for served in trained.served:
        assert served.applier.digests == served.applier.scan().digests
    trained.stage(2, trained.target, trained.base)
    errors_of(trained.engine.call("commit", version=2, sync_id="2"), none=True)
    assert trained.held() == [memory(load(Experts, trained.base))] * 2
    errors_of(trained.engine.call("rollback"), none=True)
    assert trained.held() == [memory(load(Experts, trained.target))] * 2
    for served in trained.served:
        assert served.applier.digests == served.applier.scan().digests
    assert other["ok"]["nnz"] == answer["ok"]["nnz"]


@pytest.mark.host_memory
@pytest.mark.parametrize("sampled", [True, False])
def test_a_changed_weight_among_many_is_refused(
    trained: Trained, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample sees the first element of each tensor, the write all of them."""
    one = trained.stage(1, trained.base, trained.target)
    name = NAMES[1]
    delta = delta_between(name, trained.base[name], trained.target[name])
    assert delta.indices is not None
    where = int(delta.indices[0 if sampled else -1])
    for served in trained.served:
        served.model.get_parameter(name).view(-1)[where] = 7.0
    before = trained.held()
    puts: list[bool] = []
    put_all = writes.put_all

    def noted(*arguments: Any, **options: Any) -> None:
        puts.append(True)
        put_all(*arguments, **options)

    monkeypatch.setattr(delta_applier, "put_all", noted)
    kinds = {error["type"] for error in errors_of(trained.engine.commit(one))}
    assert kinds == {"BaseMismatch"}
    assert bool(puts) is not sampled
    assert trained.held() == before


def test_a_commit_looks_at_no_param_again(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trained.stage(1, trained.base, trained.target)
    looked: list[str] = []
    monkeypatch.setattr(checks, "check_no_overlap", lambda *_: looked.append("check_no_overlap"))
    monkeypatch.setattr(delta_applier, "check_tied", lambda *_: looked.append("check_tied"))
    monkeypatch.setattr(writes, "table_of", lambda *_: looked.append("table_of"))
    monkeypatch.setattr(Write, "put", lambda *_: looked.append("put"))
    errors_of(trained.engine.commit(one), none=True)
    assert looked == []
    assert trained.held() == [memory(load(Experts, trained.target))] * 2


def test_a_rollback_looks_at_no_param(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their old values are restored together, by what the commit has left."""
    errors_of(trained.engine.commit(trained.stage(1, trained.base, trained.target)), none=True)
    looked: list[str] = []
    for elements in (HostElements, DeviceElements):
        monkeypatch.setattr(elements, "put", lambda *_: looked.append("put"))
    monkeypatch.setattr(writes, "table_of", lambda *_: looked.append("table_of"))
    monkeypatch.setattr(DigestTable, "find", lambda *_: looked.append("find"))
    errors_of(trained.engine.call("rollback"), none=True)
    assert looked == []
    assert trained.held() == [memory(load(Experts, trained.base))] * 2


def test_commit_succeeds_if_no_thread_can_free(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ThreadPoolExecutor.submit

    def failing(pool: ThreadPoolExecutor, work: Any, *arguments: Any) -> Any:
        if work.__module__ == "engine_ext.sync.disposer":
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(pool, work, *arguments)

    one = trained.stage(1, trained.base, trained.target)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", failing)
    errors_of(trained.engine.commit(one), none=True)
    assert trained.held() == [memory(load(Experts, trained.target))] * 2


def test_commit_frees_what_it_has_staged(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[StagedPart] = []
    stage = DeltaApplier.stage

    def noted(applier: DeltaApplier, *arguments: Any) -> StagedPart:
        staged.append(stage(applier, *arguments))
        return staged[-1]

    monkeypatch.setattr(DeltaApplier, "stage", noted)
    errors_of(trained.engine.commit(trained.stage(1, trained.base, trained.target)), none=True)
    deadline = time.monotonic() + 10
    while any(part.params for part in staged):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(staged) == 4


def test_what_was_written_is_freed_in_the_background(trained: Trained) -> None:
    applier = trained.served[0].applier
    deltas = [delta_between(n, trained.base[n], trained.target[n]) for n in NAMES[1:4]]
    deltas = [delta for delta in deltas if delta.dtype == "bfloat16"]
    staged = [applier.stage(decode_part(one_part(deltas)))] * 20
    log = applier.finish(staged[:1])
    assert log is not None
    freed = weakref.ref(staged[0].params[0].writes[0].new)
    Disposer().dispose(staged, [])
    lists = [log.writes, *(table.pairs for table in log.tables)]
    kept = sum(map(len, lists))
    deadline = time.monotonic() + 10
    while freed() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert kept == sum(map(len, lists)) == len(deltas)
    assert all(bits(trained.base[d.name]).size >= len(d.values) for d in deltas)
