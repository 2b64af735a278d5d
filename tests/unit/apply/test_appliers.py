"""Applied exactly or refused, for every kind of loader, from tracing to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.wire import ParamDelta
from tests.support import toy_models
from tests.support.served_models import (
    APPLIES,
    Served,
    attempt,
    base_checkpoint,
    bits,
    changed,
    delta_between,
    dense_delta,
    load,
    memory,
    named_in,
    one_part,
    parts_of,
    random_tensor,
    serve,
    target_checkpoint,
)
from tests.support.toy_models import PlainCopy, ToyModel, every_model

NAN = float("nan")


def syncs() -> Iterator[tuple[type[ToyModel], tuple[str, ...]]]:
    """Yield every model with each of its tensors alone, and with all of them."""
    for model in every_model():
        yield from ((model, (name,)) for name in model.shapes)
        if len(model.shapes) > 1:
            yield model, tuple(model.shapes)


def sync_id(value: object) -> str:
    return value.__name__ if isinstance(value, type) else "+".join(value)  # type: ignore[arg-type]


SYNCS = pytest.mark.parametrize(("model", "names"), list(syncs()), ids=sync_id)
APPLY = pytest.mark.parametrize("apply", APPLIES)
DENSE = pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])


def deltas_for(
    base: toy_models.Checkpoint, target: toy_models.Checkpoint, names: Sequence[str], dense: bool
) -> list[ParamDelta]:
    if dense:
        return [dense_delta(name, target[name]) for name in names]
    return [delta_between(name, base[name], target[name]) for name in names]


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


def assert_freshly_loaded(served: Served, target: toy_models.Checkpoint) -> None:
    assert memory(served.model) == memory(load(type(served.model), target))


# --- no third outcome ---


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


# --- what a sync must be ---


def refused(served: Served, deltas: Sequence[ParamDelta], *, full: bool = False) -> set[str]:
    """Return the tensors that the refusal names."""
    refusal = attempt(served, parts_of(deltas), full=full)
    assert refusal is not None
    return named_in(refusal)


@pytest.fixture(params=APPLIES)
def plain(request: pytest.FixtureRequest) -> Served:
    return serve(PlainCopy, base_checkpoint(PlainCopy), apply=request.param)


@pytest.fixture
def masked() -> Served:
    return serve(PlainCopy, base_checkpoint(PlainCopy))


ONES = torch.ones(6, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "delta",
    [
        dense_delta("unknown", ONES),
        dense_delta("bias", ONES.reshape(2, 3)),
        dense_delta("bias", torch.ones(5, dtype=torch.bfloat16)),
        dense_delta("bias", ONES.to(torch.float16)),
        dense_delta("bias", ONES.float()),
        dense_delta(toy_models.UNTOUCHED, torch.ones(5)),
    ],
    ids=["unknown", "reshaped", "shorter", "other dtype", "wider dtype", "a buffer"],
)
def test_a_param_must_be_the_checkpoints(plain: Served, delta: ParamDelta) -> None:
    good = delta_between("weight", *2 * [base_checkpoint(PlainCopy)["weight"]])
    assert refused(plain, [delta]) == {delta.name}
    assert refused(plain, [good, delta]) == {delta.name}


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


@pytest.mark.parametrize("deltas", [[], ["bias"]], ids=["no params", "a param without changes"])
def test_an_empty_sync_is_legal(plain: Served, deltas: list[str]) -> None:
    base = base_checkpoint(PlainCopy)
    before = memory(plain.model)
    assert attempt(plain, parts_of([delta_between(n, base[n], base[n]) for n in deltas])) is None
    assert memory(plain.model) == before


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


@pytest.mark.parametrize("second", ["sparse", "dense"])
def test_no_element_comes_twice(plain: Served, second: str) -> None:
    """Otherwise the last one would win, which no sender intends."""
    one = ParamDelta("bias", "bfloat16", (6,), np.array([1, 3]), bits(ONES[:2]))
    two = ParamDelta("bias", "bfloat16", (6,), np.array([3, 5]), bits(ONES[:2]))
    other = dense_delta("bias", ONES) if second == "dense" else two
    refusal = attempt(plain, [*parts_of([one]), *parts_of([other])])
    assert refusal is not None
    assert named_in(refusal) == {"bias"}


@pytest.mark.parametrize("left_out", ["weight", "bias", "scale"])
def test_a_full_sync_names_what_it_leaves_out(plain: Served, left_out: str) -> None:
    base = base_checkpoint(PlainCopy)
    deltas = [dense_delta(name, base[name]) for name in base if name != left_out]
    assert refused(plain, deltas, full=True) == {left_out}
    assert attempt(plain, parts_of(deltas)) is None  # a sync of dense params need not be full


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
    assert refused(plain, [dense_delta("bias", ONES)]) == {"weight"}
    plain.model.weight.data = old
    assert attempt(plain, parts_of([dense_delta("bias", ONES)])) is None


# --- the write itself ---


@DENSE
def test_a_write_that_does_not_arrive_is_no_success(
    masked: Served, monkeypatch: pytest.MonkeyPatch, dense: bool
) -> None:
    """A loader that works on meta tensors only: the read-back must detect it."""

    def load_one(self: ToyModel, name: str, weight: torch.Tensor) -> None:
        if weight.is_meta:
            getattr(self, name).copy_(weight)

    monkeypatch.setattr(PlainCopy, "load_one", load_one)
    base = base_checkpoint(PlainCopy)
    target = target_checkpoint(base, ["bias"])
    with pytest.raises(RuntimeError, match="bias"):
        attempt(masked, parts_of(deltas_for(base, target, ["bias"], dense)))


def test_a_loader_that_changes_its_mind_is_refused(
    masked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certified at start-up, but the loader writes the tensor elsewhere by now."""

    def load_one(self: ToyModel, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight.flip(0) if weight.dim() else weight)

    base = base_checkpoint(PlainCopy)
    target = target_checkpoint(base, ["bias"])
    delta = delta_between("bias", base["bias"], target["bias"])
    monkeypatch.setattr(PlainCopy, "load_one", load_one)
    assert refused(masked, [delta]) == {"bias"}


