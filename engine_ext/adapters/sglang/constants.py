"""What hangs on a model of SGLang before its weights are loaded: none of it is made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from engine_ext.derived import Constants, is_constant


class ConstantsWatch:
    """Remembers a model's constants between its making and its loading; use it around `load`.

    Only the first model that is made meanwhile counts.
    """

    def __init__(self) -> None:
        self._constants: Constants | None = None
        self._original: Callable[..., Any] | None = None

    def __enter__(self) -> ConstantsWatch:
        from sglang.srt.model_loader import loader

        original = loader._initialize_model
        self._original = original

        @functools.wraps(original)
        def initialize_model(*args: Any, **kwargs: Any) -> Any:
            model = original(*args, **kwargs)
            if self._constants is None:
                self._constants = Constants(model)
            return model

        loader._initialize_model = initialize_model
        return self

    def __exit__(self, *error: object) -> None:
        from sglang.srt.model_loader import loader

        loader._initialize_model = self._original

    def known(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor, by its path in the model, is known not to be made of weights.

        A loader that makes its model by other means leaves only the kinds of `is_constant`.
        """
        if is_constant(path, tensor):
            return True
        return self._constants is not None and self._constants(path, tensor)
