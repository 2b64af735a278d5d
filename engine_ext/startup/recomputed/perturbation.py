"""A change that gives every element of a tensor other bits, to see what depends on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_ext.placement import flat_bits
from engine_ext.startup.derived import varied


class Perturbation:
    """A change of a whole tensor, see `engine_ext.startup.recomputed.rebuild.Change`.

    Floats get another mantissa or sign, integers other bits.
    """

    new = 0  # seed

    @property
    def elements(self) -> Perturbation:
        return self

    def within(self, tensor: torch.Tensor) -> _Filler:
        return _Filler(tensor)


@dataclass(frozen=True, slots=True)
class _Filler:
    tensor: torch.Tensor

    def put(self, seed: int) -> None:
        bits = flat_bits(self.tensor)
        device = bits.device
        generator = torch.Generator(device).manual_seed(seed)
        if self.tensor.is_floating_point():
            bits.copy_(varied(bits, self.tensor.dtype, generator))
        else:
            top = torch.iinfo(bits.dtype).max
            bits ^= torch.randint(
                *(1, top, bits.shape), generator=generator, dtype=bits.dtype, device=device
            )
