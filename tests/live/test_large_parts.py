"""Parts so large that their spool files are written again, at several HTTP processes of vLLM."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.live_engine import tiny_models
from tests.faults.harness import OCTETS
from tests.live.conftest import fingerprint
from tests.live.vllm_serve import VllmServe, distribution
from tests.patches.http_processes import one_client_each
from tests.support.plain_trainer import Trainer, container, model_digest, split

pytestmark = pytest.mark.full

PROCESSES = 2
PARTS = 4
LARGE = 1 << 20
# 5 million weights.
WIDTHS = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("large") / "model", **WIDTHS)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm") / f"delta-test-{tmp_path.parent.name}-{tmp_path.name}"
    folder.mkdir()
    yield folder
    # vLLM kills its HTTP processes, whose spools the next server would remove.
    shutil.rmtree(folder)


def test_files_are_written_again(base: Path, spool: Path, tmp_path: Path) -> None:
    """Sparse and full syncs; the parts of each come to both processes, two at once."""
    trainer = Trainer(tiny_models.load_tensors(base))
    path = [distribution(tmp_path / "path")]
    engine = VllmServe(
        base,
        tp=2,
        enable_delta=True,
        python_path=path,
        extra_args=["--api-server-count", str(PROCESSES), "--delta-tuning", f"spool-dir={spool}"],
        log_path=tmp_path / "engine.log",
    )
    files, stop = set[int](), threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            for path in spool.rglob("*.safetensors"):
                try:
                    files.add(path.stat().st_ino)
                except FileNotFoundError:  # its part was removed
                    continue

    sent = 0
    with ThreadPoolExecutor(3) as threads, engine, one_client_each(engine, PROCESSES) as clients:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        for number in range(6):
            changed: dict[str, Any] = trainer.step(density=0.5)
            full = number % 3 == 2
            metadata = {**trainer.metadata(), "num_parts": str(PARTS)}
            if full:
                changed = dict.fromkeys(changed)
                metadata |= {"full": "true"}
            bodies = [
                container(trainer.tensors, group, metadata={**metadata, "part": str(part)})
                for part, group in enumerate(split(changed, PARTS))
            ]
            sent += sum(len(body) >= LARGE for body in bodies)

            def post(part: int, bodies: list[bytes] = bodies) -> str:
                client: httpx.Client = clients[part % PROCESSES]
                answer = client.post("/update_weights_delta", content=bodies[part], headers=OCTETS)
                assert answer.status_code == 200, answer.text
                return str(answer.json()["status"])

            statuses = [*threads.map(post, range(0, 2)), *threads.map(post, range(2, 4))]
            assert sorted(statuses) == ["committed"] + ["staged"] * (PARTS - 1)
            found = clients[0].get("/delta_digest", params={"scan": "true"}).json()
            assert (found["digest"], found["corrupted"]) == (
                model_digest(trainer.tensors).hex(),
                [],
            )
        stop.set()
        watcher.join()
        assert sent >= 2 * PROCESSES * 3
        assert len(files) < sent
        live = fingerprint(engine)
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    options: dict[str, Any] = {"tp": 2, "enable_delta": True, "python_path": path}
    with VllmServe(target, log_path=tmp_path / "fresh.log", **options) as fresh:
        assert fingerprint(fresh) == live
