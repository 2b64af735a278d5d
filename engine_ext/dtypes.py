"""Convert between the three names of an element type.

A dtype is written ``bfloat16`` in a manifest, ``BF16`` in a safetensors header and
``torch.bfloat16`` in a model. Values are moved and compared as integers of the same width, so that
a NaN, a -0.0 and an fp8 pattern are all just bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

# manifest name -> (safetensors code, torch dtype)
_TABLE: Final[dict[str, tuple[str, torch.dtype]]] = {
    "float64": ("F64", torch.float64),
    "float32": ("F32", torch.float32),
    "float16": ("F16", torch.float16),
    "bfloat16": ("BF16", torch.bfloat16),
    "float8_e4m3fn": ("F8_E4M3", torch.float8_e4m3fn),
    "float8_e5m2": ("F8_E5M2", torch.float8_e5m2),
    "float8_e8m0fnu": ("F8_E8M0", torch.float8_e8m0fnu),
    "int64": ("I64", torch.int64),
    "int32": ("I32", torch.int32),
    "int16": ("I16", torch.int16),
    "int8": ("I8", torch.int8),
    "uint64": ("U64", torch.uint64),
    "uint32": ("U32", torch.uint32),
    "uint16": ("U16", torch.uint16),
    "uint8": ("U8", torch.uint8),
    "bool": ("BOOL", torch.bool),
}

SAFETENSORS_CODE: Final[dict[str, str]] = {name: code for name, (code, _) in _TABLE.items()}
NAME_OF_CODE: Final[dict[str, str]] = {code: name for name, code in SAFETENSORS_CODE.items()}
TORCH_DTYPE: Final[dict[str, torch.dtype]] = {name: dtype for name, (_, dtype) in _TABLE.items()}
NAME_OF_TORCH: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPE.items()}

_BITS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BITS_DTYPE: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(_BITS[dtype.itemsize]).newbyteorder("<") for name, dtype in TORCH_DTYPE.items()
}
_TORCH_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    """Return the manifest name of a dtype; torch's own if it is in no manifest."""
    return NAME_OF_TORCH.get(dtype, str(dtype).removeprefix("torch."))


def itemsize(name: str) -> int:
    """Return the bytes of one element of a manifest dtype; KeyError if it is unknown."""
    return TORCH_DTYPE[name].itemsize


def bits_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian numpy unsigned integer dtype as wide as a manifest dtype."""
    return _BITS_DTYPE[name]


def torch_bits_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the torch integer dtype as wide as `dtype` that index operators support."""
    return _TORCH_BITS[dtype.itemsize]
