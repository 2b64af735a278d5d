"""An engine started without a checkpoint's weights: a full sync first, then deltas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ext.conformance.toy_models import (
    UNTOUCHED,
    Checkpoint,
    FusedQkv,
    PaddedVocab,
    PlainCopy,
    RepackedInPlace,
    Skipped,
    Tied,
    ToyModel,
    every_model,
)
from engine_ext.format.digest import Digest, tensor_digest
from engine_ext.model.constants import Constants, is_constant
from engine_ext.ranks import SingleRank
from engine_ext.settings import Settings
from engine_ext.startup import LoadedModel
from engine_ext.sync import initial_sync, make_receiver
from tests.support.rank_engine import Engine, part_id
from tests.support.served_models import (
    base_checkpoint,
    bits,
    delta_between,
    dense_delta,
    load,
    memory,
    one_part,
    target_checkpoint,
)


class Unloaded:
    """A model whose weights are arbitrary, and its receiver."""

    def __init__(self, model: type[ToyModel], folder: Path, **settings: Any) -> None:
        self.model = model()
        getattr(self.model, UNTOUCHED).copy_(torch.arange(5) + 0.5)
        made = Constants(self.model)
        loaded = LoadedModel(
            model=self.model,
            load_weights=self.model.load_weights,
            checkpoint=None,
            reload=self._reload,
            ranks=SingleRank(),
            constants=lambda path, tensor: is_constant(path, tensor) or made(path, tensor),
        )
        self.engine = Engine([], folder)
        self.engine.receivers = [make_receiver(loaded, Settings(**settings))]

    def _reload(self, weights: Any) -> None:
        with torch.no_grad():
            self.model.load_weights(weights)
            self.model.after_loading()

    def send(self, body: bytes) -> dict[str, Any]:
        part = part_id(body)
        [answer] = self.engine.stage(part, body)
        if "error" in answer or not answer["ok"]["complete"]:
            return answer
        [answer] = self.engine.commit(part)
        return answer

    def send_full(
        self, checkpoint: Checkpoint, version: int = 1, **metadata: Any
    ) -> dict[str, Any]:
        """One part for each dtype."""
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in checkpoint.items():
            by_dtype.setdefault(tensor.dtype, []).append(name)
        answer: dict[str, Any] = {}
        for number, names in enumerate(by_dtype.values()):
            deltas = [dense_delta(name, checkpoint[name]) for name in names]
            more = {"part": number, "num_parts": len(by_dtype), "full": True, **metadata}
            answer = self.send(one_part(deltas, base_version=None, **more))
            if "error" in answer:
                break
        return answer


def kind(answer: dict[str, Any]) -> str:
    return str(answer["error"]["type"])


# What becomes of a first full sync: its exact version, or an error and what it leaves behind.
# A loader that cannot be followed, or that holds a share of a tensor whose rest no rank has, is
# refused before the first write. Processing that changes weights after loading shows when the
# loaded bytes are compared with those sent. Every other model is loaded exactly.
REFUSED_BEFORE_THE_WRITE = {
    "Accumulates",
    "AssignsData",
    "BitsView",
    "ByteHalf",
    "BytesView",
    "ClampsAfter",
    "ColumnShard",
    "ColumnShardLast",
    "ConstantFirst",
    "FillsFirst",
    "ForeachCopy",
    "IndexPut",
    "KeepsCopy",
    "KeepsReference",
    "ReadsThroughTemporary",
    "ReadsValue",
    "RowShard",
    "RowShardFirst",
    "StackedExperts",
    "StackedExpertsLast",
    "SwapsParameter",
    "TiedInEngine",
    "TiedInPart",
    "TransformedWhileLoading",
    "Windows",
    "ZeroesFirst",
    "ZeroesPaddingRow",
}
LEFT_UNCERTAIN = {"RepackedInPlace", "ReplacedAfterLoading", "TransformedAfterLoading"}
FIRST_SYNC = {
    model: "NotUpdatable"
    if model.__name__ in REFUSED_BEFORE_THE_WRITE
    else "CommitFailed"
    if model.__name__ in LEFT_UNCERTAIN
    else "exact"
    for model in every_model()
}


@pytest.mark.parametrize(
    ("model", "outcome"), FIRST_SYNC.items(), ids=lambda v: getattr(v, "__name__", v)
)
def test_first_full_sync_has_listed_outcome(
    model: type[ToyModel], outcome: str, tmp_path: Path
) -> None:
    base = base_checkpoint(model)
    unloaded = Unloaded(model, tmp_path)
    before = memory(unloaded.model)
    answer = unloaded.send_full(base)
    [status] = unloaded.engine.status()
    state = (status["version"], status["engine_state"])
    assert outcome == (kind(answer) if "error" in answer else "exact"), answer
    if outcome == "exact":
        assert memory(unloaded.model) == memory(load(model, base))
        assert state == (1, "certain")
    elif outcome == "CommitFailed":
        assert state == (0, "uncertain")
    else:
        assert memory(unloaded.model) == before
        assert state == (0, "certain")


def test_listed_models_exist() -> None:
    listed = REFUSED_BEFORE_THE_WRITE | LEFT_UNCERTAIN
    assert listed <= {model.__name__ for model in every_model()}


@pytest.mark.parametrize("model", [PlainCopy, FusedQkv, PaddedVocab, Tied])
@pytest.mark.parametrize("apply", ["scatter", "masked"])
def test_then_it_takes_deltas(model: type[ToyModel], apply: str, tmp_path: Path) -> None:
    base = base_checkpoint(model)
    unloaded = Unloaded(model, tmp_path, apply=apply)
    answer = unloaded.send_full(base)
    assert (answer["ok"]["apply"], answer["ok"]["rollback"]) == ("reload", False)
    assert answer["ok"]["digest"] == digest(base).hex()
    names = [n for n in base if base[n].dtype == torch.bfloat16]
    target = target_checkpoint(base, names)
    deltas = [delta_between(name, base[name], target[name]) for name in names]
    answer = unloaded.send(one_part(deltas, current_version=2, base_version=1))
    assert answer["ok"]["apply"] == apply
    assert memory(unloaded.model) == memory(load(model, target))
    [plan] = unloaded.engine.call("plan")
    assert {row["status"] for row in plan["ok"]["tensors"]} == {"exact"}


def digest(checkpoint: Checkpoint) -> Digest:
    return sum((tensor_digest(n, bits(t)) for n, t in checkpoint.items()), start=Digest.ZERO)


def test_an_ignored_tensor_is_not_counted(tmp_path: Path) -> None:
    base = base_checkpoint(Skipped)
    unloaded = Unloaded(Skipped, tmp_path)
    sent = {name: tensor.numel() for name, tensor in base.items()}
    answer = unloaded.send_full(base)["ok"]
    ignored = sent.pop("rotary")
    assert answer["skipped"] == {"rotary": ignored}
    assert answer["nnz"] == answer["elements"] == sum(sent.values())
    assert answer["tensors"] == len(sent)


def test_it_says_what_it_waits_for(tmp_path: Path) -> None:
    unloaded = Unloaded(PlainCopy, tmp_path)
    [status] = unloaded.engine.status()
    assert (status["apply"], status["awaits"], status["version"]) == ("reload", "full sync", 0)
    assert unloaded.engine.call("plan") == [{"ok": {"tensors": None}}]
    [found] = unloaded.engine.call("digest", scan=True)
    assert found["ok"]["tensors"] == {}


def test_a_delta_is_refused_until_then(tmp_path: Path) -> None:
    base = base_checkpoint(PlainCopy)
    unloaded = Unloaded(PlainCopy, tmp_path)
    delta = delta_between("weight", base["weight"], base["weight"] + 1)
    assert kind(unloaded.send(one_part([delta], base_version=0))) == "BaseMismatch"
    assert "ok" in unloaded.send_full(base)


@pytest.mark.parametrize("left_out", base_checkpoint(FusedQkv))
def test_a_part_of_a_fused_weight_is_not_enough(left_out: str, tmp_path: Path) -> None:
    base = base_checkpoint(FusedQkv)
    unloaded = Unloaded(FusedQkv, tmp_path)
    before = memory(unloaded.model)
    answer = unloaded.send_full({n: t for n, t in base.items() if n != left_out})
    assert kind(answer) == "NotUpdatable"
    assert answer["error"]["missing"]
    assert memory(unloaded.model) == before
    unloaded.engine.call("abort")
    assert "ok" in unloaded.send_full(base)


def test_a_tensor_that_two_parts_send(tmp_path: Path) -> None:
    base = base_checkpoint(PlainCopy)
    unloaded = Unloaded(PlainCopy, tmp_path)
    more = {"base_version": None, "full": True, "num_parts": 2}
    whole = [dense_delta(n, t) for n, t in base.items()]
    assert "ok" in unloaded.send(one_part(whole, part=0, **more))
    answer = unloaded.send(one_part(whole[:1], part=1, **more))
    assert kind(answer) == "NotUpdatable"
    unloaded.engine.call("abort")
    assert "ok" in unloaded.send_full(base)


def test_digests_of_a_full_sync_are_checked(tmp_path: Path) -> None:
    base = base_checkpoint(PlainCopy)
    unloaded = Unloaded(PlainCopy, tmp_path)
    right = digest(base).hex()
    before = memory(unloaded.model)
    assert kind(unloaded.send_full(base, digest_after="0" * 32)) == "BaseMismatch"
    unloaded.engine.call("abort")
    assert kind(unloaded.send_full(base, digest_part=right)) == "BaseMismatch"
    unloaded.engine.call("abort")
    assert memory(unloaded.model) == before
    assert unloaded.send_full(base, digest_after=right)["ok"]["digest"] == right


@pytest.mark.parametrize("declared", ["digest_after", "digest_part"])
def test_wrong_digest_of_a_full_sync_is_the_senders(tmp_path: Path, declared: str) -> None:
    """Another full sync with the same digest would be refused again."""
    unloaded = Unloaded(PlainCopy, tmp_path)
    assert "ok" in unloaded.send_full(base_checkpoint(PlainCopy))
    again: dict[str, Any] = {"current_version": 2, declared: "0" * 32}
    answer = unloaded.send_full(base_checkpoint(PlainCopy, 7), **again)
    assert kind(answer) == "BaseMismatch"
    message = answer["error"]["message"]
    assert message.endswith("send the full sync without digests, or update the sender")


def test_what_the_reload_makes_of_it_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the reload writes other bytes than the sync's, the engine is uncertain."""
    base = base_checkpoint(PlainCopy)
    unloaded = Unloaded(PlainCopy, tmp_path)
    original = unloaded.model.load_weights

    def drop_a_bit(weights: Any) -> None:
        original(weights)
        if not unloaded.model.weight.is_meta:
            unloaded.model.weight.view(torch.int16)[0, 0] ^= 1

    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(initial_sync, "load_checkpoint", lambda *given: drop_a_bit(given[2]()))
        answer = unloaded.send_full(base)
    assert kind(answer) == "CommitFailed"
    assert "weight" in answer["error"]["message"]
    with torch.no_grad():
        assert "ok" in unloaded.send_full(base)
    assert unloaded.engine.status()[0]["engine_state"] == "certain"


