"""Every way a delta can travel, on a live engine, against a fresh engine on the target."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import tiny_models
from sglang_process import SglangProcess
from tests.engines.trainer import Trainer, container, model_digest, split
from tests.engines_sglang.conftest import PROMPTS, fingerprint

ENCODINGS = ("indices", "deltas", "deltas_zstd")
CASES = [("qwen3", 1), ("qwen3", 2), ("qwen3_moe", 1)]


class Run:
    """A live engine and the trainer that it follows."""

    def __init__(self, engine: SglangProcess, base: Path, root: Path, tp: int) -> None:
        self.engine = engine
        self.base = base
        self.root = root
        self.tp = tp
        self.trainer = Trainer(tiny_models.load_tensors(base))

    def post(self, body: bytes, **params: str) -> httpx.Response:
        return self.engine.post(
            "/update_weights_delta",
            content=body,
            params=params,
            headers={"Content-Type": "application/octet-stream"},
        )

    def next(self, **options: Any) -> bytes:
        changed = self.trainer.step()
        metadata = self.trainer.metadata()
        return container(self.trainer.tensors, changed, metadata=metadata, **options)

    def committed(self, response: httpx.Response) -> dict[str, Any]:
        answer: dict[str, Any] = response.json()
        assert response.status_code == 200, answer
        assert answer["status"] == "committed", answer
        assert answer["version"] == self.trainer.version
        assert self.engine.delta_status()["weight_version"] == str(self.trainer.version)
        return answer

    def files(self, parts: list[bytes]) -> dict[str, Any]:
        """Write parts below the root; the body of a disk request for them."""
        folder = self.root / f"weight_v{self.trainer.version:06d}"
        folder.mkdir()
        names = [f"rank0_flush{number:03d}.safetensors" for number in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            (folder / name).write_bytes(part)
        return {"model_path": str(folder), "files": names}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def run(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., SglangProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Run]:
    kind, tp = request.param
    root = tmp_path_factory.mktemp("deltas")
    base = checkpoint(kind)
    engine = start(base, tp=tp, extra_args=["--delta-root", str(root)])
    for prompt in PROMPTS:
        # What the prefix cache keeps now must not answer for later weights.
        engine.complete(prompt, max_tokens=4, temperature=0.0)
    yield Run(engine, base, root, tp)
    engine.stop()


def test_every_tensor_is_certified(run: Run) -> None:
    status = run.engine.delta_status()
    assert (status["engine"], status["ranks"]) == ("sglang", run.tp)
    assert status["uncertified"] == {}
    assert [set(found) for found in status["certification"]] == [{"exact"}] * run.tp
    assert status["digest"] == model_digest(run.trainer.tensors).hex()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_part_by_http(run: Run, encoding: str) -> None:
    body = run.next(encoding=encoding)
    before = run.engine.checksums()
    run.committed(run.post(body))
    assert run.engine.checksums() != before
    assert run.post(body).json()["status"] == "already_applied"


def test_parts_out_of_order_by_http(run: Run) -> None:
    changed = split(run.trainer.step(), 3)
    shared = run.trainer.metadata()
    bodies = [
        container(
            run.trainer.tensors,
            some,
            metadata={**shared, "part": str(number), "num_parts": "3"},
        )
        for number, some in enumerate(changed)
    ]
    for number in (2, 0):
        assert run.post(bodies[number]).json()["status"] == "staged"
    assert run.engine.delta_status()["staged"]["parts"] == [0, 2]
    run.committed(run.post(bodies[1]))


def test_files(run: Run) -> None:
    changed = split(run.trainer.step(), 2)
    parts = [container(run.trainer.tensors, some) for some in changed]
    request = {**run.files(parts), "weight_version": str(run.trainer.version)}
    run.committed(run.engine.post("/update_weights_delta", json=request))


def test_update_weights_from_disk(run: Run) -> None:
    """As slime and vime call it; the delta's folder does not become the model's path."""
    changed = split(run.trainer.step(), 3)
    parts = [container(run.trainer.tensors, some, checksum="slime") for some in changed]
    request = run.files(parts)
    version = {"weight_version": str(run.trainer.version), "load_format": "delta"}
    before = run.engine.get("/model_info").json()
    for names in (request["files"][:2], request["files"][2:]):
        body = {**request, **version, "files": names}
        response = run.engine.post("/update_weights_from_disk", json=body)
        assert run.committed(response)["success"] is True
    after = run.engine.get("/model_info").json()
    assert after == {**before, "weight_version": str(run.trainer.version)}
    assert after["model_path"] == str(run.base)


@pytest.mark.parametrize("flush_cache", ["true", "false"])
@pytest.mark.parametrize("pause_mode", ["keep", "wait", "abort"])
def test_requests_in_flight(run: Run, pause_mode: str, flush_cache: str) -> None:
    """Requests in flight end as the pause mode says, and the next ones are served."""
    answers = []

    def generate() -> None:
        options = {"prompt": "count", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        answers.append(run.engine.post("/v1/completions", json=options).json())

    thread = threading.Thread(target=generate)
    thread.start()
    run.committed(run.post(run.next(), pause_mode=pause_mode, flush_cache=flush_cache))
    thread.join()
    [choice] = answers[0]["choices"]
    assert choice["finish_reason"] in (("abort", "length") if pause_mode == "abort" else "length")
    assert run.engine.complete("a", max_tokens=2)["choices"]


def test_an_engine_that_the_caller_paused_stays_paused(run: Run) -> None:
    for flush_cache in ("true", "false"):
        run.engine.post("/pause_generation", json={"mode": "in_place"})
        run.committed(run.post(run.next(), flush_cache=flush_cache))
        with pytest.raises(httpx.ReadTimeout):
            run.engine.post("/generate", json={"text": "a"}, timeout=2)
        run.engine.post("/continue_generation", json={})
        assert run.engine.complete("a", max_tokens=2)["choices"]


def test_two_syncs_at_once(run: Run) -> None:
    """One of two senders commits, the other is refused; nothing is mixed."""
    version = run.trainer.version
    first, second = run.next(), None
    tensors = dict(run.trainer.tensors)
    run.trainer.version = version
    second = run.next()
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda body=body: answers.append(run.post(body)))
        for body in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = sorted(answer.status_code for answer in answers)
    assert codes[0] == 200
    assert codes[1] in (409, 503), [answer.text for answer in answers]
    full = dict.fromkeys(tensors)
    run.trainer.version = version + 2
    metadata = {"current_version": str(version + 2), "full": "true"}
    run.committed(run.post(container(run.trainer.tensors, full, metadata=metadata)))


def test_rollback(run: Run) -> None:
    before = run.engine.checksums()
    old, version = dict(run.trainer.tensors), run.trainer.version
    run.committed(run.post(run.next()))
    assert run.engine.checksums() != before
    answer = run.engine.post("/delta_rollback").json()
    assert answer["status"] == "rolled_back", answer
    assert run.engine.checksums() == before
    assert run.engine.get("/model_info").json()["weight_version"] == str(version)
    run.trainer.tensors, run.trainer.version = old, version


def test_refusals_change_nothing(run: Run) -> None:
    before = run.engine.checksums(), run.engine.delta_status()["version"]
    base = dict(run.trainer.tensors), run.trainer.version
    body = run.next()
    assert run.post(body[:-1]).status_code == 400
    assert run.post(body[:-1] + bytes([body[-1] ^ 1])).json()["error"]["type"] == "ChecksumMismatch"
    outside = {"model_path": "/etc", "load_format": "delta", "weight_version": "9"}
    answer = run.engine.post("/update_weights_from_disk", json=outside)
    assert (answer.status_code, answer.json()["success"]) == (403, False)
    run.trainer.version += 5
    ahead = container(
        run.trainer.tensors,
        {"model.norm.weight": torch.arange(3)},
        metadata=run.trainer.metadata(),
    )
    assert run.post(ahead).status_code == 409
    run.trainer.tensors, run.trainer.version = base
    assert (run.engine.checksums(), run.engine.delta_status()["version"]) == before
    run.committed(run.post(run.next()))


def test_other_formats_keep_their_meaning(run: Run) -> None:
    """SGLang's own answer, for a folder without a model and for a body that is none."""
    missing = {"model_path": str(run.root / "nothing"), "load_format": "auto"}
    answer = run.engine.post("/update_weights_from_disk", json=missing)
    assert answer.status_code == 400
    assert "num_paused_requests" in answer.json()
    assert run.engine.post("/update_weights_from_disk", content=b"{").status_code in (400, 422)
    run.committed(run.post(run.next()))


