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

from engine_ext.dtypes import torch_bits_dtype
from scripts.live_engine import tiny_models

GROUP: Final = 32  # weights that share a scale
BLOCK: Final = 64  # rows, and columns, that share one
_PACKED: Final = 8  # int4 values in one int32
_LINEAR: Final = "_proj.weight"


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


def _fp8_block(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    scales = _scales(generator, *(size // BLOCK for size in weight.shape))
    expanded = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    quantised = (weight / expanded).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": quantised, "weight_scale_inv": scales}


def _w8a8(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.bfloat16()}


def _w8a8_int8(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    found = _w8a8(weight, generator)
    return {**found, "weight_scale": found["weight_scale"].float()}


def _per_tensor(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    inputs: bool = False,
    zero_point: bool = False,
) -> Callable[[torch.Tensor, torch.Generator], Tensors]:
    """Return a function that quantises a weight with one scale of this shape.

    Args:
        inputs, zero_point: whether there is a scale, and a zero point, of the layer's input, too.
    """
    largest = 448 if dtype.is_floating_point else 127

    def quantise(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
        scale = weight.float().abs().amax() / largest
        scaled = weight.float() / scale
        exact = scaled if dtype.is_floating_point else scaled.round()
        found = {"weight": exact.to(dtype), "weight_scale": scale.view(shape)}
        if inputs:
            found["input_scale"] = _scales(generator, *shape)
        if zero_point:
            found["input_zero_point"] = torch.randint(-9, 9, shape, generator=generator).to(dtype)
        return found

    return quantise


def _compressed(
    form: str, weights: dict[str, Any], inputs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the configuration of a checkpoint in the format of compressed-tensors.

    Args:
        inputs: what of activations is not quantised by token, symmetric and dynamic; None if they
            are not quantised at all.
    """
    weights = {"symmetric": True, "dynamic": False, **weights}
    of_inputs = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": (
            None if inputs is None else {**of_inputs, "type": weights["type"], **inputs}
        ),
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
_ONE_SCALE: Final = {"num_bits": 8, "strategy": "tensor"}
_STATIC: Final = {"strategy": "tensor", "dynamic": False}
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
            None,
        ),
        torch.bfloat16,
    ),
    "fp8_channel": (
        _fp8_channel,
        _compressed("float-quantized", {**_EIGHT_BITS, "type": "float"}, {}),
        torch.bfloat16,
    ),
    "w8a8": (
        _w8a8,
        _compressed("int-quantized", {**_EIGHT_BITS, "type": "int"}, {}),
        torch.bfloat16,
    ),
    # For SGLang.
    "w8a8_int8": (_w8a8_int8, {"quant_method": "w8a8_int8"}, torch.bfloat16),
    "fp8_block": (
        _fp8_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
        torch.bfloat16,
    ),
    # One scale for a tensor. Where a layer fuses several, vLLM quantises them again with the
    # largest. It needs `tests/shims/vllm_cpu_fp8` for fp8.
    "fp8_tensor": (
        _per_tensor(torch.float8_e4m3fn, ()),
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        torch.bfloat16,
    ),
    "fp8_tensor_static": (
        _per_tensor(torch.float8_e4m3fn, (), inputs=True),
        {"quant_method": "fp8", "activation_scheme": "static"},
        torch.bfloat16,
    ),
    "compressed_fp8_tensor": (
        _per_tensor(torch.float8_e4m3fn, (1,)),
        _compressed("float-quantized", {**_ONE_SCALE, "type": "float"}, {}),
        torch.bfloat16,
    ),
    "compressed_fp8_tensor_static": (
        _per_tensor(torch.float8_e4m3fn, (1,), inputs=True),
        _compressed("float-quantized", {**_ONE_SCALE, "type": "float"}, _STATIC),
        torch.bfloat16,
    ),
    "w8a8_tensor": (
        _per_tensor(torch.int8, (1,)),
        _compressed("int-quantized", {**_ONE_SCALE, "type": "int"}, {}),
        torch.bfloat16,
    ),
    "w8a8_asymmetric": (
        _w8a8,
        _compressed("int-quantized", {**_EIGHT_BITS, "type": "int"}, {"symmetric": False}),
        torch.bfloat16,
    ),
    "w8a8_static": (
        _per_tensor(torch.int8, (1,), inputs=True),
        _compressed("int-quantized", {**_ONE_SCALE, "type": "int"}, _STATIC),
        torch.bfloat16,
    ),
    "w8a8_static_asymmetric": (
        _per_tensor(torch.int8, (1,), inputs=True, zero_point=True),
        _compressed(
            "int-quantized", {**_ONE_SCALE, "type": "int"}, {**_STATIC, "symmetric": False}
        ),
        torch.bfloat16,
    ),
}


def build(form: str, folder: Path, kind: str = "qwen3", **sizes: Any) -> Path:
    """Write a model whose linear weights are quantised, and return its folder.

    Args:
        form: a key of `FORMATS`.
        kind, sizes: as `tiny_models.build` takes them.
    """
    quantise, _, dtype = FORMATS[form]
    tiny_models.build(kind, folder, **sizes)
    generator = torch.Generator().manual_seed(0)
    weights = tiny_models.load_tensors(folder)
    for name, weight in weights.items():
        weights[name] = weight if name.endswith(_LINEAR) else weight.to(dtype)
    return rewrite(form, folder, quantised(weights, lambda weight: quantise(weight, generator)))


def quantised(weights: Tensors, quantise: Callable[[torch.Tensor], Tensors]) -> Tensors:
    """Return the tensors of a model with what `quantise` makes of its linear weights."""
    tensors: Tensors = {}
    for name, weight in weights.items():
        prefix = name.removesuffix("weight")
        made = quantise(weight) if name.endswith(_LINEAR) else {"weight": weight}
        tensors |= {prefix + part: tensor for part, tensor in made.items()}
    return tensors


def rewrite(form: str, folder: Path, tensors: Tensors) -> Path:
    """Make a model's folder one of a quantised checkpoint with these tensors, and return it."""
    _, config_of, dtype = FORMATS[form]
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    config |= {"dtype": name, "torch_dtype": name, "quantization_config": config_of}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def by_compressed_tensors(
    weight: torch.Tensor, kind: str, scale_dtype: torch.dtype | None = None
) -> Tensors:
    """Quantise a weight with a scale for each channel, by the library of that name.

    Args:
        kind: ``float`` or ``int``, of 8 bits.
        scale_dtype: The dtype of the stored scale; None: the weight's dtype.
    """
    from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=8, type=kind, strategy="channel", symmetric=True)
    ends = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale, zero_point = calculate_qparams(*ends, args)
    if scale_dtype is not None:  # of the module's parameter that it is copied into
        scale = scale.to(scale_dtype)
    stored: Tensors = NaiveQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point},
        QuantizationScheme(targets=["Linear"], weights=args),
    )
    return stored


def serving_dtype(form: str) -> str:
    """Return the dtype to start an engine with; bfloat16 for what is no key of `FORMATS`."""
    dtype = FORMATS[form][2] if form in FORMATS else torch.bfloat16
    return str(dtype).removeprefix("torch.")


def step(tensors: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """Return a copy in which one element in fifty has another lowest bit.

    The only scale of a tensor becomes up to twice, or half, as large. Other tensors stay: shapes,
    the order of groups, and the zero points of GPTQ's symmetric scheme. An fp8 weight never
    becomes NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in tensors.items():
        tensor = changed[name] = tensor.clone()
        if name.endswith((".weight_shape", ".g_idx", ".qzeros")):
            continue
        if name.endswith("_scale") and tensor.numel() == 1:
            tensor *= 2 ** (2 * torch.rand((), generator=generator) - 1)
            continue
        bits = tensor.view(-1).view(torch_bits_dtype(tensor.dtype))
        chosen = torch.randperm(len(bits), generator=generator)[: max(1, len(bits) // 50)]
        if tensor.dtype == torch.float8_e4m3fn:
            chosen = chosen[bits[chosen] & 0x7F < 0x7E]
        bits[chosen] ^= 1
    return changed
