"""Recompute derived tensors with the engine's own functions when their weights are written.

An adapter declares which function serves which modules (`Recomputation`). If `proof` has seen it
compute the right bits, it becomes a `Recomputed`, which runs inside the commit. The derived tensors
keep their objects and their addresses, because captured graphs and kernels' argument lists refer to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine_ext.kernels import bits_of
from engine_ext.model import AttachedTensor, attached_tensors, layout, location
from engine_ext.placement import Placement


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The engine's own function for the derived tensors of some modules.

    Attributes:
        modules: their paths in the model. `run` must change only the derived tensors on and below
            them, and these must be computed from weights on or below them.
        run: computes them from the live weights; it can write in place or attach new tensors
            under the same names. A function that serves several modules is given once with all
            their paths, or once per module with its arguments bound. It runs in the thread that
            commits, without gradients, and must not communicate with other ranks, which might run
            it less often.
    """

    modules: tuple[str, ...]
    run: Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """Derived tensors whose recomputation is proven.

    Attributes:
        modules: the modules that `run` can attach tensors to, by path. If it replaces other tensors
            than the derived ones by new objects with the same bits, the old ones are restored.
        weights: names of the live tensors that the derived ones might be computed from.
    """

    run: Callable[[], object]
    derived: Sequence[AttachedTensor]
    modules: Mapping[str, torch.nn.Module]
    weights: frozenset[str]

    @property
    def paths(self) -> list[str]:
        """The derived tensors' paths in the model."""
        return [tensor.path for tensor in self.derived]

    def moved(self) -> list[str]:
        """Return the paths of derived tensors that were replaced or have other memory now."""
        return [tensor.path for tensor in self.derived if tensor.changed]

    @torch.no_grad()
    def __call__(self) -> None:
        """Compute the derived tensors from the current weights, into the same memory.

        Raises:
            Exception: the engine's own, or RuntimeError if a result does not fit the memory of
                its derived tensor. The derived tensors might hold old or new values then; their
                objects and addresses are restored.
        """
        # Listed now: since the proof the engine has attached its caches to the modules.
        before = list(attached_tensors(self.modules))
        try:
            self.run()
            results = [(tensor, self._result(tensor)) for tensor in self.derived]
            for tensor, result in results:
                if location(result) != location(tensor.memory):
                    bits_of(tensor.memory).copy_(bits_of(result))
        finally:
            for tensor in (*before, *self.derived):
                if tensor.changed:
                    tensor.restore()

    def _result(self, tensor: AttachedTensor) -> torch.Tensor:
        """Return what the function has left under the name of a derived tensor."""
        result = tensor.current
        if result is None:
            raise RuntimeError(f"the engine's function leaves no tensor in {tensor.path}")
        if layout(result) != layout(tensor.memory):
            raise RuntimeError(
                f"the engine's function computes another {tensor.path}: {tuple(result.shape)}, "
                f"strides {result.stride()}, {result.dtype} on {result.device}"
            )
        return result.detach()


def add_recomputed(placement: Placement, recomputed: Iterable[Recomputed]) -> None:
    """Add to a placement which derived tensors are recomputed from which checkpoint tensors."""
    for one in recomputed:
        for placed in placement.values():
            if any(segment.live.name in one.weights for segment in placed.segments):
                placed.recomputed += tuple(one.paths)
