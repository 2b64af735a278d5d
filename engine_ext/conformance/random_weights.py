"""Make a checkpoint of random weights from a model's configuration."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import torch

_JITTER: Final = 0.1
_CONFIG: Final = "config.json"
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors files."""
    return any(folder.glob("*.safetensors"))


def write_random(config: Path, folder: Path) -> None:
    """Write random weights in the names and shapes of transformers.

    Args:
        config: the model's folder, or its ``config.json``.
        folder: new; gets the weights, in the dtype of the configuration (else bfloat16), and the
            other files of the model's folder.

    Raises:
        ValueError: transformers has no such architecture, or the configuration is damaged.
        OSError: there is no configuration.
    """
    import transformers

    source = config if config.is_dir() else config.parent
    chosen = source / _CONFIG if config.is_dir() else config
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not any(file.match(kind) for kind in _WEIGHTS):
            shutil.copy(file, folder / file.name)
    shutil.copy(chosen, folder / _CONFIG)
    settings: Any = transformers.AutoConfig.from_pretrained(folder)
    if getattr(settings, "quantization_config", None) is not None:
        raise ValueError(f"{chosen}: random weights are made for models without quantisation only")
    architecture = next(iter(settings.architectures or ()), "")
    cls: Any = getattr(transformers, architecture, None) or transformers.AutoModelForCausalLM
    make = getattr(cls, "_from_config", None) or cls.from_config
    dtype = getattr(settings, "dtype", None) or torch.bfloat16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(settings, dtype=dtype)
        jitter_constants(model)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    # The engine gets the fields as they were given, and not as transformers has read them.
    shutil.copy(chosen, folder / _CONFIG)


def jitter_constants(model: torch.nn.Module) -> None:
    """Add noise to tensors that are initialised to constants or ramps, such as norms and biases.

    A tensor of ones in the wrong place would look like the right one.
    """
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and (tensor.dim() < 2 or bool(tensor.std() == 0)):
                tensor.add_(_JITTER * torch.randn_like(tensor))
