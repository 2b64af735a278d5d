"""Moved weights on a compiled vLLM, in one process: what it generates is what was synced.

The engine runs in a process of its own; this file is its script too, and writes what it finds as
JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process_vllm import run

# The other weights of a CPU are in handles of oneDNN.
MOVED = ["model.layers.0.self_attn.q_norm.weight", "model.norm.weight"]


@pytest.mark.full
def test_compiled_code_reads_what_a_full_sync_wrote(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """After a parameter was given other memory, and after the healing a delta, too."""
    found = run(__file__, checkpoint("qwen3"), tmp_path / "found.json")
    assert found["moved"] != found["base"]
    assert found["corrupted"] == [MOVED, []]
    assert found["states"] == ["mismatched", "certain", "certain"]
    assert found["healed"] == found["base"]
    assert found["delta"] != found["base"]
    assert found["healed again"] == found["base"]


def main(model: str, out: str) -> None:
    """Generate, move some parameters, generate, heal, generate; twice with a delta in between."""
    import torch
    from vllm import LLM, SamplingParams

    from engine_ext import settings
    from engine_ext.adapters.vllm import plugin
    from engine_ext.conformance.verified_file import verified_file
    from scripts.live_engine import tiny_models
    from tests.support.plain_trainer import Trainer, container

    settings.Settings().export()
    plugin.install_workers()
    llm: Any = LLM(model, dtype="bfloat16", max_model_len=256)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    trainer = Trainer(tiny_models.load_tensors(Path(model)))
    base = dict(trainer.tensors)
    found: dict[str, Any] = {"corrupted": [], "states": []}

    def generate(name: str) -> None:
        llm.reset_prefix_cache()
        greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
        [request] = llm.generate(["the quick brown fox"], greedy, use_tqdm=False)
        [answer] = request.outputs
        chosen = zip(answer.token_ids, answer.logprobs, strict=True)
        found[name] = [[token, options[token].logprob] for token, options in chosen]

    def call(operation: str, **arguments: Any) -> Any:
        answer = worker.delta_updates(operation, arguments)
        assert "ok" in answer, answer
        return answer["ok"]

    def sync(body: bytes, *, full: bool) -> None:
        spooled = Path(out).with_suffix(".part")
        identity, verified = verified_file(body)
        spooled.write_bytes(verified)
        version = trainer.version
        base_version = None if full else version - 1
        part = {"version": version, "base_version": base_version, "identity": identity}
        part |= {"full": full, "num_parts": 1}
        assert call("begin", part=part, path=str(spooled), now=0.0)["admission"] == "new"
        while not call("poll", part=part)["done"]:
            time.sleep(0.01)
        done = call("prepare", part=part, keep=True)["done"]
        while not done:
            done = call("prepare", part=part)["done"]
        call("commit", version=version, sync_id=None)
        found["states"].append(call("status")["state"]["engine_state"])

    def heal() -> None:
        trainer.tensors, trainer.version = dict(base), trainer.version + 1
        metadata = {"current_version": str(trainer.version), "full": "true"}
        sync(container(base, dict.fromkeys(base), metadata=metadata), full=True)
        found["corrupted"].append(call("digest", scan=True)["corrupted"])

    generate("base")
    for name in MOVED:
        parameter = worker.get_model().get_parameter(name)
        parameter.data = torch.roll(parameter.data, 1, 0)
    generate("moved")
    found["corrupted"].append(call("digest", scan=True)["corrupted"])
    found["states"].append(call("status")["state"]["engine_state"])
    heal()
    generate("healed")
    found["corrupted"] = found["corrupted"][:2]
    changed = trainer.step(0.2)
    sync(container(trainer.tensors, changed, metadata=trainer.metadata()), full=False)
    generate("delta")
    heal()
    generate("healed again")
    found["corrupted"], found["states"] = found["corrupted"][:2], found["states"][:3]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
