"""SGLang with speculative decoding: the draft model follows in the same syncs as the target.

The wheels for CPUs lack the kernels that verify drafted tokens. ``tests/shims/sglang_cpu`` has
those of a chain, and ``tests/shims/sglang_cpu_speculative`` lets SGLang's attention verify one. How
many drafted tokens are accepted shows which weights the drafts came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineError, EngineProcess
from tests.live import draft_checkpoints
from tests.live.conftest import PROMPTS, check_steps, fingerprint
from tests.live.draft_checkpoints import Tensors, changed, mtp_of, named

SHIM = Path(__file__).parents[1] / "shims" / "sglang_cpu_speculative"

pytestmark = pytest.mark.full


def options(algorithm: str, draft: Path, tp: int = 1) -> dict[str, Any]:
    """Return an engine's arguments to draft one token at a time."""
    one = ("--speculative-num-steps", "1", "--speculative-eagle-topk", "1")
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
    flags += [*one, "--speculative-num-draft-tokens", "2"]
    return {"extra_args": flags, "python_path": [SHIM], "tp": tp}


def seen_from(engine: EngineProcess) -> dict[str, Any]:
    """All that `fingerprint` compares, which has both models, and how many drafts were accepted."""
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    answers = [
        engine.post("/generate", json={"text": text, "sampling_params": sampling}).json()
        for text in PROMPTS
    ]
    counts = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
    counted = [[answer["meta_info"][name] for name in counts] for answer in answers]
    return fingerprint(engine) | {"counted": counted, "tokens": [a["output_ids"] for a in answers]}


def check(
    start: Callable[..., EngineProcess],
    base: Path,
    draft: Path,
    algorithm: str,
    steps: Sequence[tuple[Tensors, Tensors]],
    ignored: AbstractSet[str] = frozenset(),
    tp: int = 1,
) -> list[dict[str, Any]]:
    """Sync an engine to each step's tensors of both models, and compare it with a fresh one.

    Args:
        draft: folder of the draft model, which can be the target's.
        ignored: tensors that SGLang does not use.

    Returns:
        The observation at each step.
    """
    engine = start("sglang", base, **options(algorithm, draft, tp))
    for plan in engine.get("/delta_status", params={"plan": "true"}).json()["plan"]:
        statuses = {row["name"]: row["status"] for row in plan}
        assert statuses.keys() == named(*steps[0]).keys()
        assert {name for name, status in statuses.items() if status == "ignored"} == ignored
        assert {*statuses.values()} <= {"exact", "ignored"}, plan
    seen: list[dict[str, Any]] = []

    def observe(process: EngineProcess) -> dict[str, Any]:
        seen.append(seen_from(process))
        return seen[-1]

    check_steps(engine, [named(*step) for step in steps], observe)
    engine.stop()
    new, new_draft = base.with_name("target"), base.with_name("new_draft")
    tiny_models.save_checkpoint(base, new, steps[-1][0])
    if draft == base:
        new_draft = new
    else:
        tiny_models.save_checkpoint(draft, new_draft, steps[-1][1])
    fresh = start("sglang", new, **options(algorithm, new_draft, tp))
    assert seen_from(fresh) == seen[-1]
    fresh.stop()
    return seen[: len(steps)]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_model_follows(
    tp: int, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """Both change, only the draft model, only the target: the drafts are the new model's."""
    base = tiny_models.build("qwen3", tmp_path / "base")
    own = tiny_models.load_tensors(base)
    draft = tiny_models.save_checkpoint(base, tmp_path / "draft", own)
    both, drafted = changed(own, 1), tiny_models.load_tensors(draft)
    drafts = [drafted, changed(own, 2), changed(own, 1)]
    steps = list(zip([own, both, both, changed(both, 3)], [*drafts, drafts[-1]], strict=True))
    seen = check(start, base, draft, "STANDALONE", steps, tp=tp)
    assert seen[1]["tokens"] == seen[2]["tokens"]
    assert seen[1]["counted"] != seen[2]["counted"]


@pytest.mark.parametrize("tp", [1, 2])
def test_an_eagle_head_follows(
    tp: int, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """It has the target's embedding and output head, and its own fusing of hidden states."""
    base = tiny_models.build("qwen3", tmp_path / "base")
    draft = tmp_path / "draft"
    head = draft_checkpoints.eagle_head(draft, "LlamaForCausalLMEagle", bias=True)
    own = tiny_models.load_tensors(base)
    last = changed(head, 2)
    steps = [(own, head), (changed(own, 1), last), (changed(own, 3), last)]
    check(start, base, draft, "EAGLE", steps, tp=tp)


def test_an_eagle3_head_follows(start: Callable[..., EngineProcess], tmp_path: Path) -> None:
    """It has the target's embedding, and an output head of its own."""
    base = tiny_models.build("qwen3", tmp_path / "base", num_hidden_layers=8)
    draft = tmp_path / "draft"
    head = draft_checkpoints.eagle3_head(draft)
    own = tiny_models.load_tensors(base)
    last = changed(head, 2)
    steps = [(own, head), (changed(own, 1), last), (changed(own, 3), last)]
    check(start, base, draft, "EAGLE3", steps)


def test_an_eagle3_head_with_its_own_vocabulary_is_refused(
    start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = tiny_models.build("qwen3", tmp_path / "base", num_hidden_layers=8)
    draft_checkpoints.eagle3_head(tmp_path / "draft", vocabulary=64)
    with pytest.raises(EngineError, match="a vocabulary of its own"):
        start("sglang", base, **options("EAGLE3", tmp_path / "draft"))


def test_mimos_mtp_layer_follows(start: Callable[..., EngineProcess], tmp_path: Path) -> None:
    base = tmp_path / "base"
    own = draft_checkpoints.mimo(base)
    steps: list[tuple[Tensors, Tensors]] = [(own, {}), (changed(own, 1), {})]
    steps.append(({**steps[1][0], **mtp_of(changed(own, 2))}, {}))
    check(start, base, base, "NEXTN", steps)
