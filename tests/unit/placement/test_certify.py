from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine_ext.conformance.toy_models import (
    PlainCopy,
    RowByRow,
    Skipped,
    ToyModel,
    Widened,
    every_model,
)
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement import certify
from engine_ext.placement.certify import certify_placement, holds, summary
from engine_ext.placement.plan import make_plan
from engine_ext.placement.segments import Placed, Segment, Status, TensorSpec
from engine_ext.ranks import SingleRank
from engine_ext.startup import LoaderDryRun
from tests.support.served_models import base_checkpoint, load, memory, random_tensor, serve


def placed(live: torch.Tensor, source: torch.Tensor, *, rows: int | None = None) -> Placed:
    """Place a tensor row by row (or its first rows) in live memory of the same shape."""
    module = nn.Module()
    module.register_buffer("live", live)
    [entry] = StorageIndex(module).entries
    width = source.shape[1]
    segments = [
        Segment(entry, row * width, (1,), (width,), row * width, (1,), True)
        for row in range(len(source) if rows is None else rows)
    ]
    return Placed(TensorSpec("w", tuple(source.shape), source.dtype), segments)


def judged(tensor: Placed, *checkpoint: tuple[str, torch.Tensor]) -> Placed:
    certify_placement({"w": tensor}, checkpoint)
    return tensor


@pytest.mark.parametrize("model", every_model(), ids=lambda m: m.__name__)
def test_status_of_every_habit(model: type[ToyModel]) -> None:
    """`exact` only for what some sync can update; nothing stays unjudged; nothing is written.

    A tensor that the loader skips is `ignored`.
    """
    base = base_checkpoint(model)
    served = serve(model, base)
    assert memory(served.model) == memory(load(model, base))
    for name, tensor in served.placement.items():
        assert tensor.status is not Status.UNJUDGED
        assert (tensor.status is Status.IGNORED) == ((model, name) == (Skipped, "rotary"))
        found = tensor.status in (Status.EXACT, Status.IGNORED)
        assert found == (name not in model.refused)
        assert bool(tensor.reason) == (tensor.status is Status.UNCERTIFIED)


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPE))
def test_equal_bits_are_exact_and_one_other_is_not(dtype: str) -> None:
    source = random_tensor((3, 4), TORCH_DTYPE[dtype], 0)
    assert judged(placed(source.clone(), source), ("w", source)).status is Status.EXACT
    for row in (0, 2):
        live = source.clone()
        if dtype == "bool":
            live[row, 1].logical_not_()
        else:
            live.view(torch.uint8)[row, 0] ^= 1
        tensor = judged(placed(live, source), ("w", source))
        assert tensor.status is Status.UNCERTIFIED
        assert "live" in tensor.reason


@pytest.mark.parametrize(
    ("live_bits", "source_bits", "status"),
    [
        (0x7FC1, 0x7FC1, Status.EXACT),
        (0x7FC1, 0x7FC2, Status.UNCERTIFIED),
        (0x0000, 0x8000, Status.UNCERTIFIED),
        (0x8000, 0x8000, Status.EXACT),
    ],
    ids=["same NaN", "another NaN", "0.0 for -0.0", "same -0.0"],
)
def test_bits_are_compared_not_values(live_bits: int, source_bits: int, status: Status) -> None:
    def tensor(pattern: int) -> torch.Tensor:
        words = torch.tensor([[pattern]], dtype=torch.int32).to(torch.int16)
        return words.view(torch.bfloat16)

    source = tensor(source_bits)
    assert judged(placed(tensor(live_bits), source), ("w", source)).status is status


def test_elements_of_other_ranks_are_not_compared() -> None:
    source = random_tensor((3, 4), torch.bfloat16, 0)
    live = source.clone()
    live[2] = 99
    assert judged(placed(live, source, rows=2), ("w", source)).status is Status.EXACT


def test_a_checkpoint_tensor_may_be_strided() -> None:
    source = random_tensor((4, 3), torch.bfloat16, 0).t()
    assert judged(placed(source.contiguous(), source), ("w", source)).status is Status.EXACT


@pytest.mark.parametrize(
    "checkpoint",
    [
        [],
        [("other", torch.zeros(3, 4))],
        [("w", torch.zeros(4, 3))],
        [("w", torch.zeros(3, 4, dtype=torch.float16))],
    ],
    ids=["empty", "other name", "other shape", "other dtype"],
)
def test_what_cannot_be_compared_is_uncertified(checkpoint: list[tuple[str, torch.Tensor]]) -> None:
    tensor = judged(placed(torch.zeros(3, 4), torch.zeros(3, 4)), *checkpoint)
    assert tensor.status is Status.UNCERTIFIED
    assert tensor.reason


