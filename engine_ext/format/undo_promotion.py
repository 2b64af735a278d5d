"""Undo the type promotion of values that slime concatenates.

slime concatenates params of several dtypes, which torch promotes to a common one. Only a promotion
to a dtype that holds every value of the narrow one can be undone. For any other (int32 to
bfloat16), and for any value that does not convert back bit by bit, the sender's bytes are unknown.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.dtypes import TORCH_DTYPE, bits_dtype, itemsize, torch_bits_dtype
from engine_ext.errors import MalformedPart
from engine_ext.kernels import typed

# wide dtype -> the narrower ones all of whose values it holds
_BYTES: Final = frozenset({"int8", "uint8", "bool"})
_FLOAT16: Final = _BYTES | {"float8_e4m3fn", "float8_e5m2"}
_BFLOAT16: Final = _FLOAT16 | {"float8_e8m0fnu"}
_FLOAT32: Final = _BFLOAT16 | {"bfloat16", "float16", "int16"}
_HOLDS: Final[dict[str, frozenset[str]]] = {
    "float16": _FLOAT16,
    "bfloat16": _BFLOAT16,
    "float32": _FLOAT32,
    "float64": _FLOAT32 | {"float32", "int32"},
    "int16": _BYTES,
    "int32": _BYTES | {"int16"},
    "int64": _BYTES | {"int32", "int16"},
}


def narrow_values(values: NDArray[Any], wide: str, dtype: str, tensor: str) -> NDArray[Any]:
    """Return the bit patterns of one param's values in its own dtype, unsigned ints [n].

    Args:
        values: Unsigned ints of the width of `wide`, [n]. The result is a view of them if they are
            the param's own bytes (the same dtype, or a one-byte dtype in a uint8 tensor).
        wide, dtype: Manifest names of the values tensor's dtype, and of the param's.
        tensor: The param's name, for the message.

    Raises:
        MalformedPart: `wide` does not hold every value of `dtype`, or a value does not convert
            back exactly. A NaN does so only from bfloat16 in float32, which is a shift; other
            conversions change its payload.
    """
    if wide == dtype or (wide == "uint8" and itemsize(dtype) == 1):
        return values
    if dtype not in _HOLDS.get(wide, ()):
        raise MalformedPart(f"{wide} values cannot carry a {dtype} param", tensor=tensor)
    if (wide, dtype) == ("float32", "bfloat16"):
        exact = not (values & np.uint32(0xFFFF)).any()
        narrow = (values >> np.uint32(16)).astype(bits_dtype(dtype))
    else:
        narrow, exact = _round_trip(typed(values, TORCH_DTYPE[wide]), dtype)
    if not exact:
        raise MalformedPart(
            f"a {wide} value is not exactly one of the param's {dtype}", tensor=tensor
        )
    return narrow


def _round_trip(values: torch.Tensor, dtype: str) -> tuple[NDArray[Any], bool]:
    narrow = values.to(TORCH_DTYPE[dtype])
    bits = torch_bits_dtype(values.dtype)
    exact = torch.equal(narrow.to(values.dtype).view(bits), values.view(bits))
    if values.dtype.is_floating_point:
        exact = exact and not bool(values.isnan().any())
    raw = narrow.view(torch_bits_dtype(narrow.dtype)).numpy()
    return raw.view(bits_dtype(dtype)), exact
