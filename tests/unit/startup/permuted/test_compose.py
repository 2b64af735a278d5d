"""Learned moves in a placement: gathering undoes them, and certification proves them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.model.storage_index import LiveTensor, StorageIndex
from engine_ext.placement.certify import certify_placement, holds
from engine_ext.placement.repacked import gather_live
from engine_ext.placement.segments import Placed, Repack, Segment, Status, TensorSpec
from engine_ext.startup.permuted.infer import compose
from tests.support.served_models import random_tensor
from tests.unit.startup.permuted.moves import MOVES, of_weight


def entry_of(tensor: torch.Tensor, *aliases: str) -> LiveTensor:
    module = nn.Module()
    module.register_buffer("live", tensor)
    [entry] = StorageIndex(module).entries
    entry.aliases.extend(aliases)
    return entry


def segment_of(entry: LiveTensor, shape: tuple[int, ...]) -> Segment:
    strides = torch.empty(shape, device="meta").stride()
    return Segment(entry, 0, strides, shape, 0, strides, True)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("name", MOVES)
def test_gathering_undoes_the_move(name: str) -> None:
    change, _ = MOVES[name]
    loaded = random_tensor((3, 32, 6), torch.bfloat16, 0)
    repack = of_weight(change, (3, 32, 6)).repacks["weight"]
    live = change(loaded.clone())
    before, entry = live.clone(), entry_of(live)
    parts = {
        "all": loaded,
        "expert": loaded[1],
        "rows": loaded[1:, 3:20],
        "columns": loaded[:, 5:9, 1::2],
        "one": loaded[2, 31, 5],
        "none": loaded[:0],
    }
    for box, part in parts.items():
        sizes, strides, offset = tuple(part.shape), part.stride(), int(part.storage_offset())
        segment = Segment(entry, offset, strides, sizes, offset, strides, True, repack)
        gathered = gather_live(segment)
        assert gathered.shape == part.shape, box
        assert torch.equal(gathered, part), box
        assert torch.equal(live, before), box
        assert holds(segment, loaded), box


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64], ids=str)
def test_gathering_keeps_bits(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (8 * dtype.itemsize,), dtype=torch.uint8)
    live = bits.view(dtype)
    segment = Segment(
        entry_of(live), 0, (1,), (8,), 0, (1,), True, Repack(np.array([1, 0], np.int32))
    )
    integers = live.view(torch_bits_dtype(dtype)).view(4, 2).flip(1).reshape(-1)
    assert gather_live(segment).dtype == dtype
    assert torch.equal(gather_live(segment).view(integers.dtype), integers)


def placement_of(entry: LiveTensor, shape: tuple[int, ...]) -> dict[str, Placed]:
    spec = TensorSpec("w", shape, entry.tensor.dtype)
    return {"w": Placed(spec, [segment_of(entry, shape)]), "absent": Placed(spec)}


@pytest.mark.parametrize("known_as", ["live", "tied"])
def test_a_composed_placement_is_certified(known_as: str) -> None:
    loaded = random_tensor((2, 6), torch.bfloat16, 0)
    placement = placement_of(entry_of(loaded.flip(1), "tied"), (2, 6))
    repack = of_weight(lambda w: w.flip(1), (2, 6)).repacks["weight"]
    compose(placement, {known_as: repack, "other": Repack(np.zeros(1, np.int32))})
    assert placement["w"].segments[0].repack is repack
    certify_placement(placement, [("w", loaded)])
    assert placement["w"].status is Status.EXACT


def test_a_wrong_map_is_not_certified() -> None:
    loaded = random_tensor((2, 6), torch.bfloat16, 0)
    placement = placement_of(entry_of(loaded.flip(1)), (2, 6))
    compose(placement, {"live": Repack(np.array([1, 0], np.int32))})
    certify_placement(placement, [("w", loaded)])
    assert placement["w"].status is Status.UNCERTIFIED


def test_refused_parameter_stays_uncertified_with_right_bytes() -> None:
    loaded = random_tensor((2, 6), torch.bfloat16, 0)
    placement = placement_of(entry_of(loaded.clone()), (2, 6))
    compose(placement, {}, {"live": "post-load processing also keeps it in handle"})
    certify_placement(placement, [("w", loaded)])
    assert placement["w"].status is Status.UNCERTIFIED
    assert placement["w"].reason == "live: post-load processing also keeps it in handle"


@pytest.mark.parametrize(
    "repacks",
    [
        {"live": Repack(np.arange(5, dtype=np.int32))},
        {"live": Repack(np.zeros(1, np.int32)), "tied": Repack(np.zeros(1, np.int32))},
    ],
    ids=["block does not divide", "two maps"],
)
def test_a_map_that_does_not_fit_is_refused(repacks: dict[str, Repack]) -> None:
    placement = placement_of(entry_of(torch.zeros(2, 6), "tied"), (2, 6))
    compose(placement, repacks)
    assert "does not fit" in placement["w"].reason
