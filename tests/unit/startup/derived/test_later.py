"""Copies and numbers that an engine makes of weights at a forward pass, after start-up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of, part_id
from tests.support.toy_quantised import Int8, Layer, Method, Model, linear_shapes
from tests.unit.sync.test_post_load import target_of

pytestmark = [pytest.mark.slow, pytest.mark.host_memory]


class CacheConfig:
    """Settings that modules share, and that the engine completes once it has warmed up."""

    def __init__(self) -> None:
        self.concurrency: float | None = None


class LRUCache:
    """Keeps its items in an attribute, as cachetools' classes do."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self._Cache__data = items


class Generating(Model):
    """Two blocks; what a forward pass of the first leaves is the test's."""

    shapes: ClassVar = linear_shapes("first", "second", "int8")

    def build(self, rank: int, ranks: int) -> None:
        self.first = Layer(Method(), rank=rank, ranks=ranks)
        self.second = Layer(Method(), rank=rank, ranks=ranks)
        self.int8 = Layer(Int8(), rank=rank, ranks=ranks)
        self.first.wide = None
        self.first.table = torch.zeros(2, 3, dtype=torch.int32)
        self.first.backend = SimpleNamespace(scale=1.0, softcap=30.0)
        self.first.config = CacheConfig()
        self.first.register_buffer("room", torch.full((4,), 7.0))
        self.first.register_buffer("sized", torch.full((1, 1), 7.0), persistent=False)
        self.first.register_buffer("pos_embed", places(2, 3), persistent=False)
        self.first.register_buffer("factors", places(2, 3), persistent=False)


def places(height: int, width: int) -> torch.Tensor:
    """A table of position embeddings, which an engine makes anew for a larger image."""
    return torch.sin(torch.outer(torch.arange(1.0, height + 1), torch.arange(1.0, width + 1)))


def single(first: Any) -> None:
    first.wide = first.weight.float()


def merged(first: Any) -> None:
    first.merged = torch.cat([first.weight.view(-1), first.bias])


def in_a_dict(first: Any) -> None:
    first.backend.cache = {"wide": [first.weight.float()]}


def in_other_room(first: Any) -> None:
    """In the place of a buffer that was a constant."""
    first.room = first.bias[:4].float()


def in_a_table(first: Any) -> None:
    first.pos_embed = first.weight.float()


def behind_a_table(first: Any) -> None:
    """Its beginning is as before."""
    first.factors = torch.cat([first.factors, first.weight[:2, :3].float()])


def in_a_placeholder(first: Any) -> None:
    first.sized = first.weight.float()


def number(first: Any) -> None:
    first.largest = float(first.weight.abs().max())


def number_inside(first: Any) -> None:
    first.backend.scale = float(first.bias[0])


MADE = {
    "first.wide": single,
    "first.merged": merged,
    "first.backend.cache['wide'][0]": in_a_dict,
    "first.room": in_other_room,
    "first.pos_embed": in_a_table,
    "first.factors": behind_a_table,
    "first.sized": in_a_placeholder,
    "first.largest": number,
    "first.backend.scale": number_inside,
}


WHEN = ["before the first status", "before any sync"]


@pytest.mark.parametrize(
    ("path", "when"),
    [
        *((path, "later") for path in MADE),
        *product(("first.room", "first.backend.scale"), WHEN),
    ],
)
def test_copy_of_first_forward_refuses_its_module(tmp_path: Path, path: str, when: str) -> None:
    """The other modules are updated as before; a full sync would have to update this one, too."""
    serving = Serving(Generating, tmp_path, ranks=2)
    make: Callable[[Any], None] = MADE[path]

    def generate() -> None:
        for model in serving.models:
            make(model.first)

    if when == "later":
        errors_of(serving.sync(target_of(serving)), none=True)
    elif when == "before any sync":
        serving.engine.status()
    generate()
    if when == "before the first status":
        assert {"first.weight", "first.bias"} == serving.engine.status()[0]["uncertified"].keys()
    before = serving.served()
    for full, names in ((False, ["first.weight"]), (True, list(serving.current))):
        message = refusal(serving.sync(target_of(serving, *names), full=full))
        assert message.startswith("first.")
        assert ("restart the engine" in message) == full
        assert f"the engine keeps {path} since it has generated" in message
    rest = {n: one for n, one in target_of(serving).items() if not n.startswith("first.")}
    message = refusal(serving.sync(rest, full=True))
    assert message.startswith("a full sync must cover every tensor; 2 are missing")
    assert "no full sync can replace it: restart the engine" in message
    assert serving.served() == before
    others = ["norm", "second.weight", "int8.weight", "int8.bias"]
    errors_of(serving.sync(target_of(serving, *others)), none=True)
    assert serving.reasons().keys() == {"first.weight", "first.bias"}


