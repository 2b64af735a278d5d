"""List a module's reachable objects that are neither tensors nor made of parts, like numbers."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import numpy as np
import torch

from engine_ext.model.module_walk import walk

# Values that are compared by ``==``.
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)


def reachable_leaves(module: torch.nn.Module) -> dict[str, Any]:
    """Return numbers, strings and other objects without parts that a module reaches, by path.

    Those on the module, on its submodules, and on their parameters and buffers. Left out are
    tensors, modules, classes and plain functions.
    """
    found: dict[str, Any] = {}
    seen: dict[int, int] = {}
    tensorless: dict[int, int] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            place = f"{path}.{name}".lstrip(".")
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    marks = {} if tensor is None else vars(tensor)
                    walk(marks, f"{path}.{key}".lstrip("."), seen, tensorless, leaves=found)
            elif name != "_modules":
                walk(value, place, seen, tensorless, leaves=found)
    return found


def leaves_of(value: object) -> dict[str, Any]:
    """Return the objects without parts that an object reaches; see `reachable_leaves`."""
    found: dict[str, Any] = {}
    walk(value, "", {}, {}, leaves=found)
    return found


def same_leaf(one: object, other: object) -> bool:
    """Return whether two objects without parts are equal.

    Numbers, strings, numpy's arrays, and tuples and frozen sets of these are compared by value,
    other objects by identity.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):  # 0.0 is not -0.0, and NaN is NaN
        return repr(one) == repr(other)
    if isinstance(one, (np.ndarray, np.generic)) and isinstance(other, (np.ndarray, np.generic)):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and one.dtype.kind not in "OV" and one.tobytes() == other.tobytes()
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same_leaf, one, other))
    if isinstance(one, frozenset):
        return one == other and all(isinstance(item, PLAIN) for item in one)
    return isinstance(one, PLAIN) and bool(one == other)
