"""Applied exactly or refused, for every kind of loader, from tracing to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import torch

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import PlainCopy, ToyModel, every_model
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import NotUpdatable
from tests.support.served_models import (
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
from tests.unit.sync.applier_cases import APPLY, DENSE, assert_freshly_loaded, deltas_for, sync_id

NAN = float("nan")


def syncs() -> Iterator[tuple[type[ToyModel], tuple[str, ...]]]:
    """Yield every model with each of its tensors alone, and with all of them."""
    for model in every_model():
        yield from ((model, (name,)) for name in model.shapes)
        if len(model.shapes) > 1:
            yield model, tuple(model.shapes)


SYNCS = pytest.mark.parametrize(("model", "names"), list(syncs()), ids=sync_id)


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


@SYNCS
@DENSE
@APPLY
def test_exact_or_refused(
    model: type[ToyModel], names: tuple[str, ...], dense: bool, apply: str
) -> None:
    """Applied, every bit is that of a fresh load of the target; refused, none has changed.

    `attempt` raises on any other outcome and compares the memory after a refusal.
    """
    base = base_checkpoint(model)
    served = serve(model, base, apply=apply)
    target = target_checkpoint(base, names)
    refusal = attempt(served, parts_of(deltas_for(base, target, names, dense)))
    if refusal is None:
        assert_freshly_loaded(served, target)
    else:
        assert named_in(refusal)
        assert named_in(refusal) <= set(names)
    assert (refusal is None) == is_updatable(model, names, dense, apply)


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


@pytest.mark.parametrize("model", every_model(), ids=sync_id)
@DENSE
def test_chunks_of_one_tensor(model: type[ToyModel], dense: bool) -> None:
    """The loader never sees two tensors together, so that a pair must be refused, not lost."""
    base = base_checkpoint(model)
    served = serve(model, base, chunk_bytes=1)
    names = [name for name in model.shapes if is_updatable(model, [name], dense, "masked")]
    paired = [n for n in model.needs if n not in model.refused]
    for chosen in filter(None, (names, paired)):
        target = target_checkpoint(base, chosen)
        refusal = attempt(served, parts_of(deltas_for(base, target, chosen, dense)))
        assert (refusal is None) == (chosen == names)
        if refusal is None:
            assert_freshly_loaded(served, target)
            base = target


@pytest.mark.parametrize(
    "model",
    [
        toy_models.PlainCopy,
        toy_models.FusedQkv,
        toy_models.StackedExperts,
        toy_models.PaddedVocab,
        toy_models.Tied,
    ],
    ids=sync_id,
)
@APPLY
def test_many_syncs_in_a_row(model: type[ToyModel], apply: str) -> None:
    """Errors must not accumulate, and one update can revert another."""
    base = base_checkpoint(model)
    served = serve(model, base, apply=apply)
    first = memory(served.model)
    steps = [target_checkpoint(base, model.shapes, seed) for seed in range(4)]
    for old, new in zip([base, *steps], [*steps, base], strict=True):
        deltas = [delta_between(name, old[name], new[name]) for name in model.shapes]
        assert attempt(served, parts_of(deltas)) is None
        assert_freshly_loaded(served, new)
    assert memory(served.model) == first


@pytest.mark.parametrize("model", every_model(), ids=sync_id)
@APPLY
@pytest.mark.parametrize("undo_bytes", [0, 1 << 20], ids=["no log", "log"])
def test_full_sync(model: type[ToyModel], apply: str, undo_bytes: int) -> None:
    """It must cover what the engine holds, so that one refused tensor refuses it."""
    base = base_checkpoint(model)
    served = serve(model, base, apply=apply, undo_bytes=undo_bytes)
    names = sorted(served.applier.plan.held)
    target = target_checkpoint(base, names)
    refusal = attempt(served, parts_of(deltas_for(base, target, names, True)), full=True)
    if refusal is None:
        assert_freshly_loaded(served, target)
    assert (refusal is None) == is_updatable(model, names, True, apply)


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPE))
@DENSE
@APPLY
def test_every_dtype(dtype: str, dense: bool, apply: str) -> None:
    """All are applied, but masked and sparse only dtypes that have a NaN."""

    class Typed(ToyModel):
        shapes: ClassVar = {"weight": (3, 4)}
        dtypes: ClassVar = {"weight": TORCH_DTYPE[dtype]}

    base = base_checkpoint(Typed)
    served = serve(Typed, base, apply=apply)
    target = {"weight": random_tensor((3, 4), TORCH_DTYPE[dtype], 9)}
    refusal = attempt(served, parts_of(deltas_for(base, target, ["weight"], dense)))
    maskable = dtype in ("float64", "float32", "float16", "bfloat16")
    assert (refusal is None) == (dense or maskable or apply == "scatter")
    if refusal is None:
        assert_freshly_loaded(served, target)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@DENSE
@APPLY
def test_a_nan_is_a_value_like_any_other_or_refused(dtype: str, dense: bool, apply: str) -> None:
    class Typed(ToyModel):
        shapes: ClassVar = {"weight": (4,)}
        dtypes: ClassVar = {"weight": TORCH_DTYPE[dtype]}

    base = base_checkpoint(Typed)
    served = serve(Typed, base, apply=apply)
    target = {"weight": base["weight"].clone()}
    target["weight"][2] = NAN
    refusal = attempt(served, parts_of(deltas_for(base, target, ["weight"], dense)))
    assert (refusal is None) == (dense or apply == "scatter")
    if refusal is None:
        assert_freshly_loaded(served, target)


@APPLY
def test_live_nans_survive_and_can_be_overwritten(apply: str) -> None:
    base = base_checkpoint(PlainCopy)
    base["bias"][1] = base["bias"][4] = NAN
    served = serve(PlainCopy, base, apply=apply)
    target = {**base, "bias": base["bias"].clone()}
    target["bias"][4] = 2
    assert attempt(served, parts_of([delta_between("bias", base["bias"], target["bias"])])) is None
    assert_freshly_loaded(served, target)