@pytest.mark.host_memory
def test_a_dry_run_that_changes_the_model_is_no_refusal(tmp_path: Path) -> None:
    base = base_checkpoint(PlainCopy)
    unloaded = Unloaded(PlainCopy, tmp_path)
    original = unloaded.model.load_weights
    memory_of = unloaded.model.weight.data.view(torch.int16).numpy()

    def write_unseen(weights: Any) -> None:
        memory_of[0, 0] ^= 1
        original(weights)

    applier: Any = unloaded.engine.receivers[0]._applier
    loaded = applier._loaded
    applier._loaded = dataclasses.replace(loaded, load_weights=write_unseen)
    answer = unloaded.send_full(base)
    assert kind(answer) == "CommitFailed"
    assert "weight" in answer["error"]["message"]
    assert unloaded.engine.status()[0]["engine_state"] == "uncertain"
    applier._loaded = loaded
    assert "ok" in unloaded.send_full(base)
    assert memory(unloaded.model) == memory(load(PlainCopy, base))


def test_repacking_engine_needs_checkpoint_to_start() -> None:
    model = RepackedInPlace()
    loaded = LoadedModel(
        model=model,
        load_weights=model.load_weights,
        checkpoint=None,
        reload=model.load_weights,
        ranks=SingleRank(),
        refusals={"weight": "moved"},
    )
    with pytest.raises(RuntimeError, match="weight"):
        make_receiver(loaded, Settings())


