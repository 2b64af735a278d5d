"""An embedding and a head that the engine ties: exact if a sync gives both the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.conformance.toy_models import Checkpoint, Weights
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of, part_id
from tests.support.served_models import changed, delta_between, one_part
from tests.support.toy_quantised import OUT, Int8, Layer, Method, Model, SecondCopy

EMBED, HEAD = "embed.weight", "head.weight"


class Tied(Model):
    """The head is the embedding; the checkpoint holds both, and the loader drops the head's."""

    shapes: ClassVar = {EMBED: (OUT, 6), HEAD: (OUT, 6)}
    method: ClassVar[type[Method]] = Method

    def build(self, rank: int, ranks: int) -> None:
        self.embed = Layer(Method(), bias=False, rank=rank, ranks=ranks)
        self.head = self.embed

    @classmethod
    def checkpoint(cls, seed: int = 0) -> Checkpoint:
        made = super().checkpoint(seed)
        return {**made, HEAD: made[EMBED].clone()}

    def load_weights(self, weights: Weights) -> None:
        own = {name for name, _ in self.named_parameters()}
        super().load_weights((n, t) for n, t in weights if n in own or n not in self.shapes)


class Retied(Tied):
    """Both are loaded, and tied if they turn out to be equal, as vLLM does."""

    def build(self, rank: int, ranks: int) -> None:
        self.embed = Layer(Method(), bias=False, rank=rank, ranks=ranks)
        self.head = Layer(self.method(), bias=False, rank=rank, ranks=ranks)

    def after_processing(self) -> None:
        if torch.equal(self.head.weight, self.embed.weight):
            self.head.weight = self.embed.weight


class RetiedWithCopy(Retied):
    """The head's processing makes a copy, so that it is rebuilt."""

    method = SecondCopy


class Alias(Tied):
    """The checkpoint holds the embedding only, as that of a tied model usually does."""

    shapes: ClassVar = {EMBED: (OUT, 6)}

    @classmethod
    def checkpoint(cls, seed: int = 0) -> Checkpoint:
        made = super().checkpoint(seed)
        del made[HEAD]
        return made

    def load_weights(self, weights: Weights) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if name != HEAD)


KINDS = pytest.mark.parametrize("kind", [Tied, Retied, RetiedWithCopy])
RANKS = pytest.mark.parametrize("ranks", [1, 2])
STATUSES = {Tied: "exact", Retied: "exact", RetiedWithCopy: "rebuilt"}


def both(serving: Serving, seed: int) -> Checkpoint:
    """The same new values for both."""
    target = changed(serving.current[EMBED], seed)
    return {EMBED: target, HEAD: target.clone()}


@KINDS
@RANKS
def test_the_same_values_for_both_are_exact(tmp_path: Path, kind: type[Tied], ranks: int) -> None:
    """In every kind of sync; and a rollback brings both back."""
    serving = Serving(kind, tmp_path, ranks=ranks)
    assert (serving.statuses()[EMBED], serving.statuses()[HEAD]) == ("exact", STATUSES[kind])
    before = serving.current
    options: dict[str, Any]
    for seed, options in enumerate([{}, {"dense": True}, {"full": True}, {}], 1):
        before = dict(serving.current)
        target = both(serving, seed) | {"norm": changed(serving.current["norm"], seed)}
        errors_of(serving.sync(target, **options), none=True)
        serving.assert_fresh()
    errors_of(serving.rollback(before), none=True)
    serving.assert_fresh()


@KINDS
@RANKS
def test_different_values_are_refused_with_both_names(
    tmp_path: Path, kind: type[Tied], ranks: int
) -> None:
    serving = Serving(kind, tmp_path, ranks=ranks)
    before = serving.served()

    def assert_refused(target: Checkpoint, **options: Any) -> None:
        message = refusal(serving.sync(target, **options))
        assert all(name in message for name in (EMBED, HEAD)), (*target, options, message)
        assert serving.served() == before, (*target, options)

    for sent in ((EMBED,), (HEAD,), (EMBED, HEAD)):
        target = {name: changed(serving.current[name], seed) for seed, name in enumerate(sent)}
        assert_refused(target)
        assert_refused(target, dense=True)
    assert_refused({**serving.current, HEAD: changed(serving.current[HEAD], 4)}, full=True)
    errors_of(serving.sync(both(serving, 7)), none=True)
    serving.assert_fresh()


