"""MLA's absorbed projections follow inside the commit, in every way in which vLLM keeps them.

vLLM keeps views of a `kv_b_proj` that is not quantised; with `tests.live.mla_copies` it keeps
copies, as it does of one that it has to dequantise. These are the ways of the backend for all CPUs;
by default, on a CPU with AMX, vLLM packs both halves and drops the weight. In one process each
engine runs in a process of its own; this file is its script too, and writes what it finds as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.support.in_process_vllm import run
from tests.support.plain_trainer import Trainer, container

# SYNCS: parts of the names that each sync changes. DERIVED: how many derived tensors are copies.
SYNCS = ("", "kv_b_proj", "q_a_proj")
DERIVED = {"--views": 0, "--copies": 4, "--default": 0}
ABSORBED = ("W_UV", "W_UK_T", "impl._w_uv_packed", "impl._w_uk_packed")
BACKEND = "CPU_MLA"
PACKS = torch.cpu._is_amx_tile_supported()  # what vLLM asks before it picks a backend


@pytest.mark.full
@pytest.mark.parametrize("kept", DERIVED)
def test_syncs_lead_where_a_fresh_engine_is(
    kept: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = checkpoint("deepseek_v3")
    trainer = Trainer(tiny_models.load_tensors(base))
    parts, targets = [], []
    for number, part in enumerate(SYNCS, start=1):
        changed = trainer.step(only=part)
        body = container(trainer.tensors, changed, metadata=trainer.metadata())
        parts.append(tmp_path / f"{number}.part")
        parts[-1].write_bytes(body)
        target = tmp_path / f"target{number}"
        targets.append(tiny_models.save_checkpoint(base, target, trainer.tensors))
    updated = run(__file__, base, tmp_path / "updated.json", kept, *map(str, parts))
    assert updated["uncertified"] == {}
    assert len(updated["recomputed"]) == DERIVED[kept]
    assert bool(updated["rebuilt"]) == (kept == "--default" and PACKS)
    assert len(updated["states"][0]["bits"]["absorbed"]) == 4
    assert len({json.dumps(state["places"]) for state in updated["states"]}) == 1
    *states, rolled_back = (state["bits"] for state in updated["states"])
    assert rolled_back == states[-2]
    weights = [(state["parameters"], state["absorbed"]) for state in states]
    assert len({json.dumps(each) for each in weights}) == len(states)
    for number, target in enumerate(targets, start=1):
        fresh = run(__file__, target, tmp_path / f"fresh{number}.json", kept)
        assert fresh["states"][0]["bits"] == states[number]


@pytest.mark.full
def test_served_on_two_ranks(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = checkpoint("deepseek_v3")
    options: dict[str, Any] = {
        "tp": 2,
        "extra_args": [
            *("--worker-extension-cls", "tests.live.mla_copies.Copies"),
            *("--attention-backend", BACKEND),
        ],
        "python_path": [Path(__file__).parents[2]],
    }
    engine = start("vllm", base, **options)
    plans = engine.get("/delta_status", params={"plan": "true"}).json()["plan"]
    assert [len({p for row in plan for p in row["recomputed"]}) for plan in plans] == [4, 4]
    trainer = Trainer(tiny_models.load_tensors(base))
    before = None
    for only in SYNCS:
        before = engine.checksums()
        changed = trainer.step(only=only)
        body = container(trainer.tensors, changed, metadata=trainer.metadata())
        headers = {"Content-Type": "application/octet-stream"}
        answer = engine.post("/update_weights_delta", content=body, headers=headers).json()
        assert answer["status"] == "committed", answer
    updated = fingerprint(engine)
    assert engine.post("/delta_rollback").json()["version"] == len(SYNCS) - 1
    assert engine.checksums() == before
    engine.stop()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    fresh = start("vllm", target, **options)
    assert fingerprint(fresh) == updated
    fresh.stop()


def main(model: str, out: str, kept: str, *parts: str) -> None:
    """Load a model, apply parts, take the last one back, and write what the model is each time."""
    from vllm import LLM

    from engine_ext import settings
    from engine_ext.adapters.vllm import plugin

    settings.Settings(keep_plain=True).export()  # so that every weight is in a parameter
    plugin.install_workers()
    if kept == "--copies":
        importlib.import_module("tests.live.mla_copies")
    backend = None if kept == "--default" else BACKEND
    llm: Any = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        attention_backend=backend,
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    states = [_state(llm, worker)]
    for version, part in enumerate(parts, start=1):
        _apply(worker, version, part)
        states.append(_state(llm, worker))
    if parts:
        _ok(worker, "rollback")
        states.append(_state(llm, worker))
    rows = _ok(worker, "plan")["tensors"]
    found = {
        "uncertified": _ok(worker, "status")["status"]["uncertified"],
        "recomputed": sorted({path for row in rows for path in row["recomputed"]}),
        "rebuilt": [r["name"] for r in rows if r["status"] == "rebuilt" and "kv_b" in r["name"]],
        "states": states,
    }
    Path(out).write_text(json.dumps(found))


def _state(llm: Any, worker: Any) -> dict[str, Any]:
    """Every bit of the model and what it generates; and where its parameters are."""
    from vllm import SamplingParams

    from engine_ext.model.fingerprint import hash_tensor
    from engine_ext.model.module_walk import reachable_tensors

    model = worker.model_runner.get_model()
    llm.reset_prefix_cache()
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    [answer] = llm.generate(["the quick brown fox jumps"], greedy, use_tqdm=False)
    return {
        "bits": {
            "parameters": {n: hash_tensor(p) for n, p in model.named_parameters()},
            "buffers": {n: hash_tensor(b) for n, b in model.named_buffers()},
            "absorbed": {
                f"{path}.{name}": hash_tensor(tensor)
                for path, _, name, tensor in reachable_tensors(model)
                if name in ABSORBED
            },
            "tokens": list(answer.outputs[0].token_ids),
        },
        "places": {n: [id(p), p.data_ptr(), p.stride()] for n, p in model.named_parameters()},
    }


def _apply(worker: Any, version: int, path: str) -> None:
    import msgspec

    from engine_ext.conformance.verified_file import verified_file
    from engine_ext.format import PartId, decode_part

    body = Path(path).read_bytes()
    part = decode_part(body)
    identity, verified = verified_file(body)
    path += ".verified"
    Path(path).write_bytes(verified)
    part_id = PartId(
        version=version,
        base_version=version - 1,
        identity=identity,
        sync_id=part.manifest.sync_id,
        part=0,
        num_parts=1,
    )
    sent = msgspec.to_builtins(part_id)
    _ok(worker, "begin", part=sent, path=path, now=0.0)
    while not _ok(worker, "poll", part=sent)["done"]:
        pass
    done = _ok(worker, "prepare", part=sent, keep=True)["done"]
    while not done:
        done = _ok(worker, "prepare", part=sent)["done"]
    _ok(worker, "commit", version=version, sync_id=part.manifest.sync_id)


def _ok(worker: Any, operation: str, **arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = worker.delta_updates(operation, arguments)
    assert "ok" in answer, answer
    found: dict[str, Any] = answer["ok"]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
