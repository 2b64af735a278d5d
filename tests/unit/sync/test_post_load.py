"""Syncs of modules that the engine processes after loading, from their parts to their commit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.sync import post_load
from engine_ext.sync.staged import Write
from engine_ext.sync.writes import PartWrites
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of, part_id
from tests.support.served_models import changed
from tests.support.toy_quantised import (
    IN,
    OUT,
    Attribute,
    Everything,
    Handle,
    Int8,
    Layer,
    Method,
    Model,
    Packed,
    PackedAway,
    SecondCopy,
    Table,
    TableAway,
    Transpose,
    ZeroPoints,
    linear_shapes,
    one_layer,
    parameter,
)

pytestmark = pytest.mark.slow

METHODS = [
    *(Method, Int8, Table, TableAway, Transpose, Packed, PackedAway),
    *(SecondCopy, Attribute, ZeroPoints),
]


def target_of(serving: Serving, *names: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Some elements of these tensors changed, or of all."""
    chosen = names or tuple(serving.current)
    return {n: changed(serving.current[n], seed + i) for i, n in enumerate(chosen)}


@pytest.mark.host_memory
@pytest.mark.parametrize("ranks", [1, 2])
def test_syncs_rollbacks_and_full_syncs(tmp_path: Path, ranks: int) -> None:
    serving = Serving(Everything, tmp_path, ranks=ranks)
    assert serving.reasons() == {}
    serving.assert_fresh()
    before = serving.base
    for seed in range(3):
        before = dict(serving.current)
        errors_of(serving.sync(target_of(serving, seed=seed)), none=True)
        serving.assert_fresh()
    errors_of(serving.rollback(before), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving, "int8.weight", "packed.weight")), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving, seed=40), full=True), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving, seed=50), dense=True), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
@pytest.mark.parametrize("method", METHODS)
def test_each_tensor_alone(tmp_path: Path, method: type[Method]) -> None:
    serving = Serving(one_layer(method), tmp_path)
    for name in serving.base:
        errors_of(serving.sync(target_of(serving, name)), none=True)
        serving.assert_fresh()
        errors_of(serving.rollback(serving.base), none=True)
        serving.assert_fresh()
    for name in serving.base:
        errors_of(serving.sync(target_of(serving, name)), none=True)
    serving.assert_fresh()


# --- refused with the engine unchanged, or undone ---


class Drifting(Int8):
    """Gives something else than at start-up if the test sets `drift`."""

    drift: ClassVar[Callable[[Any], None] | None] = None

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        drift = type(self).drift
        if drift is not None:
            drift(layer)


def fail(layer: Any) -> None:
    raise ValueError("no kernel for that")


def other_layout(layer: Any) -> None:
    layer.weight = parameter(layer.weight.t().contiguous())


def other_stride(layer: Any) -> None:
    layer.weight = parameter(layer.weight.t().contiguous().t())


def other_dtype(layer: Any) -> None:
    layer.weight_scale = parameter(layer.weight_scale.double())


def no_tensor(layer: Any) -> None:
    layer.weight_scale = None


def other_attribute(layer: Any) -> None:
    layer.workspace = torch.zeros(3)


def attribute_gone(layer: Any) -> None:
    del layer.weight_scale


