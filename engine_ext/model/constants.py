"""What hangs on a model before its weights are loaded: none of it is made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from engine_ext.derived.find import Constants, is_constant


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
