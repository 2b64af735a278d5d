"""What hangs on a model before its weights are loaded: none of it is made of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch

from engine_ext.model.fingerprint import fingerprint
from engine_ext.model.module_walk import hanging


class ConstantsWatch:
    """Remembers a model's constants between its making and its loading; use it around the loading.

    Only the first model that is made meanwhile counts (a draft model is made after it).

    Args:
        module: the engine's module whose function makes the model.
        name: that function's name; it is replaced for the time of the watch.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module = module
        self._name = name
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
        """Whether a tensor, by its path in the model, is known not to be made of weights.

        A loader that makes its model by other means leaves only the kinds of `is_constant`.
        """
        if is_constant(path, tensor):
            return True
        return self._constants is not None and self._constants(path, tensor)


Known = Callable[[str, torch.Tensor], bool]


# Parameters of more elements are weights; no constant is that large.
_LARGE: Final = 1 << 16


_ROTARY: Final = re.compile(r"(^|\.)(cos_sin_cache|inv_freq|cos_cached|sin_cached)$")


_CACHE: Final = re.compile(r"(^|\.)(kv_cache|k_cache|v_cache)(\[\d+\])*$")


_TABLES: Final = (torch.int64, torch.int32, torch.bool)


class Constants:
    """Remembers what hangs on a model before its weights are loaded.

    Args:
        model: made, but not loaded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._fingerprints = {
            f"{path}.{attribute}".lstrip("."): fingerprint(tensor)
            for path, _, attribute, tensor in hanging(model)
            if not tensor.is_meta and not _is_weight(tensor)
        }

    def __call__(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor was there before the weights were, with the same bits."""
        before = self._fingerprints.get(path)
        return before is not None and before == fingerprint(tensor)


def is_constant(path: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that engines do not compute from weights.

    Args:
        path: its path in the model.
        tensor: it is read only where it has a single element.

    Those are: empty tensors, rotary tables, key-value caches, one-dimensional tables of integers,
    and single elements that are 0 or 1.
    """
    if tensor.numel() == 0 or tensor.is_meta:
        return True
    if _ROTARY.search(path) or is_cache(path):
        return True
    if tensor.dim() <= 1 and tensor.dtype in _TABLES:
        return True
    return tensor.numel() == 1 and not tensor.is_complex() and float(tensor) in (0.0, 1.0)


def is_cache(path: str) -> bool:
    """Whether a path in the model is that of a key-value cache, by its name."""
    return _CACHE.search(path) is not None


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor need not be remembered as a constant."""
    return isinstance(tensor, torch.nn.Parameter) and tensor.numel() > _LARGE
