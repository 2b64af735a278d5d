"""vLLM with speculative decoding: the draft model follows in the same syncs as the target.

Target and draft model are equal at first, so that all drafted tokens are accepted; how many are
accepted after a sync shows which weights the drafts came from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps, fingerprint

DRAFT = "draft."
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

Tensors = dict[str, torch.Tensor]


def speculative(**config: Any) -> list[str]:
    """Return the flags for speculative decoding."""
    return ["--speculative-config", json.dumps({"num_speculative_tokens": 3, **config})]


def changed(tensors: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """Return a copy in which one element in fifty has the other sign."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone()
        chosen = torch.randperm(tensor.numel(), generator=generator)[: -(-tensor.numel() // 50)]
        found[name].view(-1)[chosen] *= -1
    return found


def named(target: Mapping[str, torch.Tensor], draft: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors of both checkpoints by the names that a sync has for them."""
    return {**target, **{DRAFT + name: tensor for name, tensor in draft.items()}}


def counters(engine: EngineProcess) -> dict[str, float]:
    """Return how many tokens vLLM has drafted and accepted, once it counts no more."""
    found: dict[str, float] = {}
    while True:
        before = found
        lines = engine.get("/metrics").text.splitlines()
        rows = [(line.partition("{")[0], line.rpartition(" ")[2]) for line in lines]
        found = {n: float(v) for n, v in rows if n.startswith("vllm:spec_decode_")}
        if found == before:
            return {name: found[f"vllm:spec_decode_{name}_total"] for name in COUNTERS}
        time.sleep(0.3)


def seen_from(engine: EngineProcess) -> dict[str, Any]:
    """All that `fingerprint` compares, and how many tokens were drafted and accepted."""
    before = counters(engine)
    found = fingerprint(engine)
    after = counters(engine)
    return found | {"counters": {name: after[name] - before[name] for name in COUNTERS}}


def accepted(seen: Mapping[str, Any]) -> float:
    """Return the part of the drafted tokens that were accepted."""
    found = seen["counters"]
    return float(found["num_accepted_tokens"] / found["num_draft_tokens"])


@pytest.mark.parametrize(
    ("tp", "keep_plain"),
    [
        (1, True),
        pytest.param(1, False, marks=pytest.mark.full),
        pytest.param(2, True, marks=pytest.mark.full),
    ],
    ids=["plain", "packed", "tp2"],
)
def test_a_draft_model_follows(
    tp: int, keep_plain: bool, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = tiny_models.build("qwen3", tmp_path / "base")
    own = tiny_models.load_tensors(base)
    draft = tiny_models.save_checkpoint(base, tmp_path / "draft", own)
    both = changed(own, 1)
    drafts = [tiny_models.load_tensors(draft), changed(own, 2), changed(own, 1)]
    targets, drafts = [own, both, both, changed(both, 3)], [*drafts, drafts[-1]]
    options: dict[str, Any] = {"tp": tp, "keep_plain": keep_plain}
    flags = speculative(method="draft_model", model=str(draft))
    engine = start("vllm", base, extra_args=flags, **options)
    for plan in engine.get("/delta_status", params={"plan": "true"}).json()["plan"]:
        assert {row["name"] for row in plan} == named(own, own).keys()
        assert {row["status"] for row in plan} <= {"exact", "rebuilt"}, plan
    seen: list[dict[str, Any]] = []

    def observe(process: EngineProcess) -> dict[str, Any]:
        seen.append(seen_from(process))
        return seen[-1]

    steps = [named(*pair) for pair in zip(targets, drafts, strict=True)]
    last, _ = check_steps(engine, steps, observe)
    rates = [accepted(one) for one in seen[: len(steps)]]
    assert rates[0] == rates[2] == 1.0 and max(rates[1], rates[3]) < 1.0
    target = tiny_models.save_checkpoint(base, tmp_path / "target", targets[-1])
    draft = tiny_models.save_checkpoint(base, tmp_path / "new_draft", drafts[-1])
    engine.stop()
    flags = speculative(method="draft_model", model=str(draft))
    fresh = start("vllm", target, extra_args=flags, **options)
    assert seen_from(fresh) == last
    fresh.stop()