def what_is_no_copy(model: Any) -> None:
    """Attach values as engines do while they generate; none is computed from weights."""
    first = model.first
    first.kv_cache = [torch.rand(2, 3)]
    first.backend._k_scale_cache = torch.rand(3)
    first.cos_cached_total = torch.rand(4, 2)
    first.cos_sin_cache = torch.rand(4, 2)
    first._cos_sin_cache_cast = (first.cos_sin_cache, torch.rand(4, 2))
    first.long_inv_freq = torch.rand(4)
    first._freqs_cis = torch.rand(4, 2).to(torch.complex64)
    first._rope_by_thw_cache = LRUCache({(1, 2, 3): (torch.rand(4, 2), torch.rand(4, 2))})
    first._rot_pos_ids_cache = LRUCache({(2, 3): torch.tensor([[0, 1], [1, 0]])})
    first.visual_token_mask = torch.tensor([[True], [False]])
    first.view = first.weight.view(-1)
    first.table += 3
    first.room.copy_(torch.rand(4))
    first.register_buffer("pos_embed", places(4, 5), persistent=False)
    first.positions = torch.arange(4)
    first.steps = 12
    first.config.concurrency = 3.7
    first.backend.name = "flash"
    first.backend.seconds = 0.1234567
    first.backend.enabled = 1.0


@pytest.mark.parametrize("syncs", [0, 1])
def test_other_traces_of_a_forward_refuse_nothing(tmp_path: Path, syncs: int) -> None:
    serving = Serving(Generating, tmp_path)
    for _ in range(syncs):
        errors_of(serving.sync(target_of(serving)), none=True)
    what_is_no_copy(serving.models[0])
    for seed in range(3):
        errors_of(serving.sync(target_of(serving, seed=seed)), none=True)
    assert serving.reasons() == {}


def test_dummy_engine_is_searched_after_its_first_sync(tmp_path: Path) -> None:
    serving = Serving(Generating, tmp_path, dummy=True)
    errors_of(serving.sync(serving.base, full=True), none=True)
    number(serving.models[0].first)
    message = refusal(serving.sync(target_of(serving, "first.bias")))
    assert "first.largest since it has generated" in message


def in_a_buffer(first: Any) -> None:
    first.register_buffer("wider", first.weight.float())


@pytest.mark.parametrize("make", [single, merged, in_a_buffer])
def test_new_attribute_is_found_before_any_sync(
    tmp_path: Path, make: Callable[[Any], None]
) -> None:
    """Other copies are searched for before syncs 1, 2, 4, 8."""
    serving = Serving(Generating, tmp_path)
    for seed in range(2):
        errors_of(serving.sync(target_of(serving, seed=seed)), none=True)
    make(serving.models[0].first)
    before = serving.served()
    message = refusal(serving.sync(target_of(serving, "first.weight")))
    assert ("moved these" if make is in_a_buffer else "since it has generated") in message
    assert serving.served() == before


@pytest.mark.parametrize("syncs", [0, 2])
def test_staged_sync_is_refused_once_the_engine_keeps_a_copy(tmp_path: Path, syncs: int) -> None:
    """A forward pass makes it between the first part and the commit."""
    serving = Serving(Generating, tmp_path, ranks=2)
    for seed in range(syncs):
        errors_of(serving.sync(target_of(serving, seed=seed)), none=True)
    serving.engine.status()
    body = serving.body(target_of(serving, "first.weight"))
    errors_of(serving.stage(body), none=True)
    for model in serving.models:
        single(model.first)
    before = serving.served()
    message = refusal(serving.engine.commit(part_id(body)))
    assert "the engine keeps first.wide since it has generated" in message
    assert message.endswith("restart the engine")
    assert serving.served() == before


@pytest.mark.parametrize("copied", ["first", "second"])
def test_rollback_is_refused_once_the_engine_keeps_a_copy(tmp_path: Path, copied: str) -> None:
    """A copy of what the sync has not written keeps nothing from being rolled back."""
    serving = Serving(Generating, tmp_path, ranks=2)
    base = dict(serving.current)
    errors_of(serving.sync(target_of(serving, "first.weight", "int8.weight")), none=True)
    for model in serving.models:
        single(getattr(model, copied))
    before = serving.served()
    answers = serving.rollback(base)
    if copied == "first":
        message = refusal(answers)
        assert "the engine keeps first.wide since it has generated" in message
        assert message.endswith("restart the engine")
        assert serving.served() == before
    else:
        errors_of(answers, none=True)
        serving.assert_digests()


def test_rollback_of_a_rebuilt_module_is_refused_with_a_copy(tmp_path: Path) -> None:
    serving = Serving(Generating, tmp_path)
    base = dict(serving.current)
    errors_of(serving.sync(target_of(serving, "int8.weight")), none=True)
    serving.models[0].absorbed = serving.models[0].int8(torch.eye(6)) * 2
    before = serving.served()
    message = refusal(serving.rollback(base))
    assert message.startswith("int8.")
    assert "absorbed since it has generated" in message
    assert serving.served() == before
