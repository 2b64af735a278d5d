"""The sender with ``gap8_ulp``: differences where old values are proven, values elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from delta_sender import DeltaSender, MultiSender, PartialSyncError, SyncError
from delta_sender.encode import part_builder
from engine_ext.format import encode_part
from tests.support.fake_engine import (
    A,
    B,
    C,
    Engine,
    Model,
    client_of,
    copied,
    error,
    loses,
    model_of,
    sends,
    train,
)

ONE = "layers.2.weight"


def sender_of(engine: Engine, base: Model, **options: Any) -> DeltaSender:
    options = {"encoding": "gap8_ulp", **options}
    return DeltaSender("http://engine", base.items(), client=engine.client(), **options)


def multi_of(engines: list[Engine], base: Model, **options: Any) -> MultiSender:
    options = {"client": client_of(*engines), "encoding": "gap8_ulp", **options}
    return MultiSender([A, B, C], base.items(), **options)


def met(sender: DeltaSender, engine: Engine, model: Model) -> None:
    """Let the sender find the base in the engine, and commit a first version."""
    sender.sync(model.items())
    engine.log.clear()


def encodings(engine: Engine) -> list[str]:
    return [part.manifest.encoding for part in engine.log]


def sync_ids(engine: Engine) -> list[str | None]:
    return [part.manifest.sync_id for part in engine.log]


def test_refused_salt_is_no_refusal_of_differences() -> None:
    model = model_of()
    engine = Engine.of(model, faults={0: sends(error(422, "SaltUnavailable"))})
    sender = sender_of(engine, model, flush_cache="salt")
    train(model)
    with pytest.raises(SyncError) as raised:
        sender.sync(model.items())
    assert raised.value.error["type"] == "SaltUnavailable"
    assert len(engine.requests) == 1
    sender.sync(model.items())
    assert encodings(engine) == ["gap8_ulp"]


@pytest.mark.parametrize("has_plan", [True, False])
def test_differences_without_digests_carry_their_own_proof(has_plan: bool) -> None:
    model = model_of()
    engine = Engine.of(model, has_plan=has_plan)
    sender = sender_of(engine, model, digest=False)
    train(model)
    sender.sync(model.items())
    assert engine.holds(model)
    assert encodings(engine) == ["gap8_ulp"]
    assert engine.log[0].manifest.digest_part
    assert engine.log[0].manifest.digest_before is None


def spoil(model: Model, engine: Engine) -> None:
    """Train; the engine holds others of the elements that change."""
    held = copied(model)
    train(model)
    for name, values in engine.weights.items():
        values[(held[name] != model[name]).view(-1).numpy()] ^= 4


@pytest.mark.parametrize("encoding", ["gap8_ulp", "auto"])
@pytest.mark.parametrize("bucket_bytes", [200, 1 << 20])
def test_new_values_go_where_only_what_changes_was_other(encoding: str, bucket_bytes: int) -> None:
    """Nothing but the digest after them is claimed, and it proves the rest."""
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model, encoding=encoding, bucket_bytes=bucket_bytes)
    met(sender, engine, model)
    spoil(model, engine)
    report = sender.sync(model.items())
    assert (report.full, report.version) == (False, 2)
    assert engine.holds(model)
    differing = encodings(engine).count("gap8_ulp")
    assert differing
    refused, healing = engine.log[:differing], engine.log[differing:]
    assert {part.manifest.encoding for part in healing} == {"gap8_exp"}
    assert {part.manifest.digest_before for part in healing} == {None}
    assert {part.manifest.digest_part for part in healing} == {None}
    assert healing[-1].manifest.digest_after == engine.digest().hex()
    assert not {p.manifest.sync_id for p in refused} & {p.manifest.sync_id for p in healing}
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert encodings(engine)[-1] == "gap8_ulp"
    assert engine.holds(model)


@pytest.mark.parametrize("state", ["digest off", "a tensor that no digest covers"])
def test_all_of_it_goes_where_nothing_would_prove_the_rest(state: str) -> None:
    model = model_of()
    engine = Engine.of(model, undigested=set() if state == "digest off" else {ONE})
    sender = sender_of(engine, model, digest=state != "digest off")
    met(sender, engine, model)
    spoil(model, engine)
    assert sender.sync(model.items()).full
    assert engine.holds(model)
    assert engine.log[-1].manifest.full
    assert all(part.manifest.full or part.manifest.digest_part for part in engine.log)


def test_one_sync_mixes_differences_and_values() -> None:
    model = model_of()
    dense = "layers.4.weight"
    engine = Engine.of(model, undigested={ONE})
    sender = sender_of(engine, model)
    train(model)
    model[dense] += 1
    assert sender.sync(model.items()).parts == 3
    assert engine.holds(model)
    sent: dict[str, set[str]] = {}
    for part in engine.log:  # of the smaller bucket, one param is the last part
        sent.setdefault(part.manifest.encoding, set()).update(d.name for d in part.deltas)
    assert sent == {"gap8_ulp": model.keys() - {ONE, dense}, "gap8_exp": {ONE, dense}}
    assert len(set(sync_ids(engine))) == 1


@pytest.mark.parametrize("encoding", ["gap8_exp", "gap8_ulp"])
def test_a_full_sync_and_an_empty_one_are_of_values(encoding: str) -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model, encoding=encoding)
    sender.sync(model.items())
    sender.sync_full(model.items())
    assert encodings(engine) == ["gap8_exp", "gap8_exp"]


@pytest.mark.parametrize("full", [False, True])
def test_a_refusal_that_values_meet_too_is_raised(full: bool) -> None:
    """And is no reason to send values from then on."""
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    engine.faults = dict.fromkeys(range(9), sends(error(422, "NotUpdatable")))
    train(model)
    with pytest.raises(SyncError) as caught:
        (sender.sync_full if full else sender.sync)(model.items())
    assert caught.value.status == 422
    assert len(engine.requests) == (1 if full else 2)
    engine.faults = {}
    sender.sync(model.items())
    assert engine.holds(model)
    assert encodings(engine) == ["gap8_ulp"]


def test_differences_refused_once_and_values_to_another_base() -> None:
    """One after the other: refused, then a conflict, then all of it."""
    model = model_of()
    engine = Engine.of(model, cast={ONE})
    sender = sender_of(engine, model, bucket_bytes=1)
    met(sender, engine, model)
    train(model)
    for values in engine.weights.values():
        values ^= 4
    assert sender.sync(model.items()).full
    assert engine.holds(model)
    assert len(set(sync_ids(engine))) == 3


def test_differences_whose_answer_was_lost_are_not_added_twice(naps: list[float]) -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    train(model)
    engine.faults[0] = loses
    assert sender.sync(model.items()).status == "already_applied"
    assert engine.holds(model)


# ---- several engines -----------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [300, 1 << 20])
def test_each_engine_falls_back_for_itself(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes differences gets them; a part is encoded once for all who are sent it."""
    encoded: list[str] = []
    original = encode_part

    def counted(*arguments: Any, **options: Any) -> bytes:
        encoded.append(str(options["encoding"]))
        return original(*arguments, **options)

    monkeypatch.setattr(part_builder, "encode_part", counted)
    model = model_of(tensors=3)
    a, b, c = Engine.of(model), Engine.of(model, cast={ONE}), Engine.of(model)
    sender = multi_of([a, b, c], model, bucket_bytes=bucket_bytes)
    for step in range(3):
        encoded.clear()
        train(model, step)
        reports = sender.sync(model.items())
        assert not any(report.full for report in reports.values())
        for engine in (a, b, c):
            assert engine.holds(model)
        if bucket_bytes > 300:  # of more parts, the first can be forgotten
            assert sorted(encoded) == ["gap8_exp", "gap8_ulp"]
    assert sorted(a.bodies) == sorted(c.bodies)
    assert set(encodings(a)) == {"gap8_ulp"}
    last = b.log[-1].manifest.num_parts or 0
    assert encodings(b)[-2 * last :] == ["gap8_exp"] * (2 * last)
    assert len([kind for kind in encodings(b) if kind == "gap8_ulp"]) <= last


def test_one_engine_with_other_bytes_and_one_that_missed_a_sync() -> None:
    """Differences are to what each engine holds, not to what the others do."""
    model = model_of(tensors=3)
    a, b, c = Engine.of(model), Engine.of(model), Engine.of(model)
    sender = multi_of([a, b, c], model)
    b.faults[0] = sends(error(507, "SpoolFull"))
    train(model)
    with pytest.raises(PartialSyncError):
        sender.sync(model.items())
    c.weights["layers.1.weight"] ^= 1
    train(model, 1)
    reports = sender.sync(model.items())
    assert [report.full for report in reports.values()] == [False, False, True]
    assert [report.base_version for report in reports.values()] == [1, 0, 1]
    for engine in (a, b, c):
        assert engine.holds(model)
    assert (encodings(a), encodings(b)) == (["gap8_ulp"] * 2, ["gap8_ulp"])
    train(model, 2)
    sender.sync(model.items())
    assert encodings(c)[-2:] == ["gap8_exp", "gap8_ulp"]
    assert a.bodies[-1] == b.bodies[-1] == c.bodies[-1]
