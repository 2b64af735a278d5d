"""Merge PEFT adapters on the fly, one module at a time, as `merge_and_unload` would.

The framework's own merge runs on a copy of one module, so the values are those of
`merge_and_unload` bit for bit, and the model that is trained stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the outermost modules that PEFT has put around others."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if _unloads(module) or (hasattr(module, "base_layer") and hasattr(module, "merge")):
            inside += (f"{name}.",)
            yield name, module


def refuse_unmergeable(model: nn.Module) -> None:
    """Refuse adapters that are no weights: prompts."""
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(f"{type(config).__name__}: prompts cannot be merged into the weights")


class AdaptedModule:
    """One module with its adapters.

    Args:
        name: The module's name in the model.
        module: The module; it is not changed.
        parameters: Its tensors by their names in the model, first names of tied ones.

    Attributes:
        reads: Names in the model of the tensors that merging takes.
        merges: Whether merging computes; if not, another module just takes the place of this one.
        outputs: The tensors of the module without adapters, by their names in the model without
            adapters: on the meta device if it merges, otherwise the model's own.
    """

    def __init__(self, name: str, module: nn.Module, parameters: Mapping[str, torch.Tensor]):
        self._name, self._module, self._parameters = name, module, dict(parameters)
        self.reads = tuple(self._parameters)
        self.merges = any(hasattr(one, "base_layer") for one in module.modules()) or hasattr(
            module, "token_adapter"
        )
        if self.merges:  # on a copy: unloading takes some modules apart
            module = copy.deepcopy(module, self._memo(_meta(self._parameters)))
        bare = _unload(module, merge=False) if _unloads(module) else module.get_base_layer()  # type: ignore[operator]
        self.outputs = self._named(bare)

    def merge(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the module's tensors with its active adapters merged.

        Args:
            tensors: Whole tensors by the names in `reads`; not changed.
        """
        clones = {name: tensors[name].detach().clone() for name in self.reads}
        module = copy.deepcopy(self._module, self._memo(clones))
        with torch.no_grad():
            return self._named(self._merged(module))

    def _merged(self, module: nn.Module) -> nn.Module:
        if _unloads(module):
            return _unload(module, merge=True)
        module.merge(safe_merge=False, adapter_names=None)  # type: ignore[operator]
        return module.get_base_layer()  # type: ignore[operator, no-any-return]

    def _memo(self, tensors: Mapping[str, torch.Tensor]) -> dict[int, Any]:
        """Return a memo with which `copy.deepcopy` takes the given tensors for the parameters."""
        memo: dict[int, Any] = {}
        for name, parameter in self._parameters.items():
            new = tensors[name]
            if isinstance(parameter, nn.Parameter):
                new = nn.Parameter(new, requires_grad=False)
            memo[id(parameter)] = new
        return memo

    def _named(self, bare: nn.Module) -> dict[str, torch.Tensor]:
        state = bare.state_dict(keep_vars=True)
        return {f"{self._name}.{name}" if self._name else name: t for name, t in state.items()}


def _meta(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()}


def _unloads(module: nn.Module) -> bool:
    return hasattr(module, "unload_and_optionally_merge_module")


def _unload(module: nn.Module, *, merge: bool) -> nn.Module:
    unload = module.unload_and_optionally_merge_module
    return unload(merge=merge, safe_merge=False, adapter_names=None)  # type: ignore[operator, no-any-return]
