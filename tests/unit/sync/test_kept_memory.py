"""What a staged sync keeps alive on each of eight ranks, and what its undo log counts."""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engine_ext
from engine_ext.conformance.toy_models import ToyModel
from engine_ext.format import ParamDelta, decode_part, encode_part
from tests.support.rank_engine import Engine, errors_of, part_id
from tests.support.served_models import Served, dense_delta, serve_ranks
from tests.support.staged_writes import writes_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_collections")]

RANKS = 8
ROWS, COLUMNS = 768, 768  # of so many elements a part's own kilobytes are a tenth


def rank_of_eight(number: int) -> type[ToyModel]:
    """Return a model that holds an eighth: of one tensor by rows, of the other by columns."""

    class Shard(ToyModel):
        shapes = {"rows": (ROWS, COLUMNS), "columns": (ROWS, COLUMNS)}  # noqa: RUF012

        def build(self) -> None:
            self.rows = torch.nn.Parameter(torch.zeros(ROWS // RANKS, COLUMNS).bfloat16(), False)
            self.columns = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS // RANKS).bfloat16(), False)

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            dim, size = (0, ROWS // RANKS) if name == "rows" else (1, COLUMNS // RANKS)
            getattr(self, name).copy_(weight.narrow(dim, number * size, size))

    return Shard


@pytest.fixture(scope="module")
def ranks() -> list[Served]:
    generator = torch.Generator().manual_seed(1)
    base = {
        name: torch.randn((ROWS, COLUMNS), generator=generator).bfloat16()
        for name in ("rows", "columns")
    }
    return serve_ranks([rank_of_eight(r) for r in range(RANKS)], base, apply="scatter")


@functools.cache
def a_part(encoding: str) -> bytes:
    """Return a part that changes 5 % of both tensors."""
    random = np.random.default_rng(3)
    deltas = []
    for name in ("rows", "columns"):
        indices = np.flatnonzero(random.random(ROWS * COLUMNS) < 0.05)
        values = random.integers(0, 1 << 15, indices.size, dtype=np.uint16)
        deltas.append(ParamDelta(name, "bfloat16", (ROWS, COLUMNS), indices, values))
    return encode_part(deltas, encoding=encoding, current_version=1)


def allocated(make: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a function returns, and the bytes that stay allocated with it.

    Count only what it or a thread of the engine allocates: a thread of pytest-xdist can do so, too.
    """
    tracemalloc.start(100)
    try:
        made = make()
        gc.collect()
        kept = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    places = [__file__, str(Path(engine_ext.__file__).parent / "*")]
    ours = [tracemalloc.Filter(True, place, all_frames=True) for place in places]
    return made, sum(trace.size for trace in kept.filter_traces(ours).traces)


@pytest.mark.parametrize("encoding", ["indices", "deltas", "gap8_exp"])
def test_a_rank_keeps_its_own_share(ranks: list[Served], encoding: str) -> None:
    body = a_part(encoding)
    for served in (ranks[0], ranks[-1]):
        applier = served.applier
        applier.stage(decode_part(body))  # compiles, and fills caches

        def stage(applier: Any = applier) -> Any:
            return [applier.stage(decode_part(body))]

        staged, kept = allocated(stage)
        own = sum(param.counted for param in staged[0].params)
        share = own * (2 + 2 + 4)  # new and old bits, offset
        assert 0 < own < 1.3 * staged[0].nnz / RANKS
        assert share <= kept <= 1.2 * share
        assert kept <= 16 * own


def with_norm(number: int) -> type[ToyModel]:
    """Return `rank_of_eight` with a tensor that every rank holds."""

    class Shard(rank_of_eight(number)):  # type: ignore[misc]
        shapes = {"rows": (ROWS, COLUMNS), "columns": (ROWS, COLUMNS), "norm": (COLUMNS,)}  # noqa: RUF012

        def build(self) -> None:
            super().build()
            self.norm = torch.nn.Parameter(torch.zeros(COLUMNS).bfloat16(), False)

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            if name == "norm":
                self.norm.copy_(weight)
            else:
                super().load_one(name, weight)

    return Shard


def test_a_tensor_that_every_rank_holds_keeps_no_other() -> None:
    """The part is dense, in writable memory that an engine maps."""
    models = [with_norm(number) for number in range(RANKS)]
    base = {name: torch.ones(shape).bfloat16() for name, shape in models[0].shapes.items()}
    applier = serve_ranks(models, base, apply="scatter")[1].applier
    deltas = [dense_delta(name, tensor) for name, tensor in base.items()]
    body = encode_part(deltas, encoding="deltas", current_version=1, full=True)

    def staged() -> Any:
        return applier.stage(decode_part(bytearray(body)))

    staged()
    part, kept = allocated(staged)
    share = sum(write.new.nbytes for write in writes_of(part))
    assert share < 1.1 * len(body) / RANKS
    assert kept <= 1.2 * share


def test_the_undo_log_counts_what_is_alive(ranks: list[Served]) -> None:
    body = a_part("deltas")
    for served in (ranks[0], ranks[-1]):
        applier = served.applier

        def commit(applier: Any = applier) -> Any:
            staged = [applier.stage(decode_part(body))]
            applier.write(staged)
            return applier.finish(staged)

        applier.roll_back(commit())
        log, kept = allocated(commit)
        assert log.nbytes <= kept <= 1.2 * log.nbytes
        applier.roll_back(log)


@pytest.mark.parametrize("encoding", ["indices", "deltas", "gap8_exp"])
def test_eight_ranks_keep_their_shares(ranks: list[Served], encoding: str, tmp_path: Path) -> None:
    body = a_part(encoding)
    engine, one = Engine([served.applier for served in ranks], tmp_path), part_id(body)
    errors_of(engine.stage(one, body), none=True)  # compiles, and fills caches
    engine.call("abort")
    answers, kept = allocated(lambda: engine.stage(one, body))
    errors_of(answers, none=True)
    nnz = sum(delta.nnz for delta in decode_part(body).deltas)
    assert 8 * nnz <= kept <= 1.5 * 8 * nnz
    errors_of(engine.commit(one), none=True)
    for served in ranks:
        assert served.applier.digests == served.applier.scan()[0]
