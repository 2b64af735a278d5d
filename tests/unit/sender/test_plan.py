"""The engine's plan: what a sender leaves out, and what it sends under several names."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import numpy as np
import pytest
import torch

from delta_sender import FullSyncRefused, SyncError
from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode.acked_state import EnginePlan
from tests.support.fake_engine import (
    Engine,
    Model,
    bits,
    copied,
    digest_of,
    error,
    model_of,
    sender_of,
    sends,
    train,
)


def test_the_plan_is_asked_for_once_and_with_the_token() -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model, api_key="k")
    assert engine.questions == []
    for step in range(2):
        train(model, step)
        sender.sync(model.items())
    asked = [dict(question.url.params) for question in engine.questions]
    assert asked == [{}, {"plan": "true"}]
    for question in engine.questions:
        assert question.url.path == "/delta_status"
        assert question.headers["Authorization"] == "Bearer k"


def test_changes_that_are_not_served_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model, ignored={"layers.1.weight"})
    with sender_of(engine, model) as sender:
        sender.sync(model.items())
        assert not [text for text in caplog.messages if "have changed" in text]
        for step in range(2):
            train(model, step)
            sender.sync(model.items())
    [said] = [text for text in caplog.messages if "have changed" in text]
    assert said.endswith("load of them would: layers.1.weight")


def test_ignored_tensors_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(tensors=4)
    engine = Engine.of(model, ignored={"layers.1.weight"})
    sender = sender_of(engine, model, bucket_bytes=1)
    for step in range(2):
        train(model, step)
        report = sender.sync(model.items())
        assert (report.full, report.parts, report.numel) == (False, 3, 1200)
        assert engine.holds(model)
        assert report.digest == digest_of(engine.weights).hex()
    report = sender.sync_full(model.items())
    assert (report.parts, report.density) == (3, 1.0)
    assert caplog.text.count("left out") == 1
    assert "layers.1.weight" in caplog.text
    model["layers.1.weight"] += 1
    assert sender.sync(model.items()).nnz == 0


def test_engine_refuses_uncertified_and_unknown_tensors() -> None:
    for engine in (
        Engine.of(model_of(tensors=3), uncertified={"layers.2.weight"}),
        Engine.of(model_of(tensors=2)),
    ):
        model = model_of(tensors=3)
        sender = sender_of(engine, model)
        model["layers.0.weight"] += 1
        assert sender.sync(model.items()).digest == engine.digest().hex()
        model["layers.2.weight"] += 1
        with pytest.raises(SyncError, match="NotUpdatable") as caught:
            sender.sync(model.items())
        assert caught.value.error["tensor"] == "layers.2.weight"


@pytest.mark.parametrize("status", [404, 200])
def test_an_engine_without_a_plan(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model, has_plan=False)
    if status == 404:
        missing = httpx.Response(404, json={"detail": "Not Found"})
        monkeypatch.setattr(engine, "status", lambda: missing)
    sender = sender_of(engine, model)
    for step in range(2):
        train(model, step)
        assert sender.sync(model.items()).digest is None
        assert engine.holds(model)
    assert sender.sync_full(model.items()).digest is None
    manifests = [part.manifest for part in engine.log]
    assert {m.digest_part or m.digest_before or m.digest_after for m in manifests} == {None}
    engine.ignored = {"layers.1.weight"}
    train(model, 2)
    with pytest.raises(SyncError, match="NotUpdatable"):
        sender.sync(model.items())


def test_an_engine_without_a_plan_names_what_it_ignores(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is started without a checkpoint, and finds out by the first full sync."""
    model = model_of(tensors=4)
    engine = Engine.of(model, ignored={"layers.1.weight"}, has_plan=False)
    names = sorted(engine.ignored)
    engine.faults[0] = sends(error(422, "NotUpdatable", tensors=names, ignored=names))
    sender = sender_of(engine, model)
    report = sender.sync_full(model.items())
    assert (report.full, report.numel) == (True, 1200)
    assert len(engine.requests) == 2
    assert caplog.text.count("left out") == 1
    assert "layers.1.weight" in caplog.text
    engine.has_plan = True
    for step in range(2):
        train(model, step)
        assert not sender.sync(model.items()).full
        assert engine.holds(model)
    assert sender.sync_full(model.items()).digest == engine.digest().hex()
    assert caplog.text.count("left out") == 1


@pytest.mark.parametrize("ignored", [[], ["layers.1.weight"]])
def test_an_engine_that_keeps_refusing_is_not_asked_forever(ignored: list[str]) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model, has_plan=False)
    refusal = error(422, "NotUpdatable", tensors=["layers.1.weight"], ignored=ignored)
    engine.faults |= dict.fromkeys(range(9), sends(refusal))
    sender = sender_of(engine, model)
    with pytest.raises(SyncError, match="NotUpdatable"):
        sender.sync_full(model.items())
    assert len(engine.requests) == 1 + len(ignored)


