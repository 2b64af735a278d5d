"""Versions that other trainers publish in an object store: disk requests, and pulls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_ext.log import Objects
from engine_ext.version_folders import INDEX
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.test_version_folders import STEPS, ask, check, committed
from tests.support.folder_writer import write_checkpoint, write_version
from tests.support.plain_trainer import Trainer, container, split
from tests.support.store_folders import upload

pytestmark = pytest.mark.full

Start = Callable[..., EngineProcess]
ENDPOINTS = ["/update_weights_delta", "/update_weights_from_disk"]


class Published:
    """A trainer that publishes in a store, and the engine that takes its versions from there."""

    def __init__(self, engine: EngineProcess, base: Path, store: Objects, drafts: Path) -> None:
        self.engine, self.store, self.drafts = engine, store, drafts
        self.trainer = Trainer(tiny_models.load_tensors(base))
        self.version = 0

    def folder(self, **options: Any) -> str:
        """Publish a step as slime (since v0.3.1), vime and miles do; return its URL."""
        held = dict(self.trainer.tensors)
        self.trainer.step(0.05)
        self.version += 1
        draft = write_version(self.drafts, self.version, held, self.trainer.tensors, **options)
        return upload(self.store, draft)

    def files(self, count: int) -> tuple[str, list[str]]:
        """Publish a step in files as slime up to v0.3.0 does; return its URL, and their names."""
        changed = split(self.trainer.step(), count)
        self.version += 1
        name = f"weight_v{self.version:06d}"
        names = [f"rank0_flush{number:03d}.safetensors" for number in range(count)]
        for file, some in zip(names, changed, strict=True):
            tensors, old = self.trainer.tensors, self.trainer.old
            body = container(tensors, some, encoding="deltas_zstd", old=old, checksum="slime")
            self.store.put(f"{name}/{file}", body)
        return f"{self.store.url}/{name}", names

    def load(self, path: str, url: str, **body: Any) -> Any:
        """Send a disk request for the last step."""
        version = {"weight_version": str(self.version), "load_format": "delta"}
        return self.engine.post(path, json={"model_path": url, **version, **body})

    def check(self) -> None:
        check(self.engine, self.trainer.tensors, self.version)


@pytest.mark.parametrize(("kind", "tp"), [("vllm", 2), ("sglang", 1)])
def test_an_engine_takes_a_trainers_versions_from_a_store(
    kind: str,
    tp: int,
    checkpoint: Callable[[str], Path],
    start: Start,
    store_url: str,
    tmp_path: Path,
) -> None:
    base, store = checkpoint("qwen3"), Objects(store_url)
    (tmp_path / "cache").mkdir(mode=0o700)
    arguments = ["--delta-root", store_url, "--delta-tuning", f"cache-dir={tmp_path / 'cache'}"]
    engine = start(kind, base, tp=tp, extra_args=arguments)
    run = Published(engine, base, store, tmp_path / "drafts")

    # Folders with an index.
    for number, options in enumerate(STEPS):
        url = run.folder(**options)
        body = {"model_path": url, "load_format": "delta"}
        answer = engine.post(ENDPOINTS[number % 2], json=body)
        assert committed(answer), answer.text
        run.check()
        assert engine.post(ENDPOINTS[number % 2], json=body).json()["status"] == "already_applied"

    # One that is being written, and one with another base: nothing changes.
    held, version = dict(run.trainer.tensors), run.version
    run.trainer.step(0.05)
    draft = write_version(tmp_path / "next", version + 1, held, run.trainer.tensors)
    url = upload(store, draft, index=False)
    unfinished = engine.post(ENDPOINTS[1], json={"model_path": url, "load_format": "delta"})
    assert unfinished.status_code == 400, unfinished.text
    check(engine, held, version)
    wrong = {**held, "model.norm.weight": held["model.norm.weight"] + 1}
    store.put(f"{draft.name}/{INDEX}", (draft / INDEX).read_bytes())
    other = write_version(tmp_path / "other", version + 1, wrong, run.trainer.tensors)
    for file in other.glob("*.safetensors"):
        store.put(f"{other.name}/{file.name}", file.read_bytes())
    refused = engine.post(ENDPOINTS[1], json={"model_path": url, "load_format": "delta"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "BaseMismatch")
    check(engine, held, version)
    upload(store, draft)
    run.version += 1
    assert committed(ask(engine, url))
    run.check()

    # Files without an index: all at once, or one after the other.
    url, names = run.files(2)
    assert committed(run.load(ENDPOINTS[0], url, files=names))
    run.check()
    url, [first, second] = run.files(2)
    assert committed(run.load(ENDPOINTS[1], url, files=[first]))
    waits = engine.post("/update_weight_version", json={"new_version": str(run.version + 1)})
    assert (waits.status_code, waits.json()["error"]["files"]) == (409, [second])
    assert committed(run.load(ENDPOINTS[1], url, files=[second]))
    run.check()

    # Pulled, and loaded as the checkpoint that they were pulled under; one step changes nothing.
    before, held = run.version, dict(run.trainer.tensors)
    run.folder(encoding="overwrite")
    run.version += 1
    upload(store, write_version(run.drafts, run.version, {}, {}))
    run.files(3)
    local = str(tmp_path / "local")
    wanted: dict[str, Any] = {"local_checkpoint_dir": local, "source_dir": store_url}
    wanted["target_version"] = run.version
    pulled = engine.post("/pull_weights", json=wanted)
    assert (pulled.status_code, pulled.json()["success"]) == (200, True), pulled.text
    check(engine, held, before)
    loaded = engine.post(
        ENDPOINTS[1], json={"model_path": local, "weight_version": str(run.version)}
    )
    assert committed(loaded), loaded.text
    run.check()
    missing = engine.post("/pull_weights", json={**wanted, "target_version": run.version + 1})
    assert (missing.status_code, missing.json()["success"]) == (400, False)

    # A plain checkpoint, and on from there.
    run.version += 2
    run.trainer.step(0.3)
    full = ask(
        engine, upload(store, write_checkpoint(run.drafts, run.version, run.trainer.tensors))
    )
    assert committed(full), full.text
    run.check()
    assert committed(ask(engine, run.folder()))
    run.check()
    engine.stop()
