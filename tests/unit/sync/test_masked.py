from __future__ import annotations

import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_ext.conformance.toy_models import PlainCopy, RowShard, SetItem, ToyModel, Widened
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.format import ParamDelta
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.segments import Placed, Status
from engine_ext.sync.delta_applier import DeltaApplier
from engine_ext.sync.masked import (
    apply_masked,
    chunks,
    densify,
    masked_copies,
    merge,
    refusal,
)
from engine_ext.sync.staged import Write
from tests.support.served_models import (
    PROPERTY,
    Served,
    base_checkpoint,
    bits,
    changed,
    delta_between,
    dense_delta,
    load,
    memory,
    parts_of,
    random_tensor,
    serve,
)
from tests.support.staged_writes import writes_of
from tests.support.thread_ranks import Shard, shards

NAN = float("nan")
NAN_BITS = 0x7FC1
COPY, FILL = torch.Tensor.copy_, torch.Tensor.fill_


def sparse(
    dtype: str, shape: tuple[int, ...], indices: list[int], values: list[float]
) -> ParamDelta:
    new = torch.tensor(values).to(TORCH_DTYPE[dtype])
    return ParamDelta("w", dtype, shape, np.array(indices, np.int64), bits(new))


# --- properties ---


def holds_new(served: Served, delta: ParamDelta) -> bool:
    """Return whether live memory holds the delta's new bits."""
    [part] = parts_of([delta])
    return all(write.holds() for write in writes_of(served.applier.stage(part)))


@pytest.mark.slow
@PROPERTY
@given(
    shard=shards(),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 1 << 20),
    chunk_bytes=st.sampled_from([1, 64, 1 << 20]),
    dense=st.booleans(),
)
def test_applied_is_freshly_loaded(
    shard: Shard, density: float, seed: int, chunk_bytes: int, dense: bool
) -> None:
    """Any shard, any density, any chunking: live memory ends as after a fresh load."""
    model = shard.model(number=3)
    base = base_checkpoint(model, seed)
    served = serve(model, base)
    target = {**base, **{n: changed(base[n], seed + 7, density) for n in ("w0", "w2")}}
    deltas = [
        dense_delta(n, target[n]) if dense and n == "w2" else delta_between(n, base[n], target[n])
        for n in base
    ]
    assert [refusal(d, served.placement[d.name]) for d in deltas] == [None] * 3
    apply_masked(served.model.load_weights, served.index, deltas, chunk_bytes)
    assert memory(served.model) == memory(load(model, target))
    assert all(holds_new(served, d) for d in deltas)


def test_reading_back_waits_for_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device runs it on the worker's stream, and threads read on streams of their own."""
    events: list[str] = []
    holds = Write.holds
    monkeypatch.setattr(DeltaApplier, "_synchronize", lambda self: events.append("waited"))

    def read(write: Write) -> bool:
        events.append("read")
        return holds(write)

    monkeypatch.setattr(Write, "holds", read)
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base, apply="masked")
    [part] = parts_of([delta_between(n, base[n], changed(base[n], 3)) for n in base])
    served.applier.write([served.applier.stage(part)])
    assert events[:2] == ["waited", "read"]


@pytest.mark.slow
@PROPERTY
@given(shard=shards(), seed=st.integers(0, 1 << 20), data=st.data())
def test_reading_back_sees_any_touched_element(
    shard: Shard, seed: int, data: st.DataObject
) -> None:
    model = shard.model()
    base = base_checkpoint(model, seed)
    served = serve(model, base)
    delta = delta_between("w0", base["w0"], changed(base["w0"], seed + 7))
    apply_masked(served.model.load_weights, served.index, [delta], 1 << 20)
    assert holds_new(served, delta)

    assert delta.indices is not None
    element = data.draw(st.integers(0, shard.on_rank().size - 1))
    touched = bool(np.isin(shard.on_rank()[element], delta.indices))
    live = served.model.w0.data[shard.live_index]
    live.view(torch.int16)[np.unravel_index(element, live.shape)] ^= 1
    assert holds_new(served, delta) is not touched


@PROPERTY
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 1 << 20))
def test_densify_puts_every_value_in_its_place(numel: int, nnz: int, seed: int) -> None:
    chosen = np.random.default_rng(seed).permutation(numel)[:nnz]
    indices = np.sort(chosen).astype(np.int64)
    values = bits(random_tensor((len(indices),), torch.bfloat16, seed))
    full = densify(ParamDelta("w", "bfloat16", (1, numel), indices, values))
    assert full.shape == (1, numel)
    assert bits(full)[indices].tolist() == values.tolist()
    assert full.isnan().sum() == numel - len(indices)


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12),
    st.integers(1, 120),
)
def test_chunks_keep_every_delta_and_the_limit(
    sizes: list[tuple[int, bool]], chunk_bytes: int
) -> None:
    deltas = [
        dense_delta(f"w{n}", torch.zeros(size, dtype=torch.bfloat16))
        if dense
        else ParamDelta(f"w{n}", "bfloat16", (size,), np.empty(0, np.int64), np.empty(0, np.uint16))
        for n, (size, dense) in enumerate(sizes)
    ]
    cut = list(chunks(deltas, chunk_bytes))
    assert sorted(d.name for chunk in cut for d in chunk) == sorted(d.name for d in deltas)
    for chunk in cut:
        assert chunk
        assert len(chunk) == 1 or sum(2 * d.numel for d in chunk) <= chunk_bytes
        assert len({d.indices is None for d in chunk}) == 1


