"""Prove that rebuilding a module gives what the engine has made of it.

Before anything is served, each module is rebuilt

1. from its unprocessed weights as they are: every tensor of the live module must come out as it is,
   bit for bit, and every attribute must be there;
2. if the engine keeps an opaque handle, the handle that was made anew is put in its place, and the
   module must compute the same from random inputs, bit for bit;
3. with other bits in these, one parameter at a time: something must come out differently. This
   shows that processing reads them, and no copy of them. A parameter that nothing depends on
   must be gone from the live module (zero points of a symmetric scheme), or processing must leave
   it in place, and not read it there;
4. if the loader computes a parameter, into memory that holds something else: the same must come
   out, because a fresh engine does not begin with what is served.

All of this must leave unchanged what the live module holds, such as an object or a tensor that its
copies share. A parameter must not have been reachable from the module by another way before it was
processed.

Every rank runs the same rebuilds in the same order, because processing can communicate; a module
that fails on one rank fails on all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from engine_ext.errors import DeltaError
from engine_ext.model import content_changed, hash_tensor, reachable_containers
from engine_ext.placement import Placed, Placement, Status, flat_bits
from engine_ext.ranks import RankGroup
from engine_ext.startup.recomputed.compare import RebuildError
from engine_ext.startup.recomputed.lockstep import LockstepRunner
from engine_ext.startup.recomputed.rebuild import Difference, Perturbation, Probe, Rebuild
from engine_ext.startup.recomputed.unprocessed_modules import Replacement

logger = logging.getLogger(__name__)

Container = dict[Any, Any] | list[Any]


def prove_rebuilds(
    model: torch.nn.Module,
    rebuilds: Iterable[Rebuild],
    placement: Placement,
    probe: Probe,
    ranks: RankGroup,
) -> list[Rebuild]:
    """Prove which modules can be rebuilt, and mark the checkpoint tensors in them.

    All ranks must call it.

    Args:
        model: the live one, which is as it was before when this returns.
        rebuilds: of the model.
        placement: certified; the exact tensors of a proven module become `REBUILT`, and those of
            any other are refused.
        ranks: None if this is the only one.

    Returns:
        The proven ones that some checkpoint tensor is written to.
    """
    lockstep = LockstepRunner(ranks)
    inside: dict[str, tuple[Rebuild, list[Placed]]] = {}
    for rebuild in rebuilds:
        found = [
            placed
            for placed in placement.values()
            if any(
                s.live.name in rebuild.names or rebuild.contains(s.live.name)
                for s in placed.segments
            )
        ]
        if found:
            inside[rebuild.path] = rebuild, found
    proven = []
    for path in lockstep.agree(inside):
        one, tensors = inside.get(path, (None, []))
        try:
            if one is None:  # other ranks have it
                lockstep.follow(path, model)
            else:
                lockstep.run(path, functools.partial(_prove, one, tensors, probe))
        except Exception as error:
            known = isinstance(error, (RebuildError, DeltaError))
            kind = "" if known else f"{type(error).__name__}: "
            for placed in tensors:
                placed.refuse(f"{path} cannot be rebuilt from it: {kind}{error}")
            continue
        if one is not None:
            proven.append(one)
        for placed in tensors:
            if placed.status is Status.EXACT:
                placed.status = Status.REBUILT
    return proven


def _prove(one: Rebuild, tensors: Sequence[Placed], probe: Probe) -> None:
    names = one.names
    live = {segment.live.name for placed in tensors for segment in placed.segments}
    if any(one.contains(name) and name not in names for name in live):
        raise RebuildError("it is in another module that is processed as a whole")
    held = _Held(one)
    try:
        _prove_bits(one, sorted({names[name] for name in live if name in names}), probe, held)
    finally:
        held.restore()


def _prove_bits(one: Rebuild, written: list[str], probe: Probe, held: _Held) -> None:
    rebuilt = one.rebuild({})
    held.check()
    found = rebuilt.differences
    wrong = sorted({d.path for d in found if not isinstance(d.new, Replacement)})
    if wrong:
        raise RebuildError(f"processing it again gives other bits in {', '.join(wrong)}")
    one.check_old_values()
    expected = _probed(one, [], probe) if found else None
    if found and expected is None:
        handles = ", ".join(sorted(d.path for d in found))
        raise RebuildError(f"it keeps {handles}, and nothing shows whether that is right")
    if expected is not None and not _same(_probed(one, found, probe), expected):
        raise RebuildError("with the handles made anew it computes something else")
    for name in written:
        if one.shares(name):
            raise RebuildError(f"processing might read {name} in another way than from its copy")
        if name in one.in_place:
            # Nothing need depend on it; but processing must not read live memory either.
            reads = not _differs(one, {name: [Perturbation()]}, probe, expected)
            if reads:
                with _other_live_bits(one, name):
                    reads = _differs(one, {}, probe, expected)
        elif one.keeps(name):
            reads = not _differs(one, {name: [Perturbation()]}, probe, expected)
        else:
            reads = False
            if dict(one.weights())[name].is_floating_point():
                _try_others(one, name)
        held.check()
        if reads:
            raise RebuildError(f"processing reads another copy of {name}")
    replaced = {difference.path for difference in found}
    one.proven = {p: text for p, text in rebuilt.fingerprints.items() if p not in replaced}


def _try_others(one: Rebuild, name: str) -> None:
    """Raise RebuildError if other bits of a parameter change what cannot be replaced.

    Processing can fail on them, which says nothing: they were not made for it.
    """
    try:
        one.rebuild({name: [Perturbation()]})
    except RebuildError:
        raise
    except Exception:
        logger.info("delta updates: %s fails on other bits of %s", one.path, name, exc_info=True)


def _differs(
    one: Rebuild,
    changes: Mapping[str, list[Perturbation]],
    probe: Probe,
    expected: torch.Tensor | None,
) -> bool:
    """Return whether a rebuild with these changes gives something else than the live module has."""
    found = one.rebuild(changes).differences
    if any(not isinstance(d.new, Replacement) for d in found):
        return True
    return expected is not None and not _same(_probed(one, found, probe), expected)


@contextlib.contextmanager
def _other_live_bits(one: Rebuild, name: str) -> Iterator[None]:
    """Put other bits into an unprocessed weight that is live memory, for a while."""
    tensor = dict(one.weights())[name]
    memory = flat_bits(tensor)
    before = memory.clone()
    try:
        Perturbation().within(tensor).put(Perturbation.new)
        yield
    finally:
        memory.copy_(before)


class _Held:
    """The state that a live module holds besides its own tensors, as of when this was made."""

    def __init__(self, one: Rebuild) -> None:
        modules = [] if one.module is None else list(one.module.modules())
        containers: list[Container] = [vars(module) for module in modules]
        if one.module is not None:
            containers += reachable_containers(one.module)
        self._containers = [(container, container.copy()) for container in containers]
        self._tensors = [(t, t.clone(), hash_tensor(t)) for t in one.shared_tensors()]

    def check(self) -> None:
        """Raise RebuildError if something else is there now, or has other bits."""
        changed = any(content_changed(container, before) for container, before in self._containers)
        if changed or any(hash_tensor(tensor) != text for tensor, _, text in self._tensors):
            raise RebuildError("processing a copy writes to the live module")

    def restore(self) -> None:
        """Write the bits back."""
        for tensor, before, text in self._tensors:
            if hash_tensor(tensor) != text:
                tensor.copy_(before)


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


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and torch.equal(flat_bits(one), flat_bits(other))
