"""Checkpoints of tiny models that are quantised as `delta_sender.diff.quantize` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn

from delta_sender import quantize_weight
from tests.support.trainer_models import Tensors, save, saved

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "fp8_block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "fp8_channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "int8_channel": {"quant_method": "compressed-tensors", "format": "int-quantized"},
}


def quantised(model: nn.Module, form: str) -> Tensors:
    """Return the model's checkpoint with quantised linear weights; all else is in bfloat16.

    Weights are quantised in the model's own precision, with channel scales in bfloat16.
    """
    tensors: Tensors = {}
    for name, tensor in saved(model).items():
        if name.endswith("_proj.weight"):
            for suffix, stored in quantize_weight(tensor, form, torch.bfloat16).items():
                tensors[name + suffix] = stored
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    return tensors


def save_quantised(model: nn.Module, form: str, folder: Path) -> Path:
    """Write the model's quantised checkpoint, and return its folder."""
    save(model, folder)
    save_file(quantised(model, form), folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": CONFIGS[form], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