@pytest.mark.parametrize("replaced", ["cache", "bias"])
def test_a_buffer_that_no_sync_writes_to_may_move(replaced: str) -> None:
    """vLLM puts rotary embeddings in another dtype at the first forward pass."""

    class Cached(PlainCopy):
        def build(self) -> None:
            super().build()
            self.register_buffer("cache", torch.arange(4.0), persistent=False)

    base = base_checkpoint(Cached)
    served = serve(Cached, base)
    tensor = getattr(served.model, replaced)
    moved = tensor.detach().clone()
    setattr(served.model, replaced, moved if replaced == "cache" else torch.nn.Parameter(moved))
    target = target_checkpoint(base, ["weight"])
    delta = delta_between("weight", base["weight"], target["weight"])
    error = attempt(served, parts_of([delta]))
    if replaced == "cache":
        assert error is None
    else:
        assert error is not None
        assert "moved these after start-up: ['bias']" in str(error)


def test_the_loader_gets_only_what_changes_here() -> None:
    base = base_checkpoint(toy_models.Skipped)
    served = serve(toy_models.Skipped, base, elsewhere=["rotary"])
    given: list[str] = []
    original = served.model.load_one

    def load_one(name: str, weight: torch.Tensor) -> None:
        if not weight.is_meta:
            given.append(name)
        original(name, weight)

    served.model.load_one = load_one  # type: ignore[method-assign]
    target = target_checkpoint(base, base)
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    assert attempt(served, parts_of(deltas)) is None
    assert set(given) == {"weight"}


@pytest.mark.parametrize("model", every_model(), ids=sync_id)
@APPLY
def test_describe_is_json_and_names_the_uncertified(model: type[ToyModel], apply: str) -> None:
    served = serve(model, base_checkpoint(model), apply=apply)
    told = json.loads(json.dumps(served.applier.describe()))
    assert told["apply"] == apply
    assert sum(told["certification"].values()) == len(model.shapes)
    assert told["uncertified"].keys() <= model.refused
    assert all(told["uncertified"].values())
