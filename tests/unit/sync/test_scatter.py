"""The scatter apply, and copies of a tensor on one rank."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.conformance.toy_models import (
    CastBefore,
    PlainCopy,
    Replicated,
    ToyModel,
    Windows,
    parameter,
)
from engine_ext.errors import BaseMismatch
from engine_ext.format.digest import tensor_digest
from engine_ext.kernels import table_of
from engine_ext.placement.casts import checkpoint_bits, live_bits
from engine_ext.placement.plan import make_plan
from engine_ext.ranks import SingleRank
from engine_ext.sync.thread_pool import ThreadPool
from tests.support.served_models import (
    PROPERTY,
    attempt,
    base_checkpoint,
    bits,
    changed,
    delta_between,
    dense_delta,
    load,
    memory,
    on_a_device,
    parts_of,
    placed,
    replan,
    serve,
    small_pieces,
    target_checkpoint,
)
from tests.support.thread_ranks import Shard, shards
from tests.unit.sync.applier_cases import DENSE


@pytest.mark.slow
@PROPERTY
@given(
    shard=shards(),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 1 << 20),
    dense=st.booleans(),
    span=st.sampled_from([1, 7, 1 << 16]),
    threads=st.sampled_from([1, 3]),
    digested=st.booleans(),
    host=st.booleans(),
    full=st.booleans(),
)
def test_applied_and_taken_back(
    shard: Shard,
    density: float,
    seed: int,
    dense: bool,
    span: int,
    threads: int,
    digested: bool,
    host: bool,
    full: bool,
) -> None:
    """Any shard, any density, any pieces: live memory ends as after a fresh load.

    Without `host`, the operators for other devices do it, on the CPU.
    """
    model = shard.model(number=2)
    base = base_checkpoint(model, seed)
    served = serve(model, base, apply="scatter", threads=threads)
    plan = served.applier.plan
    if not digested:
        plan = replace(plan, digested=frozenset())
    replan(served, plan if host else on_a_device(plan))
    target = {name: changed(tensor, seed + 7, density) for name, tensor in base.items()}
    deltas = [
        dense_delta(n, target[n])
        if full or (dense and n == "w1")
        else delta_between(n, base[n], target[n])
        for n in base
    ]
    with small_pieces(span):
        assert attempt(served, parts_of(deltas), full=full) is None
    assert memory(served.model) == memory(load(model, target))


@pytest.mark.host_memory
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("every", "sampled"), [(1 << 20, {0}), (7, {0, 10}), (5, {0, 5, 10})])
@pytest.mark.parametrize("together", [True, False])
def test_what_the_sample_misses_the_write_finds(
    together: bool, every: int, sampled: set[int], threads: int
) -> None:
    """Wherever it is: what was written is undone, and what was not is left as it is.

    Of the pieces, of 5 elements each, the first one is sampled if one call visits all pieces. Else
    it is where enough elements have passed since the last.
    """
    if together:
        sampled = {0, 5, 10}
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base, apply="scatter", threads=threads)
    target = {name: changed(tensor, 7, 1.0) for name, tensor in base.items()}
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    flat = served.model.weight.data.view(torch.int16).reshape(-1)
    tables = table_of if together else lambda elements: None
    first, found = memory(served.model), set()
    for place in range(12):
        with (
            small_pieces(5),
            mock.patch("engine_ext.sync.writes.table_of", tables),
            mock.patch("engine_ext.sync.writes.SAMPLED", every),
        ):
            staged = [served.applier.stage(part) for part in parts_of(deltas)]
        flat[place] ^= 0x100
        before = memory(served.model)
        with (
            mock.patch("engine_ext.placement.live_elements.SAMPLED", 1 << 20),
            mock.patch("engine_ext.sync.writes.SAMPLED", every),
        ):
            try:
                served.applier.check_base(staged)
            except BaseMismatch:
                found.add(place)
        with pytest.raises(BaseMismatch, match="between staging and commit"):
            served.applier.write(staged)
        served.applier.undo(staged)
        assert memory(served.model) == before, place
        flat[place] ^= 0x100
        assert memory(served.model) == first, place
    assert found == sampled


def test_what_nothing_was_written_to_is_not_undone() -> None:
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base, apply="scatter")
    target = target_checkpoint(base, ["weight"])
    [part] = parts_of([delta_between("weight", base["weight"], target["weight"])])
    staged = [served.applier.stage(part)]
    served.model.weight.data.view(torch.int16).reshape(-1)[:] ^= 1
    before = memory(served.model)
    served.applier.undo(staged)
    assert memory(served.model) == before


class CopiedTwice(PlainCopy):
    """Copies a tensor to the same place twice."""

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        super().load_one(name, weight)
        super().load_one(name, weight)


@pytest.mark.parametrize("full", [False, True])
def test_a_tensor_that_is_copied_twice_is_written_once(full: bool) -> None:
    base = base_checkpoint(CopiedTwice)
    served = serve(CopiedTwice, base, apply="scatter")
    target = target_checkpoint(base, list(base))
    deltas = [
        dense_delta(n, target[n]) if full else delta_between(n, base[n], target[n]) for n in base
    ]
    assert attempt(served, parts_of(deltas), full=full) is None
    assert memory(served.model) == memory(load(CopiedTwice, target))


class NarrowedColumns(ToyModel):
    """The copy casts, through memory in another order than the checkpoint's."""

    shapes: ClassVar = {"weight": (3, 4)}
    dtypes: ClassVar = {"weight": torch.float32}

    def build(self) -> None:
        self.weight = parameter(4, 3, dtype=torch.bfloat16)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.copy_(weight.t())


