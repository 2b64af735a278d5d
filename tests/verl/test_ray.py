"""Engines inside a Ray cluster of two nodes: each part is put into Ray's object store once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from delta_sender import MultiSender, PartialSyncError
from delta_sender.integrations.ray_transport import RayTransport, relay_on
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.support.plain_trainer import Trainer, model_digest
from tests.support.shown_examples import examples

pytestmark = [pytest.mark.engine, pytest.mark.full]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The ids of the nodes of a cluster: the trainer's, and one for engines."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        small = {"num_cpus": 1, "object_store_memory": 256 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=small)
        try:
            del small["include_dashboard"]
            second = cluster.add_node(**small)
            ray.init(address=cluster.address)
            yield [ray.get_runtime_context().get_node_id(), second.node_id]
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_engines_on_another_node(
    nodes: list[str],
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    engines = {kind: start(kind, base) for kind in ("vllm", "sglang")}
    names: dict[str, Any] = {"MultiSender": MultiSender, "base": base}
    names["engines"] = [(nodes[1], engine.url) for engine in engines.values()]
    exec(examples("sender.md")["ray"], names)
    relays = names["relays"]
    assert names["sender"].sync(trainer.tensors.items()).keys() == relays.keys()
    names["sender"].close()
    names["client"].close()
    transport = RayTransport(relays)
    with httpx.Client(transport=transport) as client:
        options: dict[str, Any] = {"client": client, "encoding": "gap8_exp", "bucket_bytes": 20_000}
        sender = MultiSender([*relays], base, **options)
        parts = 0
        for version in (2, 3, 4):
            trainer.step()
            reports = sender.sync(trainer.tensors.items())
            parts += max(report.parts for report in reports.values())
            assert {report.status for report in reports.values()} == {"committed"}
            assert {report.version for report in reports.values()} == {version}
            digests = {report.digest for report in reports.values()}
            assert digests == {model_digest(trainer.tensors).hex()}
        assert parts > 3
        claim = 1  # of the run, the same body for both
        assert transport.stored == parts + claim

        # An actor that is gone is an engine that does not answer; the other one gets the step.
        ray.kill(relays[engines["sglang"].url])
        trainer.step()
        with pytest.raises(PartialSyncError) as partial:
            sender.sync(trainer.tensors.items())
        assert [*partial.value.failures] == [engines["sglang"].url]
        sender.close()
    for kind, version in (("vllm", 5), ("sglang", 4)):
        status = engines[kind].delta_status()
        assert status.version.number == version
        scan = engines[kind].get("/delta_digest", params={"scan": "true"}).json()
        assert scan["corrupted"] == []
    seen = fingerprint(engines["vllm"])
    for engine in engines.values():
        engine.stop()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    fresh = start("vllm", target)
    assert fingerprint(fresh) == seen
    fresh.stop()


def test_a_host_without_a_relay(nodes: list[str]) -> None:
    with httpx.Client(transport=RayTransport({})) as client, pytest.raises(httpx.TransportError):
        client.get("http://engine:8000/delta_status")


def test_an_engine_that_is_down(nodes: list[str]) -> None:
    url = "http://127.0.0.1:9"
    relays = {url: relay_on(nodes[1], url)}
    with httpx.Client(transport=RayTransport(relays)) as client:
        with pytest.raises(httpx.ReadError):
            client.post(f"{url}/update_weights_delta", content=torch.zeros(9).numpy().tobytes())
