"""The class of transformers that a checkpoint is of, and its model without values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from delta_sender.diff.quantize import FORMS
from engine_ext.files import read_checkpoint


def empty_model(folder: str | os.PathLike[str]) -> nn.Module:
    """Return the model of a checkpoint folder on the meta device: its names and shapes.

    transformers loads the folder's tensors, without values, into another such model: loading finds
    out under which names the folder has the model's tensors, and whether experts are fused there.

    Raises:
        ValueError: transformers has no such class, or the folder cannot be read.
    """
    import transformers
    from transformers import core_model_loading, modeling_utils
    from transformers.conversion_mapping import get_model_conversion_mapping

    folder = Path(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    architecture = (config.architectures or ["none"])[0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ValueError(f"{folder}: transformers has no {architecture}")
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # a trainer's weights are not quantised
    with torch.device("meta"):
        model, loaded = model_class(config), model_class(config)
    core_model_loading.convert_and_load_state_dict_in_model(
        loaded,
        _without_values(dict(read_checkpoint(folder))),
        modeling_utils.LoadStateDictConfig(
            device_map={"": "meta"}, weight_mapping=get_model_conversion_mapping(loaded)
        ),
    )
    model._weight_conversions = loaded._weight_conversions
    assert isinstance(model, nn.Module)
    return model


def _without_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors on the meta device, those of quantised weights as bfloat16."""
    scales = scales_in({name: tensor.dtype for name, tensor in tensors.items()})
    return {
        name: torch.empty(tensor.shape, dtype=_dtype(tensor), device="meta")
        for name, tensor in tensors.items()
        if name not in scales
    }


def class_hint(model: nn.Module, folder: Path | None) -> str:
    """Return which class to load, if a folder is of another one than the model; else ""."""
    if folder is None:
        folder = Path(str(getattr(model, "name_or_path", "") or "-"))
    try:
        config = json.loads((folder / "config.json").read_bytes())
        [wanted, *_] = config["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if wanted in (known.__name__ for known in type(model).__mro__):
        return ""
    return (
        f"; the model is a {type(model).__name__}, the checkpoint one of {wanted}: load it with "
        f"transformers.{wanted}.from_pretrained({str(folder)!r})"
    )


def quantised_form(dtypes: Mapping[str, torch.dtype]) -> str | None:
    """Return the form in which some of a checkpoint's tensors are quantised; None if none is."""
    for form, (stored, suffix, _, _) in FORMS.items():
        for name, dtype in dtypes.items():
            if dtype == stored and name + suffix in dtypes:
                return form
    return None


def scales_in(dtypes: Mapping[str, torch.dtype]) -> set[str]:
    """Return the names of the scales of a checkpoint's quantised weights, in any form."""
    return {
        name + suffix
        for stored, suffix, _, _ in FORMS.values()
        for name, dtype in dtypes.items()
        if dtype == stored and name + suffix in dtypes
    }


def _dtype(tensor: torch.Tensor) -> torch.dtype:
    quantised = {form.dtype for form in FORMS.values()}
    return torch.bfloat16 if tensor.dtype in quantised else tensor.dtype
