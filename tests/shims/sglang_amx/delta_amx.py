"""A plugin of SGLang that lets a CPU without AMX load quantised weights.

SGLang refuses to, although it computes them with PyTorch but for the last step, which three kernels
do. Here these are a few lines each: their arithmetic is the real one's, the order of the elements
that they pack is not. Nothing can be generated with the result.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_GPTQ = 1  # of `amx_utils.CPUQuantAlgo`


def register() -> None:
    """Stand in for AMX and the kernels; SGLang calls this in each of its processes."""
    if hasattr(torch.ops.sgl_kernel, "convert_weight_packed"):
        return
    _LIBRARY.define("convert_weight_packed(Tensor weight) -> Tensor")
    _LIBRARY.impl("convert_weight_packed", pack, "CPU")
    _LIBRARY.define(
        "convert_weight_packed_scale_zp(Tensor weight, Tensor zeros, Tensor scales, int algo)"
        " -> (Tensor, Tensor, Tensor)"
    )
    _LIBRARY.impl("convert_weight_packed_scale_zp", pack_int4, "CPU")

    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers import amx_utils, quantization
    from sglang.srt.layers.quantization import fp8, w8a8_int8
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    fp8_kernel.sgl_per_tensor_quant_fp8 = quantise_fp8
    fp8._is_cpu_amx_available = w8a8_int8._is_cpu_amx_available = True
    amx_utils.cpu_has_amx_support = quantization.cpu_has_amx_support = lambda: True
    # This one asks for the capability of a GPU.
    CompressedTensorsConfig._check_scheme_supported = lambda *args, **kwargs: True


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight with four columns at a time of all rows; of int8, each row's sum, too."""
    *experts, rows, columns = weight.shape
    tiles = weight.reshape(*experts, rows, columns // 4, 4).transpose(-3, -2)
    packed = tiles.contiguous().view(weight.shape)
    if weight.dtype != torch.int8:
        return packed
    sums = weight.sum(-1, keepdim=True, dtype=torch.int32)
    return torch.cat([packed, sums.view(torch.int8)], -1)


def pack_int4(
    weight: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, algo: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int4 values by row in bytes, with each row's sum, and the zero points in bytes."""
    values = _unpack(weight.t()).t() if algo == _GPTQ else _unpack(weight)
    rows = values.t().contiguous()
    packed = rows[:, 0::2] | rows[:, 1::2] << 4
    sums = rows.sum(1, dtype=torch.int32).view(-1, 1).view(torch.uint8)
    return torch.cat([packed, sums], 1), _unpack(zeros) + (algo == _GPTQ), scales.clone()


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the eight values of each int32, from the lowest bits on, along the rows."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = words.contiguous().unsqueeze(-1) >> shifts & 15
    return values.flatten(-2).to(torch.uint8)


def quantise_fp8(
    weight: torch.Tensor, output: torch.Tensor, scale: torch.Tensor, is_static: bool
) -> None:
    """Quantise by one scale, which is found first unless it is static."""
    top = torch.finfo(output.dtype).max
    if not is_static:
        scale.copy_(weight.float().abs().max() / top)
    output.copy_((weight.float() / scale.float()).clamp(-top, top).to(output.dtype))
