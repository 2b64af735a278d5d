"""Small quantised checkpoints with the tensors that published ones have.

The quantised tensors are random: what is tested is where their bits end up, not what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from scripts.live_engine import tiny_models

GROUP: Final = 32  # weights that share a scale
_PACKED: Final = 8  # int4 values in one int32

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Tensors = dict[str, torch.Tensor]


def _packed(generator: torch.Generator, *shape: int) -> torch.Tensor:
    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
    return bits.to(torch.int32)


def _scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * 0.01 + 0.001


def _awq(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    """AutoAWQ's ``gemm`` layout."""
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    return {
        "qweight": _packed(generator, inputs, outputs // _PACKED),
        "qzeros": _packed(generator, groups, outputs // _PACKED),
        "scales": _scales(generator, groups, outputs).half(),
    }


def _gptq(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    """GPTQ without act-order, symmetric: the zero points are all 7, stored as one less."""
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    return {
        "qweight": _packed(generator, inputs // _PACKED, outputs),
        "qzeros": torch.full((groups, outputs // _PACKED), 0x77777777, dtype=torch.int32),
        "scales": _scales(generator, groups, outputs).half(),
        "g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
    }


def _w4a16(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    outputs, inputs = weight.shape
    return {
        "weight_packed": _packed(generator, outputs, inputs // _PACKED),
        "weight_scale": _scales(generator, outputs, inputs // GROUP).bfloat16(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _fp8_channel(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.bfloat16()}


def _w8a8(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.bfloat16()}


def _compressed(form: str, weights: dict[str, Any], activations: bool) -> dict[str, Any]:
    """Return the configuration of a checkpoint in the format of compressed-tensors."""
    weights = {"symmetric": True, "dynamic": False, **weights}
    inputs = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {**inputs, "type": weights["type"]} if activations else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_INT4: Final = {"bits": 4, "group_size": GROUP}
_EIGHT_BITS: Final = {"num_bits": 8, "strategy": "channel"}
# By format: what it makes of one weight, its configuration, and the dtype of everything else.
FORMATS: Final[dict[str, tuple[Callable[..., Tensors], dict[str, Any], torch.dtype]]] = {
    "awq": (
        _awq,
        {"quant_method": "awq", **_INT4, "zero_point": True, "version": "gemm"},
        torch.float16,
    ),
    "gptq": (
        _gptq,
        {"quant_method": "gptq", **_INT4, "desc_act": False, "sym": True},
        torch.float16,
    ),
    "w4a16": (
        _w4a16,
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
            activations=False,
        ),
        torch.bfloat16,
    ),
    "fp8_channel": (
        _fp8_channel,
        _compressed("float-quantized", {**_EIGHT_BITS, "type": "float"}, activations=True),
        torch.bfloat16,
    ),
    "w8a8": (
        _w8a8,
        _compressed("int-quantized", {**_EIGHT_BITS, "type": "int"}, activations=True),
        torch.bfloat16,
    ),
}


def build(form: str, folder: Path) -> Path:
    """Write a Qwen3 whose linear weights are quantised, and return its folder.

    Args:
        form: a key of `FORMATS`.
    """
    quantise, config_of, dtype = FORMATS[form]
    tiny_models.build("qwen3", folder)
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, weight in tiny_models.load_tensors(folder).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.to(dtype)
            continue
        prefix = name.removesuffix("weight")
        tensors |= {prefix + part: t for part, t in quantise(weight, generator).items()}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    config |= {"dtype": name, "torch_dtype": name, "quantization_config": config_of}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def serving_dtype(form: str) -> str:
    """Return the dtype to start an engine with; bfloat16 for what is no key of `FORMATS`."""
    dtype = FORMATS[form][2] if form in FORMATS else torch.bfloat16
    return str(dtype).removeprefix("torch.")


def step(tensors: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """Return a copy in which one element in fifty has another lowest bit.

    What is no weight stays: shapes, the order of groups, and the zero points of GPTQ's symmetric
    scheme. An fp8 weight never becomes NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in tensors.items():
        tensor = changed[name] = tensor.clone()
        if name.endswith((".weight_shape", ".g_idx", ".qzeros")):
            continue
        bits = tensor.view(-1).view(_BITS[tensor.itemsize])
        chosen = torch.randperm(len(bits), generator=generator)[: max(1, len(bits) // 50)]
        if tensor.dtype == torch.float8_e4m3fn:
            chosen = chosen[bits[chosen] & 0x7F < 0x7E]
        bits[chosen] ^= 1
    return changed
