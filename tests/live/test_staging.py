"""A large delta is staged while the engine generates; only its commit stops the tokens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.plain_trainer import Trainer, container, model_digest, split

# 26 million elements: staging 40 % of them takes long enough to be seen.
LARGE = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
PARTS = 3


class Stream:
    """Completions, one after the other, with the time of every token."""

    def __init__(self, url: str) -> None:
        self.times: list[float] = []
        self.failures: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stream:
        self._thread.start()
        while len(self.times) < 20 and not self.failures:
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        options = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
            while not self._stop.is_set():
                with client.stream("POST", "/v1/completions", json=options) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            self.times.append(time.monotonic())
                            if "error" in json.loads(line[6:]):
                                self.failures.append(line)

    def between(self, start: float, end: float) -> int:
        return sum(start < t < end for t in self.times)


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def test_tokens_flow_while_a_large_delta_is_staged(
    kind: str, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = tiny_models.build("qwen3", tmp_path / "large", **LARGE)
    engine = start(kind, base)
    trainer = Trainer(tiny_models.load_tensors(base))
    some = split(trainer.step(0.4), PARTS)
    metadata = {**trainer.metadata(), "num_parts": str(PARTS)}
    bodies = [
        container(
            trainer.tensors, part, encoding="indices", metadata={**metadata, "part": str(number)}
        )
        for number, part in enumerate(some)
    ]
    assert sum(map(len, bodies)) > 50 << 20
    headers = {"Content-Type": "application/octet-stream"}
    with Stream(engine.url) as stream:
        for number, body in enumerate(bodies):
            began = time.monotonic()
            answer = engine.post("/update_weights_delta", content=body, headers=headers).json()
            ended = time.monotonic()
            last = number == PARTS - 1
            assert answer.get("status") == ("committed" if last else "staged"), answer
            tokens, busy = stream.between(began, ended), ended - began
            print(f"part {number}: {tokens} tokens in {busy:.2f} s", answer["timings_ms"])
            assert tokens >= 3, f"{tokens} tokens in {busy:.2f} s"
            assert ("pause_ms" in answer["timings_ms"]) == last
    assert stream.failures == []
    found = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert found["digest"] == model_digest(trainer.tensors).hex()
    engine.stop()
