"""One engine whose ranks are on two hosts, which share neither memory nor the spool."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import xxhash

from engine_ext.conformance.verified_file import verified_file
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from tests.faults.harness import OCTETS
from tests.faults.observed import SHIMS
from tests.live.conftest import fingerprint
from tests.live.vllm_serve import VllmServe, distribution
from tests.support.hosts import Host, two_hosts
from tests.support.plain_trainer import Trainer, container, model_digest, split

pytestmark = pytest.mark.full

PORT = 29_431
PARTS = 3
VLLM_STAGES = ("--pipeline-parallel-size", "2")
SGLANG_STAGES = ("--pp-size", "2")
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def shims(kind: str, layout: tuple[str, ...]) -> list[Path]:
    """Return a shim that lets vLLM generate with pipeline stages on CPU."""
    return [SHIMS / "vllm_cpu_pp"] if kind == "vllm" and layout else []


class VllmWorkers(VllmServe):
    """The workers of vLLM's second host; they serve nothing."""

    def _server_arguments(self) -> list[str]:
        return [*super()._server_arguments(), "--node-rank", "1", "--headless"]

    def _wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        """Do not wait: they start together with those of the first host."""


class SglangWorkers(SglangProcess):
    """The schedulers of SGLang's second host."""

    def _server_arguments(self) -> list[str]:
        return [*super()._server_arguments(), "--node-rank", "1"]

    def _wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        """Do not wait: they start together with those of the first host."""


class Cluster:
    """An engine on two hosts.

    Attributes:
        engine: its server, on the first host.
        workers: those of the second one.
        cached: the hosts' caches of parts.
    """

    def __init__(
        self, kind: str, base: Path, folder: Path, hosts: tuple[Host, Host], *layout: str
    ) -> None:
        self.cached = [host.folder / "cache" for host in hosts]
        first = hosts[0]
        options: dict[str, Any] = {
            "tp": 1 if layout else 2,
            "enable_delta": True,
            "python_path": [distribution(folder / "path"), *shims(kind, layout)],
        }
        environment: dict[str, str] = {}
        if kind == "vllm":
            common = [
                *("--master-addr", first.address, "--master-port", str(PORT)),
                *("--distributed-executor-backend", "mp"),
            ]
        else:
            common = ["--dist-init-addr", f"{first.address}:{PORT}"]
            environment = CORES if layout else {}
        processes: list[EngineProcess] = []
        both = (VllmServe, VllmWorkers) if kind == "vllm" else (SglangProcess, SglangWorkers)
        types: list[Any] = [*both]
        for process, host, cache in zip(types, hosts, self.cached, strict=True):
            cache.mkdir()
            arguments = ["--nnodes", "2", *common, "--delta-tuning", f"cache-dir={cache}", *layout]
            processes.append(
                process(
                    base,
                    extra_args=arguments,
                    extra_env={**host.environment, **environment},
                    command_prefix=host.prefix,
                    log_path=folder / f"{host.folder.name}.log",
                    **options,
                )
            )
        self.engine, self.workers = processes


@contextlib.contextmanager
def running(kind: str, base: Path, folder: Path, *layout: str) -> Iterator[Cluster]:
    folder.mkdir()
    with two_hosts(folder) as hosts:
        cluster = Cluster(kind, base, folder, hosts, *layout)
        with cluster.workers, cluster.engine:
            yield cluster


def bodies(trainer: Trainer, encoding: str = "gap8_ulp", *, full: bool = False) -> list[bytes]:
    """Make a step; return the parts of its sync."""
    before = model_digest(trainer.tensors).hex()
    changed: dict[str, Any] = trainer.step()
    metadata = {**trainer.metadata(), "num_parts": str(PARTS)}
    metadata |= {"digest_after": model_digest(trainer.tensors).hex()}
    if full:
        changed, encoding = dict.fromkeys(changed), "indices"
        metadata["full"] = "true"
    else:
        metadata["digest_before"] = before
    return [
        container(
            trainer.tensors,
            group,
            encoding=encoding,
            metadata={**metadata, "part": str(part)},
            old=trainer.old,
        )
        for part, group in enumerate(split(changed, PARTS))
    ]


def post(engine: EngineProcess, body: bytes) -> httpx.Response:
    return engine.post("/update_weights_delta", content=body, headers=OCTETS)


def send(engine: EngineProcess, parts: list[bytes]) -> None:
    answers = [post(engine, part) for part in parts]
    assert [answer.status_code for answer in answers] == [200] * PARTS, answers[-1].text
    assert answers[-1].json()["status"] == "committed"


def holds(engine: EngineProcess, trainer: Trainer) -> bool:
    found = engine.get("/delta_digest", params={"scan": "true"}).json()
    return (found["digest"], found["corrupted"]) == (model_digest(trainer.tensors).hex(), [])


def contents(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.part")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("vllm", ()), ("vllm", VLLM_STAGES), ("sglang", ()), ("sglang", SGLANG_STAGES)],
    ids=["vllm-tp2", "vllm-pp2", "sglang-tp2", "sglang-pp2"],
)
def test_both_hosts_are_bit_identical(
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
    kind: str,
    layout: tuple[str, ...],
) -> None:
    base = checkpoint("qwen3")
    trainer, sent = Trainer(tiny_models.load_tensors(base)), list[bytes]()
    with running(kind, base, tmp_path / "hosts", *layout) as cluster:
        engine, parts = cluster.engine, list[bytes]()
        for encoding in ("gap8_ulp", "deltas", "gap8_exp"):
            parts = bodies(trainer, encoding)
            send(engine, parts)
            sent += parts
            assert holds(engine, trainer)
        # Each part was fetched by the second host, once, and read in the spool on the first.
        first, second = map(contents, cluster.cached)
        files = [verified_file(body)[1] for body in sent]
        assert (first, second) == (set(), set(map(xxhash.xxh3_128_hexdigest, files)))

        # A damaged copy is not read: the same parts come again, as another sync would send them.
        for copy in cluster.cached[1].glob("*.part"):
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
        live = fingerprint(engine)
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    fresh = start(
        kind,
        target,
        tp=1 if layout else 2,
        extra_args=layout,
        extra_env=CORES,
        python_path=shims(kind, layout),
    )
    assert fingerprint(fresh) == live


def test_nothing_is_served_after_a_host_has_died(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM on the first host waits for the others forever then, with and without deltas."""
    base = checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    with running("vllm", base, tmp_path / "hosts") as cluster:
        engine = cluster.engine
        send(engine, bodies(trainer))
        first, second, _ = bodies(trainer)
        assert post(engine, first).status_code == 200
        for pid in cluster.workers.pids():
            os.kill(pid, signal.SIGKILL)
        for path, request in (
            ("/update_weights_delta", {"content": second, "headers": OCTETS}),
            ("/v1/completions", {"json": {"prompt": "the quick", "max_tokens": 4}}),
        ):
            with pytest.raises(httpx.ReadTimeout):
                engine.post(path, timeout=10.0, **request)
