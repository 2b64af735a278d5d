"""Detect whether vLLM has wrapped a model's weight loaders.

While layers are reloaded one by one, or quantised while they are loaded, the parameters' loaders
are wrapped: they buffer their input and process it later, into memory that is not the live
parameters' yet. Tracing such a loader does not show where a tensor's elements end up.
"""

from __future__ import annotations

import torch

# The name by which vLLM itself recognises its wrapper, and an attribute of the one around it.
_WRAPPER = "online_process_loader"
_STAMP = "_rdt_stamp_inner"


def active_wrapper(model: torch.nn.Module) -> str | None:
    """Return why this model's loader cannot be traced or used now, or None if it can."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for path, module in model.named_modules():
        if getattr(module, "_do_torchao_reload", False):
            return "its loader quantises with torchao what it is given"
        info = LAYERWISE_INFO.get(module)
        if info is not None and info.can_load():
            return f"{path or 'the model'} is being reloaded layer by layer, or quantised online"
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            loader = getattr(tensor, "weight_loader", None)
            while loader is not None:
                if getattr(loader, "__name__", "") == _WRAPPER or hasattr(loader, _STAMP):
                    where = f"{path}.{name}".lstrip(".")
                    return f"the loader of {where} is still wrapped by a reload"
                loader = getattr(loader, "__wrapped__", None)
    return None
