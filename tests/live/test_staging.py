"""A large delta is staged while the engine generates; only its commit stops the tokens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.armed_faults import arm
from tests.support.plain_trainer import Trainer, container, model_digest, split

# 26 million elements; a part sends 40 % of them.
LARGE = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
PARTS = 3
TOKENS = 10  # of a request, while one part is staged
SHIM = Path(__file__).parents[1] / "shims" / "faults"


class Stream:
    """Completions, one after the other, whose tokens are counted."""

    def __init__(self, url: str) -> None:
        self.tokens = 0
        self.failures: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stream:
        self._thread.start()
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
                            self.tokens += 1
                            if "error" in json.loads(line[6:]):
                                self.failures.append(line)

    def wait_for(self, more: int) -> None:
        """Wait for this many more tokens."""
        enough = self.tokens + more
        wait_until(lambda: self.tokens >= enough or bool(self.failures), f"{more} more tokens")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"not in {timeout_s} s: {what}"
        time.sleep(0.01)


def post_while_generating(
    engine: EngineProcess, body: bytes, stream: Stream, faults: Path
) -> dict[str, Any]:
    """Send a part whose staging lasts until there are `TOKENS` more; the answer."""
    begun, enough = faults / "staging-0", faults / "enough-0"
    arm(faults, "repeat_stage", 0)
    with ThreadPoolExecutor(1) as pool:
        octets = {"Content-Type": "application/octet-stream"}
        posted = pool.submit(engine.post, "/update_weights_delta", content=body, headers=octets)
        try:
            wait_until(lambda: begun.exists() or posted.done(), "the part is staged")
            begun.unlink()
            stream.wait_for(TOKENS)
            assert not posted.done()
        finally:
            enough.touch()
        answer: dict[str, Any] = posted.result().json()
        return answer


@pytest.mark.full
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_tokens_flow_while_a_large_delta_is_staged(
    kind: str, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """Each part's staging lasts until the tokens are there, however slow the machine is."""
    base = tiny_models.build("qwen3", tmp_path / "large", **LARGE)
    faults = tmp_path / "faults"
    faults.mkdir()
    engine = start(kind, base, python_path=[SHIM], extra_env={"DELTA_FAULTS": str(faults)})
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
    with Stream(engine.url) as stream:
        stream.wait_for(20)
        for number, body in enumerate(bodies):
            answer = post_while_generating(engine, body, stream, faults)
            last = number == PARTS - 1
            assert answer.get("status") == ("committed" if last else "staged"), answer
            assert ("pause_ms" in answer["timings_ms"]) == last
    assert stream.failures == []
    found = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert found["digest"] == model_digest(trainer.tensors).hex()
    engine.stop()