def test_a_delta_is_not_added_to_what_another_update_has_loaded(run: Run) -> None:
    """SGLang's own update loads the base again; only a full sync is taken then."""
    request = {"model_path": str(run.base), "load_format": "auto"}
    answer = run.engine.post("/update_weights_from_disk", json=request)
    assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text
    version, tensors = run.trainer.version, dict(run.trainer.tensors)
    refused = run.post(run.next())
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "BaseMismatch")
    assert run.engine.post("/delta_rollback").json()["error"]["type"] == "BaseMismatch"
    assert run.engine.complete("a", max_tokens=2)["choices"]
    run.trainer.tensors, run.trainer.version = tensors, version + 1
    metadata = {"current_version": str(version + 1), "full": "true"}
    dense = dict.fromkeys(tensors)
    run.committed(run.post(container(tensors, dense, metadata=metadata)))
    run.committed(run.post(run.next()))


def test_equals_a_fresh_engine(
    run: Run, start: Callable[..., SglangProcess], tmp_path: Path
) -> None:
    """Last: all that the engine computes with is what a fresh engine loads."""
    found = run.engine.get("/delta_digest", params={"scan": "true"}).json()
    assert found["corrupted"] == []
    assert found["digest"] == model_digest(run.trainer.tensors).hex()
    updated = fingerprint(run.engine)
    run.engine.stop()
    target = tiny_models.save_checkpoint(run.base, tmp_path / "target", run.trainer.tensors)
    fresh = start(target, tp=run.tp, enable_delta=False)
    assert updated == fingerprint(fresh)
    fresh.stop()
