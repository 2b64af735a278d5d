from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_ext.dtypes import TORCH_DTYPE, bits_dtype, itemsize
from engine_ext.errors import MalformedPart
from engine_ext.format.undo_promotion import narrow_values
from tests.support.cases import in_one_test

FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
INTS = ("int32", "int16", "int8", "uint8", "bool")
LOSSLESS = [
    *(("float64", narrow) for narrow in (*FLOATS, *INTS)),
    *(("float32", narrow) for narrow in (*FLOATS[1:], *INTS[1:])),
    *(("bfloat16", narrow) for narrow in (*FLOATS[3:], *INTS[2:])),
    *(("float16", narrow) for narrow in (*FLOATS[3:5], *INTS[2:])),
    *(("int64", narrow) for narrow in INTS),
    *(("int32", narrow) for narrow in INTS[1:]),
    *(("int16", narrow) for narrow in INTS[2:]),
]


def bits(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().view(bits_dtype(dtype))


def every_value(dtype: str) -> torch.Tensor:
    """All patterns of a one- or two-byte dtype (some of a wider one) but NaN."""
    if dtype == "bool":
        return torch.tensor([False, True])
    width = itemsize(dtype)
    if width <= 2:
        patterns = np.arange(256**width).astype(bits_dtype(dtype))
    else:
        patterns = np.random.default_rng(0).integers(0, 2**32, 10_000).astype(bits_dtype(dtype))
    tensor = torch.from_numpy(patterns.view(np.uint8)).view(TORCH_DTYPE[dtype])
    return tensor[~tensor.isnan()] if tensor.dtype.is_floating_point else tensor


@in_one_test(("wide", "dtype"), LOSSLESS)
def test_every_value_comes_back(wide: str, dtype: str) -> None:
    tensor = every_value(dtype)
    widened = bits(tensor.to(TORCH_DTYPE[wide]), wide)
    narrowed = narrow_values(widened, wide, dtype, "w")
    assert narrowed.dtype == bits_dtype(dtype)
    assert np.array_equal(narrowed, bits(tensor, dtype))
    widened.flags.writeable = False
    assert np.array_equal(narrow_values(widened, wide, dtype, "w"), narrowed)


@in_one_test("wide", sorted(TORCH_DTYPE))
@in_one_test("dtype", sorted(TORCH_DTYPE))
def test_other_pairs_are_refused(wide: str, dtype: str) -> None:
    ones = bits(torch.ones(3).to(TORCH_DTYPE[wide]), wide)
    same = wide == dtype or (wide == "uint8" and itemsize(dtype) == 1)
    if same or (wide, dtype) in LOSSLESS:
        assert narrow_values(ones, wide, dtype, "w").dtype == bits_dtype(dtype)
        assert narrow_values(ones[:0], wide, dtype, "w").size == 0
    else:
        with pytest.raises(MalformedPart, match="cannot carry") as caught:
            narrow_values(ones, wide, dtype, "w")
        assert caught.value.operands == {"tensor": "w"}


@in_one_test("dtype", ["bfloat16", "float8_e4m3fn", "int8", "uint8", "bool", "float64"])
def test_own_bytes_are_not_touched(dtype: str) -> None:
    patterns = np.arange(250, 256).astype(bits_dtype(dtype))
    assert narrow_values(patterns, dtype, dtype, "w") is patterns
    if itemsize(dtype) == 1:
        assert narrow_values(patterns, "uint8", dtype, "w") is patterns


def test_bfloat16_in_float32_keeps_nan_payloads() -> None:
    patterns = np.array([0x7F81, 0xFFC1, 0x7FFF, 0x8000, 0xFF80], np.uint16)
    widened = patterns.astype(np.uint32) << 16
    assert np.array_equal(narrow_values(widened, "float32", "bfloat16", "w"), patterns)


@in_one_test(
    ("wide", "dtype", "value"),
    [
        ("float32", "bfloat16", 1.00001),
        ("float32", "float16", 1e-9),
        ("float32", "float16", 65536.0),
        ("float32", "float8_e4m3fn", 449.0),
        ("float32", "float8_e8m0fnu", 3.0),
        ("float32", "float8_e8m0fnu", -1.0),
        ("float32", "int8", 128.0),
        ("float32", "int8", 0.5),
        ("float32", "int8", -0.0),
        ("float32", "int16", float("inf")),
        ("float32", "bool", 2.0),
        ("float64", "float32", 0.1),
        ("float64", "bfloat16", 1e300),
        ("int64", "int32", 2**31),
        ("int64", "bool", 2),
        ("int32", "uint8", -1),
        ("int32", "int8", 128),
        *(("float32", dtype, float("nan")) for dtype in ("float16", "float8_e4m3fn", "int8")),
        *(("float64", dtype, float("nan")) for dtype in ("float32", "bfloat16")),
    ],
)
def test_inexact_values_are_refused(wide: str, dtype: str, value: float) -> None:
    values = bits(torch.tensor([0, value, 0], dtype=TORCH_DTYPE[wide]), wide)
    with pytest.raises(MalformedPart, match="not exactly") as caught:
        narrow_values(values, wide, dtype, "w")
    assert caught.value.operands == {"tensor": "w"}
