"""The Triton kernels beside PyTorch's and numpy's operators; `test_kernels` says how it is run.

Under Triton's interpreter on the CPU (``TRITON_INTERPRET=1``), else on the CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delta_sender import diff_device
from delta_sender import snapshot as sender_snapshot
from delta_sender.diff_device import begin_device_compare
from delta_sender.snapshot import Snapshot
from engine_ext.dtypes import torch_bits_dtype
from engine_ext.kernels import gather_scatter as host_gather_scatter
from engine_ext.kernels import triton as device
from engine_ext.kernels.triton import block_sums, compact, gap_decode, gather_scatter, self_test
from engine_ext.placement import targets
from engine_ext.wire import (
    decode_part,
    device_digest,
    digest_on_device,
    encode_part,
    tensor_digest,
)
from engine_ext.wire.gap_streams import encode_gaps
from engine_ext.wire.positions import Positions, decode_positions, encode_positions
from tests.support.device import DEVICE
from tests.support.served_models import (
    attempt,
    base_checkpoint,
    changed,
    delta_between,
    load,
    memory,
    serve,
)
from tests.support.toy_models import ColumnShard, FusedQkv, RowShard, ToyModel

BLOCK = 16
QUICK = settings(deadline=None, database=None, max_examples=10)
BITS = [torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """Borders of blocks in little data; and the kernels, whatever the tensors are on.

    The host's loops are numpy's: they are not what is tested, and numba takes its time to start.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        for module in (compact, gap_decode, gather_scatter):
            patch.setattr(module, "BLOCK", BLOCK)
        for module in (device, diff_device, host_gather_scatter, targets, digest_on_device):
            patch.setattr(module, "runs_kernels", lambda device: True)
        yield


