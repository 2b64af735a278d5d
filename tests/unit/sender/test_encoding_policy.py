"""What ``auto`` picks, and that engines take it."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

from delta_sender import DeltaSender, MultiSender
from delta_sender.encode import part_builder
from delta_sender.encode.encoding_policy import (
    EncodingChoice,
    EncodingPolicy,
    ParamStats,
    _sizes,
    escaped_share,
)
from engine_ext.format import ParamDelta, encode_part
from scripts.bench import synthetic_weights
from tests.support.fake_engine import A, B, Engine, Handler, Model, client_of, model_of, train

BF16 = ParamStats(numel=1_000_000, nnz=20_000, width=2, floating=True, escaped=0.01)
SLOW, FAST = 20e6, 20e9


def auto(
    stats: ParamStats, speed: float, *, dense: bool = False, differences: bool = True
) -> EncodingChoice:
    return EncodingPolicy("auto", differences).choose(stats, dense, speed)


def test_few_bytes_on_a_slow_link_and_little_work_on_a_fast_one() -> None:
    assert auto(BF16, SLOW) == EncodingChoice("gap8_ulp", False)
    assert auto(BF16, FAST) == EncodingChoice("gap8_ulp", False, stored=True)
    assert auto(replace(BF16, escaped=None), FAST) == EncodingChoice("gap8_exp", False, stored=True)
    assert auto(replace(BF16, escaped=None), SLOW) == EncodingChoice("gap8_exp", False)
    assert auto(BF16, SLOW, differences=False) == EncodingChoice("gap8_exp", False)
    assert auto(BF16, SLOW, dense=True) == EncodingChoice("gap8_exp", True)
    assert auto(BF16, FAST, dense=True) == EncodingChoice("deltas", True)


@pytest.mark.parametrize(("gbit", "stored"), [(1, False), (10, False), (24, False), (25, True)])
def test_a_fast_link_is_not_waited_for_by_zstd(gbit: float, stored: bool) -> None:
    for density in (0.001, 0.02, 0.1):
        stats = replace(BF16, nnz=int(density * BF16.numel))
        assert auto(stats, gbit * 1e9 / 8).stored == stored
        assert not auto(stats, gbit * 1e9 / 8, dense=True).stored


@pytest.mark.parametrize("encoding", ["indices", "deltas", "deltas_zstd", "auto"])
def test_positions_reach_as_far_as_the_tensor(encoding: str) -> None:
    """Nobody knows before the change how large its gaps are."""
    policy = EncodingPolicy(encoding, differences=False)
    for numel in (1 << 33, 1 << 31):
        stats = ParamStats(numel=numel, nnz=1000, width=2, floating=True)
        for speed in (SLOW, 1e9, FAST):
            choice = policy.choose(stats, False, speed)
            indices = np.array([5, numel - 1])
            value = np.zeros(2, np.uint16)
            delta = ParamDelta("w", "bfloat16", (numel,), indices, value)
            encode_part([delta], encoding=choice.encoding, current_version=1)
    assert policy.sparsely(proven=False, numel=5).encoding == policy.empty


def test_differences_that_are_large_go_as_values() -> None:
    wide = replace(BF16, width=4, escaped=0.95)
    assert auto(wide, SLOW) == EncodingChoice("gap8_exp", False)
    assert auto(replace(wide, escaped=0.01), SLOW) == EncodingChoice("gap8_ulp", False)


def test_a_param_goes_dense_sooner_on_a_faster_link() -> None:
    def dense_from(speed: float) -> float:
        densities = [0.01 * percent for percent in range(1, 101)]
        stats = [replace(BF16, nnz=int(d * BF16.numel), escaped=None) for d in densities]
        picks = [auto(one, speed) for one in stats]
        first = next(number for number, pick in enumerate(picks) if pick.dense)
        assert all(pick.dense for pick in picks[first:])
        return densities[first]

    limits = [dense_from(speed) for speed in (SLOW, 125e6, 1e9, FAST)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > 0.6
    assert limits[-1] < 0.3


@functools.cache
def weights(numel: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """Return weights before and after a step that changes a share of them."""
    rng = np.random.default_rng(0)
    old = synthetic_weights.make_weights(numel, rng)
    return old, synthetic_weights.change(old, density, rng)


@pytest.mark.parametrize("density", [0.001, 0.02, 0.1, 0.5])
@pytest.mark.parametrize(
    ("encoding", "stored"),
    [
        ("deltas", False),
        ("gap8_exp", False),
        ("gap8_ulp", False),
        ("gap8_exp", True),
        ("gap8_ulp", True),
    ],
)
def test_the_reckoned_bytes_are_those_of_the_parts(
    density: float, encoding: str, stored: bool
) -> None:
    old, new = weights(500_000, density)
    deltas = synthetic_weights.deltas_of(old, new, 1)
    if encoding == "gap8_ulp":
        deltas = synthetic_weights.as_differences(deltas, old)
    part = encode_part(
        deltas, encoding=encoding, current_version=1, digest_part="0" * 32, stored=stored
    )
    moved = old != new
    stats = ParamStats(old.size, int(moved.sum()), 2, True, escaped_share(old[moved], new[moved]))
    reckoned = dict(_sizes(stats))[EncodingChoice(encoding, False, stored)]
    header = 8 + int.from_bytes(part[:8], "little")
    assert reckoned == pytest.approx(len(part) - header, rel=0.12)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_share_of_large_differences(width: int) -> None:
    small = np.array([1, 7, -7, -1], np.int64).astype(f"u{width}")
    large = np.array([8, -8, 100, -100], np.int64).astype(f"u{width}")
    for old in (0, 3, 2 ** (8 * width) - 3):
        base = np.full(4, old, f"u{width}")
        assert escaped_share(base, base + small) == 0.0
        both = np.concatenate([base + small, base + large])
        assert escaped_share(np.tile(base, 2), both) == 0.5
    assert escaped_share(small[:0], small[:0]) == 0.0


@pytest.mark.parametrize("encoding", ["gap8_exp", "gap8_ulp"])
@pytest.mark.parametrize("density", [0.7, 0.8, 0.9, 0.97, 1.0])
def test_of_many_changes_the_shorter_form_goes(density: float, encoding: str) -> None:
    old, new = weights(250_000, density)
    values = synthetic_weights.deltas_of(old, new, 1)
    sparse = synthetic_weights.as_differences(values, old) if encoding == "gap8_ulp" else values
    dense = [msgspec.structs.replace(values[0], indices=None, values=new)]
    sizes = [
        len(encode_part(sparse, encoding=encoding, current_version=1, digest_part="0" * 32)),
        len(encode_part(dense, encoding="gap8_exp", current_version=1)),
    ]
    moved = old != new
    stats = ParamStats(old.size, int(moved.sum()), 2, True, escaped_share(old, new), is_large=True)
    picked = EncodingPolicy(encoding).choose(stats, False, SLOW)
    chosen, other = (sizes[1], sizes[0]) if picked.dense else sizes
    assert chosen <= 1.02 * other
    assert EncodingPolicy(encoding).choose(stats, True, SLOW) == EncodingChoice("gap8_exp", True)
    assert EncodingPolicy("deltas").choose(stats, False, SLOW) == EncodingChoice("deltas", True)


def test_without_packing_dense_tensors_are_sent_dense() -> None:
    """Whatever the gaps are on average: one that is long makes all of them long."""
    model = {"w": torch.zeros(200_000, dtype=torch.bfloat16)}
    engine = Engine.of(model)
    sender = sender_of(engine, model, encoding="deltas")
    model["w"].view(torch.int16)[:90_000] += 1
    model["w"].view(torch.int16)[-1] += 1
    report = sender.sync(model.items())
    assert report.picked == {"deltas, dense": 1}
    assert report.wire_bytes < 402_000


def test_a_large_tensor_that_is_kept_dense_goes_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(torch.bfloat16, numel=4000)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    for limit, sent in ((8000, "gap8_ulp"), (7999, "gap8_exp, dense")):
        monkeypatch.setattr(part_builder, "_LARGE", limit)
        set_speed(sender, SLOW)
        train(model, limit, density=0.9)
        assert sender.sync(model.items()).picked == {sent: 6}
        assert engine.holds(model)


def test_any_param_has_a_way() -> None:
    for numel, nnz in ((1, 1), (1 << 34, 1), (10, 10), (5, 0)):
        for width in (1, 2, 4, 8):
            for speed in (SLOW, FAST):
                stats = ParamStats(numel, nnz, width, True, 1.0)
                assert auto(stats, speed, dense=True).dense
                assert nnz in (0, numel) or not auto(stats, speed).dense
    assert dict(_sizes(ParamStats(1 << 32, 1000, 2, True)))[EncodingChoice("deltas", False)] == 6000


# ---- with engines --------------------------------------------------------------------------------


def sender_of(engine: Engine, base: Model, **options: Any) -> DeltaSender:
    options = {"encoding": "auto", **options}
    return DeltaSender("http://engine/", base.items(), client=engine.client(), **options)


def set_speed(sender: DeltaSender, speed: float) -> None:
    sender._publisher.sessions[0].destination.speed.measured = speed


def encodings(engine: Engine) -> set[str]:
    return {part.manifest.encoding for part in engine.log}


def test_what_was_picked_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = model_of(torch.bfloat16, numel=4000)
    engine = Engine.of(model, undigested={"layers.1.weight"})
    sender = sender_of(engine, model)
    assert sender.sync(model.items()).picked == {}
    train(model)
    report = sender.sync(model.items())
    assert report.picked == {"gap8_ulp": 5, "gap8_exp": 1}
    assert engine.holds(model)
    assert "gap8_exp: 1, gap8_ulp: 5" in caplog.text
    set_speed(sender, FAST)
    train(model, 1)
    assert sender.sync(model.items()).picked == {"gap8_ulp, stored": 5, "gap8_exp, stored": 1}
    assert engine.holds(model)
    train(model, 2, density=0.5)
    assert sender.sync(model.items()).picked == {"deltas, dense": 6}
    set_speed(sender, SLOW)
    train(model, 3, density=0.5)
    assert sender.sync(model.items()).picked == {"gap8_ulp": 5, "gap8_exp": 1}
    train(model, 4, density=0.8)  # kept dense, and still the link says how it goes
    assert sender.sync(model.items()).picked == {"gap8_ulp": 5, "gap8_exp, dense": 1}
    assert sender.sync_full(model.items()).picked == {"gap8_exp, dense": 6}
    assert engine.holds(model)


@pytest.mark.slow
@pytest.mark.parametrize("speed", [SLOW, 125e6, 1e9, FAST])
@pytest.mark.parametrize("has_plan", [True, False])
def test_an_engine_follows_whatever_is_picked(speed: float, has_plan: bool) -> None:
    model = model_of(torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8)
    engine = Engine.of(model, has_plan=has_plan)
    sender = sender_of(engine, model, bucket_bytes=500)
    for step, density in enumerate([0.0, 0.01, 0.3, 0.9, 1.0]):
        set_speed(sender, speed)
        train(model, step, density)
        report = sender.sync(model.items())
        assert not report.full
        assert engine.holds(model)
    assert sender.sync_full(model.items()).full
    assert engine.holds(model)


def test_engine_gets_values_after_it_refuses_differences() -> None:
    model = model_of()
    engine = Engine.of(model, cast={"layers.2.weight"})
    sender = sender_of(engine, model)
    for step in range(2):
        train(model, step)
        report = sender.sync(model.items())
        assert not report.full
        assert engine.holds(model)
        assert report.picked == {"gap8_exp": 6}
    assert encodings(engine) == {"gap8_ulp", "gap8_exp"}
    assert engine.log[-1].manifest.encoding == "gap8_exp"


def test_each_link_is_measured_for_itself() -> None:
    model = model_of(numel=200_000)
    engines = Engine.of(model), Engine.of(model)
    sender = MultiSender([A, B], model.items(), client=client_of(*engines), encoding="auto")
    for session, speed in zip(sender._publisher.sessions, (SLOW, FAST), strict=True):
        session.destination.speed.measured = speed
    train(model)
    reports = sender.sync(model.items())
    assert [set(report.picked) for report in reports.values()] == [
        {"gap8_ulp"},
        {"gap8_ulp, stored"},
    ]
    assert all(engine.holds(model) for engine in engines)


def test_posts_are_measured(naps: list[float]) -> None:
    model = model_of(numel=400_000)
    engine = Engine.of(model)
    sender = sender_of(engine, model)

    def fails(take: Handler, request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    engine.faults[0] = fails
    train(model)
    report = sender.sync(model.items())
    measured = sender._publisher.sessions[0].destination.speed.measured
    assert measured is not None
    assert report.link_bytes_per_s == measured
    # Of the request that was answered, not of the wait before it.
    assert measured >= report.wire_bytes / (report.post_ms / 1e3) / 2
