"""Write the checkpoints of the GPU rows: small random models of sizes that CUDA kernels take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from scripts.live_engine import quantised_checkpoints, tiny_models, vision_models
from scripts.live_engine.quantised_checkpoints import Tensors

# Blocks of fp8 checkpoints have 128 rows and columns: no projection can be smaller.
_BLOCK: Final = 128
_WIDE: Final = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512}
_WIDE_EXPERTS: Final = {**_WIDE, "moe_intermediate_size": 256}
_MXFP4_GROUP: Final = 32  # values that share a scale


def quantised(form: str, kind: str = "qwen3", **sizes: Any) -> Callable[[Path], Path]:
    """Return a writer of a model of `kind` in a format of `quantised_checkpoints`."""

    def write(folder: Path) -> Path:
        quantised_checkpoints.build(form, folder, kind, **sizes)
        gates = _gates(tiny_models.load_tensors(folder))
        return _configured(folder, ignore=["lm_head", *gates])

    return write


def _gates(weights: Tensors) -> list[str]:
    """Return the experts' routers, which published checkpoints leave as they are."""
    return [n.removesuffix(".weight") for n in weights if n.endswith("mlp.gate.weight")]


def _configured(folder: Path, **fields: Any) -> Path:
    """Set fields of a checkpoint's ``quantization_config``."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.setdefault("quantization_config", {}).update(fields)
    path.write_text(json.dumps(config))
    return folder


def _block_scaled(weight: torch.Tensor) -> Tensors:
    rows, columns = (size // _BLOCK for size in weight.shape)
    blocks = weight.float().view(rows, _BLOCK, columns, _BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-6) / 448
    values = (blocks / scales).view(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scales.view(rows, columns)}


def fp8_block(kind: str) -> Callable[[Path], Path]:
    """Return a writer of a model of `kind` with fp8 blocks, as DeepSeek's and Qwen's have."""

    def write(folder: Path) -> Path:
        tiny_models.build(kind, folder, **(_WIDE if kind == "qwen3" else _WIDE_EXPERTS))
        weights = tiny_models.load_tensors(folder)
        made = quantised_checkpoints.quantised(weights, _block_scaled)
        quantised_checkpoints.rewrite("fp8_block", folder, made)
        block = [_BLOCK, _BLOCK]
        return _configured(
            folder, weight_block_size=block, modules_to_not_convert=["lm_head", *_gates(weights)]
        )

    return write


def gpt_oss_mxfp4(folder: Path) -> Path:
    """Write a gpt-oss whose experts are MXFP4, with the tensors of the published checkpoints."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    tiny_models.build("gpt_oss", folder, **sizes)
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, tensor in tiny_models.load_tensors(folder).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            groups = inputs // _MXFP4_GROUP
            blocks = (experts, outputs, groups, _MXFP4_GROUP // 2)
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, blocks, dtype=torch.uint8, generator=generator
            )
            tensors[f"{name}_scales"] = torch.randint(
                116, 122, blocks[:3], dtype=torch.uint8, generator=generator
            )
        else:
            tensors[name] = tensor
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    return _configured(folder, quant_method="mxfp4", modules_to_not_convert=kept)


def plain(kind: str, **sizes: Any) -> Callable[[Path], Path]:
    """Return a writer of a bf16 model of `kind`."""
    return lambda folder: tiny_models.build(kind, folder, **sizes)


def tied_with_head(folder: Path) -> Path:
    """Write a tied Qwen3 whose checkpoint holds the head too, as Qwen3-0.6B's does."""
    return tiny_models.add_head(tiny_models.build("qwen3", folder, tie_word_embeddings=True))


def vision(folder: Path) -> Path:
    """Write a Gemma3 with a vision tower."""
    return vision_models.build("gemma3", folder)