def test_a_plan_that_cannot_be_had_fails_the_sync(
    naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    train(model)
    for answer, attempts in ((error(401, "Unauthorized"), 1), (httpx.Response(502), 8)):
        with monkeypatch.context() as patched:
            patched.setattr(engine, "status", lambda answer=answer: answer)
            with pytest.raises(SyncError) as caught:
                sender.sync(model.items())
        assert caught.value.status == answer.status_code
        assert len(engine.questions) == attempts
        engine.questions.clear()
    assert engine.requests == []
    assert sender.sync(model.items()).digest == digest_of(engine.weights).hex()


@pytest.mark.parametrize("first", ["embed.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    ("held", "ignored"),
    [
        ({"embed.weight"}, set()),  # the checkpoint lacks the other
        ({"embed.weight"}, {"lm_head.weight"}),
        ({"embed.weight", "lm_head.weight"}, set()),  # the engine keeps them apart
    ],
)
def test_tied_tensors_are_sent_under_each_held_name(
    first: str, held: set[str], ignored: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(20, 4)
    names = sorted(["embed.weight", "lm_head.weight"], key=lambda name: name != first)
    model = {names[0]: weight, "norm.weight": torch.ones(8), names[1]: weight}
    engine = Engine.of({n: t for n, t in model.items() if n in held or n not in names})
    engine.ignored = ignored
    sender = sender_of(engine, model)
    for send in (sender.sync, sender.sync_full, sender.sync):
        train(model, density=0.2)
        report = send(model.items())
        assert all(np.array_equal(engine.weights[name], bits(weight)) for name in held)
        assert report.digest == digest_of(engine.weights).hex()
        assert report.numel == 80 * len(held) + 8
    assert "left out" not in caplog.text


@pytest.mark.parametrize("tied_to", ["embed.weight", ""])
def test_what_the_engine_ties_is_sent_for_it_to_compare(tied_to: str) -> None:
    names = ("embed.weight", "lm_head.weight")
    snapshot = Snapshot({name: torch.ones(20, 4) for name in names}.items(), "deltas")
    rows = [
        {"name": "embed.weight", "status": "exact", "digested": True, "tied_to": ""},
        {"name": "lm_head.weight", "status": "ignored", "digested": False, "tied_to": tied_to},
    ]
    plan = EnginePlan.read([rows], snapshot)
    assert plan.ignored == (set() if tied_to else {"lm_head.weight"})
    assert plan.missing == []


def test_another_engine_at_the_same_place() -> None:
    """It was restarted: other tensors are ignored, and others are in its digest."""
    model = model_of(tensors=4)
    engine = Engine.of(model, ignored={"layers.0.weight"})
    sender = sender_of(engine, model)
    train(model)
    sender.sync(model.items())
    fresh = Engine.of(
        model_of(tensors=4), ignored={"layers.1.weight"}, undigested={"layers.2.weight"}
    )
    engine.weights, engine.version, engine.committed = fresh.weights, 0, set()
    engine.ignored, engine.undigested = fresh.ignored, fresh.undigested
    train(model, 1)
    report = sender.sync(model.items())
    assert report.full
    assert engine.holds(model)
    assert report.digest == engine.digest().hex()
    train(model, 2)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_base_of_other_names_commits_nothing() -> None:
    """Without a change, too: an empty version would say that the engine holds these tensors."""
    model = model_of(tensors=3)
    engine = Engine.of(model)
    renamed = {f"module.{name}": tensor for name, tensor in model.items()}
    with sender_of(engine, renamed) as sender:
        with pytest.raises(SyncError, match=r"the base has module\.\S+, \.\.\.; the engine \w+"):
            sender.sync(renamed.items())
        assert sender.version == 0
    assert engine.version == 0


def test_long_lists_of_names_are_cut_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(tensors=9)
    engine = Engine.of(model)
    kept = dict(list(model.items())[:1])
    sender = sender_of(engine, kept)
    train(kept)
    sender.sync(kept.items())
    [warned] = [record.message for record in caplog.records if "digests prove" in record.message]
    assert "covers 8 tensors that are not in the base: layers.1.weight, " in warned
    assert warned.endswith("layers.5.weight and 3 more")


@pytest.mark.parametrize("answer", [{"version": 3}, {"engine": "vllm"}, {}])
def test_status_of_another_form_is_refused(answer: dict[str, object]) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    engine.status = lambda: httpx.Response(200, json=answer)  # type: ignore[method-assign]
    with sender_of(engine, model) as sender:
        train(model)
        with pytest.raises(SyncError, match="no status of this version"):
            sender.sync(model.items())
    assert engine.requests == []


def other_of(model: Model) -> Model:
    other = copied(model)
    train(other)
    return other


class PlanEngine(Engine):
    """Its plan has dtypes and shapes, as a real one's."""

    def plan(self) -> list[list[dict[str, object]]] | None:
        return [
            [{**row, "dtype": "bfloat16", "shape": [4, 100]} for row in rank]
            for rank in super().plan() or []
        ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda base: {name: tensor.float() for name, tensor in base.items()},
            "the dtype is float32 in the base and bfloat16 in the engine: layers.0.weight, ",
        ),
        (
            lambda base: {name: tensor[:2] for name, tensor in base.items()},
            "the shape is [2, 100] in the base and [4, 100] in the engine: layers.0.weight, ",
        ),
        (
            lambda base: {"layers.1.weight": base["layers.1.weight"]},
            "the base has no layers.0.weight",
        ),
        (
            lambda base: {**base, "module.layers.0.weight": torch.zeros(4, 100).bfloat16()},
            "the engine has no module.layers.0.weight; it has layers.0.weight: take the prefix "
            "'module.' off the names",
        ),
    ],
    ids=["dtype", "shape", "lacking", "unknown"],
)
def test_refusal_says_how_base_differs(change: Callable[[Model], Model], says: str) -> None:
    """`full="allow"` would not help."""
    model = model_of()
    wrong = change(other_of(model))
    with sender_of(PlanEngine.of(model, version=6), wrong) as sender:
        with pytest.raises(FullSyncRefused) as caught:
            sender.sync(wrong.items())
    assert says in str(caught.value)
    assert "--full" not in str(caught.value)


def test_refusal_of_alike_base_names_full_sync() -> None:
    model = model_of()
    wrong = other_of(model)
    with sender_of(PlanEngine.of(model), wrong) as sender:
        with pytest.raises(FullSyncRefused, match="--allow-full"):
            sender.sync(wrong.items())
