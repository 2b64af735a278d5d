"""Checksums of whole new tensors, over random shards on one to three ranks, and over replicas."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.conformance.toy_models import (
    Broadcast,
    Checkpoint,
    FusedQkv,
    Narrowed,
    PlainCopy,
    Replicated,
    Tied,
    ToyModel,
    Transposed,
    Widened,
    parameter,
)
from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.format import DecodedPart, Limits, ParamDelta, decode_part, encode_part
from engine_ext.ranks import ReplicaRanks
from engine_ext.sync import new_states
from engine_ext.sync.new_states import GatheredProof
from engine_ext.version_folders import find_change
from tests.support.folder_writer import checksum, payload, raw_bytes
from tests.support.rank_engine import Engine, errors_of, part_id
from tests.support.served_models import (
    PROPERTY,
    Served,
    attempt,
    base_checkpoint,
    changed,
    load,
    memory,
    named_in,
    random_tensor,
    serve,
    serve_ranks,
)


def change(name: str, old: torch.Tensor, new: torch.Tensor, encoding: str = "xor") -> ParamDelta:
    """What a trainer that holds `old` publishes of a tensor."""
    content = payload(encoding, raw_bytes(old), raw_bytes(new))
    frame = np.frombuffer(zstandard.compress(content, 1), np.uint8)
    dtype, shape = NAME_OF_TORCH[new.dtype], tuple(new.shape)
    declared = f"xxh3-128:{checksum('xxh3-128', raw_bytes(new).tobytes())}"
    return find_change(name, dtype, shape, encoding, frame, declared, Limits())


def part(deltas: Sequence[ParamDelta], version: int = 1) -> bytes:
    return encode_part(deltas, encoding="gap8_xor", current_version=version)


def parts_of_change(delta: ParamDelta) -> list[DecodedPart]:
    return [decode_part(part([delta]))]


def shard(shape: tuple[int, ...], dtype: torch.dtype, dim: int, rank: int, ranks: int) -> Any:
    """A model of one rank: a slice of one tensor, and all of another."""
    size = shape[dim] // ranks

    class Shard(ToyModel):
        shapes: ClassVar = {"weight": shape, "whole": (5,)}
        dtypes: ClassVar = {"weight": dtype}

        def build(self) -> None:
            own = [size if d == dim else n for d, n in enumerate(shape)]
            self.weight, self.whole = parameter(*own, dtype=dtype), parameter(5)

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            if name == "weight":
                weight = weight.narrow(dim, rank * size, size)
            getattr(self, name).copy_(weight)

    return Shard


def two_shards(rank: int) -> Any:
    """A model of one of two ranks: half of two tensors each."""

    class Shards(ToyModel):
        shapes: ClassVar = {"one": (4, 3), "two": (4, 3)}
        dtypes: ClassVar = dict.fromkeys(shapes, torch.bfloat16)

        def build(self) -> None:
            self.one, self.two = (parameter(2, 3, dtype=torch.bfloat16) for _ in range(2))

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            getattr(self, name).copy_(weight.narrow(0, 2 * rank, 2))

    return Shards


@pytest.mark.slow
@settings(PROPERTY, max_examples=30)
@given(
    data=st.data(),
    ranks=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]),
    encoding=st.sampled_from(["xor", "overwrite"]),
    chunk=st.integers(1, 30),
    read=st.integers(1, 9),
    seed=st.integers(0, 1 << 16),
)
def test_what_is_spread_is_proven(
    data: st.DataObject,
    ranks: int,
    dtype: torch.dtype,
    encoding: str,
    chunk: int,
    read: int,
    seed: int,
) -> None:
    dims = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(dims) - 1))
    dims[dim] *= ranks
    shape = tuple(dims)
    models = [shard(shape, dtype, dim, rank, ranks) for rank in range(ranks)]
    base = base_checkpoint(models[0], seed)
    target = {n: changed(t, seed + k) for k, (n, t) in enumerate(base.items())}
    sizes: dict[str, Any] = {"_CHUNK": chunk, "_READ": read, "_SHARE_BYTES": 1}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(new_states, **sizes):
        served = serve_ranks(models, base, apply="scatter")
        engine = Engine([one.applier for one in served], Path(folder))
        for number, (name, new) in enumerate(target.items()):  # parts, as of several dtypes
            body = part([change(name, base[name], new, encoding)], len(target))
            one = part_id(body, base_version=0, part=number, num_parts=2, sync_id="s")
            errors_of(engine.stage(one, body), none=True)
        errors_of(engine.call("commit", version=len(base), sync_id="s"), none=True)
        assert [memory(one.model) for one in served] == [
            memory(load(model, target)) for model in models
        ]

        # One bit of live memory of one rank that nobody knows of.
        victim = data.draw(st.integers(0, ranks - 1))
        live = served[victim].model.weight.data.view(torch.uint8).view(-1)
        live[data.draw(st.integers(0, live.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
        before = [memory(one.model) for one in served]
        body = part([change("weight", target["weight"], base["weight"])], len(base) + 1)
        errors = errors_of(engine.stage(part_id(body), body))
        assert {(error["type"], error["tensor"]) for error in errors} == {
            ("BaseMismatch", "weight")
        }
        assert [memory(one.model) for one in served] == before


@pytest.mark.parametrize("wrong", [("one",), ("one", "two")], ids=str)
def test_failed_proof_fails_again_when_asked_again(wrong: tuple[str, ...], tmp_path: Path) -> None:
    """A process that did not get the first answer asks again, and the sync is still staged."""
    models = [two_shards(0), two_shards(1)]
    base = base_checkpoint(models[0], 1)
    theirs = {n: changed(t, 9) if n in wrong else t for n, t in base.items()}
    target = {n: changed(t, 20 + k) for k, (n, t) in enumerate(theirs.items())}
    served = serve_ranks(models, base, apply="scatter")
    engine = Engine([one.applier for one in served], tmp_path, timeout=5.0)
    body = part([change(name, theirs[name], target[name]) for name in base])
    one, before = part_id(body), [memory(rank.model) for rank in served]
    for answers in (engine.stage(one, body), engine.prepare(one), engine.prepare(one)):
        assert {error["type"] for error in errors_of(answers)} == {"BaseMismatch"}
    errors_of(engine.commit(one))
    assert [memory(rank.model) for rank in served] == before


@pytest.mark.parametrize(
    "model", [PlainCopy, FusedQkv, Transposed, Broadcast, Replicated, Tied], ids=str
)
def test_models(model: type[ToyModel], tmp_path: Path) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    engine = Engine([served.applier], tmp_path)
    for version, encoding in enumerate(("xor", "overwrite"), start=1):
        target = {n: changed(t, 4 * version + k) for k, (n, t) in enumerate(base.items())}
        body = part([change(n, base[n], target[n], encoding) for n in base], version)
        errors_of(engine.apply(part_id(body), body), none=True)
        assert memory(served.model) == memory(load(model, target)), encoding
        assert served.applier.digests == served.applier.plan.scan(), encoding
        base = target


def test_a_cast_that_keeps_all_bits() -> None:
    """bf16 in fp32: applied, but no NaN, whose bits a cast can change."""
    base = {"weight": random_tensor((3, 4), torch.bfloat16, 1)}
    served = serve(Widened, base, apply="scatter")
    target = {"weight": base["weight"] + 1}
    applied = parts_of_change(change("weight", base["weight"], target["weight"]))
    assert attempt(served, applied) is None
    assert memory(served.model) == memory(load(Widened, target))
    odd = target["weight"].clone()
    odd.view(torch.int16).view(-1)[3] = 0x7F81
    refusal = attempt(served, parts_of_change(change("weight", target["weight"], odd)))
    assert refusal is not None
    assert "NaN" in refusal.message


def test_a_cast_that_loses_bits() -> None:
    base = {"weight": random_tensor((3, 4), torch.float32, 1).bfloat16().float()}
    served = serve(Narrowed, base, apply="scatter")
    refusal = attempt(served, parts_of_change(change("weight", base["weight"], -base["weight"])))
    assert refusal is not None
    assert named_in(refusal) == {"weight"}


def test_the_masked_apply_refuses() -> None:
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base, apply="masked")
    [name, *_] = base
    refusal = attempt(served, parts_of_change(change(name, base[name], base[name] + 1)))
    assert refusal is not None
    assert named_in(refusal) == {name}


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    """Each would prove a state that the other one changes."""
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base, apply="scatter")
    engine = Engine([served.applier], tmp_path)
    [name, *_] = base
    old, half = base[name], base[name].clone()
    half.view(-1)[0] += 1
    new = old.clone()
    new.view(-1)[1] += 1
    sent = [part([change(name, old, tensor)]) for tensor in (half, new)]
    ids = [part_id(b, part=k, num_parts=2, sync_id="s") for k, b in enumerate(sent)]
    errors_of(engine.stage(ids[0], sent[0]), none=True)
    [error] = errors_of(engine.stage(ids[1], sent[1]))
    assert (error["type"], error["tensor"]) == ("NotUpdatable", name)
    assert memory(served.model) == memory(load(PlainCopy, base))


class Replicas(ReplicaRanks):
    """The ranks of two replicas of two, in threads."""

    def __init__(self, everyone: Group, own: Group, rank: int) -> None:
        self._everyone, self.group, self.rank = everyone, ThreadRanks(own, rank % 2), rank

    def all_gather(self, value: Any) -> list[Any]:
        return self._everyone.all_gather(self.rank, json.loads(json.dumps(value)))


@pytest.mark.parametrize("victim", [None, 0, 3])
def test_each_replica_proves_what_it_holds(victim: int | None, tmp_path: Path) -> None:
    shape = (3, 4)
    models = [shard(shape, torch.bfloat16, 1, rank % 2, 2) for rank in range(4)]
    base: Checkpoint = base_checkpoint(models[0])
    served: list[Served] = serve_ranks(models, base, apply="scatter")
    everyone, groups = Group(4), [Group(2), Group(2)]
    for rank, one in enumerate(served):
        ranks = Replicas(everyone, groups[rank // 2], rank)
        one.applier._proof = GatheredProof(one.applier.plan, ranks)
    engine = Engine([one.applier for one in served], tmp_path)
    target = {n: changed(t, 8) for n, t in base.items()}
    body = part([change(n, base[n], target[n]) for n in base])
    if victim is None:
        errors_of(engine.apply(part_id(body), body), none=True)
        assert [memory(one.model) for one in served] == [memory(load(m, target)) for m in models]
        return
    served[victim].model.weight.data.view(torch.int16)[2, -1] ^= 1
    before = [memory(one.model) for one in served]
    errors = errors_of(engine.stage(part_id(body), body))
    assert {error["type"] for error in errors} == {"BaseMismatch"}
    assert [memory(one.model) for one in served] == before
