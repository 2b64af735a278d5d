"""Random shard loaders, and what they do said a second time, in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import strategies as st

from engine_ext.conformance.toy_models import ToyModel, parameter


@dataclass(frozen=True)
class Shard:
    """A strided box of a checkpoint tensor, permuted into a padded parameter.

    Attributes:
        shape: of the checkpoint tensor.
        slices: (start, length, step) for each dimension of it.
        axes: the permutation.
        padding: elements before and after the box in the parameter, for each dimension of it.
        by_row: copied row by row, not at once.
    """

    shape: tuple[int, ...]
    slices: tuple[tuple[int, int, int], ...]
    axes: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    by_row: bool

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + (n - 1) * step + 1, step) for a, n, step in self.slices)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.slices[axis][1] for axis in self.axes)

    @property
    def live_shape(self) -> tuple[int, ...]:
        return tuple(b + n + a for n, (b, a) in zip(self.sizes, self.padding, strict=True))

    @property
    def live_index(self) -> tuple[slice, ...]:
        return tuple(slice(b, b + n) for n, (b, _) in zip(self.sizes, self.padding, strict=True))

    def on_rank(self) -> np.ndarray[Any, Any]:
        """Flat checkpoint indices in the live box's row-major order, by numpy."""
        flat = np.arange(int(np.prod(self.shape))).reshape(self.shape)
        return flat[self.index].transpose(self.axes).reshape(-1)

    def model(self, number: int = 1) -> type[ToyModel]:
        """A toy model that holds `number` checkpoint tensors of this kind."""
        shard = self

        class Sharded(ToyModel):
            shapes: ClassVar = {f"w{n}": shard.shape for n in range(number)}

            def build(self) -> None:
                for name in self.shapes:
                    setattr(self, name, parameter(*shard.live_shape))

            def load_one(self, name: str, weight: torch.Tensor) -> None:
                source = weight[shard.index].permute(shard.axes)
                live = getattr(self, name).data[shard.live_index]
                if shard.by_row:
                    for target, row in zip(live, source, strict=True):
                        target.copy_(row)
                else:
                    live.copy_(source)

        return Sharded


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    slices = []
    for size in shape:
        step = draw(st.integers(1, 2))
        start = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, (size - 1 - start) // step + 1))
        slices.append((start, length, step))
    axes = tuple(draw(st.permutations(range(len(shape)))))
    padding = tuple(draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in shape)
    return Shard(shape, tuple(slices), axes, padding, draw(st.booleans()))
