"""Vision-language models: new weights of either part, and no embedding of an image from old ones.

The same images are shown before and after every step, so an embedding or KV entry that outlived a
commit would give other log probabilities than a fresh engine on the same weights.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from delta_sender import DeltaSender
from scripts.live_engine import tiny_models, vision_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import PROMPTS, check_steps, fingerprint
from tests.support.plain_trainer import Trainer

OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"python_path": [Path(__file__).parents[1] / "shims" / "vllm_cpu_vision"]},
    "sglang": {"extra_args": ["--enable-multimodal"]},
}
# Parts of the names of what a step changes.
LANGUAGE, TOWER, PROJECTOR = "language_model", "vision_tower", "multi_modal_projector"
IMAGES = (1, 2)
# The last layer of LLaVA's tower is not used, nor is what follows it.
IGNORED = {"gemma3": 0, "llava": 18}


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def build(kind: str) -> Path:
        return vision_models.build(kind, tmp_path_factory.mktemp(kind))

    return build


@pytest.mark.full
@pytest.mark.parametrize("engine_kind", ["vllm", "sglang"])
def test_no_embedding_outlives_a_commit(
    engine_kind: str, vision: Callable[[str], Path], start: Callable[..., EngineProcess]
) -> None:
    base = vision("gemma3")
    engine = start(engine_kind, base, **OPTIONS[engine_kind])
    old = tiny_models.load_tensors(base)
    before = [answers(engine), answers(engine)]
    assert before[0] == before[1]
    assert before[0][0] != before[0][1]  # it sees them
    with DeltaSender(engine.url, base=old.items()) as sender:
        report = sender.sync(other_vision(old).items())
    assert (report.status, report.full) == ("committed", False)
    assert all(x != y for x, y in zip(before[0], answers(engine), strict=True))
    assert engine.post("/delta_rollback", json={}).json()["status"] == "rolled_back"
    assert answers(engine) == before[0]
    engine.stop()


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine_kind", "kind", "tp"),
    [
        ("vllm", "gemma3", 1),
        ("vllm", "gemma3", 2),
        ("vllm", "llava", 1),
        ("sglang", "gemma3", 1),
        ("sglang", "gemma3", 2),
    ],
)
def test_exact(
    engine_kind: str,
    kind: str,
    tp: int,
    vision: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = vision(kind)
    engine = start(engine_kind, base, tp=tp, **OPTIONS[engine_kind])
    assert engine.delta_status().health.uncertified == {}
    assert ignored(engine) == IGNORED[kind]
    trainer = Trainer(tiny_models.load_tensors(base))
    steps = [dict(trainer.tensors)]
    for part in (LANGUAGE, TOWER, PROJECTOR, ""):
        trainer.step(density=0.2, only=part)
        steps.append(dict(trainer.tensors))

    seen: list[tuple[Any, Any]] = []

    def observe(engine: EngineProcess) -> tuple[Any, Any]:
        seen.append((fingerprint(engine), answers(engine)))
        return seen[-1]

    last, _ = check_steps(engine, steps, observe)
    for step, (before, after) in enumerate(itertools.pairwise(seen[: len(steps)])):
        changed = before[0]["logprobs"] != after[0]["logprobs"]
        assert changed == (step not in (1, 2))  # vision is not asked for a text
        assert all(x != y for x, y in zip(before[1], after[1], strict=True))

    check_request_in_flight(engine, steps[-1])
    check_requests_meanwhile(engine, other_vision(steps[-1]))
    engine.stop()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[-1])
    fresh = start(engine_kind, target, tp=tp, **OPTIONS[engine_kind])
    assert observe(fresh) == last
    fresh.stop()


def check_request_in_flight(engine: EngineProcess, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let a request that shows an image run while the vision part is synced.

    It writes one and the same token, so what it computes at each place depends on weights alone.
    """
    old = alternatives(engine)
    request, chunks = threading.Thread(), list[Any]()
    for _ in range(10):
        chunks = []
        request, under_way = stream(engine, chunks)
        assert under_way.wait(60)
        engine.pause()
        time.sleep(0.5)  # what was written before the pause is still on its way
        if request.is_alive():
            break
        engine.resume()  # it had ended before the pause
    with DeltaSender(engine.url, base=tensors.items()) as sender:
        assert sender.sync(other_vision(tensors).items()).status == "committed"
    assert request.is_alive()
    engine.resume()
    request.join()
    new = alternatives(engine)
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    found = [other for choice in choices for other in others(choice["logprobs"])]
    assert len(found) == len(old) == len(new)
    far = [float((x - y).abs().max()) for x, y in zip(found, old, strict=True)]
    near = [float((x - y).abs().max()) for x, y in zip(found, new, strict=True)]
    by_new = [n < f for n, f in zip(near, far, strict=True)]
    switch = by_new.index(True)
    assert switch >= 1
    assert all(by_new[switch:])
    # A prefix that is computed at once is rounded otherwise than token by token.
    assert max(near[switch:]) < min(far[switch:])


