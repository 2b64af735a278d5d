"""Deltas whose values are differences to the old ones: added once, to proven old values, or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import Checkpoint, ToyModel
from engine_ext.errors import BaseMismatch
from engine_ext.format import Unproven, decode_part, encode_part
from engine_ext.format.digest import Digest, change_digest
from tests.support.rank_engine import Engine, errors_of, part_id
from tests.support.served_models import (
    PROPERTY,
    as_on_a_device,
    attempt,
    base_checkpoint,
    bits,
    changed,
    delta_between,
    load,
    memory,
    named_in,
    replan,
    serve,
    serve_ranks,
    small_pieces,
    target_checkpoint,
)
from tests.support.thread_ranks import Shard, shards


def differences(
    base: Checkpoint, target: Checkpoint, names: Sequence[str], version: int = 1
) -> bytes:
    """A `gap8_ulp` part."""
    deltas, change = [], Digest.ZERO
    for name in names:
        delta = delta_between(name, base[name], target[name])
        assert delta.indices is not None
        old = bits(base[name])[delta.indices]
        change += change_digest(name, delta.indices, old, delta.values)
        deltas.append(msgspec.structs.replace(delta, values=delta.values - old, differences=True))
    return encode_part(
        deltas, encoding="gap8_ulp", current_version=version, digest_part=change.hex()
    )


@pytest.mark.slow
@PROPERTY
@given(
    shard=shards(),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 1 << 20),
    span=st.sampled_from([1, 7, 1 << 16]),
    threads=st.sampled_from([1, 3]),
    host=st.booleans(),
)
def test_applied_and_taken_back(
    shard: Shard, density: float, seed: int, span: int, threads: int, host: bool
) -> None:
    """Any shard that holds all of its tensor: live memory ends as a fresh load leaves it."""
    model = shard.model(number=2)
    base = base_checkpoint(model, seed)
    served = serve(model, base, apply="scatter", threads=threads)
    target = {name: changed(tensor, seed + 7, density) for name, tensor in base.items()}
    if not host:
        as_on_a_device(served)
    part = decode_part(differences(base, target, sorted(base)))
    if served.peer:  # the second rank counts and digests the elements that are not here
        digest = Digest.parse(part.manifest.digest_part or "")
        here = sum((p.change for p in served.applier.stage(part).params), start=Digest.ZERO)
        rank_summary = served.peer.rank_summary

        def with_change(parts: object) -> dict[str, object]:
            return {**rank_summary([part]), "changes": [(digest - here).hex()]}

        served.peer.rank_summary = with_change  # type: ignore[method-assign]
    with small_pieces(span):
        assert attempt(served, [part]) is None
    assert memory(served.model) == memory(load(model, target))


@pytest.mark.parametrize(
    "model",
    [
        toy_models.PlainCopy,
        toy_models.FusedQkv,
        toy_models.Replicated,
        toy_models.Transposed,
        toy_models.Widened,
    ],
)
def test_old_values_that_are_not_the_senders_are_refused(model: type[ToyModel]) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    name = next(iter(base))
    other = {**base, name: base[name].clone()}
    other[name].view(-1).view(torch.int16)[0] ^= 1
    target = target_checkpoint(other, [name])
    before = memory(served.model)
    with pytest.raises(BaseMismatch):
        attempt(served, [decode_part(differences(other, target, [name]))])
    assert memory(served.model) == before
    target = target_checkpoint(base, [name])
    assert attempt(served, [decode_part(differences(base, target, [name]))]) is None
    assert memory(served.model) == memory(load(model, target))


def test_copies_must_agree() -> None:
    """The digest sees the first copy only; a difference is not added to another one."""
    base = base_checkpoint(toy_models.Replicated)
    served = serve(toy_models.Replicated, base, apply="scatter")
    part = decode_part(differences(base, target_checkpoint(base, ["weight"]), ["weight"]))
    served.model.second.data.view(torch.int16)[0, 0] ^= 1
    before = memory(served.model)
    with pytest.raises(BaseMismatch, match="copies"):
        attempt(served, [part])
    assert memory(served.model) == before


@pytest.mark.parametrize(
    ("model", "apply", "digested", "reason"),
    [
        (toy_models.PlainCopy, "scatter", False, "no digest"),
        (toy_models.PlainCopy, "masked", True, "the loader needs values"),
        (toy_models.CastBefore, "scatter", True, "casts"),
        (toy_models.Narrowed, "scatter", True, "no digest"),
    ],
)
def test_where_differences_are_refused(
    model: type[ToyModel], apply: str, digested: bool, reason: str
) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply=apply)
    if not digested:
        replan(served, replace(served.applier.plan, digested=frozenset()))
    name = next(iter(base))
    part = decode_part(differences(base, target_checkpoint(base, [name]), [name]))
    refusal = attempt(served, [part])
    assert refusal is not None
    assert named_in(refusal) == {name}
    assert reason in refusal.message


class TestRanks:
    """Two ranks that each hold half of a tensor."""

    models = (toy_models.RowShardFirst, toy_models.RowShard)

    @pytest.fixture(autouse=True)
    def start(self, tmp_path: Path) -> None:
        self.base = base_checkpoint(toy_models.RowShard)
        self.served = serve_ranks(self.models, self.base, apply="scatter")
        self.engine = Engine([served.applier for served in self.served], tmp_path)
        self.target = target_checkpoint(self.base, ["weight"])

    def memories(self) -> list[dict[str, bytes]]:
        return [memory(served.model) for served in self.served]

    def fresh(self, checkpoint: Checkpoint) -> list[dict[str, bytes]]:
        return [memory(load(model, checkpoint)) for model in self.models]

    def test_a_repeat_is_not_added_again(self) -> None:
        body = differences(self.base, self.target, ["weight"])
        errors_of(self.engine.apply(part_id(body), body), none=True)
        assert self.memories() == self.fresh(self.target)
        for answer in self.engine.stage(part_id(body), body):
            assert answer["ok"]["admission"] == "already_applied"
        assert self.memories() == self.fresh(self.target)

    def test_the_same_differences_at_the_next_version_are_refused(self) -> None:
        """Also where they are a continuation, which no base version guards."""
        body = differences(self.base, self.target, ["weight"])
        errors_of(self.engine.apply(part_id(body), body), none=True)
        for again in (
            part_id(differences(self.base, self.target, ["weight"], version=2)),
            part_id(body, unproven=Unproven(), identity="another"),
        ):
            identity = mock.Mock(return_value=again.identity)
            with mock.patch("engine_ext.format.verified_part.part_identity", identity):
                answers = self.engine.stage(again, body)
            assert {error["type"] for error in errors_of(answers)} == {"BaseMismatch"}
            assert self.memories() == self.fresh(self.target)
            self.engine.call("abort")

    def test_a_rank_with_another_old_value_keeps_all_from_writing(self) -> None:
        live = next(iter(self.served[1].model.parameters())).data.view(torch.int16)
        live.view(-1)[-1] ^= 4
        target = {"weight": self.base["weight"] + 1}
        before = self.memories()
        body = differences(self.base, target, ["weight"])
        errors = errors_of(self.engine.stage(part_id(body), body))
        assert {error["type"] for error in errors} == {"BaseMismatch"}
        assert self.memories() == before

    def test_rolled_back_and_applied_again(self) -> None:
        body = differences(self.base, self.target, ["weight"])
        errors_of(self.engine.apply(part_id(body), body), none=True)
        errors_of(self.engine.call("rollback"), none=True)
        assert self.memories() == self.fresh(self.base)
        errors_of(self.engine.apply(part_id(body), body), none=True)
        assert self.memories() == self.fresh(self.target)
