"""The sender's copy of the weights: what differs from it, and how it follows commits."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from delta_sender.diff import compare as diff_host
from delta_sender.diff import snapshot
from delta_sender.diff.snapshot import Changes, Snapshot

pytestmark = pytest.mark.slow


def model(tensors: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    sizes = rng.integers(1, 300, tensors)
    bits = (rng.integers(-(1 << 15), 1 << 15, size, np.int16) for size in sizes)
    return {f"layers.{n}": torch.from_numpy(one).view(torch.bfloat16) for n, one in enumerate(bits)}


def changes(kept: Snapshot, tensors: dict[str, torch.Tensor]) -> Changes:
    return {key: change for key, change in kept.read(tensors.items()) if change is not None}


@pytest.mark.parametrize(
    ("ahead", "together"),
    [(1, 700), (1000, 1), (1000, 1 << 20), (1 << 20, 700), (1 << 20, 1 << 20)],
)
def test_many_small_tensors_are_compared_and_written(
    ahead: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many a thread gets at a time, and however far the comparison is ahead."""
    monkeypatch.setattr(snapshot, "_AHEAD", ahead)
    monkeypatch.setattr(snapshot, "_WRITTEN", together)
    monkeypatch.setattr(diff_host, "_CHUNK", together)
    rng = np.random.default_rng(0)
    tensors = model(30, rng)
    kept = Snapshot(tensors.items(), "gap8_ulp")
    assert changes(kept, tensors) == {}
    for _ in range(2):
        others = {}
        for name in sorted(tensors)[::2]:
            bits = tensors[name].view(torch.int16)
            others[name] = sorted(set(rng.integers(0, bits.numel(), 9).tolist()))
            bits[others[name]] ^= 1
        found = changes(kept, tensors)
        assert {key: one.nnz for key, one in found.items()} == {
            k: len(v) for k, v in others.items()
        }
        kept.advance(found)
        assert changes(kept, tensors) == {}
        for name, tensor in tensors.items():
            assert kept.image(name).values.tobytes() == tensor.view(torch.int16).numpy().tobytes()


def test_a_collection_that_makes_its_tensors_is_not_held() -> None:
    """Its names are checked first, which makes each tensor once more."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class Lazy(Collection[tuple[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name in ("a", "b", "c"):
                tensor = torch.ones(4)
                # The last of the earlier tensors can still be a variable of the iterating caller.
                assert all(one() is None for one in alive[:-1])
                alive.append(weakref.ref(tensor))
                yield name, tensor
                del tensor

        def __len__(self) -> int:
            return 3

        def __contains__(self, item: object) -> bool:
            return False

    held = Snapshot(((name, torch.zeros(4)) for name in "abc"), "deltas")
    read = held.read(Lazy())
    assert [key for key, change in read if change is not None] == ["a", "b", "c"]
    assert len(alive) == 6
    del read
    assert all(one() is None for one in alive)


class Subclass(torch.Tensor):
    """A subclass as frameworks have; it can have no memory of its own."""


@pytest.mark.parametrize("dense", [False, True])
def test_tensors_of_every_kind_are_compared_together(dense: bool) -> None:
    """Every element size, not contiguous, with a gradient, at odd addresses, of a subclass."""
    odd = torch.from_numpy(np.zeros(41, np.uint8)[1:].view(np.int16)).view(torch.bfloat16)
    tensors = {
        "bytes": torch.arange(50, dtype=torch.uint8),
        "wide": torch.arange(50, dtype=torch.float64),
        "turned": torch.arange(50, dtype=torch.bfloat16).reshape(5, 10).T,
        "parameter": torch.nn.Parameter(torch.arange(50, dtype=torch.float32)),
        "odd": odd,
        "subclass": torch.arange(50, dtype=torch.bfloat16).as_subclass(Subclass),
        "plain": torch.arange(50, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.0),
    }
    kept = Snapshot(tensors.items(), "gap8_ulp")
    for _ in range(2):
        with torch.no_grad():
            for tensor in tensors.values():
                tensor += 1 if dense else (torch.arange(tensor.numel()) == 7).view(tensor.shape)
        found = changes(kept, tensors)
        expected = {name: t.numel() if dense else 1 for name, t in tensors.items()}
        if not dense:
            del expected["scalar"]
        assert {name: change.nnz for name, change in found.items()} == expected
        kept.advance(found)
        assert changes(kept, tensors) == {}
        for name, tensor in tensors.items():
            bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
            assert kept.image(name).values.tobytes() == bits.numpy().tobytes()


def test_memory_that_is_exchanged_while_it_is_compared() -> None:
    """As by a generator that gathers a parameter into itself, and puts its shard back."""
    model = {f"w{n}": torch.nn.Parameter(torch.arange(40.0) + n) for n in range(5)}
    kept = Snapshot(model.items(), "gap8_ulp")

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.items():
            shard, whole = parameter.data, parameter.detach() + (torch.arange(40) == 3)
            parameter.data = whole
            del whole
            yield name, parameter
            parameter.data = shard[:0]

    found = {key: change for key, change in kept.read(gathered()) if change is not None}
    expected = {f"w{n}": [3.0 + n + 1] for n in range(5)}
    assert {k: c.decoded().new.view(np.float32).tolist() for k, c in found.items()} == expected


@pytest.mark.parametrize("numel", [8, diff_host._CHUNK])
def test_a_tensor_with_the_negative_bit_is_refused(numel: int) -> None:
    """Its memory holds the negated values."""
    kept = Snapshot([("w", torch.zeros(numel))], "gap8_ulp")
    with pytest.raises(RuntimeError, match="negative bit"):
        [*kept.read([("w", torch._neg_view(torch.ones(numel)))])]


@pytest.fixture
def sharded() -> Iterator[torch.Tensor]:
    """A tensor of FSDP2 on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("given", [list, iter])
def test_sharded_tensor_is_refused_by_name(sharded: torch.Tensor, given: type) -> None:
    """It has no memory of its own: on a GPU its address is 0."""
    kept = Snapshot([("w", torch.ones(8, 4))], "gap8_ulp")
    said = r"^w: a DTensor, .*named_tensors\(model, base\)"
    with pytest.raises(ValueError, match=said):
        [*kept.read(given([("w", sharded)]))]
    with pytest.raises(ValueError, match=said):
        Snapshot(given([("w", sharded)]), "gap8_ulp")
    assert changes(kept, {"w": torch.ones(8, 4)}) == {}


def test_tensor_without_values_is_named() -> None:
    base = {"a": torch.zeros(2), "b": torch.zeros(2)}
    meta = {**base, "b": torch.empty(2, device="meta")}
    with pytest.raises(ValueError, match="b: on the meta device, so it has no values"):
        Snapshot(meta.items(), "deltas_zstd")
    with pytest.raises(ValueError, match="b: on the meta device, so it has no values"):
        changes(Snapshot(base.items(), "deltas_zstd"), meta)