BEHAVIOURS: list[Callable[[Any], None]] = [
    *(fail, other_layout, other_stride, other_dtype, no_tensor, other_attribute, attribute_gone)
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rebuild_that_goes_wrong_is_refused(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(one_layer(Drifting), tmp_path, ranks=ranks)
    for seed, behaviour in enumerate(BEHAVIOURS):
        before, target = serving.served(), target_of(serving, seed=10 * seed)
        with monkeypatch.context() as patch:
            patch.setattr(Drifting, "drift", staticmethod(behaviour))
            answers = serving.sync(target)
            assert "lin cannot be rebuilt with the new weights" in refusal(answers), behaviour
            assert {a["error"]["type"] for a in answers} == {"NotUpdatable"}
            assert answers[0]["error"]["module"] == "lin"
        assert serving.served() == before, behaviour
        serving.assert_fresh()
        errors_of(serving.sync(target), none=True)
        serving.assert_fresh()


@pytest.mark.host_memory
@pytest.mark.parametrize("kind", [Everything, one_layer(Packed), one_layer(SecondCopy)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_write_on_one_rank_is_undone_on_all(
    tmp_path: Path, ranks: int, kind: type[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(kind, tmp_path, ranks=ranks)
    before, applier = serving.served(), serving.applier(ranks - 1)
    write = applier.write

    def write_and_fail(staged: Any, given_up: Any) -> None:
        write(staged, given_up)
        raise OSError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(applier, "write", write_and_fail)
        refused = refusal(serving.sync(target_of(serving)))
    assert "every rank was restored" in refused
    assert "no more" in refused
    assert serving.served() == before
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving, seed=7)), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
def test_a_write_that_fails_half_way_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(Everything, tmp_path)
    before, put = serving.served(), Write.put
    for number in (0, 1, 3):
        calls = count(-number)

        def put_or_fail(self: Write, compares: bool, calls: count[int] = calls) -> None:
            if not self.live and next(calls) == 0:
                raise OSError("no more")
            put(self, compares)

        with monkeypatch.context() as patch:
            patch.setattr(Write, "put", put_or_fail)
            assert "every rank was restored" in refusal(serving.sync(target_of(serving))), number
        assert serving.served() == before, number
        serving.assert_fresh()


def test_rebuilt_modules_without_their_writes_are_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of a device can be missing on one rank; another commit of the sync is whole."""
    serving = Serving(Everything, tmp_path, ranks=2)
    before, calls = serving.served(), count()

    def make_or_fail(writes: Any) -> Any:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("no room")
        return PartWrites(writes)

    with monkeypatch.context() as patch:
        patch.setattr(post_load, "PartWrites", make_or_fail)
        assert "no room" in refusal(serving.sync(target_of(serving)))
    assert next(calls) >= 2  # both ranks
    assert serving.served() == before
    errors_of(serving.sync(target_of(serving)), none=True)
    serving.assert_fresh()


def test_the_rebuilt_differences_count_for_the_undo_log(tmp_path: Path) -> None:
    """One bit of a row's largest weight changes the codes of its whole row."""
    serving = Serving(one_layer(Int8), tmp_path, undo_bytes=4)
    before = serving.served()
    target = {"lin.weight": serving.base["lin.weight"].clone()}
    target["lin.weight"][0, 0] = 100.0
    message = refusal(serving.sync(target))
    assert "--delta-undo-bytes allows 4" in message
    assert serving.served() == before
    errors_of(serving.sync(target_of(serving), full=True), none=True)
    serving.assert_fresh()


class TwoLayers(Model):
    shapes: ClassVar = linear_shapes("one", "two")

    def build(self, rank: int, ranks: int) -> None:
        self.one, self.two = Layer(Int8()), Layer(Int8())


def test_unprocessed_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    size = 2 * (OUT * IN + OUT)
    serving = Serving(TwoLayers, tmp_path, shadow_bytes=2 * size - 1)
    assert serving.reasons().keys() == {"two.weight", "two.bias"}
    assert serving.states[0].nbytes == size - 2 * OUT  # the bias stays in place
    before = serving.served()
    message = refusal(serving.sync(target_of(serving, "two.weight")))
    assert f"take {size} bytes more than {size}: raise --delta-shadow-bytes" in message
    assert serving.served() == before
    errors_of(serving.sync(target_of(serving, "one.weight", "one.bias", "norm")), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sync_that_is_dropped_changes_nothing(tmp_path: Path, ranks: int) -> None:
    """Before it is prepared, and afterwards."""
    serving = Serving(Everything, tmp_path, ranks=ranks)
    before = serving.served()
    body = serving.body(target_of(serving))
    part = part_id(body)
    engine = serving.engine
    engine.begin(part, engine.spool(body))
    errors_of(engine.poll(part), none=True)
    base: dict[str, Any] = {"complete": True, "folder": None, "files": []}
    settled = [a["ok"] for a in engine.settle(part, staged=True)]
    assert settled == [{"complete": True, "done": False, "rebuilt": 0, "base": base}] * ranks
    assert {e["type"] for e in errors_of(engine.commit(part))} == {"Conflict"}
    engine.call("abort")
    assert {e["type"] for e in errors_of(engine.prepare(part))} == {"Conflict"}
    assert serving.served() == before
    errors_of(serving.stage(body), none=True)
    assert serving.served() == before
    engine.call("abort")
    errors_of(serving.sync(target_of(serving, seed=30)), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
def test_batches_are_prepared_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_load, "_BATCH", 1)
    serving = Serving(Everything, tmp_path, ranks=2)
    errors_of(serving.sync(target_of(serving)), none=True)
    serving.assert_fresh()


# --- the engine changes something in between ---


def swap_tensor(layer: Any) -> None:
    layer.fast = layer.fast.clone()


def swap_memory(layer: Any) -> None:
    layer.fast.data = layer.fast.clone()


def swap_list(layer: Any) -> None:
    layer.copies = list(layer.copies)


def swap_item(layer: Any) -> None:
    layer.copies[0] = layer.copies[0].clone()


def swap_parameter(layer: Any) -> None:
    layer.weight = parameter(layer.weight.clone())


SWAPS = [
    (Attribute, swap_tensor),
    (Attribute, swap_memory),
    (SecondCopy, swap_item),
    (SecondCopy, swap_list),
    (Int8, swap_parameter),
]


@pytest.mark.parametrize(("method", "swap"), SWAPS)
def test_a_tensor_swapped_between_prepare_and_commit(
    tmp_path: Path, method: type[Method], swap: Callable[[Any], None]
) -> None:
    serving = Serving(one_layer(method), tmp_path)
    before = serving.served()
    body = serving.body(target_of(serving))
    errors_of(serving.stage(body), none=True)
    swap(serving.models[0].lin)
    assert "moved" in refusal(serving.engine.commit(part_id(body)))
    assert serving.served() == before


@pytest.mark.parametrize(("method", "swap"), SWAPS)
def test_a_tensor_swapped_between_commit_and_rollback(
    tmp_path: Path, method: type[Method], swap: Callable[[Any], None]
) -> None:
    serving = Serving(one_layer(method), tmp_path)
    errors_of(serving.sync(target_of(serving)), none=True)
    swap(serving.models[0].lin)
    before = serving.served()
    assert "moved" in refusal(serving.rollback(serving.base))
    assert serving.served() == before


@pytest.mark.host_memory
def test_a_handle_swapped_between_prepare_and_commit(tmp_path: Path) -> None:
    serving = Serving(one_layer(Packed), tmp_path)
    body = serving.body(target_of(serving))
    errors_of(serving.stage(body), none=True)
    other = serving.models[0].lin.handle = Handle(torch.zeros(OUT, IN))
    assert "changed between staging and commit" in refusal(serving.engine.commit(part_id(body)))
    assert serving.models[0].lin.handle is other


def test_another_value_between_prepare_and_commit(tmp_path: Path) -> None:
    serving = Serving(one_layer(SecondCopy), tmp_path)
    target = target_of(serving)
    body = serving.body(target)
    errors_of(serving.stage(body), none=True)
    copy = serving.models[0].lin.copies[0]
    old, new = serving.current["lin.weight"], target["lin.weight"]
    [row, column] = (old != new).nonzero()[0].tolist()
    copy[column, row] += 1
    assert "changed between staging and commit" in refusal(serving.engine.commit(part_id(body)))
