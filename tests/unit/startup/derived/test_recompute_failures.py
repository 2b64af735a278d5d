"""The engine's own function for derived tensors fails in the commit, or does something else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.rank_engine import errors_of
from tests.unit.startup.derived.latent_attention import KV, Attention, Service, fail_with

pytestmark = pytest.mark.slow


def failing(times: int) -> Callable[[], None]:
    left = iter(range(times))

    def fail() -> None:
        if next(left, None) is not None:
            raise OSError("no memory")

    return fail


@pytest.mark.parametrize("rank", [0, 1])
def test_function_that_raises_in_commit_is_undone_everywhere(
    tmp_path: Path, attention: type[Attention], rank: int
) -> None:
    service = Service(tmp_path, attention=attention)
    service.models[rank].attentions[1].fails = failing(1)
    errors = errors_of(service.sync(list(service.base)))
    assert {(e["type"], e["engine_state"]) for e in errors} == {("WriteUndone", "unchanged")}
    assert "no memory" in errors[0]["message"]
    service.assert_holds(service.base)
    errors_of(service.sync(list(service.base)), none=True)
    service.assert_holds(service.target)


def test_function_that_fails_in_undo_leaves_engine_uncertain(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.models[0].attentions[0].fails = failing(2)
    assert {e["type"] for e in errors_of(service.sync(list(KV)))} == {"CommitFailed"}
    assert {s["engine_state"] for s in service.engine.status()} == {"uncertain"}
    errors_of(service.sync(list(service.base), version=2, full=True), none=True)
    service.assert_holds(service.target)


def test_another_failure_on_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that had finished takes its derived tensors back too."""
    service = Service(tmp_path)
    applier = service.engine.receivers[1]._applier
    with monkeypatch.context() as patch:
        patch.setattr(applier, "write", partial(fail_with, OSError("gone")))
        assert {e["type"] for e in errors_of(service.sync(list(KV)))} == {"WriteUndone"}
    service.assert_holds(service.base)


@pytest.mark.parametrize("what", ["shape", "strides", "dtype", "nothing"])
def test_a_function_that_makes_something_else_in_the_commit(tmp_path: Path, what: str) -> None:
    service = Service(tmp_path)
    layer = service.models[0].attentions[0]

    def spoil() -> None:
        layer.fails = lambda: None
        if what == "nothing":
            del layer.W_UV
        else:
            layer.W_UV = {
                "shape": layer.W_UV[:2],
                "strides": layer.W_UV.t().contiguous().t(),
                "dtype": layer.W_UV.float(),
            }[what]

    layer.fails = spoil
    errors = errors_of(service.sync(list(KV)))
    assert {e["type"] for e in errors} == {"WriteUndone"}
    assert "layers.0.W_UV" in errors[0]["message"]
    service.assert_holds(service.base)


@pytest.mark.parametrize("what", ["object", "memory", "gone"])
def test_a_derived_tensor_that_moved_is_noticed(tmp_path: Path, what: str) -> None:
    service = Service(tmp_path)
    layer = service.models[1].attentions[0]
    old, kept = layer.W_UV, layer.W_UV.data
    if what == "object":
        layer.W_UV = old.clone()
    elif what == "memory":
        old.data = old.data.clone()
    else:
        del layer.W_UV
    for names in (["norm"], list(KV)):
        errors = errors_of(service.sync(names))
        assert {e["type"] for e in errors} == {"BaseMismatch"}
        assert [e["tensors"] for e in errors] == [["layers.0.kv_b_proj", "layers.0.q_proj"]] * 2
    answers = service.sync(list(service.base), full=True)
    [error] = [answer["error"] for answer in answers if "error" in answer]
    assert (error["type"], error["tensors"]) == ("NotUpdatable", ["layers.0.W_UV"])
    assert "restart the engine" in error["message"]
    layer.W_UV = old
    old.data = kept
    errors_of(service.sync(list(service.base), full=True), none=True)
    service.assert_holds(service.target)