@contextmanager
def blocks(size: int) -> Iterator[None]:
    """The interpreter takes its time for each."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (compact, gap_decode, gather_scatter):
            patch.setattr(module, "BLOCK", size)
        yield


def random_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, (size + 1) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype)[:size].to(DEVICE)


# --- compare ---


@QUICK
@given(
    dtype=st.sampled_from(BITS),
    size=st.sampled_from([0, 1, 15, 16, 17, 33, 70]),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    start=st.sampled_from([0, 1, 1000]),
    seed=st.integers(0, 1 << 20),
)
@example(dtype=torch.int16, size=32, density=1.0, start=0, seed=0)
def test_every_changed_bit_is_found(
    dtype: torch.dtype, size: int, density: float, start: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    whole = random_bits(size + 1, dtype, seed)
    old, new = whole[1:], whole[1:].clone()  # the one not aligned as an allocation is
    chosen = torch.from_numpy(np.flatnonzero(random.random(size) < density)).to(DEVICE)
    flips = torch.from_numpy(random.integers(0, 8 * dtype.itemsize, chosen.numel())).to(DEVICE)
    new[chosen] ^= (torch.ones_like(flips) << flips).to(dtype)
    found = begin_device_compare(old, new, start, torch.int32)()
    expected = diff_device._compare_by_operators(old, new, start, torch.int32)
    assert found.indices.tolist() == (chosen + start).tolist()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        # -0.0 is not 0.0, a NaN is itself and no other NaN, subnormals are not flushed.
        (torch.bfloat16, [(0, 0x8000), (0x7FC0, 0x7FC0), (0x7FC0, 0x7FC1), (0, 1)]),
        (torch.float16, [(0, 0x8000), (0x7E00, 0x7E00), (0x7E00, 0xFE00), (0, 1)]),
        (torch.float32, [(0, 1 << 31), (0x7FC00000, 0x7FC00000), (0x7F800001, 0x7FC00001), (0, 1)]),
        (torch.float64, [(0, 1 << 63), (0x7FF8 << 48, 0x7FF8 << 48), (0x7FF8 << 48, 0xFFF8 << 48)]),
        (torch.float8_e4m3fn, [(0, 0x80), (0x7F, 0x7F), (0x7F, 0xFF), (0, 1)]),
        (torch.bool, [(0, 1), (1, 1)]),
    ],
)
def test_values_are_bits(dtype: torch.dtype, patterns: list[tuple[int, int]]) -> None:
    pairs = np.array(patterns * 5, f"u{dtype.itemsize}")  # over the border of a block
    old, new = (
        torch.from_numpy(np.ascontiguousarray(side).view(np.uint8)).view(torch_bits_dtype(dtype))
        for side in pairs.T
    )
    found = begin_device_compare(old.to(DEVICE), new.to(DEVICE), 0, torch.int64)()
    expected = np.flatnonzero(pairs[:, 0] != pairs[:, 1])
    assert found.indices.tolist() == expected.tolist()
    assert found.old.tolist() == old[expected].tolist()
    assert found.new.tolist() == new[expected].tolist()


def test_places_beyond_int32() -> None:
    old = torch.zeros(20, dtype=torch.int16, device=DEVICE)
    new = old.clone()
    new[[0, 19]] = 1
    found = begin_device_compare(old, new, 1 << 32, torch.int64)()
    assert found.indices.tolist() == [1 << 32, (1 << 32) + 19]


def test_what_cannot_be_compared() -> None:
    one = torch.zeros(3, dtype=torch.int16)
    for other in (one[1:], one.int(), one.view(1, 3), one.to("meta")):
        with pytest.raises(ValueError, match="not integers of one"):
            begin_device_compare(one, other, 0, torch.int32)


# --- elements ---


@QUICK
@given(
    dtype=st.sampled_from(BITS),
    offsets=st.sampled_from([torch.int32, torch.int64]),
    count=st.sampled_from([0, 1, 15, 16, 17, 40]),
    seed=st.integers(0, 1 << 20),
)
def test_elements_are_exchanged(
    dtype: torch.dtype, offsets: torch.dtype, count: int, seed: int
) -> None:
    flat, new = random_bits(61, dtype, seed)[1:], random_bits(count, dtype, seed + 1)
    order = np.random.default_rng(seed).permutation(60)[:count]
    where = torch.from_numpy(order).to(DEVICE, offsets)
    expected, old = flat.clone(), flat[where.long()]
    expected[where.long()] = new
    assert torch.equal(gather_scatter.swap(flat, where, new), old)
    assert torch.equal(flat, expected)
    gather_scatter.put(flat, where, old)
    expected[where.long()] = old
    assert torch.equal(flat, expected)


# --- gaps ---


def sent(indices: Sequence[int], encoding: str) -> Positions:
    raw, width = encode_positions(encoding, np.array(indices, np.int64))
    raw.flags.writeable = False
    return Positions(encoding, raw, width)


@QUICK
@given(
    encoding=st.sampled_from(["deltas", "gap8_exp"]),
    steps=st.lists(
        st.one_of(st.integers(1, 4), st.sampled_from([254, 255, 256, 257, 511, 65535, 65536])),
        min_size=1,
        max_size=40,
    ),
    shift=st.sampled_from([-3, 0, 1]),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
@example(encoding="gap8_exp", steps=[256] * 32, shift=0, bounds=(0, 32))
@example(encoding="gap8_exp", steps=[255 * 40], shift=0, bounds=(0, 1))
@example(encoding="gap8_exp", steps=[70000] * 3, shift=0, bounds=(1, 3))
@example(encoding="deltas", steps=[1, 1 << 17], shift=0, bounds=(0, 2))
def test_gaps_are_followed(
    encoding: str, steps: list[int], shift: int, bounds: tuple[int, int]
) -> None:
    indices = np.cumsum(steps)
    first, last = sorted(min(bound, len(steps)) for bound in bounds)
    positions = sent(indices.tolist(), encoding)
    decoded = decode_positions(*positions, int(indices[-1]) + 1)
    assert decoded.tolist() == indices.tolist()
    symbols, skip = positions.gaps() or pytest.fail("these are gaps")
    for dtype in (torch.int32, torch.int64):
        found = gap_decode.decode(symbols, skip, slice(first, last), shift, dtype, DEVICE)
        assert found.dtype == dtype
        assert found.tolist() == (decoded[first:last] - shift).tolist()


def test_symbols_of_two_bytes_and_far_offsets() -> None:
    """Planes put together, a gap over 2**32, and an int32 of what is beyond it on the way."""
    far = [65534, 200_000, (1 << 32) + 9, (1 << 33) + 5, (1 << 33) + 7]
    stream, width = encode_gaps(np.array(far))
    assert width == 2
    symbols, skip = Positions("gap8_ulp", stream, width).gaps() or pytest.fail("these are gaps")
    with blocks(1 << 15):
        found = gap_decode.decode(symbols, skip, slice(0, 5), 0, torch.int64, DEVICE)
        near = gap_decode.decode(symbols, skip, slice(3, 5), 1 << 33, torch.int32, DEVICE)
    assert found.tolist() == far
    assert near.tolist() == [5, 7]


def test_symbols_of_four_bytes_have_no_sign() -> None:
    far = [3, (1 << 31) + 9, (1 << 31) + 9 + (1 << 32) - 1]
    symbols, skip = sent(far, "deltas").gaps() or pytest.fail("these are gaps")
    assert symbols.itemsize == 4
    assert gap_decode.decode(symbols, skip, slice(0, 3), 0, torch.int64, DEVICE).tolist() == far


# --- digests ---


@QUICK
@given(
    dtype=st.sampled_from(BITS),
    size=st.sampled_from([0, 1, 1000, 1024, 1025, 3000, 9000]),
    start=st.sampled_from([0, 1, 1023, 1024, (1 << 33) + 1000]),
    kernels=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@example(dtype=torch.int16, size=40_000, start=7, kernels=True, seed=0)
@example(dtype=torch.int16, size=40_000, start=7, kernels=False, seed=0)
def test_a_device_digests_what_the_host_does(
    dtype: torch.dtype, size: int, start: int, kernels: bool, seed: int
) -> None:
    values = random_bits(size + 1, dtype, seed)[1:]
    with mock.patch.object(digest_on_device, "runs_kernels", return_value=kernels):
        found = device_digest("größe.重み", values, start=start)
    expected = tensor_digest("größe.重み", host_gather_scatter.host_bits(values.cpu()), start=start)
    assert found == expected


# --- the trial ---


def test_the_trial_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_SIZE", 150)
    with blocks(64):
        assert self_test.wrong(DEVICE) == []


@pytest.mark.parametrize(
    ("module", "function", "named"),
    [
        (compact, "write", "compare of"),
        (gather_scatter, "swap", "exchange of"),
        (gap_decode, "decode", "decode"),
        (block_sums, "dense", "digest"),
    ],
)
def test_the_trial_sees_what_is_wrong(
    module: Any, function: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(module, function)

    def off_by_one_bit(*arguments: Any) -> Any:
        result = whole(*arguments)
        (result if isinstance(result, torch.Tensor) else result[2])[-1] ^= 1
        return result

    monkeypatch.setattr(module, function, off_by_one_bit)
    monkeypatch.setattr(self_test, "_SIZE", 50)
    with blocks(64):
        found = self_test.wrong(DEVICE)
    assert found
    assert all(one.startswith(named) for one in found)


# --- as a receiver uses them ---


@pytest.mark.parametrize("digested", [True, False])
@pytest.mark.parametrize(
    ("model", "encoding"),
    [(RowShard, "gap8_exp"), (RowShard, "indices"), (ColumnShard, "deltas"), (FusedQkv, "deltas")],
)
def test_applied_and_taken_back(model: type[ToyModel], encoding: str, digested: bool) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    plan = served.applier.plan
    targets = {n: tuple(replace(t, host=None) for t in ts) for n, ts in plan.targets.items()}
    covered = plan.digested if digested else frozenset()
    served.applier.plan = replace(plan, targets=targets, digested=covered)
    served.applier.digests = served.applier.plan.scan()
    target = {name: changed(tensor, 7, 0.6) for name, tensor in base.items()}
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    body = encode_part(deltas, encoding=encoding, current_version=1)
    with mock.patch.object(gap_decode, "decode", wraps=gap_decode.decode) as decode:
        assert attempt(served, [decode_part(body)]) is None
    assert memory(served.model) == memory(load(model, target))
    # What is not one run in the checkpoint, as a column shard, is located on the host.
    runs = sum(t.locator.shift is not None for ts in targets.values() for t in ts)
    assert decode.call_count == (0 if encoding == "indices" else runs)


@pytest.mark.parametrize("kept_on", ["device", "host"])
def test_as_a_sender_uses_them(kept_on: str) -> None:
    held = {"w": torch.arange(99, dtype=torch.int32, device=DEVICE).to(torch.bfloat16)}
    snapshot = Snapshot(held.items(), "gap8_exp", kept_on)
    with (
        mock.patch.object(sender_snapshot, "is_on_device", return_value=True),
        mock.patch.object(diff_device, "_CHUNK_BYTES", 64),
    ):
        for places in ([0, 31, 32, 50, 98], [1, 31, 97]):
            new = held["w"].clone()
            new[places] = -1 - new[places]
            new[50] = float("nan")  # the second time it stays
            ((_, change),) = snapshot.read([("w", new)])
            assert change is not None
            assert change.indices is not None
            assert change.indices.tolist() == places
            snapshot.advance({"w": change})
            held = {"w": new}
        assert list(snapshot.read(held.items())) == [("w", None)]
