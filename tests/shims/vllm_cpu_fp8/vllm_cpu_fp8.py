"""A plugin of vLLM that quantises to fp8 on the CPU, where vLLM has no kernel for it.

vLLM's build for CPUs declares ``_C::static_scaled_fp8_quant`` and its two dynamic siblings without
an implementation. Weights that are quantised per tensor, and static activation scales, need them.
"""

from __future__ import annotations

import torch

_MAX = torch.finfo(torch.float8_e4m3fn).max


def register() -> None:
    """Replace the function that calls the kernels; vLLM calls this in each of its processes."""
    from vllm import _custom_ops

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix as fp8 and its scale, as vLLM's function of this name does.

    Args:
        scale: one for the whole matrix; None computes it, or one for each row if
            `use_per_token_if_dynamic` says so.
    """
    wide = input.float()
    if scale is None:
        by_row = wide.abs().amax(1, keepdim=True)
        largest = by_row if use_per_token_if_dynamic else by_row.amax(0)
        if scale_ub is not None:
            largest = largest.minimum(scale_ub)
        scale = (largest / _MAX).clamp(min=1 / (_MAX * 512))
    elif scale.numel() != 1:
        raise NotImplementedError("a static scale for each group")
    if output is None:
        rows = max(num_token_padding or 0, len(input))
        output = torch.zeros(rows, input.shape[1], dtype=torch.float8_e4m3fn)
    output[: len(input)] = (wide / scale).clamp(-_MAX, _MAX).to(output.dtype)
    return output, scale
