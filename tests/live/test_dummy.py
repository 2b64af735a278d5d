"""An engine started with dummy weights: a full sync first, then deltas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_sender import DeltaSender
from engine_ext.dtypes import torch_bits_dtype
from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.live.quantised_cases import CASES, Case

DUMMY = ("--load-format", "dummy")
# The loader of Mamba computes A of A_log.
REBUILT = CASES | {"mamba2": Case("mamba2", {})}


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_dummy_weights_take_a_full_sync_and_then_deltas(
    kind: str,
    tp: int,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = checkpoint("qwen3")
    target = _perturbed(base, tmp_path / "target")
    engine = start(kind, base, tp=tp, extra_args=DUMMY)
    status = engine.delta_status()
    assert (status.apply, status.version.number) == ("reload", 0)
    assert status.health.awaits_full_sync is True
    log = engine.log_path.read_text()
    assert "the load format dummy reads no checkpoint to certify against" in log
    with DeltaSender(engine.url, tiny_models.load_tensors(base).items()) as sender:
        first = sender.sync(tiny_models.load_tensors(base).items())
        assert (first.full, first.engine["apply"]) == (True, "reload")
        second = sender.sync(tiny_models.load_tensors(target).items())
        assert (second.full, second.engine["apply"]) == (False, "scatter")
        assert second.digest == second.engine["digest"]
    certification = engine.delta_status().health.certification
    assert [list(rank) for rank in certification] == [["exact"]] * tp
    _compare_with_a_fresh_one(engine, start(kind, target, tp=tp))


@pytest.mark.full
def test_dummy_weights_with_absorbed_projections(
    start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """The reload gives every weight, and what is made of them, the same places again."""
    dense = {"first_k_dense_replace": 2}  # experts would be repacked
    base = tiny_models.build("deepseek_v3", tmp_path / "base", **dense)
    target = _perturbed(base, tmp_path / "target")
    engine = start("vllm", base, extra_args=DUMMY)
    with DeltaSender(engine.url, tiny_models.load_tensors(base).items()) as sender:
        assert sender.sync(tiny_models.load_tensors(base).items()).full
        assert not sender.sync(tiny_models.load_tensors(target).items()).full
    _compare_with_a_fresh_one(engine, start("vllm", target))


@pytest.mark.full
@pytest.mark.parametrize("name", REBUILT)
def test_dummy_weights_of_what_is_rebuilt(
    name: str, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """The engine's own processing runs again, on what the sync brings."""
    case = REBUILT[name]
    base = case.build(tmp_path / "base")
    weights = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        weights.append(quantised_checkpoints.step(weights[-1], seed))
    target = tiny_models.save_checkpoint(base, tmp_path / "target", weights[-1])
    engine = start("vllm", base, **case.options(*DUMMY))
    with DeltaSender(engine.url, weights[0].items()) as sender:
        assert sender.sync(weights[0].items()).full
        for step in weights[1:]:
            assert not sender.sync(step.items()).full
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert scan["corrupted"] == []
    _compare_with_a_fresh_one(engine, start("vllm", target, **case.options()), case.observed)


def _compare_with_a_fresh_one(
    engine: EngineProcess,
    fresh: EngineProcess,
    observed: Callable[[EngineProcess], dict[str, Any]] = fingerprint,
) -> None:
    assert observed(engine) == observed(fresh)
    engine.stop()
    fresh.stop()


def _perturbed(base: Path, target: Path) -> Path:
    """Write a copy of a checkpoint; 5 % of every tensor's elements, at least one, differ."""
    generator = torch.Generator().manual_seed(3)
    loaded = sorted(tiny_models.load_tensors(base).items())
    tensors = {name: tensor.clone() for name, tensor in loaded}
    for tensor in tensors.values():
        count = max(1, round(0.05 * tensor.numel()))
        indices = torch.randperm(tensor.numel(), generator=generator)[:count]
        tensor.view(-1).view(torch_bits_dtype(tensor.dtype))[indices] ^= 1
    return tiny_models.save_checkpoint(base, target, tensors)