@PROPERTY
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 1 << 20))
def test_merged_deltas_are_one_delta(owners: list[int], seed: int) -> None:
    """Element i of a tensor is sent by delta ``owners[i]`` (0: by none); together they are one."""
    values = bits(random_tensor((len(owners),), torch.bfloat16, seed))

    def part(wanted: Callable[[int], bool]) -> ParamDelta:
        indices = np.array([i for i, o in enumerate(owners) if wanted(o)], np.int64)
        return ParamDelta("w", "bfloat16", (len(owners),), indices, values[indices])

    split = [part(functools.partial(operator.eq, n)) for n in (3, 1, 2)]
    other = dense_delta("other", torch.zeros(2))
    [merged, kept] = merge([split[0], other, *split[1:]])
    whole = part(bool)
    assert kept is other
    assert (merged.name, merged.dtype, merged.shape) == (whole.name, whole.dtype, whole.shape)
    assert merged.indices is not None
    assert whole.indices is not None
    assert merged.indices.tolist() == whole.indices.tolist()
    assert merged.values.tolist() == whole.values.tolist()


# --- what it cannot carry ---


@functools.cache
def traced(dtype: str) -> Placed:
    model = type("M", (ToyModel,), {"shapes": {"w": (4,)}, "dtypes": {"w": TORCH_DTYPE[dtype]}})
    [tensor] = serve(model, base_checkpoint(model)).placement.values()
    return tensor


def placed(dtype: str, status: Status = Status.EXACT, reason: str = "") -> Placed:
    return dataclasses.replace(traced(dtype), status=status, reason=reason)


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPE))
def test_sparse_needs_a_dtype_with_nan_and_dense_none(dtype: str) -> None:
    new = random_tensor((4,), TORCH_DTYPE[dtype], 0)
    delta = ParamDelta("w", dtype, (4,), np.array([1]), bits(new)[1:2])
    maskable = dtype in ("float64", "float32", "float16", "bfloat16")
    assert (refusal(delta, placed(dtype)) is None) is maskable
    assert refusal(dense_delta("w", new), placed(dtype)) is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_new_value_that_is_nan_goes_dense_only(dtype: str) -> None:
    assert "NaN" in str(refusal(sparse(dtype, (4,), [0, 2], [1.0, NAN]), placed(dtype)))
    new = torch.tensor([1, NAN, 2, 3], dtype=TORCH_DTYPE[dtype])
    assert refusal(dense_delta("w", new), placed(dtype)) is None


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.EXACT])
@pytest.mark.parametrize("dense", [False, True])
def test_only_exact_tensors_are_carried(status: Status, dense: bool) -> None:
    delta = (
        dense_delta("w", torch.ones(4, dtype=torch.bfloat16))
        if dense
        else sparse("bfloat16", (4,), [0], [1.0])
    )
    assert refusal(delta, placed("bfloat16", status))
    assert refusal(delta, placed("bfloat16", Status.UNCERTIFIED, "because")) == "because"


def test_every_write_must_be_a_python_copy() -> None:
    served = serve(SetItem, base_checkpoint(SetItem))
    delta = sparse("bfloat16", (3, 4), [0], [1.0])
    assert "copy_" in str(refusal(delta, served.placement["weight"]))


# --- the replacement of Tensor.copy_ and Tensor.fill_ ---


@pytest.fixture
def live() -> ToyModel:
    return load(PlainCopy, base_checkpoint(PlainCopy))


@contextmanager
def originals_return() -> Iterator[None]:
    yield
    assert torch.Tensor.copy_ is COPY
    assert torch.Tensor.fill_ is FILL


def masks(live: ToyModel) -> bool:
    """Return whether a copy of NaN into live memory leaves it unchanged now."""
    before = bits(live.bias)
    with torch.no_grad():
        live.bias.copy_(torch.full((6,), NAN))
        unchanged = bool((bits(live.bias) == before).all())
        COPY(live.bias, torch.from_numpy(before.view(np.int16)).view(torch.bfloat16))
    return unchanged


def test_a_copy_overwrites_only_where_the_source_is_not_nan(live: ToyModel) -> None:
    with torch.no_grad(), originals_return(), masked_copies(StorageIndex(live)):
        result = live.bias.data[1:5].copy_(torch.tensor([1, NAN, 3, NAN]), non_blocking=True)
        assert result.data_ptr() == live.bias.data[1:].data_ptr()
    old = base_checkpoint(PlainCopy)["bias"].tolist()
    assert live.bias.tolist() == [old[0], 1, old[2], 3, old[4], old[5]]