@KINDS
def test_elements_that_only_one_of_them_names(tmp_path: Path, kind: type[Tied]) -> None:
    """They are sent with the values that they have already."""
    serving = Serving(kind, tmp_path)
    target = both(serving, 1)
    every = delta_between(HEAD, torch.full_like(target[HEAD], 1e30), target[HEAD])
    assert every.nnz == target[HEAD].numel()
    body = one_part([delta_between(EMBED, serving.current[EMBED], target[EMBED]), every])
    errors_of(serving.stage(body), none=True)
    errors_of(serving.engine.commit(part_id(body)), none=True)
    serving.current |= target
    serving.assert_fresh()


def test_a_head_that_differs_at_the_start_is_refused_alone(tmp_path: Path) -> None:
    """The engine drops it, as a fresh load does; what it uses in its place is updated."""
    base = Tied.checkpoint()
    serving = Serving(Tied, tmp_path, checkpoint={**base, HEAD: changed(base[HEAD], 1)})
    assert serving.reasons().keys() == {HEAD}
    assert f"ties it to {EMBED}" in serving.reasons()[HEAD]
    target = {name: changed(serving.current[name], 5) for name in (EMBED, HEAD)}
    assert HEAD in refusal(serving.sync(target))
    errors_of(serving.sync({EMBED: target[EMBED]}), none=True)
    serving.assert_fresh()


def test_a_head_that_is_not_tied_is_exact_alone(tmp_path: Path) -> None:
    base = Retied.checkpoint()
    serving = Serving(Retied, tmp_path, checkpoint={**base, HEAD: changed(base[HEAD], 1)})
    assert set(serving.statuses().values()) == {"exact"}
    errors_of(serving.sync({HEAD: changed(serving.current[HEAD], 5)}), none=True)
    serving.assert_fresh()


def test_another_dtype_than_that_of_the_tensor_it_is_tied_to(tmp_path: Path) -> None:
    base = Tied.checkpoint()
    serving = Serving(Tied, tmp_path, checkpoint={**base, HEAD: base[HEAD].float()})
    assert "another shape or dtype" in serving.reasons()[HEAD]


def test_two_that_were_loaded_differently_are_refused(tmp_path: Path) -> None:
    """The head's rows are reversed, so that equal weights are not equal tensors."""

    class Reversed(Retied):
        def build(self, rank: int, ranks: int) -> None:
            super().build(rank, ranks)
            self.head.weight.weight_loader = lambda live, w: live.data.copy_(w.flip(0))  # type: ignore[attr-defined]

        @classmethod
        def checkpoint(cls, seed: int = 0) -> Checkpoint:
            made = super().checkpoint(seed)
            return {**made, HEAD: made[EMBED].flip(0)}

    serving = Serving(Reversed, tmp_path)
    assert serving.reasons().keys() == {EMBED, HEAD}


def test_a_head_that_is_quantised_is_not_tied(tmp_path: Path) -> None:
    class Quantised(Retied):
        method = Int8

    serving = Serving(Quantised, tmp_path)
    assert (serving.statuses()[EMBED], serving.statuses()[HEAD]) == ("exact", "rebuilt")
    errors_of(serving.sync({HEAD: changed(serving.current[HEAD], 5)}), none=True)
    serving.assert_fresh()


def test_the_first_sync_of_an_engine_without_weights(tmp_path: Path) -> None:
    serving = Serving(Tied, tmp_path, dummy=True)
    other = {**serving.base, HEAD: changed(serving.base[HEAD], 1)}
    message = refusal(serving.sync(other, full=True))
    assert EMBED in message
    assert HEAD in message
    errors_of(serving.sync(serving.base, full=True), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(both(serving, 1)), none=True)
    serving.assert_fresh()


@RANKS
def test_an_alias_need_not_be_sent(tmp_path: Path, ranks: int) -> None:
    serving = Serving(Alias, tmp_path, ranks=ranks)
    options: dict[str, Any]
    for seed, options in enumerate([{}, {"dense": True}, {"full": True}], 1):
        target = {"norm": serving.current["norm"], EMBED: changed(serving.current[EMBED], seed)}
        errors_of(serving.sync(target, **options), none=True)
        serving.assert_fresh()
