"""Stands for SGLang's kernels, which have no CPU build on the package index.

SGLang imports them always and calls them where they are faster; what is called here raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} needs SGLang's kernels, which are not installed")

    return missing