def test_a_nan_that_is_live_stays_as_it_is(live: ToyModel) -> None:
    live.bias.data.view(torch.int16)[2] = NAN_BITS
    with torch.no_grad(), masked_copies(StorageIndex(live)):
        live.bias.copy_(torch.full((6,), NAN))
    assert bits(live.bias)[2] == NAN_BITS


def test_a_source_is_broadcast_and_converted(live: ToyModel) -> None:
    with torch.no_grad(), masked_copies(StorageIndex(live)):
        live.weight.copy_(torch.tensor([1.0, NAN, 2.0, NAN], dtype=torch.float64))
    old = base_checkpoint(PlainCopy)["weight"]
    assert (live.weight[:, ::2].cpu() == torch.tensor([1, 2])).all()
    assert (live.weight[:, 1::2].cpu() == old[:, 1::2]).all()


def test_a_fill_of_live_memory_does_nothing(live: ToyModel) -> None:
    before = memory(live)
    with torch.no_grad(), originals_return(), masked_copies(StorageIndex(live)):
        assert live.weight.data[2:].fill_(0).shape == (4, 4)
        live.bias.fill_(torch.tensor(3.0))
    assert memory(live) == before


def test_other_memory_is_written_as_ever(live: ToyModel) -> None:
    other = torch.ones(3)
    with torch.no_grad(), originals_return(), masked_copies(StorageIndex(live)):
        other.copy_(torch.tensor([NAN, 2, NAN]))
        assert other.isnan().tolist() == [True, False, True]
        assert other.fill_(5).tolist() == [5, 5, 5]


def test_dense_copies_are_not_masked_but_fills_still_do_nothing(live: ToyModel) -> None:
    with torch.no_grad(), originals_return(), masked_copies(StorageIndex(live), dense=True):
        live.weight.fill_(0)
        live.bias.copy_(torch.full((6,), NAN))
    assert live.bias.isnan().all()
    assert (live.weight.cpu() == base_checkpoint(PlainCopy)["weight"]).all()


def test_another_thread_is_not_masked(live: ToyModel) -> None:
    index = StorageIndex(live)
    seen: list[bool] = []
    with originals_return(), masked_copies(index):
        thread = threading.Thread(target=lambda: seen.append(masks(live)))
        thread.start()
        thread.join()
        assert masks(live)
        with torch.no_grad():
            filling = threading.Thread(target=lambda: live.scale.data.fill_(3))
            filling.start()
            filling.join()
    assert seen == [False]
    assert live.scale.item() == 3


def test_only_one_thread_masks_at_a_time(live: ToyModel) -> None:
    """A second one waits, and the originals are restored whichever of them ends last."""
    index = StorageIndex(live)
    entered, leave, order = threading.Event(), threading.Event(), []

    def second() -> None:
        entered.set()
        with masked_copies(index):
            order.append("second")
            assert masks(live)

    with originals_return():
        thread = threading.Thread(target=second)
        with masked_copies(index):
            thread.start()
            assert entered.wait(5)
            leave.wait(0.05)
            order.append("first")
            assert masks(live)
        thread.join(5)
    assert order == ["first", "second"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_puts_the_originals_back(live: ToyModel, error: type[BaseException]) -> None:
    with originals_return():
        with pytest.raises(error):
            with masked_copies(StorageIndex(live)):
                raise error
        assert not masks(live)
        with masked_copies(StorageIndex(live)):  # and the lock is free
            assert masks(live)


def test_a_failing_loader_puts_the_originals_back(live: ToyModel) -> None:
    def fails(weights: object) -> None:
        raise OSError("the loader")

    delta = sparse("bfloat16", (6,), [0], [1.0])
    for broken in (delta, dense_delta("bias", torch.ones(6, dtype=torch.bfloat16))):
        with originals_return(), pytest.raises(OSError, match="the loader"):
            apply_masked(fails, StorageIndex(live), [broken], 1)


# --- reading back ---


def test_reading_back_ignores_what_other_ranks_hold() -> None:
    base = base_checkpoint(RowShard)
    served = serve(RowShard, base)
    elsewhere = sparse("bfloat16", (6, 4), [0, 3], [9.0, 9.0])
    assert holds_new(served, replace(elsewhere, name="weight"))
    here = sparse("bfloat16", (6, 4), [0, 23], [9.0, 9.0])
    assert not holds_new(served, replace(here, name="weight"))


def test_reading_back_a_dense_delta_compares_nan_too() -> None:
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    new = torch.full((6,), NAN, dtype=torch.bfloat16)
    assert not holds_new(served, dense_delta("bias", new))
    COPY(served.model.bias.data, new)
    assert holds_new(served, dense_delta("bias", new))


def test_a_cast_is_never_carried() -> None:
    served = serve(Widened, base_checkpoint(Widened))
    assert refusal(sparse("bfloat16", (3, 4), [0], [1.0]), served.placement["weight"])