@DENSE
@pytest.mark.parametrize("model", [CastBefore, NarrowedColumns], ids=str)
def test_a_nan_through_casts_is_refused(model: type[ToyModel], dense: bool) -> None:
    """Casts keep every number that fits, but the bits of a NaN depend on how they are made."""
    base = {name: t.bfloat16().to(t.dtype) for name, t in base_checkpoint(model).items()}
    served = serve(model, base, apply="scatter")
    target = {"weight": base["weight"].clone()}
    target["weight"][1, 2] = float("nan")
    old, new = base["weight"], target["weight"]
    delta = dense_delta("weight", new) if dense else delta_between("weight", old, new)
    refusal = attempt(served, parts_of([delta]))
    assert refusal is not None
    assert "bits of a NaN" in refusal.message


def test_windows_are_refused_for_what_they_are() -> None:
    """As many elements are written as the tensor has, but some twice and others never."""
    _, _, placement = placed(Windows, base_checkpoint(Windows))
    plan = make_plan(placement, SingleRank())
    assert "several times" in placement["weight"].reason
    assert not plan.targets


# --- copies on one rank ---


class OneOfThree(Replicated):
    """Broadcast into one parameter, and copied into another one."""

    shapes: ClassVar = {"weight": (4,)}


@pytest.mark.parametrize("model", [Replicated, OneOfThree], ids=str)
def test_copies_must_agree(model: type[ToyModel]) -> None:
    """A digest sees the first copy only; the others are compared with it. A full sync repairs."""
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    rows = (0,) if model is Replicated else (0, 2)
    for seed, (row, live, dense) in enumerate(product(rows, ("first", "second"), (False, True))):
        target = target_checkpoint(base, ["weight"], seed)
        getattr(served.model, live).data.view(torch.int16)[row, 0] ^= 1
        delta = delta_between("weight", base["weight"], target["weight"])
        whole = dense_delta("weight", target["weight"])
        before = memory(served.model)
        with pytest.raises(BaseMismatch, match="weight") as caught:
            attempt(served, parts_of([whole if dense else delta]))
        assert caught.value.operands["tensor"] == "weight"
        assert memory(served.model) == before
        assert attempt(served, parts_of([whole]), full=True) is None
        assert memory(served.model) == memory(load(model, target))
        base = target


@pytest.mark.parametrize("model", [Replicated, OneOfThree])
def test_copies_count_once(model: type[ToyModel]) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    target = target_checkpoint(base, ["weight"])
    [part] = parts_of([delta_between("weight", base["weight"], target["weight"])])
    staged = served.applier.stage(part)
    assert [param.counted for param in staged.params] == [part.deltas[0].nnz]
    assert served.applier.digest == tensor_digest("weight", bits(base["weight"]))


def test_nothing_goes_on_after_a_failure() -> None:
    """An undo must not run during a write."""
    pool = ThreadPool(3)
    started, ended = [], []
    slow = threading.Event()

    def do(number: int) -> None:
        started.append(number)
        if number == 1:
            raise OSError("the first to fail")
        slow.wait(0.02)
        ended.append(number)

    with pytest.raises(OSError, match="the first"):
        pool.map(do, range(50))
    assert sorted(started) == sorted([*ended, 1])
    assert len(started) < 50
    assert pool.map(lambda n: n * n, range(50)) == [n * n for n in range(50)]


def test_every_bfloat16_comes_back_from_float32() -> None:
    """Also NaNs: the digest of a widened tensor is that of the checkpoint's bits."""
    values = np.arange(1 << 16, dtype=np.uint16)
    wide = live_bits(values, "bfloat16", torch.float32)
    assert np.array_equal(checkpoint_bits(wide, torch.float32, "bfloat16"), values)
