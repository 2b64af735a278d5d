"""The digest by PyTorch's operators, on the CPU; `tests/unit/kernels` has the kernel."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.format import digest_on_device
from engine_ext.format.digest import Digest, tensor_digest
from engine_ext.format.digest_on_device import device_digest
from engine_ext.kernels.gather_scatter import signed
from tests.unit.format.test_digest import GOLDEN, NAME, UNSIGNED, random_values

pytestmark = pytest.mark.slow

# No example database: a test must leave nothing behind in the working tree.
PROPERTY = settings(deadline=None, database=None, max_examples=50)
WIDTHS = pytest.mark.parametrize("width", UNSIGNED)


@pytest.mark.parametrize(("name", "indices", "values", "width", "expected"), GOLDEN)
def test_golden(
    name: str, indices: list[int], values: list[int], width: int, expected: str
) -> None:
    patterns = signed(np.array(values, UNSIGNED[width]))
    assert device_digest(name, patterns, torch.tensor(indices)).hex() == expected


@WIDTHS
@PROPERTY
@given(size=st.integers(0, 60), start=st.sampled_from([0, 3, 1020, 2**40 + 1]), data=st.data())
def test_the_device_digests_what_the_host_does(
    width: int, size: int, start: int, data: st.DataObject
) -> None:
    values = random_values(size, width, data.draw(st.integers(0, 1000)))
    places = np.array(sorted(data.draw(st.sets(st.integers(0, 2**50), min_size=size))), np.int64)
    places = places[:size]
    with mock.patch.object(digest_on_device, "_CHUNK", data.draw(st.sampled_from([7, 1024]))):
        dense = device_digest(NAME, signed(values), start=start)
        sparse = device_digest(NAME, signed(values), torch.from_numpy(places))
    assert dense == tensor_digest(NAME, values, start=start)
    assert sparse == tensor_digest(NAME, values, places)


def test_a_box_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first one on a device: boxes are digested in pauses."""
    values = random_values(50, 2, 1)
    expected = tensor_digest("", values)
    bits = signed(values)
    assert device_digest("", bits) == expected
    monkeypatch.setattr(torch, "from_numpy", mock.Mock(side_effect=AssertionError("uploaded")))
    assert device_digest("", bits) == expected


@WIDTHS
def test_nothing_is_zero(width: int) -> None:
    assert device_digest(NAME, signed(np.empty(0, UNSIGNED[width]))) == Digest.ZERO
