"""The judge itself: it must not be possible to pass it by accident."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine_ext.conformance import models
from engine_ext.conformance.cases import CASES, Run, cell
from engine_ext.conformance.judge import EXACT, REFUSED, TORN, WRONG, Verdict, judge
from engine_ext.conformance.subject import Delta, Rank
from engine_ext.conformance.syncs import Group, Sync, bits, checkpoints, deltas_of, syncs_of
from engine_ext.conformance.toy_models import (
    AssignsData,
    ColumnShard,
    ColumnShardLast,
    FusedQkv,
    PlainCopy,
)

SETUP = (PlainCopy,)
SYNC = syncs_of(SETUP)[1]


class Script:
    """Serves, and then does what a test wants done."""

    name = "script"

    def __init__(self, *, elements: int = 0, fails: bool = False, beside: bool = False) -> None:
        self.elements = elements
        self.fails = fails
        self.beside = beside
        self.ranks: Sequence[Rank] = []

    def serve(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        for rank in ranks:
            rank.load()
            rank.process()

    @torch.no_grad()
    def apply(self, deltas: Sequence[Delta]) -> None:
        """Write some elements of every delta, into parameters of the checkpoint's names."""
        model: Any = self.ranks[0].model
        for delta in deltas:
            flat = getattr(model, delta.name).data.view(-1)
            indices = torch.arange(flat.numel()) if delta.indices is None else delta.indices
            count = self.elements
            flat[indices[:count]] = delta.values[:count]
        if self.beside:
            model.serving_state[2] = -1.0
        if self.fails:
            raise OSError("no more")


def outcome(**how: Any) -> str:
    return judge(SETUP, SYNC, lambda: Script(**how)).outcome


def test_outcomes() -> None:
    assert outcome(elements=1 << 20) == EXACT
    assert outcome(elements=0) == WRONG
    assert outcome(elements=1) == WRONG
    assert outcome(elements=1 << 20, beside=True) == WRONG
    assert outcome(fails=True) == REFUSED
    assert outcome(elements=1, fails=True) == TORN
    assert outcome(elements=1 << 20, fails=True) == TORN
    assert outcome(beside=True, fails=True) == TORN


def test_a_subject_that_will_not_serve_refuses() -> None:
    class Shy(Script):
        def serve(self, ranks: Sequence[Rank]) -> None:
            raise RuntimeError("not this model")

    verdict = judge(SETUP, SYNC, Shy)
    assert verdict == Verdict(REFUSED, "does not serve: RuntimeError: not this model")


def test_a_subject_that_changes_the_model_while_serving_is_wrong() -> None:
    class Clumsy(Script):
        def serve(self, ranks: Sequence[Rank]) -> None:
            super().serve(ranks)
            model: Any = ranks[0].model
            model.bias.data[0] += 1

    assert judge(SETUP, SYNC, Clumsy) == Verdict(WRONG, "serving changed rank 0: bias")


def test_a_subject_must_start_the_engine() -> None:
    class Idle(Script):
        def serve(self, ranks: Sequence[Rank]) -> None:
            self.ranks = ranks

    with pytest.raises(RuntimeError, match="must load and process every rank once"):
        judge(SETUP, SYNC, Idle)


def test_every_tensor_counts_and_the_gaps_between_elements() -> None:
    """Tensors that a module holds in a list, swapped memory, and memory next to a view."""

    class Meddles(Script):
        def __init__(self, change: str) -> None:
            super().__init__()
            self.change = change

        def apply(self, deltas: Sequence[Delta]) -> None:
            model: Any = self.ranks[0].model
            if self.change == "list":
                model.absorbed[1][0, 0] += 1
            elif self.change == "swap":
                model.norm.data = model.norm.data.repeat(2)[::2]
            raise OSError("no")

    setup = (models.DerivedBeside,)
    for change, expected in (("list", TORN), ("swap", TORN), ("", REFUSED)):
        subject = functools.partial(Meddles, change)
        assert judge(setup, syncs_of(setup)[0], subject).outcome == expected


def test_deltas_are_deterministic_and_lead_to_the_target() -> None:
    for setup in ((FusedQkv,), (models.ManyDtypes,), (models.OtherFloats,), (AssignsData,)):
        for sync in syncs_of(setup):
            base, target = checkpoints(setup, sync)
            again = checkpoints(setup, sync)[1]
            deltas = deltas_of(sync, base, target)
            assert [delta.name for delta in deltas] == list(sync.tensors)
            for delta in deltas:
                flat = base[delta.name].reshape(-1).clone()
                assert delta.values.numel()
                if delta.indices is None:
                    flat = delta.values.clone()
                else:
                    assert not torch.equal(bits(flat), bits(target[delta.name].reshape(-1)))
                    bits(flat)[delta.indices] = bits(delta.values)
                assert torch.equal(bits(flat), bits(target[delta.name].reshape(-1)))
                assert torch.equal(bits(again[delta.name]), bits(target[delta.name]))


def test_syncs_hold_what_a_careless_receiver_loses() -> None:
    setup = (ColumnShard, ColumnShardLast)
    by_name = {sync.name: sync for sync in syncs_of(setup)}
    _, to_nan = checkpoints(setup, by_name["to NaN"])
    assert to_nan["weight"].isnan().any()
    assert len(set(bits(to_nan["weight"][to_nan["weight"].isnan()]).tolist())) == 3
    base, numbers = checkpoints(setup, by_name["zeros and NaNs in the base"])
    assert base["weight"].isnan().any()
    assert not numbers["weight"].isnan().any()
    zeros = numbers["weight"] == 0
    assert zeros.any()
    assert torch.signbit(numbers["weight"][zeros]).all()
    _, sparse = checkpoints(setup, by_name["sparse 40 %"])
    assert sparse["weight"].isinf().any()


def cell_of(*outcomes: tuple[Group, str]) -> str:
    return cell([Run(SETUP, Sync("", g, ()), Verdict(outcome)) for g, outcome in outcomes])


def test_cells_name_the_worst_and_what_differs() -> None:
    assert cell_of(("sparse", EXACT), ("dense", EXACT), ("NaN", EXACT)) == "exact"
    assert cell_of(("sparse", EXACT), ("NaN", REFUSED)) == "exact, NaN refused"
    assert cell_of(("sparse", EXACT), ("sparse", REFUSED), ("dense", REFUSED)) == "refused"
    assert cell_of(("sparse", EXACT), ("sparse", WRONG), ("sparse", TORN)) == "**wrong**"
    assert cell_of(("sparse", EXACT), ("alone", EXACT), ("alone", TORN)) == "exact, alone **torn**"


def test_every_case_has_its_own_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
