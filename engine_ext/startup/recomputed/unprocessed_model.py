"""The model as its loader knows it: every module that processing has changed is as before.

It is a shallow copy. It shares the live tensors, except for the parameters of the modules that are
rebuilt. The live model is not touched, so the loader can be run dry on the copy any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine_ext.model import StorageIndex, address_range, reachable_tensors
from engine_ext.placement import flat_bits
from engine_ext.startup.permuted import loaded_tensors
from engine_ext.startup.recomputed.module_rebuild import ModuleRebuild
from engine_ext.startup.recomputed.unprocessed_modules import (
    UnprocessedModule,
    storage_of,
)


def make_unprocessed_model(
    model: torch.nn.Module, states: Sequence[UnprocessedModule]
) -> torch.nn.Module:
    """Return a copy of a processed model with the modules in `states` as they were before.

    A parameter that processing only moves has the memory of the live one, and so has a buffer. If
    the live module has none like it, it has no data, and the loader is not seen to write to it.
    """
    copies = with_parts([(state.module, state.before) for state in states])
    for state in states:
        if state.moves:
            _share_memory(state)
    root = with_modules(model, copies)
    for state in states:
        _bind_loaders(state.before, copies)
    return root


def with_parts(
    copies: Sequence[tuple[torch.nn.Module, torch.nn.Module]],
) -> dict[int, torch.nn.Module]:
    """Return what replaces modules, given each with its copy, and the modules in them.

    Such a part can be found elsewhere in the model, too: attention has a projection of its block.
    If it has a copy of its own, that replaces it.

    Returns:
        The copies by the `id` of the original.
    """
    found = {id(module): copy for module, copy in copies}
    for module, copy in copies:
        for path, part in module.named_modules():
            found.setdefault(id(part), copy.get_submodule(path))
    return found


def with_modules(module: torch.nn.Module, replaced: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """Return a module with some replaced on or below it; itself if none is.

    The modules are shallow copies down to the replaced ones. `replaced` is by the `id` of the
    original; all others that were visited are added.
    """
    known = replaced.get(id(module))
    if known is not None:
        return known
    children = {
        n: c if c is None else with_modules(c, replaced) for n, c in module._modules.items()
    }
    copy = module
    if any(child is not module._modules[name] for name, child in children.items()):
        copy = object.__new__(type(module))
        vars(copy).update(vars(module), _modules=children)
    replaced[id(module)] = copy
    return copy


def _share_memory(state: UnprocessedModule) -> None:
    """Give the parameters and buffers before processing the memory that the live ones have."""
    live = dict(loaded_tensors(state.module))
    for name, tensor in list(loaded_tensors(state.before)):
        now = live.get(name)
        if now is None or (now.numel(), now.dtype) != (tensor.numel(), tensor.dtype):
            continue
        data = now.detach()
        view = data.as_strided(tensor.shape, tensor.stride(), data.storage_offset())
        _replace(state.before, tensor, view)


def _replace(module: torch.nn.Module, tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Put a tensor with other memory in the place of one, under all its names, alike otherwise."""
    new = data
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(data, requires_grad=False)
        new.__class__ = type(tensor)
        vars(new).update(vars(tensor))
    for part in module.modules():
        registries: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for registry in registries:
            for name in [name for name, value in registry.items() if value is tensor]:
                registry[name] = new


def share_views(model: torch.nn.Module, states: Iterable[UnprocessedModule]) -> None:
    """Let unprocessed weights be the memory of live views of them.

    Mamba's mixer keeps such a view of its convolution's weight. A tensor of the module itself is
    none: it is what processing made.
    """
    views: dict[StorageWeakRef, list[torch.Tensor]] = {}
    for _, _, _, view in reachable_tensors(model):
        if not isinstance(view, torch.nn.Parameter):  # it would have a name of its own
            views.setdefault(storage_of(view), []).append(view)
    for state in states:
        own = {id(tensor) for _, _, _, tensor in reachable_tensors(state.module)}
        for name, parameter in list(state.weights()):
            storage, offset = state.memory[name]
            others = [v for v in views.get(storage, ()) if id(v) not in own]
            if others:
                shared = torch.empty(0, dtype=parameter.dtype, device=others[0].device)
                memory = others[0].untyped_storage()
                shared.set_(memory, offset, parameter.shape, parameter.stride())
                if torch.equal(flat_bits(shared).to(parameter.device), flat_bits(parameter)):
                    _replace(state.before, parameter, shared)
                    state.devices.pop(name, None)


def share_in_place(rebuild: ModuleRebuild, index: StorageIndex) -> int:
    """Let unprocessed weights be live memory where processing leaves a tensor as it is.

    So a tied tensor stays tied, and takes no memory of its own. All ranks must call it.

    Args:
        index: of the live model.

    Returns:
        The bytes that the unprocessed weights take less.
    """
    state, freed = rebuild.state, 0
    weights = dict(state.weights())
    for name, live in rebuild.find_in_place():
        if name in state.in_place:
            continue
        own = address_range(live)
        if all((entry.start, entry.end) == own for entry in index.overlapping(live)):
            _replace(state.before, weights[name], live.detach())
            state.devices.pop(name, None)
            state.in_place.add(name)
            freed += live.nbytes
    return freed


def _bind_loaders(module: torch.nn.Module, copies: dict[int, torch.nn.Module]) -> None:
    """Bind what the parameters keep of live modules' methods to the copies."""
    for parameter in module.parameters():
        for name, value in list(vars(parameter).items()):
            if isinstance(value, MethodType) and id(value.__self__) in copies:
                vars(parameter)[name] = MethodType(value.__func__, copies[id(value.__self__)])
