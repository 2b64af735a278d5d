"""Boxes that cross the bus through pinned buffers; on the CPU the buffers are plain memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.kernels import HostLink, download_box, upload_box
from tests.support.served_models import PROPERTY

pytestmark = pytest.mark.slow

DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a box of a larger tensor on the device, and that tensor."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    margins = [draw(st.integers(0, 2)) for _ in sizes]
    shape = [size + margin for size, margin in zip(sizes, margins, strict=True)]
    dtype = draw(st.sampled_from(DTYPES))
    count = int(torch.tensor(shape).prod())
    whole = torch.arange(count).to(dtype).view(shape).to(DEVICE)
    box = whole[tuple(slice(m, m + n) for m, n in zip(margins, sizes, strict=True))]
    if draw(st.booleans()):
        box = box.transpose(0, -1)
    return box, whole


@PROPERTY
@given(boxes(), st.integers(8, 64))
def test_upload_writes_the_box_and_nothing_else(
    given_box: tuple[torch.Tensor, torch.Tensor], nbytes: int
) -> None:
    box, whole = given_box
    bits = torch.arange(100, 100 + box.numel()).to(box.dtype).view(box.shape)
    expected = whole.clone()
    expected.as_strided(box.shape, box.stride(), box.storage_offset()).copy_(bits)
    HostLink(DEVICE, nbytes).upload(box, bits)
    assert torch.equal(whole.cpu(), expected.cpu())


@PROPERTY
@given(boxes(), st.integers(8, 64))
def test_download_reads_the_box(given_box: tuple[torch.Tensor, torch.Tensor], nbytes: int) -> None:
    box, _ = given_box
    bits = torch.zeros(box.shape, dtype=box.dtype)
    HostLink(DEVICE, nbytes).download(box, bits)
    assert torch.equal(bits, box.cpu())


@pytest.mark.parametrize("size", [0, 1, 1 << 14])
def test_boxes_go_there_and_back(size: int) -> None:
    box, bits = torch.zeros(size, dtype=torch.int16).to(DEVICE), torch.arange(size).to(torch.int16)
    back = torch.zeros(size, dtype=torch.int16)
    upload_box(box, bits)
    download_box(box, back)
    assert torch.equal(back, bits)


def test_a_link_that_was_used_is_used_again() -> None:
    link = HostLink(DEVICE, 64)
    box, back = torch.zeros(1000, dtype=torch.int32).to(DEVICE), torch.empty(1000).int()
    for start in range(3):
        bits = torch.arange(start, start + 1000, dtype=torch.int32)
        link.upload(box, bits)
        link.download(box, back)
        assert torch.equal(back, bits)
