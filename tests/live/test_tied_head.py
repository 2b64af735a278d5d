"""A config that ties its head, and a checkpoint that holds the head all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps, fingerprint
from tests.support.plain_trainer import Trainer, container

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # an engine starts up to three times


def step(tensors: Tensors, *, ties: bool) -> tuple[Tensors, Tensors]:
    """Return a trainer's next tensors, and which elements it has changed."""
    trainer = Trainer(dict(tensors))
    changed = trainer.step()
    if ties:
        trainer.tensors[HEAD], changed[HEAD] = trainer.tensors[EMBED].clone(), changed[EMBED]
    return trainer.tensors, changed


def refused(engine: EngineProcess, tensors: Tensors, changed: Tensors) -> dict[str, Any]:
    """Return the error of a sync, which must leave the engine unchanged."""
    before = engine.checksums()
    body = container(tensors, changed, metadata={"current_version": "1", "base_version": "0"})
    headers = {"Content-Type": "application/octet-stream"}
    answer = engine.post("/update_weights_delta", content=body, headers=headers)
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["engine_state"]) == (422, "unchanged"), error
    assert engine.checksums() == before
    return error


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vllm", {}),
        ("vllm", {"tp": 2}),
        ("vllm", {"keep_plain": False}),
        ("sglang", {}),
    ],
    ids=["vllm", "vllm-two-ranks", "vllm-packed", "sglang"],
)
def test_a_head_equal_to_the_embedding_is_exact(
    kind: str, options: dict[str, Any], start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = tiny_models.build("qwen3", tmp_path / "base", tie_word_embeddings=True)
    steps = [tiny_models.load_tensors(tiny_models.add_head(base))]
    for _ in range(2):
        steps.append(step(steps[-1], ties=True)[0])
    engine = start(kind, base, **options)
    assert engine.delta_status().health.uncertified == {}
    tensors, changed = step(steps[0], ties=False)
    for names in ({EMBED, HEAD}, {EMBED}, {HEAD}):
        error = refused(engine, tensors, {name: changed[name] for name in names})
        assert error["tensors"] == [HEAD, EMBED]
        assert (HEAD in error["message"], EMBED in error["message"]) == (True, True)
    seen, reports = check_steps(engine, steps, fingerprint)
    assert [report.version for report in reports] == [1, 2]
    engine.stop()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[-1])
    fresh = start(kind, target, **options)
    assert fingerprint(fresh) == seen
    fresh.stop()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_head_of_its_own_is_exact_or_refused(
    kind: str, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """vLLM does not tie it then; SGLang drops it, and says so of each sync that has one."""
    base = tiny_models.build("qwen3", tmp_path / "base", tie_word_embeddings=True)
    tensors = tiny_models.load_tensors(base)
    tiny_models.add_head(base, tensors[EMBED].flip(0))
    steps = [tiny_models.load_tensors(base)]
    engine = start(kind, base)
    uncertified = engine.delta_status().health.uncertified
    assert set(uncertified) == (set() if kind == "vllm" else {HEAD})
    target, changed = step(steps[0], ties=False)
    if kind == "sglang":
        assert EMBED in uncertified[HEAD]
        assert refused(engine, target, {HEAD: changed[HEAD]})["tensor"] == HEAD
        target[HEAD] = steps[0][HEAD]
        body = container(
            target,
            {name: where for name, where in changed.items() if name != HEAD},
            metadata={"current_version": "1", "base_version": "0"},
        )
        answer = engine.post(
            "/update_weights_delta",
            content=body,
            headers={"Content-Type": "application/octet-stream"},
        )
        assert answer.json()["status"] == "committed", answer.json()
        seen = fingerprint(engine)
    else:
        steps.append(target)
        target, _ = step(target, ties=False)
        seen, _ = check_steps(engine, [*steps, target], fingerprint)
    engine.stop()
    fresh = start(kind, tiny_models.save_checkpoint(base, tmp_path / "target", target))
    assert fingerprint(fresh) == seen
    fresh.stop()
