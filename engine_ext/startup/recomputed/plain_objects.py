"""Recognise objects that a rebuild compares part by part, in place of replacing them as a whole.

Processing can make an object that holds tensors, such as a kernel with its quantisation's scales.
The live object must stay: compiled code and captured graphs have its tensors. Where it holds
nothing but tensors and values, its tensors are written to like a module's own.
"""

from __future__ import annotations

from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch

from engine_ext.model import PLAIN


class _Plain:
    pass


# The layout of an object whose class and all of its bases are written in Python, without slots: any
# other has a part that no attribute shows.
_LAYOUT: Final = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")
_OTHERS: Final = (*PLAIN, type, FunctionType, MethodType, ModuleType, torch.Tensor, torch.nn.Module)


def is_plain(value: object) -> bool:
    """Return whether an object has no state but its attributes.

    One whose class has a finalizer stands for something outside of Python.
    """
    kind = type(value)
    return (
        all(getattr(kind, name) == getattr(_Plain, name) for name in _LAYOUT)
        and not isinstance(value, _OTHERS)
        and not hasattr(kind, "__del__")
    )


def opaque_part(live: object, new: object, path: str = "") -> str | None:
    """Return the path of a first part of two plain objects that cannot be compared, or None.

    That is a part of other kinds than tensors, modules, values, containers and plain objects, if
    it is not the same object in both. Parts of different kinds are left to the comparison.
    """
    seen: set[tuple[int, int]] = set()

    def visit(live: Any, new: Any, path: str) -> str | None:
        if live is new or type(live) is not type(new) or (id(live), id(new)) in seen:
            return None
        seen.add((id(live), id(new)))
        if isinstance(live, (*PLAIN, torch.Tensor, torch.nn.Module)):
            return None
        if isinstance(live, MethodType) and live.__func__ is new.__func__:
            return visit(live.__self__, new.__self__, f"{path}.__self__")
        if isinstance(live, (set, frozenset)):
            return None if all(isinstance(item, PLAIN) for item in live | new) else path
        if isinstance(live, (list, tuple)):
            parts = [(f"{path}[{n}]", *both) for n, both in enumerate(zip(live, new, strict=False))]
        elif isinstance(live, dict):
            parts = [(f"{path}[{k!r}]", live[k], new[k]) for k in live.keys() & new.keys()]
        elif is_plain(live):
            both = vars(live).keys() & vars(new).keys()
            parts = [(f"{path}.{name}", vars(live)[name], vars(new)[name]) for name in both]
        else:
            return path
        found = (visit(one, other, inner) for inner, one, other in parts)
        return next((inner for inner in found if inner is not None), None)

    return visit(live, new, path)
