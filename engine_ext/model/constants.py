"""Recognise tensors on a model that are not computed from its weights.

A tensor that no checkpoint tensor is loaded into might still have been computed from one (see
`engine_ext.startup.derived.find`). Two things show that it was not:

- its kind: rotary tables, key-value caches, integer tables and the like (`is_constant`);
- its history: it was on the model, with the same bits, before any weight was loaded
  (`Constants`, which `ConstantsWatch` fills in between the model's construction and its loading).
  Equal bits prove nothing if it might be a copy of a bias of zeros and was written to since.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch

from engine_ext.model.fingerprint import hash_tensor
from engine_ext.model.module_walk import reachable_tensors

Known = Callable[[str, torch.Tensor], bool]
"""Whether a tensor, given with its path in the model, is known not to be computed from weights."""

_ROTARY: Final = re.compile(
    r"(^|\.)(_?(long_short_)?cos_sin_cache(_cast)?|((original|long|short)_)?inv_freq"
    r"|(cos|sin)_cached(_total)?|_?freqs_(cis|cached))(\[\d+\])*$"
    # TurboQuant's rotations and levels, of the size of a head.
    r"|(^|\.)_tq_(PiT?|Pi_half|centroids|midpoints)$"
    # Qwen2.5-VL's, by the image's size.
    r"|(^|\.)_rope_by_thw_cache\W"
)
_CACHE: Final = re.compile(
    r"(^|\.)(kv_cache|_?[kv](_scale)?_cache)(\[\d+\])*$"
    r"|(^|\.)hisparse_cache(\.|$)"  # vLLM's, of MLA layers, an object with several
    r"|(^|\.)_uq_[kv]full_buf$"
)
_TABLES: Final = (torch.int64, torch.int32, torch.bool)
# Parameters with more elements are weights; no constant is that large.
_LARGE: Final = 1 << 16


def is_constant(path: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a kind that engines do not compute from weights.

    These are empty tensors, rotary tables, key-value caches, and one-dimensional integer tables.
    The `path` is that in the model.
    """
    if tensor.numel() == 0 or tensor.is_meta or _ROTARY.search(path) or is_cache(path):
        return True
    return tensor.dim() <= 1 and tensor.dtype in _TABLES


def is_default(tensor: torch.Tensor) -> bool:
    """Return whether a constructor has filled a tensor with one number.

    Scales and zero points that a checkpoint can omit have such defaults.
    """
    if tensor.numel() > _LARGE or not is_filled(tensor):
        return False
    # Zeros might be memory that nothing was written to.
    return tensor.numel() == 1 or bool(tensor.detach().flatten()[0].float())


def is_filled(tensor: torch.Tensor) -> bool:
    """Return whether all elements, at least one, are the same number."""
    if not tensor.numel() or tensor.is_meta:
        return False
    flat = tensor.detach().flatten()
    first = flat[0].float()  # fp8 numbers cannot be compared
    return bool(flat[-1].float() == first and (flat.float() == first).all())


def is_cache(path: str) -> bool:
    """Return whether a path in the model names a key-value cache."""
    return _CACHE.search(path) is not None


class Constants:
    """Hashes of the tensors on a model whose weights are not loaded yet."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._fingerprints: dict[str, str] = {}
        # How often those that might become copies of a weight were written to.
        self._writes: dict[str, tuple[weakref.ref[torch.Tensor], int, torch.device]] = {}
        for path, module, attribute, tensor in reachable_tensors(model):
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            if tensor.is_meta or (is_parameter and tensor.numel() > _LARGE):
                continue
            name = f"{path}.{attribute}".lstrip(".")
            self._fingerprints[name] = hash_tensor(tensor)
            if not is_parameter and _can_equal_weight(tensor, module):
                self._writes[name] = weakref.ref(tensor), tensor._version, tensor.device

    def __call__(self, path: str, tensor: torch.Tensor) -> bool:
        """Return whether the tensor was there before the weights were, and is as it was."""
        before = self._fingerprints.get(path)
        if before is None or before != hash_tensor(tensor):
            return False
        if path not in self._writes:
            return True
        known, writes, device = self._writes[path]
        # Engines move whole models to another device, which replaces their buffers.
        moved = known() is not tensor and tensor.device != device
        return moved or (known() is tensor and tensor._version == writes)


def _can_equal_weight(tensor: torch.Tensor, module: torch.nn.Module) -> bool:
    """Return whether a weight of a module can have the elements of a tensor by chance.

    These are several floating-point numbers, all the same. Engines fill single ones again, the
    scales of their KV caches.
    """
    if tensor.numel() < 2 or not tensor.is_floating_point() or tensor.is_inference():
        return False
    if all(parameter.shape != tensor.shape for parameter in module.parameters()):
        return False
    return is_filled(tensor)


class ConstantsWatch:
    """Context manager that fingerprints a model between its construction and its loading.

    Only the first model constructed in the block counts (a draft model is constructed later). The
    engine's function `name` in `module`, which constructs it, is replaced during the block.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._name = module, name
        self._original: Callable[..., Any] = getattr(module, name)
        self._constants: Constants | None = None

    def __enter__(self) -> ConstantsWatch:
        original = self._original

        @functools.wraps(original)
        def make_model(*args: Any, **kwargs: Any) -> Any:
            model = original(*args, **kwargs)
            if self._constants is None:
                self._constants = Constants(model)
            return model

        setattr(self._module, self._name, make_model)
        return self

    def __exit__(self, *error: object) -> None:
        setattr(self._module, self._name, self._original)

    def known(self, path: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is known not to be computed from weights.

        If the engine constructed its model by other means, only `is_constant` decides.
        """
        constants = self._constants
        return is_constant(path, tensor) or (constants is not None and constants(path, tensor))
