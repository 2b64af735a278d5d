"""The timing of a large model, with stand-ins for the engines and the sender."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from scripts.gpu import timing
from scripts.gpu.trees import REHEARSAL
from scripts.live_engine.tiny_models import load_tensors

DIGEST = "0" * 32


class Engine:
    """Takes syncs and reloads; its weights are the files that it was started with or reloads."""

    made: list[Engine]

    def __init__(self, model: Path, flags: Any, *, delta: bool, log_path: Path, **_: Any) -> None:
        self.model, self.delta, self.log_path = model, delta, log_path
        self.version, self.url, self.is_up = 0, f"http://{log_path}", False
        log_path.write_text("INFO Model loading took 1 s\nINFO delta updates: traced\nnoise\n")
        self.made.append(self)

    def __enter__(self) -> Engine:
        time.sleep(0.0 if self.delta else 1.0)
        self.weights = load_tensors(self.model)
        self.is_up = True
        return self

    def stop(self, grace_s: float = 0.0) -> None:
        pass

    def pids(self) -> list[int]:
        return []

    def delta_status(self) -> Any:
        return SimpleNamespace(version=SimpleNamespace(number=self.version))

    def get(self, path: str, **_: Any) -> httpx.Response:
        assert path == "/delta_digest"
        self.assert_its_turn()
        return httpx.Response(200, json={"corrupted": [], "digest": DIGEST})

    def post(self, path: str, json: Any, **_: Any) -> httpx.Response:
        assert (path, json["method"]) == ("/collective_rpc", "reload_weights")
        self.assert_its_turn()
        self.weights = load_tensors(Path(json["kwargs"]["weights_path"]))
        return httpx.Response(200)

    def assert_its_turn(self) -> None:
        with (self.log_path.parents[1] / "measure.lock").open() as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def checksums(self) -> dict[str, Any]:
        return {
            name: hash(tensor.view(torch.int16).numpy().tobytes())
            for name, tensor in self.weights.items()
        }


class Sender:
    """Writes to the only engine with delta updates; `loses` every value of one tensor."""

    loses = ""

    def __init__(self, url: str, weights: Any, *, base_version: int, encoding: str) -> None:
        [self._engine] = [one for one in Engine.made if one.url == url]
        assert self._engine.delta
        assert sum(one.is_up for one in Engine.made) == 3  # two of the new tree, one of the base
        assert base_version == self._engine.version

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sync(self, weights: Any) -> Any:
        kept = {name: tensor.clone() for name, tensor in weights if name != self.loses}
        self._engine.weights.update(kept)
        self._engine.version += 1
        answer = {"timings_ms": {"pause_ms": 1.0, "commit_ms": 0.5}, "digest": DIGEST}
        sizes = {"wire_bytes": 10, "parts": 1, "encode_ms": 1.0, "post_ms": 1.0, "density": 0.02}
        link = {"picked": {"gap8_ulp": 1}, "link_bytes_per_s": 1e9}
        return SimpleNamespace(status="committed", full=False, engine=answer, **sizes, **link)

    sync_full = sync


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def stream(*_: Any, **__: Any) -> Iterator[Any]:
        def lines() -> Iterator[str]:
            while True:
                time.sleep(0.02)
                yield "data: {}"

        yield SimpleNamespace(iter_lines=lines)

    monkeypatch.setenv(REHEARSAL, "1")
    monkeypatch.setattr(Engine, "made", [], raising=False)
    monkeypatch.setattr(timing, "GpuVllm", Engine)
    monkeypatch.setattr(timing, "DeltaSender", Sender)
    monkeypatch.setattr(httpx, "stream", stream)


@pytest.mark.slow
@pytest.mark.parametrize("loses", ["", pytest.param("model.norm.weight", marks=pytest.mark.full)])
def test_two_trees_are_timed_and_compared(
    loses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sender, "loses", loses)
    given: dict[str, Any] = {"size": "tiny", "folder": tmp_path, "trees": ("new", "base")}
    with ThreadPoolExecutor(2) as pool:
        timed = pool.submit(timing.run, **given, name="new", stock=True)
        other = timing.run(**given, name="base", stock=False)
    facts = timed.result()
    assert "error" not in facts, facts["error"]
    assert [sync["encoding"] for sync in facts["syncs"][::2]] == [*timing.ENCODINGS, timing.FULL]
    assert all(sync["token_gap_ms"]["largest"] >= 20 for sync in facts["syncs"])
    assert facts["loading"] == ["INFO Model loading took 1 s", "INFO delta updates: traced"]
    assert (facts["digest_as_answered"], len(facts["reload_weights"])) == (True, 2)
    assert facts["verdict"] == (f"DIFFERS: [{loses!r}]" if loses else "exact (25 tensors)")
    json.dumps(facts)
    assert ("error" in other, other["stock_start_s"]) == (False, None)
    assert len(other["syncs"]) == 2 * (len(timing.ENCODINGS) + 1)


def test_a_timing_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Engine) -> Engine:
        raise RuntimeError("it exited")

    monkeypatch.setattr(Engine, "__enter__", fail)
    facts = timing.run("tiny", tmp_path, "new", stock=True, trees=["new"])
    assert facts["error"] == "RuntimeError: it exited"
    assert facts["weights"] > 1e6
