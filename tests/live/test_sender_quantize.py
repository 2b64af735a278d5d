"""The sender's fp8 blocks are those that vLLM's own function makes on the CPU."""

from __future__ import annotations

import pytest
import torch

from delta_sender import quantize_weight
from tests.support.fake_engine import bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 1), (384, 129)])
def test_blocks_equal_vllm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype)
    weight[:, 128:] = 0  # whole blocks of some
    found = quantize_weight(weight, "fp8_block")
    for tensor, expected in zip(found.values(), per_block_cast_to_fp8(weight), strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert (bits(tensor) == bits(expected)).all()
