"""Look at a live model: its tensors, which of them are tied, and what PEFT has put around them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from delta_sender.models.adapters import (
    AdaptedModule,
    adapted_modules,
    refuse_unmergeable,
)
from delta_sender.models.ranks import is_sharded, wraps_others

# What wrappers around a module of the model put into names.
_WRAPPERS: Final = re.compile(
    r"^pretrained_model\.|\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
# What PEFT puts into the names of tensors that it keeps, and of those that it replaces.
_ADAPTED: Final = re.compile(r"\b(base_layer|modules_to_save\.[^.]+)\.")
_REPLACED: Final = re.compile(r"\boriginal_module\.")
# What value-head wrappers add to a model; no checkpoint that an engine serves has it.
VALUE_HEAD: Final = "v_head."


def unwrapped(model: Any) -> nn.Module:
    """Return the model itself, without DDP, torch.compile, a value head, and PEFT's model class."""
    while True:
        if not isinstance(model, nn.Module):
            raise TypeError(f"a torch.nn.Module is needed, and not a {type(model).__name__}")
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            refuse_unmergeable(model)
            model = model.get_base_model()  # type: ignore[operator]
        elif _has_value_head(model):
            model = model.pretrained_model
        else:
            return model


def _has_value_head(model: nn.Module) -> bool:
    """Whether a model is in `pretrained_model`, and nothing but a value head next to it."""
    parts = {name for name, _ in model.named_children()}
    return parts == {"pretrained_model", VALUE_HEAD.rstrip(".")}


def plain_name(name: str) -> str:
    """Return a tensor's name without what wrappers have put into it."""
    return _WRAPPERS.sub("", name)


def live_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that is trained, by their names in the model without wrappers.

    Frameworks shard parameters, and every rank holds whole buffers, so that they can be read also
    where parameters cannot (FSDP1, DeepSpeed ZeRO-3). Buffers on the meta device, those that are
    sharded, and those that several active copies claim are left out.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for name, buffer in unwrapped(model).named_buffers():
        if buffer.device.type != "meta" and not is_sharded(buffer) and not _REPLACED.search(name):
            found.setdefault(_ADAPTED.sub("", plain_name(name)), []).append(buffer)
    return {name: buffers[0] for name, buffers in found.items() if len(buffers) == 1}


class ModelState:
    """The tensors of a model without wrappers, by their names without adapters.

    Attributes:
        model: The model.
        live: The model's own tensors, by name in the model.
        tensors: Tensors that the checkpoint's are made of, by name without adapters; live ones, or
            on the meta device if adapters are merged into them.
        reads: For every live one of `tensors` its name in `live`.
        modules: Modules whose adapters are merged.
        aliases: Further names of tied tensors, as keys of `tensors`, with the name that is saved.
        vocabulary: Rows of the input embeddings; None if the model has none.

    Raises:
        ValueError: The model is quantised or wrapped so that its tensors cannot be
            read, or adapters are on tied tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.live: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{name}: not a tensor, but {type(tensor).__name__}")
            self.live[name] = tensor
        _refuse_unreadable(model, self.live)
        self.tensors: dict[str, torch.Tensor] = {}
        self.reads: dict[str, str] = {}
        self.modules: list[AdaptedModule] = []
        inside: set[str] = set()
        for name, module in adapted_modules(model):
            prefix = f"{name}."
            own = {n: t for n, t in self.live.items() if n.startswith(prefix)}
            self._add(AdaptedModule(plain_name(name), module, own), own)
            inside |= own.keys()
        for name, tensor in self.live.items():
            if name not in inside:
                self.tensors[plain_name(name)], self.reads[plain_name(name)] = tensor, name
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
        for name in ignored:
            self.tensors.pop(name, None)
        self.aliases = _aliases(model, self.tensors)
        self.vocabulary = _vocabulary(model)

    def _add(self, module: AdaptedModule, own: Mapping[str, torch.Tensor]) -> None:
        self.tensors |= module.outputs
        if module.merges:
            self.modules.append(module)
            ids = {id(tensor) for tensor in own.values()}
            tied = [n for n, t in self.live.items() if id(t) in ids and n not in own]
            if tied:
                raise ValueError(
                    f"{tied[0]}: tied to a tensor that an adapter is on, so merging would change "
                    "both; untie them before training"
                )
            return
        names = {id(tensor): name for name, tensor in own.items()}
        self.reads |= {key: names[id(tensor)] for key, tensor in module.outputs.items()}


def _refuse_unreadable(model: nn.Module, live: Mapping[str, torch.Tensor]) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantised; train in the checkpoint's dtype, or in float32")
    for name, tensor in live.items():
        if "_fsdp_wrapped_module." in name or name.endswith("_flat_param"):
            raise ValueError(f"{name}: FSDP1 is not supported; use FSDP2 (`fully_shard`)")
        if hasattr(tensor, "ds_id"):
            raise ValueError(f"{name}: DeepSpeed ZeRO-3 holds it; give gathered tensors instead")


def refuse_offloaded(model: nn.Module, live: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that have no values.

    Raises:
        ValueError: One is on the meta device; the message says how to read what is offloaded.
    """
    for name, tensor in live.items():
        if tensor.device.type == "meta":
            hint = ""
            if any(hasattr(module, "_hf_hook") for module in model.modules()):
                hint = (
                    "; accelerate has offloaded it: keep the model in memory, or give "
                    "checkpoint_names the items that "
                    "accelerate.utils.modeling.get_state_dict_offloaded_model(model) returns"
                )
            raise ValueError(f"{name}: on the meta device, so it has no values{hint}")


def _vocabulary(model: nn.Module) -> int | None:
    try:
        return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    if is_sharded(tensor) or tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    if wraps_others(tensor):
        inner, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        held = [_identity(getattr(tensor, name)) for name in inner]
        return (type(tensor), repr(context), *held)
    view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (tensor.device, tensor.untyped_storage().data_ptr(), *view)


def _aliases(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return, for every further name of a tied tensor, the name that `save_pretrained` keeps."""
    by_identity: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        by_identity.setdefault(_identity(tensor), []).append(name)
    tied = [names for names in by_identity.values() if len(names) > 1]
    if not tied:  # offloading puts other empty tensors in the places of tied ones
        ties = getattr(model, "all_tied_weights_keys", None) or {}
        pairs = [
            [source, name] for name, source in ties.items() if {source, name} <= tensors.keys()
        ]
        tied = [pair for pair in pairs if all(tensors[n].device.type == "meta" for n in pair)]
    aliases: dict[str, str] = {}
    for names in tied:
        kept = _kept(model, names)
        aliases |= {name: kept for name in names if name != kept}
    return aliases


def _kept(model: nn.Module, names: list[str]) -> str:
    if not hasattr(model, "save_pretrained"):
        return names[0]
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    one = torch.empty(1, device="cpu")
    kept: str = next(iter(remove_tied_weights_from_state_dict(dict.fromkeys(names, one), model)))
    return kept
