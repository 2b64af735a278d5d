"""SGLang's streaming sessions, which keep KV for their next turn, across a sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.plain_trainer import Trainer, container

pytestmark = pytest.mark.full

TURN = [3 + number % 250 for number in range(100)]


class Session:
    """One session; without an id, prompts that begin anew.

    Attributes:
        tokens: all of its turns, with the answers.
    """

    def __init__(self, engine: EngineProcess, *, is_open: bool = True) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        body = {"capacity_of_str_len": 4096, "streaming": True}
        self.id = engine.post("/open_session", json=body).json() if is_open else None

    def ask(self, tokens: list[int]) -> tuple[list[float], int]:
        """Take a turn; the log probabilities of the answer, and how many tokens were cached."""
        body: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
        }
        if self.id is not None:
            body["session_params"] = {"id": self.id}
        answer = self.engine.post("/generate", json=body)
        answer.raise_for_status()
        found = answer.json()["meta_info"]
        self.tokens += [*tokens, *(token for _, token, _ in found["output_token_logprobs"])]
        return [logprob for logprob, *_ in found["output_token_logprobs"]], found["cached_tokens"]


def test_a_session_continues_with_the_new_weights(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess]
) -> None:
    base = checkpoint("qwen3")
    engine = start("sglang", base, extra_args=["--enable-streaming-session"])
    trainer = Trainer(tiny_models.load_tensors(base))
    session = Session(engine)
    session.ask(TURN)
    _, cached = session.ask([5, 6, 7])
    assert cached >= len(TURN)
    whole = [*session.tokens, 8, 9]
    with_old, _ = Session(engine, is_open=False).ask(whole)
    changed = trainer.step(0.5)
    body = container(trainer.tensors, changed, metadata=trainer.metadata())
    headers = {"Content-Type": "application/octet-stream"}
    answer = engine.post("/update_weights_delta", content=body, headers=headers).json()
    assert answer["status"] == "committed", answer
    with_new, cached = session.ask([8, 9])
    assert cached == 0
    engine.post("/flush_cache").raise_for_status()
    assert Session(engine, is_open=False).ask(whole) == (with_new, 0)
    assert with_new != with_old
    engine.stop()
