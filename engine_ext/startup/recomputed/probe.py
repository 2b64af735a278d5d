"""Try a layer out: what does it compute from inputs that are the same every time?"""

from __future__ import annotations

from typing import Any, Final

import torch

_ROWS: Final = 4


def probe_linear(layer: Any) -> torch.Tensor:
    """Return what a linear layer of either engine computes from random rows, without the bias."""
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    return apply_to_rows(layer, width, layer.params_dtype)


def apply_to_rows(layer: Any, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a layer's quant method computes from random rows, without the bias.

    Args:
        width: elements of a row on this rank.
        dtype: of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, width, generator=generator)
    rows = rows.to(next(layer.parameters()).device, dtype)
    output: torch.Tensor = layer.quant_method.apply(layer, rows, bias=None)
    return output
