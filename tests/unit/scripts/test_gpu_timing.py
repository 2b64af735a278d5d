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
from safetensors.torch import save_file

from scripts.gpu import own_ways, sparse_apply, timing
from scripts.gpu.trees import REHEARSAL
from scripts.live_engine.tiny_models import load_tensors

DIGEST = "0" * 32
SPARSE_APPLY_MS = 86_400_000.5  # as no measured reload takes


class Engine:
    """Takes syncs and reloads; its weights are the files that it was started with or reloads."""

    made: list[Engine]

    def __init__(self, model: Path, flags: Any, *, delta: bool, log_path: Path, **_: Any) -> None:
        self.model, self.delta, self.log_path = model, delta, log_path
        self.version, self.url, self.is_up = 0, f"http://{log_path}", False
        log_path.write_text("INFO Model loading took 1 s\nINFO delta updates: traced\nnoise\n")
        self.made.append(self)

    def __enter__(self) -> Engine:
        with (self.log_path.parents[1] / "start.lock").open() as lock:
            with pytest.raises(BlockingIOError):  # nothing else starts
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        assert path == "/collective_rpc"
        self.assert_its_turn()
        request, results = httpx.Request("POST", self.url), list[Any]([None])
        if json["method"] == "reload_weights":
            self.weights = load_tensors(Path(json["kwargs"]["weights_path"]))
        else:
            assert json["method"] == "time_sparse_apply"
            self.weights, results = {}, [[SPARSE_APPLY_MS]]
        return httpx.Response(200, json={"results": results}, request=request)

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
    engines = 3  # that are up: two of the new tree, one of the base

    def __init__(self, url: str, weights: Any, *, base_version: int, encoding: str) -> None:
        [self._engine] = [one for one in Engine.made if one.url == url]
        assert self._engine.delta
        assert sum(one.is_up for one in Engine.made) == self.engines
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
    assert facts["digest_as_answered"]
    found = [(one["way"], one["wall_ms"] == SPARSE_APPLY_MS) for one in facts["own_ways"]]
    sparse, reload = ("sparse_nccl, apply alone", True), ("reload_weights", False)
    assert found == [sparse, sparse, reload, reload]
    assert facts["read_both_ms"] > 0
    assert {*facts["gpu_mib"]} == {"before", "after", "stock"}
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


@pytest.mark.slow
def test_a_stock_engine_that_fails_leaves_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sender, "engines", 1)
    start = Engine.__enter__

    def fail(self: Engine) -> Engine:
        if not self.delta:
            raise RuntimeError("it exited")
        return start(self)

    monkeypatch.setattr(Engine, "__enter__", fail)
    facts = timing.run("tiny", tmp_path, "new", stock=True, trees=["new"])
    assert "error" not in facts, facts["error"]
    assert facts["stock_error"] == "RuntimeError: it exited"
    assert facts["logs"].keys() == {"live", "stock"}
    assert len(facts["syncs"]) == 2 * (len(timing.ENCODINGS) + 1)


@pytest.mark.slow
def test_the_stock_engines_own_sparse_apply(tmp_path: Path) -> None:
    """Random elements, and no others, get the checkpoint's values, by the model's own loader."""
    written = {"a": torch.full((40, 50), 2.0), "b": torch.full((30,), 3.0)}
    save_file({name: one.bfloat16() for name, one in written.items()}, tmp_path / "x.safetensors")
    model = torch.nn.ParameterDict(
        {n: torch.zeros_like(one).bfloat16() for n, one in written.items()}
    )
    model.requires_grad_(False)

    def load_weights(weights: Any) -> set[str]:
        return {name for name, one in weights if model[name].copy_(one) is not None}

    setattr(model, "load_weights", load_weights)  # noqa: B010 - a module has no such attribute
    worker = sparse_apply.SparseApply()
    setattr(worker, "model_runner", SimpleNamespace(get_model=lambda: model))  # noqa: B010
    [spent] = worker.time_sparse_apply(str(tmp_path), 0.2)
    assert spent > 0
    for name, one in written.items():
        changed = model[name] != 0
        assert torch.equal(model[name][changed], one.bfloat16()[changed])
        assert 0.05 < changed.float().mean() < 0.5


def test_a_way_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Broken:
        url = ""

        def post(self, path: str, json: Any, **_: Any) -> httpx.Response:
            works = json["method"] == "reload_weights"
            request = httpx.Request("POST", "http://engine")
            return httpx.Response(200 if works else 500, json={"results": [None]}, request=request)

    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 100))
    stock: Any = Broken()
    found = own_ways.time_files(stock, tmp_path, 0.02)
    assert [("error" in one, one["way"]) for one in found] == [
        (True, "sparse_nccl, apply alone"),
        *[(False, "reload_weights")] * 2,
    ]