def test_a_cast_is_not_exact() -> None:
    served = serve(Widened, base_checkpoint(Widened))
    assert served.placement["weight"].status is Status.CAST


@pytest.mark.parametrize("status", [Status.NOT_ON_RANK, Status.UNCERTIFIED])
def test_a_judgement_stands(status: Status) -> None:
    source = torch.ones(3, 4)
    tensor = placed(source.clone(), source)
    tensor.status, tensor.reason = status, "before"
    judged(tensor, ("w", source))
    assert (tensor.status, tensor.reason) == (status, "before")


def test_a_name_that_comes_twice_is_judged_once() -> None:
    source = torch.ones(3, 4)
    tensor = placed(torch.zeros(3, 4), source)
    judged(tensor, ("w", source), ("w", torch.zeros(3, 4)))
    assert tensor.status is Status.UNCERTIFIED
    assert "several of the files" in tensor.reason


def test_a_name_that_comes_twice_alike_is_exact() -> None:
    source = torch.ones(3, 4)
    tensor = placed(source.clone(), source)
    judged(tensor, ("w", source), ("w", source))
    assert tensor.status is Status.EXACT


def test_the_first_reason_stands() -> None:
    tensor = placed(torch.ones(3, 4), torch.ones(3, 4))
    tensor.refuse("first")
    tensor.refuse("second")
    assert tensor.reason == "first"


def test_holds_compares_every_segment() -> None:
    base = base_checkpoint(RowByRow)
    served = serve(RowByRow, base)
    segments = served.placement["weight"].segments
    assert len(segments) == 5
    served.model.weight.data[3] = 0
    wrong = [not holds(segment, base["weight"]) for segment in segments]
    assert wrong == [False, True, False, False, False]  # it loads the rows from the last one


def test_summary_counts_each_status() -> None:
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    assert summary(served.placement) == {"exact": 3}
    served.placement["bias"].refuse("because")
    assert summary(served.placement) == {"exact": 2, "uncertified": 1}


@pytest.mark.parametrize(("rows", "accepted"), [(3, False), (1, True)])
def test_where_moves_are_unknown_a_constant_shows_no_order(rows: int, accepted: bool) -> None:
    """A transposed matrix of ones looks like itself; a single element has one order only."""
    source = torch.full((rows, rows), float("nan"), dtype=torch.bfloat16)
    tensor = placed(source.clone(), source)
    certify_placement({"w": tensor}, [("w", source)], moves_known=False)
    assert tensor.status is (Status.EXACT if accepted else Status.UNCERTIFIED)
    assert accepted or "all its elements are the same" in tensor.reason
    known = placed(source.clone(), source)
    certify_placement({"w": known}, [("w", source)])
    assert known.status is Status.EXACT


# The first digest ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", every_model(), ids=lambda m: m.__name__)
def test_certified_digests_are_those_of_a_scan(
    model: type[ToyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread and with several."""
    monkeypatch.setattr(certify, "_PIECE", 3)
    monkeypatch.setattr(certify, "_AHEAD", 40)
    base = base_checkpoint(model)
    live = load(model, base)
    traced = LoaderDryRun(live, live.load_weights, StorageIndex(live)).trace(model.specs())
    for threads in (1, 3):
        placement = {n: replace(one, segments=[*one.segments]) for n, one in traced.items()}
        certified = certify_placement(placement, base.items(), threads=threads)
        assert certified.keys() == {n for n, one in placement.items() if one.status is Status.EXACT}
        plan = make_plan(placement, SingleRank())
        assert plan.scan(known=certified) == plan.scan()


@pytest.mark.host_memory
def test_what_is_certified_is_not_read_again() -> None:
    base = base_checkpoint(PlainCopy)
    live = load(PlainCopy, base)
    placement = LoaderDryRun(live, live.load_weights, StorageIndex(live)).trace(PlainCopy.specs())
    certified = certify_placement(placement, base.items())
    plan = make_plan(placement, SingleRank())
    before = plan.scan()
    for parameter in live.parameters():
        parameter.data.zero_()
    assert plan.scan(known=certified) == before
    assert plan.scan() != before


def test_any_element_that_differs_is_seen_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words of eight bytes, and in what is left of a piece."""
    monkeypatch.setattr(certify, "_PIECE", 7)
    source = random_tensor((3, 4), torch.bfloat16, 1)
    live = source.clone()
    [*_, last] = placed(live, source).segments
    segment = Segment(last.live, 0, (4, 1), (3, 4), 0, (4, 1), True)

    def status() -> Status:
        return judged(replace(placed(live, source), segments=[segment]), ("w", source)).status

    for element in range(12):
        live.view(torch.int16).view(-1)[element] ^= 1
        assert status() is Status.UNCERTIFIED, element
        live.copy_(source)
    assert status() is Status.EXACT
