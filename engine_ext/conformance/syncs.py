"""The syncs that every loader is given: which tensors change, how many elements, to what."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from engine_ext.conformance.subject import Delta
from engine_ext.conformance.toy_models import Checkpoint, ToyModel
from engine_ext.dtypes import torch_bits_dtype

Setup = tuple[type[ToyModel], ...]
"""The model's class on each rank; the checkpoint is the same for all of them."""

Group = Literal["sparse", "dense", "alone", "NaN"]

_ODD_NUMBERS = (-0.0, float("inf"), float("-inf"), 1e-40)
_ODD_NANS = (0x7FC0, 0xFFC1 - 0x10000, 0x7F81)  # as bfloat16 bits; quiet, negative, signalling
# Tensors that are in a model only to see that they do not suffer from its habit.
_COMPANIONS = frozenset({"norm", "bias", "D"})


@dataclass(frozen=True, slots=True)
class Sync:
    """One change of a checkpoint.

    Attributes:
        name: for people.
        group: what the table sums up.
        tensors: those that change and are sent.
        dense: those of them that are sent whole.
        density: share of their elements that change, at least one.
        nan: whether NaNs are among the new values.
        odd_base: whether the base holds NaNs and zeros, and just these change: the zeros their
            sign, the NaNs to numbers.
    """

    name: str
    group: Group
    tensors: tuple[str, ...]
    dense: frozenset[str] = field(default_factory=frozenset)
    density: float = 0.4
    nan: bool = False
    odd_base: bool = False


def syncs_of(setup: Setup) -> list[Sync]:
    """Every sync that this model is given."""
    names = tuple(setup[0].shapes)
    focus = [name for name in names if name not in _COMPANIONS] or list(names)
    floating = any(spec.dtype.is_floating_point for spec in setup[0].specs())
    return syncs_for(names, focus, floating=floating)


def syncs_for(names: tuple[str, ...], focus: Sequence[str], *, floating: bool) -> list[Sync]:
    """Every sync of some tensors.

    Args:
        focus: those that are sent alone; the first is the one that is sent whole among the others.
        floating: whether some tensor can hold NaNs.
    """
    found = [
        Sync("sparse 0.5 %", "sparse", names, density=0.005),
        Sync("sparse 40 %", "sparse", names),
        Sync("dense", "dense", names, dense=frozenset(names)),
    ]
    if floating:
        found.append(Sync("zeros and NaNs in the base", "sparse", names, odd_base=True))
        found.append(Sync("to NaN", "NaN", names, nan=True))
    if len(names) > 1:
        found.append(Sync("one dense", "dense", names, dense=frozenset(focus[:1])))
        found += [Sync(f"only {name}", "alone", (name,)) for name in focus]
    return found


def checkpoints(setup: Setup, sync: Sync) -> tuple[Checkpoint, Checkpoint]:
    """Base and target; the same at every call."""
    model = setup[0]
    seed = zlib.crc32(f"{model.__name__} {sync.name}".encode())
    base = {
        spec.name: _random(spec.shape, spec.dtype, seed + number)
        for number, spec in enumerate(model.specs())
    }
    if sync.odd_base:
        for tensor in base.values():
            if tensor.is_floating_point():
                tensor.view(-1)[0::5] = 0.0
                tensor.view(-1)[3::5] = float("nan")
    model.adjust(base)
    target = {name: tensor.clone() for name, tensor in base.items()}
    for number, name in enumerate(sync.tensors):
        change(target[name], sync, seed + 1000 + number)
    return base, target


def deltas_of(sync: Sync, base: Checkpoint, target: Checkpoint) -> list[Delta]:
    """The tensors that a trainer sends, by bits."""
    found = []
    for name in sync.tensors:
        old, new = base[name].reshape(-1), target[name].reshape(-1)
        indices = None
        if name not in sync.dense:
            indices = torch.nonzero(bits(old) != bits(new)).view(-1)
        values = new.clone() if indices is None else bits(new)[indices].view(new.dtype)
        found.append(Delta(name, tuple(target[name].shape), new.dtype, indices, values))
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its width, which compare by bits."""
    return tensor.view(torch_bits_dtype(tensor.dtype))


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)


def change(tensor: torch.Tensor, sync: Sync, seed: int) -> None:
    """Give some elements of a contiguous tensor other bits, as the sync says, in place."""
    flat = tensor.view(-1)
    generator = torch.Generator().manual_seed(seed)
    new = _random((flat.numel(),), flat.dtype, seed)
    if sync.odd_base and flat.is_floating_point():
        wide = flat.double()
        zeros = torch.nonzero(wide == 0).view(-1)
        chosen = torch.nonzero((wide == 0) | wide.isnan()).view(-1)
        new[zeros] = torch.full((len(zeros),), -0.0).to(flat.dtype)
    else:
        count = max(1, round(sync.density * flat.numel()))
        chosen = torch.randperm(flat.numel(), generator=generator)[:count].sort().values
    odd = chosen[1::2] if len(chosen) > 1 else chosen
    if sync.nan and flat.is_floating_point():
        new[odd] = _nans(len(odd), flat.dtype)
    elif flat.element_size() > 1 and flat.is_floating_point() and not sync.odd_base:
        odd = odd[: len(_ODD_NUMBERS)]
        new[odd] = torch.tensor(_ODD_NUMBERS, dtype=flat.dtype)[: len(odd)]
    same = chosen[bits(new)[chosen] == bits(flat)[chosen]]
    bits(new)[same] ^= 1
    bits(flat)[chosen] = bits(new)[chosen]


def _nans(count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.bfloat16:
        return torch.full((count,), float("nan")).to(dtype)
    patterns = torch.tensor(_ODD_NANS, dtype=torch.int16).view(dtype)
    return patterns.repeat(count)[:count]
