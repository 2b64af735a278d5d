"""vLLM's executor for Ray, with a worker on each of two hosts.

The hosts share neither memory, the spool nor a temporary folder. vLLM's platform for CPUs takes no
Ray; `tests/shims/vllm_cpu_ray` gives it what is missing, and everything else is vLLM's own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import xxhash

from engine_ext.conformance.verified_file import verified_file
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.vllm import VllmProcess
from tests.faults.harness import OCTETS
from tests.faults.observed import SHIMS
from tests.live.conftest import fingerprint
from tests.live.test_hosts import bodies, contents, holds, post, send
from tests.support.plain_trainer import Trainer
from tests.support.ray_nodes import Node, Nodes, two_nodes

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

PYTHON_PATH = [SHIMS / "vllm_cpu_ray", SHIMS / "vllm_cpu_pp"]
STAGES = ("--pipeline-parallel-size", "2")
WORKER = "RayWorkerProc"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with two_nodes(tmp_path_factory.mktemp("nodes"), PYTHON_PATH) as nodes:
        yield nodes


def on(nodes: Nodes, base: Path, log: Path, *layout: str) -> EngineProcess:
    """Return an engine that has a worker on each node; it is to be entered."""
    return VllmProcess(
        base,
        tp=1 if layout else 2,
        enable_delta=True,
        extra_args=["--distributed-executor-backend", "ray", *layout],
        extra_env=nodes.environment,
        python_path=PYTHON_PATH,
        log_path=log,
    )


def cached(node: Node) -> Path:
    return node.temporary / f"delta-updates-cache-{os.geteuid()}"


@pytest.mark.parametrize("layout", [(), STAGES], ids=["tp2", "pp2"])
def test_both_hosts_are_bit_identical(
    nodes: Nodes,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
    layout: tuple[str, ...],
) -> None:
    base = checkpoint("qwen3")
    trainer, sent = Trainer(tiny_models.load_tensors(base)), list[bytes]()
    before = contents(cached(nodes.second))
    with on(nodes, base, tmp_path / "engine.log", *layout) as engine:
        assert [len(node.workers(WORKER)) for node in (nodes.first, nodes.second)] == [1, 1]
        parts: list[bytes] = []
        for encoding in ("gap8_ulp", "deltas", "gap8_exp"):
            parts = bodies(trainer, encoding)
            send(engine, parts)
            sent += parts
            assert holds(engine, trainer)
        # Each part was fetched by the second host, once, and read in the spool on the first.
        fetched = contents(cached(nodes.second)) - before
        files = [verified_file(body)[1] for body in sent]
        assert fetched == set(map(xxhash.xxh3_128_hexdigest, files))
        assert contents(cached(nodes.first)) == set()

        # A damaged copy is not read: the same parts come again, as another sync would send them.
        for copy in cached(nodes.second).glob("*.part"):
            copy.write_bytes(bytes(copy.stat().st_size))
        assert engine.post("/delta_rollback").status_code == 200
        send(engine, parts)
        assert holds(engine, trainer)

        # A sync of another base is refused on both hosts, and so is half a part.
        refused = post(engine, bodies(Trainer(dict(trainer.tensors), version=7))[0])
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "VersionConflict")
        assert post(engine, parts[0][:-8]).status_code == 400
        assert holds(engine, trainer)

        send(engine, bodies(trainer, full=True))
        assert holds(engine, trainer)
        assert engine.complete("the quick", max_tokens=8)
        live = fingerprint(engine)
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    options = {"extra_args": layout, "python_path": PYTHON_PATH[1:]}
    fresh = start("vllm", target, tp=1 if layout else 2, **options)
    assert fingerprint(fresh) == live
    fresh.stop()


def test_nothing_is_served_after_a_remote_worker_died(
    nodes: Nodes, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A call that is on its way then waits forever, with and without deltas."""
    base = checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    with on(nodes, base, tmp_path / "engine.log") as engine:
        send(engine, bodies(trainer))
        first, second, _ = bodies(trainer)
        assert post(engine, first).status_code == 200
        [worker] = nodes.second.workers(WORKER)
        os.kill(worker, signal.SIGKILL)
        for path, request in (
            ("/update_weights_delta", {"content": second, "headers": OCTETS}),
            ("/v1/completions", {"json": {"prompt": "the quick", "max_tokens": 4}}),
        ):
            with pytest.raises(httpx.ReadTimeout):
                engine.post(path, timeout=10.0, **request)
