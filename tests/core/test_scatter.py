"""The scatter apply: exact or refused for every loader habit, and how it finds the elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.errors import BaseMismatch
from engine_ext.holders import resolve
from engine_ext.locate import Locator
from engine_ext.placement import Placed, Repack, Segment, Status, TensorSpec
from engine_ext.storage_index import StorageIndex

from .harness import (
    PROPERTY,
    attempt,
    base_checkpoint,
    changed,
    delta_between,
    dense_delta,
    load,
    memory,
    named_in,
    parts_of,
    serve,
    target_checkpoint,
)
from .shards import Shard, shards
from .test_applier import DENSE, SYNCS
from .toy import CastBefore, PlainCopy, ToyModel

WRITTEN = (Status.EXACT, Status.CAST, Status.NOT_ON_RANK)


@SYNCS
@DENSE
def test_exact_or_refused(model: type[ToyModel], names: tuple[str, ...], dense: bool) -> None:
    """What is certified is written as a fresh load would; the rest is refused by name."""
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    target = target_checkpoint(base, names)
    deltas = [
        dense_delta(n, target[n]) if dense else delta_between(n, base[n], target[n]) for n in names
    ]
    refusal = attempt(served, parts_of(deltas))
    if refusal is None:
        assert memory(served.model) == memory(load(model, target))
    else:
        assert named_in(refusal) <= set(names)
    certified = all(served.placement[name].status in WRITTEN for name in names)
    assert (refusal is None) == certified


@PROPERTY
@given(
    shard=shards(),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 1 << 20),
    dense=st.booleans(),
)
def test_applied_and_taken_back(shard: Shard, density: float, seed: int, dense: bool) -> None:
    """Any shard, any density: live memory ends as a fresh load leaves it, and goes back."""
    model = shard.model(number=2)
    base = base_checkpoint(model, seed)
    served = serve(model, base, apply="scatter")
    target = {name: changed(tensor, seed + 7, density) for name, tensor in base.items()}
    deltas = [
        dense_delta(n, target[n]) if dense and n == "w1" else delta_between(n, base[n], target[n])
        for n in base
    ]
    before, applier = memory(served.model), served.applier
    digests = dict(applier.digests)
    staged = [applier.stage(part) for part in parts_of(deltas)]
    applier.check_sync(staged, full=False)
    applier.check_base(staged)
    applier.write(staged)
    log = applier.finish(staged)
    assert log is not None
    assert memory(served.model) == memory(load(model, target))
    assert applier.digests == applier.plan.scan()
    applier.roll_back(log)
    assert memory(served.model) == before
    assert applier.digests == applier.plan.scan() == digests


def test_a_weight_that_changes_after_staging_is_noticed() -> None:
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base, apply="scatter")
    target = target_checkpoint(base, ["weight"])
    [part] = parts_of([delta_between("weight", base["weight"], target["weight"])])
    staged = [served.applier.stage(part)]
    served.model.weight.data.view(torch.int16).reshape(-1)[0] ^= 1
    with pytest.raises(BaseMismatch):
        served.applier.check_base(staged)


@DENSE
def test_a_nan_through_casts_is_refused(dense: bool) -> None:
    """Casts to a wider dtype and back keep every number, but not the bits of a NaN."""
    base = base_checkpoint(CastBefore)
    served = serve(CastBefore, base, apply="scatter")
    target = {"weight": base["weight"].clone()}
    target["weight"][1, 2] = float("nan")
    old, new = base["weight"], target["weight"]
    delta = dense_delta("weight", new) if dense else delta_between("weight", old, new)
    refusal = attempt(served, parts_of([delta]))
    assert refusal is not None
    assert "bits of a NaN" in refusal.message


# --- locating ---


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Offset, sizes, source strides (some 0: broadcast) and live strides (dense, any order)."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    source = tuple(draw(st.sampled_from([0, 1, 2, 3, 5, 12, 40])) for _ in sizes)
    order = draw(st.permutations(range(len(sizes))))
    live, step = [0] * len(sizes), 1
    for dim in order:
        live[dim], step = step, step * sizes[dim]
    return draw(st.integers(0, 5)), sizes, source, tuple(live)


@PROPERTY
@given(box=boxes(), repacked=st.booleans(), chosen=st.sets(st.integers(0, 140)))
def test_locator_finds_what_the_box_says(
    box: tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    repacked: bool,
    chosen: set[int],
) -> None:
    """Against a walk over every element of the box."""
    offset, sizes, source, live = box
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(64), requires_grad=False)
    permutation = np.random.default_rng(1).permutation(64) if repacked else np.arange(64)
    repack = Repack(permutation.astype(np.int32)) if repacked else None
    entry = StorageIndex(model).by_name["w"]
    segment = Segment(entry, 0, live, sizes, offset, source, True, repack)
    expected = set()
    flat = [
        (offset + sum(map(np.multiply, at, source)), sum(map(np.multiply, at, live)))
        for at in np.ndindex(*sizes)
    ]
    if len({where for where, _ in flat}) * Locator(segment).copies != len(flat):
        return  # a box that holds an element twice by accident comes from no loader
    expected = {(int(i), int(permutation[o])) for i, o in flat if int(i) in chosen}
    indices = np.array(sorted(chosen), np.int64)
    found, offsets = Locator(segment)(indices)
    assert {(int(i), int(o)) for i, o in zip(indices[found], offsets, strict=True)} == expected
    assert len(offsets) == len(expected)


# --- holders ---

COLUMNS = [(0, ((4, 8), (4, 1))), (4, ((4, 8), (4, 1)))]


@pytest.mark.parametrize(
    ("by_rank", "reason"),
    [
        ([[(0, ((32, 1),))]], ""),
        ([[(0, ((32, 1),))], [(0, ((32, 1),))]], ""),
        ([[(0, ((16, 1),))], [(16, ((16, 1),))]], ""),
        ([[COLUMNS[0]], [COLUMNS[1]]], ""),
        ([[(0, ((16, 1),))]], "16 of its elements are on no rank"),
        ([[(0, ((20, 1),))], [(16, ((16, 1),))]], "overlap"),
        ([[COLUMNS[0]], [(0, ((16, 1),))]], "overlap"),
        ([[(0, ((16, 1), (2, 1)))]], "several times"),
    ],
)
def test_boxes_are_equal_or_disjoint_and_cover_the_tensor(
    by_rank: list[list[tuple[int, tuple[tuple[int, int], ...]]]], reason: str
) -> None:
    placement = {"w": Placed(TensorSpec("w", (4, 8), torch.bfloat16), status=Status.EXACT)}
    holders = resolve(placement, [{"w": boxes} for boxes in by_rank])
    assert (placement["w"].status is Status.EXACT) == (reason == "")
    assert reason in placement["w"].reason
    assert sum(len(ranks) for ranks in holders["w"].values()) == len(by_rank)