def stream(engine: EngineProcess, chunks: list[Any]) -> tuple[threading.Thread, threading.Event]:
    """Start a request that adds to `chunks`; the event is set by its first ones."""
    under_way = threading.Event()

    def read() -> None:
        body = repeat(engine, stream=True)
        with engine._client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data.startswith("{"):
                    chunks.append(json.loads(data))
                    if len(chunks) > 2:
                        under_way.set()

    request = threading.Thread(target=read)
    request.start()
    return request, under_way


def check_requests_meanwhile(engine: EngineProcess, tensors: Mapping[str, torch.Tensor]) -> None:
    """Show the same few images all the time while the vision part is synced; none must fail."""
    statuses: list[int] = []
    done = threading.Event()

    def ask() -> None:
        for seed in itertools.cycle(range(3)):
            body = question(engine, (seed,), max_tokens=4)
            statuses.append(engine.post("/v1/chat/completions", json=body).status_code)
            if done.is_set():
                return

    requests = [threading.Thread(target=ask) for _ in range(3)]
    for request in requests:
        request.start()
    with DeltaSender(engine.url, base=tensors.items()) as sender:
        for _ in range(6):
            tensors = other_vision(tensors)
            assert sender.sync(tensors.items()).status == "committed"
    done.set()
    for request in requests:
        request.join()
    assert set(statuses) == {200}
    assert len(statuses) > 6


def alternatives(engine: EngineProcess) -> list[torch.Tensor]:
    """Return `others` of a request that writes the same token again and again."""
    answer = engine._checked(engine.post("/v1/chat/completions", json=repeat(engine)))
    return others(answer["choices"][0]["logprobs"])


def repeat(engine: EngineProcess, **options: Any) -> dict[str, Any]:
    token = Tokenizer.from_file(str(engine.model / "tokenizer.json")).token_to_id("a")
    return question(engine, IMAGES, max_tokens=200, logit_bias={str(token): 50}, **options)


def others(logprobs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the log probabilities of the likeliest tokens [5] at each place, in their order."""
    return [
        torch.tensor([token["logprob"] for token in place["top_logprobs"]]).sort().values
        for place in logprobs["content"]
    ]


def other_vision(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the vision part's elements in another order."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: tensor if LANGUAGE in name else shuffled(tensor, generator)
        for name, tensor in tensors.items()
    }


def shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return tensor.view(-1)[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)


def ignored(engine: EngineProcess) -> int:
    return int(engine.delta_status().health.certification[0].get("ignored", 0))


def answers(engine: EngineProcess) -> list[Any]:
    """Return texts and log probabilities for a prompt with each image, and with both of them."""
    found = []
    for seeds in (IMAGES[:1], IMAGES[1:], IMAGES):
        answer = engine.post("/v1/chat/completions", json=question(engine, seeds))
        [choice] = engine._checked(answer)["choices"]
        del choice["weight_spans"]  # the version, which a fresh engine counts anew
        found.append(choice)
    return found


def question(engine: EngineProcess, seeds: tuple[int, ...], **options: Any) -> dict[str, Any]:
    urls = [{"url": vision_models.image_url(seed)} for seed in seeds]
    images = [{"type": "image_url", "image_url": url} for url in urls]
    content = [*images, {"type": "text", "text": PROMPTS[0]}]
    return {
        "model": str(engine.model),
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 5,
        **options,
    }
