"""vLLM with speculative decoding: the draft model follows in the same syncs as the target.

Where target and draft model are equal, all drafted tokens are accepted; so how many are accepted
after a sync shows which weights the drafts came from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live import draft_checkpoints
from tests.live.conftest import PROMPTS, check_steps, fingerprint
from tests.live.draft_checkpoints import Tensors, changed, mtp_of, named, normal, with_mtp

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def speculative(method: str, draft: Path | None) -> list[str]:
    """Return the flags for speculative decoding."""
    tokens = 1 if method == "mtp" else 3
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens}
    config |= {} if draft is None else {"model": str(draft)}
    config |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1} if method == "ngram" else {}
    return ["--speculative-config", json.dumps(config)]


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
    """All that `fingerprint` compares, and how many tokens were drafted and accepted.

    The prompt of several blocks would find cached KV of older weights, the draft model's too.
    """
    before = counters(engine)
    found = fingerprint(engine)
    long = engine.complete(" ".join(PROMPTS * 4), max_tokens=12, temperature=0.0, logprobs=5)
    after = counters(engine)
    counted = {name: after[name] - before[name] for name in COUNTERS}
    return found | {"long": long["choices"][0]["logprobs"], "counters": counted}


def accepted(seen: Mapping[str, Any]) -> float:
    """Return the part of the drafted tokens that were accepted."""
    found = seen["counters"]
    return float(found["num_accepted_tokens"] / found["num_draft_tokens"])


def check(
    start: Callable[..., EngineProcess],
    base: Path,
    draft: Path | None,
    method: str,
    steps: Sequence[tuple[Tensors, Tensors]],
    ignored: AbstractSet[str] = frozenset(),
    **options: Any,
) -> list[dict[str, Any]]:
    """Sync an engine to each step's tensors of both models, and compare it with a fresh one.

    Args:
        draft: folder of the draft model; None if it reads the target's.
        ignored: tensors that vLLM does not use.
        options: of the engine.

    Returns:
        The observation at each step.
    """
    options = {**options, "extra_args": speculative(method, draft)}
    engine = start("vllm", base, **options)
    for plan in engine.get("/delta_status", params={"plan": "true"}).json()["plan"]:
        assert {row["name"] for row in plan} == named(*steps[0]).keys()
        statuses = {row["name"]: row["status"] for row in plan}
        assert {name for name, status in statuses.items() if status == "ignored"} == ignored
        assert {*statuses.values()} <= {"exact", "cast", "rebuilt", "ignored"}, plan
    seen: list[dict[str, Any]] = []

    def observe(process: EngineProcess) -> dict[str, Any]:
        seen.append(seen_from(process))
        return seen[-1]

    check_steps(engine, [named(*step) for step in steps], observe)
    engine.stop()
    target, new_draft = base.with_name("target"), base.with_name("new_draft")
    tiny_models.save_checkpoint(base, target, steps[-1][0])
    if draft is not None:
        tiny_models.save_checkpoint(draft, new_draft, steps[-1][1])
        options["extra_args"] = speculative(method, new_draft)
    fresh = start("vllm", target, **options)
    assert seen_from(fresh) == seen[-1]
    fresh.stop()
    return seen[: len(steps)]


@pytest.mark.parametrize(
    ("tp", "keep_plain"),
    [
        pytest.param(1, True, marks=pytest.mark.full),
        pytest.param(1, False, marks=pytest.mark.full),
        pytest.param(2, True, marks=pytest.mark.full),
    ],
    ids=["plain", "packed", "tp2"],
)
def test_a_draft_model_follows(
    tp: int, keep_plain: bool, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """Both change, only the draft model, only the target: the drafts are the new model's."""
    base = tiny_models.build("qwen3", tmp_path / "base")
    own = tiny_models.load_tensors(base)
    draft = tiny_models.save_checkpoint(base, tmp_path / "draft", own)
    both = changed(own, 1)
    drafts = [tiny_models.load_tensors(draft), changed(own, 2), changed(own, 1)]
    steps = list(zip([own, both, both, changed(both, 3)], [*drafts, drafts[-1]], strict=True))
    seen = check(start, base, draft, "draft_model", steps, tp=tp, keep_plain=keep_plain)
    assert accepted(seen[0]) == accepted(seen[2]) == 1.0
    assert max(accepted(seen[1]), accepted(seen[3])) < 1.0


@pytest.mark.full
def test_an_eagle_head_follows(start: Callable[..., EngineProcess], tmp_path: Path) -> None:
    """It has the target's embedding and output head, and its own fusing of hidden states."""
    base = tiny_models.build("qwen3", tmp_path / "base")
    draft = tmp_path / "draft"
    head = draft_checkpoints.eagle_head(draft)
    own = tiny_models.load_tensors(base)
    last = changed(head, 2)
    steps = [(own, head), (changed(own, 1), last), (changed(own, 3), last)]
    check(start, base, draft, "eagle", steps)


@pytest.mark.full
@pytest.mark.parametrize("keep_plain", [True, False], ids=["plain", "packed"])
def test_mimos_mtp_layer_follows(
    keep_plain: bool, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    own = draft_checkpoints.mimo(base)
    steps: list[tuple[Tensors, Tensors]] = [(own, {}), (changed(own, 1), {})]
    steps.append(({**steps[1][0], **mtp_of(changed(own, 2))}, {}))
    check(start, base, None, "mtp", steps, keep_plain=keep_plain)


@pytest.mark.full
def test_deepseeks_mtp_layer_follows(start: Callable[..., EngineProcess], tmp_path: Path) -> None:
    """Its checkpoint has copies of the embedding and the output head, which vLLM does not use."""
    base = tiny_models.build("deepseek_v3", tmp_path / "base", num_nextn_predict_layers=1)
    tensors = tiny_models.load_tensors(base)
    hidden = tensors["model.norm.weight"].numel()
    extra = {f"{name}.weight": normal(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    extra["eh_proj.weight"] = normal(hidden, 2 * hidden)
    copies = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "shared_head.head.weight": tensors["lm_head.weight"],
    }
    new = "model.layers.2."
    own = with_mtp(base, "model.layers.1.", new, {**extra, **copies})
    steps: list[tuple[Tensors, Tensors]] = [(own, {}), (changed(own, 1), {}), (changed(own, 2), {})]
    check(start, base, None, "mtp", steps, {new + name for name in copies})


@pytest.mark.full
def test_ngrams_have_no_weights(start: Callable[..., EngineProcess], tmp_path: Path) -> None:
    base = tiny_models.build("qwen3", tmp_path / "base")
    own = tiny_models.load_tensors(base)
    check(start, base, None, "ngram", [(own, {}), (changed(own, 1), {}), (changed(own, 2), {})])
