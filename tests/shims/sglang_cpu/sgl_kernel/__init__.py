"""Stands for SGLang's kernels, which have no CPU build on the package index.

SGLang imports them always and calls them where they are faster; what is called here raises, but for
the few that are in `chains`.
"""

from __future__ import annotations

from typing import Any

from sgl_kernel import chains


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    if name in vars(chains):
        return vars(chains)[name]

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} needs SGLang's kernels, which are not installed")

    return missing
