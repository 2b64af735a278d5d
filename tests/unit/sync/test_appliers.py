"""Applied exactly or refused, for every kind of loader, from tracing to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import PlainCopy, ToyModel
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import NotUpdatable
from tests.support.served_models import (
    Served,
    attempt,
    base_checkpoint,
    delta_between,
    dense_delta,
    memory,
    named_in,
    parts_of,
    random_tensor,
    serve,
    stage,
    target_checkpoint,
)
from tests.unit.sync.applier_cases import (
    APPLY,
    EVERY_MODEL,
    assert_freshly_loaded,
    deltas_for,
    each_sync,
)

NAN = float("nan")


# What only the masked apply refuses.
CAST = {toy_models.Widened: frozenset({"weight"}), toy_models.Narrowed: frozenset({"weight"})}


def is_updatable(model: type[ToyModel], names: Sequence[str], dense: bool, apply: str) -> bool:
    """Return what the toy model declares about itself."""
    if apply == "scatter":
        return not (model.refused - CAST.get(model, frozenset())) & set(names)
    return not model.refused & set(names) and (
        all(
            (dense or name not in model.dense_only)
            and model.needs.get(name, frozenset()) <= set(names)
            for name in names
        )
    )


@EVERY_MODEL
@APPLY
def test_exact_or_refused(model: type[ToyModel], apply: str) -> None:
    """Applied, every bit is that of a fresh load of the target; refused, none has changed.

    `attempt` raises on any other outcome and compares the memory after a refusal. The syncs follow
    each other: errors must not accumulate, and one update can revert another.
    """
    base = base_checkpoint(model)
    served = serve(model, base, apply=apply)
    current, first = base, memory(served.model)
    for number, (names, dense) in enumerate(each_sync(model), start=1):
        target = target_checkpoint(current, names, number)
        refusal = attempt(served, parts_of(deltas_for(current, target, names, dense)))
        case = f"{'+'.join(names)}, dense: {dense}"
        assert (refusal is None) == is_updatable(model, names, dense, apply), case
        if refusal is None:
            assert_freshly_loaded(served, target)
            current = target
        else:
            assert named_in(refusal), case
            assert named_in(refusal) <= set(names), case
    held = sorted(served.applier.plan.held)
    for target in (target_checkpoint(current, held), base):
        assert_full_sync(served, target, apply)
    if is_updatable(model, held, True, apply):
        assert memory(served.model) == first


def assert_full_sync(served: Served, target: toy_models.Checkpoint, apply: str) -> None:
    """It must cover what the engine holds, so that one refused tensor refuses it."""
    names = sorted(served.applier.plan.held)
    refusal = attempt(served, parts_of([dense_delta(n, target[n]) for n in names]), full=True)
    assert (refusal is None) == is_updatable(type(served.model), names, True, apply)
    if refusal is None:
        assert_freshly_loaded(served, target)


@EVERY_MODEL
@APPLY
def test_full_sync_without_undo_log(model: type[ToyModel], apply: str) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply=apply, undo_bytes=0)
    assert_full_sync(served, target_checkpoint(base, served.applier.plan.held), apply)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fnuz])
@APPLY
def test_tensor_of_a_foreign_dtype_is_refused(dtype: torch.dtype, apply: str) -> None:
    """The others can be updated."""

    class Foreign(ToyModel):
        shapes: ClassVar = {"weight": (6, 4), "phases": (3, 2)}
        dtypes: ClassVar = {"phases": dtype}

    base = base_checkpoint(Foreign)
    served = serve(Foreign, base, apply=apply)
    name = str(dtype).removeprefix("torch.")
    assert f"no delta can have its dtype, {name}" in served.placement["phases"].reason
    assert [row["dtype"] for row in served.applier.plan.table()] == ["bfloat16", name]
    target = target_checkpoint(base, ["weight"])
    served.applier.write(stage(served, parts_of(deltas_for(base, target, ["weight"], False))))
    assert torch.equal(served.model.weight.cpu(), target["weight"])
    other = dense_delta("phases", torch.zeros(3, 2))
    with pytest.raises(NotUpdatable, match=f"it is {name} "):
        stage(served, parts_of([other]))


@EVERY_MODEL
def test_chunks_of_one_tensor(model: type[ToyModel]) -> None:
    """The loader never sees two tensors together, so that a pair must be refused, not lost."""
    base = base_checkpoint(model)
    served = serve(model, base, chunk_bytes=1)
    paired = [n for n in model.needs if n not in model.refused]
    for seed, dense in enumerate((False, True)):
        names = [name for name in model.shapes if is_updatable(model, [name], dense, "masked")]
        for chosen in filter(None, (names, paired)):
            target = target_checkpoint(base, chosen, seed)
            refusal = attempt(served, parts_of(deltas_for(base, target, chosen, dense)))
            assert (refusal is None) == (chosen == names), f"{chosen}, dense: {dense}"
            if refusal is None:
                assert_freshly_loaded(served, target)
                base = target


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPE))
@APPLY
def test_every_dtype(dtype: str, apply: str) -> None:
    """All are applied, but masked and sparse only numbers of dtypes that have a NaN."""

    class Typed(ToyModel):
        shapes: ClassVar = {"weight": (3, 4)}
        dtypes: ClassVar = {"weight": TORCH_DTYPE[dtype]}

    base = base_checkpoint(Typed)
    served = serve(Typed, base, apply=apply)
    maskable = dtype in ("float64", "float32", "float16", "bfloat16")
    for seed, dense in enumerate((False, True)):
        target = {"weight": random_tensor((3, 4), TORCH_DTYPE[dtype], 9 + seed)}
        targets = [(target, dense or maskable or apply == "scatter")]
        if maskable:  # a NaN is a value like any other, or refused
            odd = {"weight": target["weight"].clone()}
            odd["weight"].view(-1)[2 + seed] = NAN
            targets.append((odd, dense or apply == "scatter"))
        for new, is_applied in targets:
            refusal = attempt(served, parts_of(deltas_for(base, new, ["weight"], dense)))
            assert (refusal is None) == is_applied, f"{new}, dense: {dense}"
            if refusal is None:
                assert_freshly_loaded(served, new)
                base = new


@APPLY
def test_live_nans_survive_and_can_be_overwritten(apply: str) -> None:
    base = base_checkpoint(PlainCopy)
    base["bias"][1] = base["bias"][4] = NAN
    served = serve(PlainCopy, base, apply=apply)
    target = {**base, "bias": base["bias"].clone()}
    target["bias"][4] = 2
    assert attempt(served, parts_of([delta_between("bias", base["bias"], target["bias"])])) is None
    assert_freshly_loaded(served, target)
