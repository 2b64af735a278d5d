"""Derived tensors that the engine's own function computes again when their weights were written.

An adapter says which function that is for which modules (`Recomputation`). What
`engine_ext.derived.proof` has seen it to do right becomes a `Recomputed`, which runs inside the
commit. The derived tensors keep their objects and their addresses: captured graphs and kernels'
argument lists refer to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine_ext.kernels.gather_scatter import bits_of
from engine_ext.model.state_guard import AttachedTensor, held_tensors, place
from engine_ext.placement.segments import Placement


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The engine's own way to compute the derived tensors of some modules.

    Attributes:
        modules: their paths in the model. Of what hangs on them and below them, `run` may change
            the derived tensors only, and these must be made of weights on or below them.
        run: computes them from the live weights; it may write in place or hang other tensors in
            the same places. One function may serve several modules: give it once with all of
            their paths, or once per module with its arguments bound. It runs in the thread that
            commits, without gradients, and must not communicate with other ranks: not every rank
            runs it as often.
    """

    modules: tuple[str, ...]
    run: Callable[[], object]


class Recomputed:
    """Derived tensors that are proven to follow.

    Args:
        run: the engine's function.
        derived: the tensors that it computes.
        modules: those on and below which it may hang tensors, by path. Where it replaces others
            than the derived ones by new objects, with the same bits, the old ones are put back.
        weights: live tensors that they may be computed from, by name.
    """

    def __init__(
        self,
        run: Callable[[], object],
        derived: Sequence[AttachedTensor],
        modules: Mapping[str, torch.nn.Module],
        weights: frozenset[str],
    ) -> None:
        self.weights = weights
        self._run = run
        self._derived = derived
        self._modules = modules

    @property
    def paths(self) -> list[str]:
        """The derived tensors' paths in the model."""
        return [held.path for held in self._derived]

    def moved(self) -> list[str]:
        """The derived tensors in whose place there is another object, or that have other memory."""
        return [held.path for held in self._derived if held.changed]

    @torch.no_grad()
    def __call__(self) -> None:
        """Compute the derived tensors from the weights as they are now.

        Raises:
            Exception: the engine's own, or RuntimeError if what it makes does not fit the memory
                of the derived tensors. Some of them may hold new values then, in the old places.
        """
        # As of now: since the proof the engine has hung its caches there.
        hung = list(held_tensors(self._modules))
        try:
            self._run()
            fresh = [(held, self._made(held)) for held in self._derived]
            for held, made in fresh:
                if place(made) != place(held.memory):
                    bits_of(held.memory).copy_(bits_of(made))
        finally:
            for held in (*hung, *self._derived):
                if held.changed:
                    held.put_back()

    def _made(self, held: AttachedTensor) -> torch.Tensor:
        """What the function has left in the place of a derived tensor."""
        made = held.now
        if made is None:
            raise RuntimeError(f"the engine's function leaves no tensor in {held.path}")
        if layout(made) != layout(held.memory):
            raise RuntimeError(
                f"the engine's function makes another {held.path}: {tuple(made.shape)}, strides "
                f"{made.stride()}, {made.dtype} on {made.device}"
            )
        return made.detach()


def layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """All but the address: device, shape, strides, dtype."""
    return (tensor.device, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def note(placement: Placement, recomputed: Iterable[Recomputed]) -> None:
    """Write down in a placement which derived tensors follow which checkpoint tensors."""
    for one in recomputed:
        for placed in placement.values():
            if any(segment.live.name in one.weights for segment in placed.segments):
                placed.recomputed += tuple(one.paths)


def triggered(recomputed: Iterable[Recomputed], live: frozenset[str]) -> Iterator[Recomputed]:
    """Those whose tensors may be computed from one of these live tensors."""
    return (one for one in recomputed if one.weights & live)
