"""Learning from a processing after loading: moves, and the reasons against the rest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.model.storage_index import extent
from engine_ext.placement.segments import Repack
from engine_ext.startup.permuted import index_probe
from engine_ext.startup.permuted.infer import InferredRepacks, infer_repacks
from tests.support.served_models import PROPERTY, random_tensor
from tests.unit.startup.permuted.moves import MOVES, Change, of_weight, vnni

Tensors = dict[str, torch.Tensor]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("name", MOVES)
def test_a_move_is_learned(name: str) -> None:
    """The map takes every element from where the loader wrote it to where it is now."""
    change, block = MOVES[name]
    learned = of_weight(change, (3, 32, 6))
    assert learned.refusals == {}
    repack = learned.repacks["weight"]
    assert repack.block == block
    assert repack.permutation.dtype == np.int32
    loaded = random_tensor((3, 32, 6), torch.bfloat16, 0)
    live = change(loaded.clone())
    memory = live.as_strided((extent(live),), (1,), live.storage_offset())
    assert torch.equal(memory[torch.from_numpy(repack.move(np.arange(576)))], loaded.view(-1))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (2, 32, 700)) for dtype in DTYPES),
        *((torch.float8_e5m2, shape) for shape in [(45000,), (45000, 1), (1, 45000)]),
        *((torch.bfloat16, shape) for shape in [(45000,), (45000, 1), (1, 45000)]),
    ],
    ids=str,
)
def test_digits_name_every_element_of_every_dtype(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    bits = torch_bits_dtype(dtype)  # fp8 has no flip
    learned = of_weight(
        lambda w: w.view(bits).view(-1).flip(0).view(dtype).view(shape), shape, dtype
    )
    numel = torch.Size(shape).numel()
    assert learned.refusals == {}
    assert learned.repacks["weight"].permutation.tolist() == list(range(numel))[::-1]


@PROPERTY
@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 1 << 20), st.booleans())
def test_any_permutation_is_learned(rows: int, columns: int, seed: int, alike: bool) -> None:
    generator = np.random.default_rng(seed)
    if alike:
        order = generator.permutation(columns)
        where = (np.arange(rows)[:, None] * columns + order).reshape(-1)
    else:
        where = generator.permutation(rows * columns)
    take = torch.from_numpy(np.argsort(where))
    learned = of_weight(lambda w: w.view(-1)[take].view(w.shape), (rows, columns))
    assert learned.refusals == {}
    repack = learned.repacks.get("weight", Repack(np.zeros(1, np.int32)))
    assert repack.move(np.arange(rows * columns)).tolist() == where.tolist()
    assert ("weight" in learned.repacks) == (where != np.arange(len(where))).any()
    smaller = [b for b in range(1, repack.block) if repack.block % b == 0]
    assert not any(
        (Repack(repack.permutation[:b]).move(np.arange(len(where))) == where).all() for b in smaller
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.float8_e8m0fnu], ids=str)
def test_what_stays_is_neither_moved_nor_refused(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (0, 4), (7,), (4, 9)]:
        assert of_weight(lambda w: w.clone(), shape, dtype) == InferredRepacks({}, {}), shape


def padded(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, 2))


def last_column_zeroed(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.flip(2).contiguous()
    weight[..., -1] = 0
    return weight


def nan_replaced(weight: torch.Tensor) -> torch.Tensor:
    return weight.flip(2).nan_to_num(nan=1.0)


REFUSED: Mapping[str, tuple[Change, str]] = {
    "padding": (padded, "makes 768 elements of its 576"),
    "cut": (lambda w: w[:, :16].contiguous(), "makes 288 elements of its 576"),
    "emptied": (lambda w: torch.empty(0, dtype=w.dtype), "makes 0 elements"),
    "padding in the same size": (last_column_zeroed, "pads it"),
    "scaling": (lambda w: w * 3, "computes"),
    "scaling by a power of two": (lambda w: w * 2, "post-load processing"),
    "scaling after a move": (lambda w: vnni(w) * 0.5, "computes"),
    "halves added": (lambda w: torch.cat([w[:, :16] + w[:, 16:], w[:, 16:]], 1), "computes"),
    "negation": (lambda w: -w, "computes"),
    "quantised": (lambda w: w.to(torch.float8_e4m3fn), "makes it torch.float8_e4m3fn"),
    "quantised and back": (lambda w: w.to(torch.float8_e5m2).to(w.dtype), "post-load processing"),
    "widened": (lambda w: w.float(), "makes it torch.float32"),
    "sorted": (lambda w: w.view(-1).sort().values.view(w.shape), "post-load processing"),
    "sorted rows": (lambda w: w.sort(-1).values, "post-load processing"),
    "one expert twice": (lambda w: w[[0, 1, 1]], "every element exactly once"),
    "NaN replaced": (nan_replaced, "does not move all values alike"),
    "-0.0 lost": (lambda w: w.flip(2) + 0.0, "does not move all values alike"),
    "clamped": (lambda w: w.flip(2).clamp(0, 256), "does not move all values alike"),
    "rounded": (lambda w: w.flip(2).round(), "does not move all values alike"),
    "constant": (torch.zeros_like, "pads it"),
    "gaps": (lambda w: torch.cat([w, w], 1)[:, :32], "leaves gaps"),
    "broadcast": (lambda w: w[:1].expand(3, 32, 6), "leaves gaps"),
}


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_move_is_refused(name: str) -> None:
    change, reason = REFUSED[name]
    learned = of_weight(change, (3, 32, 6))
    assert learned.repacks == {}
    assert reason in learned.refusals["weight"]


def test_a_sort_that_digits_cannot_tell_from_a_copy_is_refused() -> None:
    """Few elements: their indices are one digit, and come sorted already."""
    learned = of_weight(lambda w: w.sort().values, (200,))
    assert learned.repacks == {}
    assert "does not move all values alike" in learned.refusals["weight"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e8m0fnu], ids=str)
def test_a_dtype_without_digits_is_refused_if_it_is_moved(dtype: torch.dtype) -> None:
    learned = of_weight(lambda w: w.view(torch.uint8).roll(1).view(dtype), (32,), dtype)
    assert "holds no digits" in learned.refusals["weight"]


def test_a_map_that_would_be_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_probe, "_SMALL_MAP", 0)
    shape = (4, 8)
    assert of_weight(lambda w: w.flip(0), shape, torch.bfloat16).refusals == {}
    assert of_weight(lambda w: w.flip(1), shape, torch.uint8).refusals == {}
    assert "a map of 32" in of_weight(lambda w: w.flip(0), shape, torch.uint8).refusals["weight"]


def test_a_parameter_that_is_not_contiguous_is_refused() -> None:
    strided = torch.empty(4, 6).t()
    assert (
        "not contiguous"
        in infer_repacks({"w": strided}, lambda p: {"w": p["w"].flip(0)}).refusals["w"]
    )


def test_the_parameters_themselves_are_not_touched() -> None:
    weight = random_tensor((4, 6), torch.bfloat16, 0)
    before = weight.clone()
    infer_repacks({"w": weight}, lambda p: {"w": p["w"].zero_()})
    assert torch.equal(weight, before)


def test_parameters_are_judged_one_by_one() -> None:
    shapes = {"moved": (2, 8), "kept": (3,), "scaled": (5,), "gone": (2,)}

    def process(probes: Tensors) -> Tensors:
        moved = probes["moved"].flip(1)
        return {"moved": moved, "kept": probes["kept"], "scaled": probes["scaled"] / 2}

    learned = infer_repacks({name: torch.empty(shape) for name, shape in shapes.items()}, process)
    assert set(learned.repacks) == {"moved"}
    assert set(learned.refusals) == {"scaled", "gone"}
    assert "removes it" in learned.refusals["gone"]


def test_parameters_that_change_places_are_refused() -> None:
    learned = infer_repacks(
        {"a": torch.empty(2, 300), "b": torch.empty(2, 300)},
        lambda probes: {"a": probes["b"], "b": probes["a"]},
    )
    assert learned.repacks == {}
    assert set(learned.refusals) == {"a", "b"}


def test_a_move_that_depends_on_values_is_refused() -> None:
    """As act-order packing does, by the values of another parameter."""
    learned = infer_repacks(
        {"weight": torch.empty(1, 64), "order": torch.empty(64)},
        lambda probes: {
            "weight": probes["weight"][:, probes["order"].argsort()],
            "order": probes["order"],
        },
    )
    assert learned.repacks == {}
    assert set(learned.refusals) == {"weight", "order"}


def test_what_a_refused_parameter_is_made_of_is_refused() -> None:
    """A scale that stays where it is, folded into the weight: a new scale alone would be lost."""
    shapes = {"weight": (8, 6), "scale": (8, 1), "bias": (8,)}
    learned = infer_repacks(
        {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        lambda probes: {**probes, "weight": probes["weight"] * probes["scale"]},
    )
    assert learned.repacks == {}
    assert set(learned.refusals) == {"weight", "scale"}
    assert learned.refusals["scale"].endswith("also computes weight from it")


def test_a_parameter_that_is_also_kept_elsewhere_is_refused() -> None:
    def process(probes: Tensors) -> Tensors:
        unpacked = probes["weight"].clone()
        return {**probes, "weight": probes["weight"].flip(0), "unpacked": unpacked}

    learned = infer_repacks({"weight": torch.empty(8), "bias": torch.empty(8)}, process)
    assert learned.repacks == {}
    assert learned.refusals.keys() == {"weight"}
    assert "unpacked" in learned.refusals["weight"]


def test_something_made_of_no_parameter_refuses_none() -> None:
    learned = infer_repacks({"w": torch.empty(8)}, lambda p: {**p, "rotary": torch.arange(4)})
    assert learned == InferredRepacks({}, {})


def test_something_that_is_never_the_same_refuses_all() -> None:
    """A handle: an address, which says nothing about the content of its memory."""
    calls = iter(range(1000))
    learned = infer_repacks(
        {"v": torch.empty(8), "w": torch.empty(8)},
        lambda p: {**p, "handle": torch.tensor(next(calls))},
    )
    assert all("handle" in learned.refusals[name] for name in "vw")


@pytest.mark.parametrize("call", range(10))
def test_a_processing_that_fails_refuses_all(call: int) -> None:
    calls = iter(range(1000))

    def process(probes: Tensors) -> Tensors:
        if next(calls) == call:
            raise ValueError("no such kernel\nat all")
        return {"v": probes["v"].flip(0), "w": probes["w"]}

    learned = infer_repacks(
        {"v": torch.empty(2, 300, dtype=torch.bfloat16), "w": torch.empty(8)}, process
    )
    if next(calls) <= call:  # it was never called so often
        assert learned.repacks.keys() == {"v"}
        return
    assert learned.repacks == {}
    assert learned.refusals.keys() == {"v", "w"}
    assert "ValueError: no such kernel" in learned.refusals["v"]
