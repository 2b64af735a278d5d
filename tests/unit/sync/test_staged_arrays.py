"""The arrays of a part's elements: one for what an undo needs, one for the new bits."""

from __future__ import annotations

import numpy as np
import torch

from engine_ext.format import ParamDelta
from engine_ext.sync.staged_arrays import StagedArrays, allocate
from tests.support.served_models import base_checkpoint, serve
from tests.support.toy_models import ToyModel


class TwoTensors(ToyModel):
    shapes = {"a": (8, 16), "b": (4, 16)}  # noqa: RUF012

    def build(self) -> None:
        self.a = torch.nn.Parameter(torch.zeros(8, 16).bfloat16(), False)
        self.b = torch.nn.Parameter(torch.zeros(4, 16).bfloat16(), False)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight)


def arrays() -> list[StagedArrays]:
    plan = serve(TwoTensors, base_checkpoint(TwoTensors), apply="scatter").applier.plan
    runs = []
    for name, count in (("a", 5), ("b", 3)):
        [target] = plan.targets[name]
        shape = TwoTensors.shapes[name]
        delta = ParamDelta(name, "bfloat16", shape, np.arange(count), np.zeros(count, np.uint16))
        runs.append((delta, target))
    found, _ = allocate(runs)
    return found


def test_each_param_has_its_elements_and_nothing_is_shared() -> None:
    first, second = arrays()
    assert [(a.start, a.stop, a.offsets.size, a.old.size, a.new.size) for a in (first, second)] == [
        (0, 5, 5, 5, 5),
        (0, 3, 3, 3, 3),
    ]
    for number, array in enumerate([*_of(first), *_of(second)]):
        array[:] = number
    for number, array in enumerate([*_of(first), *_of(second)]):
        assert set(array.tolist()) == {number}


def test_what_an_undo_needs_does_not_keep_the_new_bits() -> None:
    first, second = arrays()
    assert first.offsets.base is first.old.base is second.old.base
    assert first.new.base is second.new.base
    assert first.new.base is not first.old.base


def test_those_of_batches_lie_in_the_same_memory() -> None:
    _, others = allocate([], [(3, np.uint16), (0, np.uint8), (2, np.uint16)])
    assert [[array.size for array in arrays] for arrays in others] == [[3] * 3, [0] * 3, [2] * 3]
    assert [array.dtype for array in others[0]] == [np.int32, np.uint16, np.uint16]
    bases = [[array.base for array in arrays] for arrays in (others[0], others[2])]
    assert bases[0][0] is bases[0][1] is bases[1][0] is bases[1][1]
    assert bases[0][2] is bases[1][2] is not bases[0][0]


def test_a_piece_is_cut_to_the_run() -> None:
    first, _ = arrays()
    piece = first.piece(3, 9)
    assert (piece.start, piece.stop, piece.old.size) == (3, 5, 2)
    piece.offsets[:] = 7
    assert first.offsets[3:].tolist() == [7, 7]
    outside = first.piece(6, 9)
    assert outside.start == outside.stop
    assert outside.new.size == 0


def _of(one: StagedArrays) -> list[np.ndarray]:
    return [one.offsets, one.old, one.new]
