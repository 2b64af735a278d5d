"""Conditions for an applier to take a sync; a refusal names what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import PlainCopy, ToyModel
from engine_ext.errors import BaseMismatch
from engine_ext.format import ParamDelta
from tests.support.served_models import (
    APPLIES,
    Served,
    attempt,
    base_checkpoint,
    bits,
    changed,
    delta_between,
    dense_delta,
    memory,
    named_in,
    one_part,
    parts_of,
    serve,
    target_checkpoint,
)
from tests.unit.sync.applier_cases import APPLY, assert_freshly_loaded, refused, sync_id


@pytest.fixture(params=APPLIES)
def plain(request: pytest.FixtureRequest) -> Served:
    return serve(PlainCopy, base_checkpoint(PlainCopy), apply=request.param)


ONES = torch.ones(6, dtype=torch.bfloat16)


def test_a_param_must_be_the_checkpoints(plain: Served) -> None:
    good = delta_between("weight", *2 * [base_checkpoint(PlainCopy)["weight"]])
    for case, delta in {
        "unknown": dense_delta("unknown", ONES),
        "reshaped": dense_delta("bias", ONES.reshape(2, 3)),
        "shorter": dense_delta("bias", torch.ones(5, dtype=torch.bfloat16)),
        "other dtype": dense_delta("bias", ONES.to(torch.float16)),
        "wider dtype": dense_delta("bias", ONES.float()),
        "a buffer": dense_delta(toy_models.UNTOUCHED, torch.ones(5)),
    }.items():
        assert refused(plain, [delta]) == {delta.name}, case
        assert refused(plain, [good, delta]) == {delta.name}, case


@APPLY
def test_an_alias_that_the_checkpoint_does_not_hold(apply: str) -> None:
    served = serve(toy_models.Tied, base_checkpoint(toy_models.Tied), apply=apply)
    new = torch.ones(5, 4, dtype=torch.bfloat16)
    assert refused(served, [dense_delta("head", new)]) == {"head"}
    assert attempt(served, parts_of([dense_delta("embed", new)])) is None


@APPLY
def test_a_tensor_that_the_engine_ignores_is_skipped(apply: str) -> None:
    base = base_checkpoint(toy_models.Skipped)
    served = serve(toy_models.Skipped, base, apply=apply)
    target = target_checkpoint(base, base)
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    [part] = parts_of(deltas)
    staged = served.applier.stage(part)
    sent = {delta.name: delta.nnz for delta in part.deltas}
    assert (staged.skipped, staged.nnz) == ({"rotary": sent["rotary"]}, sent["weight"])
    assert attempt(served, [part]) is None
    assert_freshly_loaded(served, target)
    assert refused(served, [dense_delta("rotary", ONES)]) == {"rotary"}  # of another shape


@APPLY
def test_one_refused_tensor_refuses_the_others(apply: str) -> None:
    base = base_checkpoint(toy_models.RepackedInPlace)
    served = serve(toy_models.RepackedInPlace, base, apply=apply)
    target = target_checkpoint(base, base)
    deltas = [delta_between(n, base[n], target[n]) for n in ("norm", "experts")]
    assert refused(served, deltas) == {"experts"}


@APPLY
def test_a_tensor_of_another_rank_is_let_through(apply: str) -> None:
    """This rank holds nothing of it, but checks shape and dtype all the same."""
    base = base_checkpoint(toy_models.Skipped)
    served = serve(toy_models.Skipped, base, elsewhere=["rotary"], apply=apply)
    before = memory(served.model)
    delta = delta_between("rotary", base["rotary"], changed(base["rotary"], 5))
    assert attempt(served, parts_of([delta])) is None
    assert memory(served.model) == before
    assert refused(served, [dense_delta("rotary", ONES)]) == {"rotary"}


@APPLY
def test_changes_in_another_ranks_shard_change_nothing_here(apply: str) -> None:
    base = base_checkpoint(toy_models.RowShard)
    served = serve(toy_models.RowShard, base, apply=apply)
    before = memory(served.model)
    target = base["weight"].clone()
    target[:3] = 5
    assert attempt(served, parts_of([delta_between("weight", base["weight"], target)])) is None
    assert memory(served.model) == before


def test_an_empty_sync_is_legal(plain: Served) -> None:
    """Without params, and with one without changes."""
    base = base_checkpoint(PlainCopy)
    before = memory(plain.model)
    for names in ([], ["bias"]):
        deltas = [delta_between(n, base[n], base[n]) for n in names]
        assert attempt(plain, parts_of(deltas)) is None, names
        assert memory(plain.model) == before, names


@pytest.mark.parametrize("model", [PlainCopy, toy_models.MakesDict], ids=sync_id)
@APPLY
def test_a_tensor_may_come_in_two_parts(model: type[ToyModel], apply: str) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply=apply)
    target = target_checkpoint(base, ["weight"])
    whole = delta_between("weight", base["weight"], target["weight"])
    assert whole.indices is not None
    halves = [
        ParamDelta("weight", whole.dtype, whole.shape, whole.indices[k], whole.values[k])
        for k in (slice(1, None, 2), slice(0, None, 2))
    ]
    parts = [part for half in halves for part in parts_of([half])]
    assert attempt(served, parts) is None
    assert_freshly_loaded(served, target)


def test_no_element_comes_twice(plain: Served) -> None:
    """Otherwise the last one would win, which no sender intends."""
    one = ParamDelta("bias", "bfloat16", (6,), np.array([1, 3]), bits(ONES[:2]))
    two = ParamDelta("bias", "bfloat16", (6,), np.array([3, 5]), bits(ONES[:2]))
    for second in (two, dense_delta("bias", ONES)):
        refusal = attempt(plain, [*parts_of([one]), *parts_of([second])])
        assert refusal is not None, second
        assert named_in(refusal) == {"bias"}, second


def test_a_full_sync_names_what_it_leaves_out(plain: Served) -> None:
    base = base_checkpoint(PlainCopy)
    for left_out in base:
        deltas = [dense_delta(name, base[name]) for name in base if name != left_out]
        assert refused(plain, deltas, full=True) == {left_out}
        # A sync of dense params need not be full.
        assert attempt(plain, parts_of(deltas)) is None, left_out


def test_a_full_sync_is_dense() -> None:
    """Such a part cannot even be encoded."""
    base = base_checkpoint(PlainCopy)
    deltas = [dense_delta("weight", base["weight"]), delta_between("bias", base["bias"], ONES)]
    with pytest.raises(ValueError, match="not dense"):
        one_part(deltas, full=True)


@APPLY
def test_a_full_sync_covers_what_other_ranks_hold(apply: str) -> None:
    base = base_checkpoint(toy_models.Skipped)
    served = serve(toy_models.Skipped, base, elsewhere=["rotary"], apply=apply)
    assert refused(served, [dense_delta("weight", base["weight"])], full=True) == {"rotary"}


def test_a_moved_weight_is_noticed(plain: Served) -> None:
    """Even if the sync is for another tensor: the placement of a moved model is not certified."""
    old = plain.model.weight.data
    plain.model.weight.data = old.clone()
    with pytest.raises(BaseMismatch) as raised:
        attempt(plain, parts_of([dense_delta("bias", ONES)]))
    assert raised.value.operands["moved"] == ["weight"]
    plain.model.weight.data = old
    assert attempt(plain, parts_of([dense_delta("bias", ONES)])) is None
