"""Prove that rebuilding a module gives what the engine has made of it.

Before anything is served, each module is rebuilt

1. from its shadow as it is: every tensor of the live module must come out as it is, bit for bit,
   and every attribute must be there;
2. if the engine keeps an opaque handle, the handle that was made anew is put in its place, and the
   module must compute the same from random inputs, bit for bit;
3. from a shadow with other bits, one parameter at a time: something must come out differently. This
   shows that processing reads the shadow, and no copy of it. A parameter that nothing depends on
   (zero points of a symmetric scheme) must be gone from the live module.

None of this may change what the live module holds, such as an object that its copies share. No
parameter may have been reachable from the module by another way before it was processed.

Every rank runs the same rebuilds in the same order, because processing may communicate.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from engine_ext.derived import varied
from engine_ext.model import reachable_containers
from engine_ext.placement import Placement, Status, flat_bits
from engine_ext.rebuild.compare import RebuildError
from engine_ext.rebuild.elements import Replacement
from engine_ext.rebuild.loader_rebuild import LoaderRebuild
from engine_ext.rebuild.module_rebuild import Difference, ModuleRebuild

logger = logging.getLogger(__name__)

Rebuild = ModuleRebuild | LoaderRebuild
Container = dict[Any, Any] | list[Any]

Probe = Callable[[torch.nn.Module], torch.Tensor | None]
"""Return what a live module computes from an input, the same every time; None if unknown."""


class _OtherBits:
    """A change of every element of a parameter: another mantissa or sign, or another integer."""

    new = 0  # seed

    @property
    def elements(self) -> _OtherBits:
        return self

    def within(self, tensor: torch.Tensor) -> _Filler:
        return _Filler(tensor)


@dataclass(frozen=True, slots=True)
class _Filler:
    tensor: torch.Tensor

    def put(self, seed: int) -> None:
        bits = flat_bits(self.tensor)
        generator = torch.Generator().manual_seed(seed)
        if self.tensor.is_floating_point():
            bits.copy_(varied(bits.cpu(), self.tensor.dtype, generator))
        else:
            top = torch.iinfo(bits.dtype).max
            mask = torch.randint(1, top, bits.shape, generator=generator, dtype=bits.dtype)
            bits ^= mask.to(bits.device)


def prove_rebuilds(
    rebuilds: Iterable[Rebuild], placement: Placement, probe: Probe
) -> list[Rebuild]:
    """Prove which modules can be rebuilt, and mark the checkpoint tensors in them.

    Args:
        rebuilds: of the live model, which is as it was before when this returns.
        placement: certified; the exact tensors of a proven module become `REBUILT`, and those of
            any other are refused.

    Returns:
        The proven ones that some checkpoint tensor is written to.
    """
    proven = []
    for one in rebuilds:
        names = {f"{one.path}.{name}".lstrip("."): name for name, _ in one.shadow()}
        inside = [
            placed
            for placed in placement.values()
            if any(segment.live.name in names for segment in placed.segments)
        ]
        if not inside:
            continue
        segments = [s for p in inside for s in p.segments if s.live.name in names]
        written = {names[segment.live.name] for segment in segments}
        start = {name: tensor.data_ptr() for name, tensor in one.shadow()}
        try:
            if any(start[names[s.live.name]] != s.live.start for s in segments):
                raise RebuildError("it is in another module that is processed as a whole")
            _prove(one, sorted(written), probe)
        except Exception as error:
            kind = "" if isinstance(error, RebuildError) else f"{type(error).__name__}: "
            for placed in inside:
                placed.refuse(f"{one.path} cannot be rebuilt from it: {kind}{error}")
            continue
        proven.append(one)
        for placed in inside:
            if placed.status is Status.EXACT:
                placed.status = Status.REBUILT
    return proven


def _prove(one: Rebuild, written: list[str], probe: Probe) -> None:
    containers: list[Container] = []
    if one.module is not None:
        containers += reachable_containers(one.module)
        containers += [vars(module) for module in one.module.modules()]
    before = [container.copy() for container in containers]
    found = one.rebuild({})
    if any(map(_changed, containers, before)):
        raise RebuildError("processing a copy writes to the live module")
    wrong = sorted({d.path for d in found if not isinstance(d.new, Replacement)})
    if wrong:
        raise RebuildError(f"processing it again gives other bits in {', '.join(wrong)}")
    expected = _probed(one, [], probe) if found else None
    if found and expected is None:
        handles = ", ".join(sorted(d.path for d in found))
        raise RebuildError(f"it keeps {handles}, and nothing shows whether that is right")
    if expected is not None and not _same(_probed(one, found, probe), expected):
        raise RebuildError("with the handles made anew it computes something else")
    for name in written:
        if one.shares(name):
            raise RebuildError(f"processing may read {name} in another way than from its copy")
        if one.keeps(name) and not _differs(one, name, probe, expected):
            raise RebuildError(f"processing reads another copy of {name}")


def _differs(one: Rebuild, name: str, probe: Probe, expected: torch.Tensor | None) -> bool:
    """Return whether a rebuild from other bits of one parameter gives something else."""
    found = one.rebuild({name: [_OtherBits()]})
    if any(not isinstance(d.new, Replacement) for d in found):
        return True
    return expected is not None and not _same(_probed(one, found, probe), expected)


def _probed(one: Rebuild, handles: list[Difference], probe: Probe) -> torch.Tensor | None:
    """Return what the live module computes with other handles, and put the old ones back."""
    old = [difference.elements.read() for difference in handles]
    try:
        for difference in handles:
            difference.elements.put(difference.new)
        return None if one.module is None else probe(one.module)
    except Exception:
        logger.info("delta updates: %s cannot be tried out", one.path, exc_info=True)
        return None
    finally:
        for difference, value in zip(handles, old, strict=True):
            difference.elements.put(value)


def _changed(container: Container, before: Container) -> bool:
    """Return whether a dict or list holds other objects than before."""
    items: Any = container.values() if isinstance(container, dict) else container
    others: Any = before.values() if isinstance(before, dict) else before
    return len(container) != len(before) or any(map(operator.is_not, items, others))


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and torch.equal(flat_bits(one), flat_bits(other))
