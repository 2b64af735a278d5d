"""A small AWQ checkpoint: int4 weights packed into int32, with zero points and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from scripts.live_engine import tiny_models

_GROUP: Final = 32  # weights that share a scale
_PACKED: Final = 8  # int4 values in one int32


def build(folder: Path) -> Path:
    """Write a Qwen3 whose linear weights are random AWQ tensors, and return its folder.

    For a weight [out, in]: ``qweight`` int32 [in, out / 8], ``qzeros`` int32 [in / 32, out / 8]
    and ``scales`` float16 [in / 32, out], as AutoAWQ's ``gemm`` layout has them.
    """
    tiny_models.build("qwen3", folder)
    generator = torch.Generator().manual_seed(0)

    def packed(*shape: int) -> torch.Tensor:
        bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
        return bits.to(torch.int32)

    tensors = {}
    for name, weight in tiny_models.load_tensors(folder).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.half()
            continue
        outputs, inputs = weight.shape
        prefix, groups = name.removesuffix("weight"), inputs // _GROUP
        tensors[f"{prefix}qweight"] = packed(inputs, outputs // _PACKED)
        tensors[f"{prefix}qzeros"] = packed(groups, outputs // _PACKED)
        scales = torch.rand(groups, outputs, generator=generator) * 0.01 + 0.001
        tensors[f"{prefix}scales"] = scales.half()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "float16", "torch_dtype": "float16"}
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": _GROUP,
        "zero_point": True,
        "version": "gemm",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