def test_every_live_weight_counts(tmp_path: Path) -> None:
    """Also one that no tensor of the sync writes."""

    class Extra(PlainCopy):
        def build(self) -> None:
            super().build()
            self.extra = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    answer = Unloaded(Extra, tmp_path).send_full(base_checkpoint(PlainCopy))
    assert kind(answer) == "NotUpdatable"
    assert "extra" in answer["error"]["message"]


class Method:
    """As engines' quant methods."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing is to be done."""


def a_norm(model: Any) -> None:
    model.norm = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16), requires_grad=False)


def an_omitted_scale(model: Any) -> None:
    a_norm(model)
    model.quant_method = Method()


def a_buffer(values: torch.Tensor, *, persistent: bool = True) -> Callable[[Any], None]:
    def register(model: Any) -> None:
        model.register_buffer("scalar", values.clone(), persistent=persistent)

    return register


@pytest.mark.parametrize(
    ("add", "missing"),
    [
        (a_norm, "norm"),
        (a_buffer(torch.ones(1)), "scalar"),
        (a_buffer(torch.zeros(2, 3)), "scalar"),
        (an_omitted_scale, None),
        (a_buffer(torch.arange(3.0)), None),  # computed
        (a_buffer(torch.ones(3), persistent=False), None),
        (a_buffer(torch.ones(3, dtype=torch.int32)), None),
    ],
)
def test_constructors_values_that_a_checkpoint_replaces(
    add: Callable[[Any], None], missing: str | None, tmp_path: Path
) -> None:
    class Extra(PlainCopy):
        def build(self) -> None:
            super().build()
            add(self)

    answer = Unloaded(Extra, tmp_path).send_full(base_checkpoint(PlainCopy))
    assert answer.get("error", {}).get("missing") == (missing and [missing])
