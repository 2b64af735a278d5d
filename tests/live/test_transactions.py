"""Commit, undo, rollback and digest on a live engine with two ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

from engine_ext.format.digest import Digest, change_digest, tensor_digest
from engine_ext.ranks.status import EngineStatus
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.armed_faults import arm
from tests.support.plain_trainer import Trainer, bits, container, model_digest
from tests.support.present import present

OCTETS = {"Content-Type": "application/octet-stream"}
SCRUB_S = 0.2
SHIM = Path(__file__).parents[1] / "shims" / "faults"


class Server:
    def __init__(self, engine: EngineProcess, trainer: Trainer, faults: Path) -> None:
        self.engine = engine
        self.trainer = trainer
        self.faults = faults

    def post(self, body: bytes) -> httpx.Response:
        return self.engine.post("/update_weights_delta", content=body, headers=OCTETS)

    def arm(self, fault: str, rank: int, text: str = "") -> None:
        arm(self.faults, fault, rank, text)

    def digest(self, scan: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.get(
            "/delta_digest", params={"scan": str(scan).lower()}
        ).json()
        return found

    def status(self) -> EngineStatus:
        """Return the status without the parts that change between syncs."""
        return msgspec.structs.replace(self.engine.delta_status(), scrub=None, server=None)

    def scrubbed(self) -> list[str]:
        """Return the tensors that differ, once all were read that there are now."""
        scrub = present(self.engine.delta_status().scrub)
        passes, give_up = scrub.passes + 2, time.monotonic() + 60
        while scrub.passes < passes:
            assert scrub.error is None
            assert time.monotonic() < give_up, "scrubbing does not get there"
            time.sleep(SCRUB_S / 4)
            scrub = present(self.engine.delta_status().scrub)
        found: list[str] = scrub.mismatched
        return found

    def mismatches(self) -> float:
        """Return how many scrubbing has found so far, by the engine's own route."""
        found, before = self._mismatches(), -1.0
        while found != before:  # what was found just now might not be counted yet
            found, before = self._mismatches(), found
        return found

    def _mismatches(self) -> float:
        time.sleep(5 * SCRUB_S)  # the ranks are asked as often as they scrub
        lines = self.engine.get("/metrics").text.splitlines()
        [line] = [one for one in lines if one.startswith("delta_updates_scrub_mismatches_total")]
        return float(line.rsplit(" ", 1)[1])

    def heal(self) -> None:
        """Send a full sync, the only one that is taken once a mismatch was found."""
        self.trainer.version += 1
        metadata = {"current_version": str(self.trainer.version), "full": "true"}
        dense = dict.fromkeys(self.trainer.tensors)
        healed = self.post(container(self.trainer.tensors, dense, metadata=metadata))
        assert healed.json()["status"] == "committed", healed.text
        status = self.engine.delta_status()
        assert (status.health.state, status.health.mismatched) == ("certain", [])
        found = self.digest(scan=True)
        assert (found["corrupted"], found["digest"]) == (
            [],
            model_digest(self.trainer.tensors).hex(),
        )

    def refuses_deltas(self, *names: str) -> None:
        """Deltas of the named tensors, of others, and a rollback: the bits are known to differ."""
        status = self.engine.delta_status()
        assert (status.health.state, status.health.mismatched) == ("mismatched", [*names])
        tensors, version = self.trainer.tensors, self.trainer.version
        for one in (names[0], "model.embed_tokens.weight"):
            self.trainer.version = version + 1
            body = container(tensors, {one: torch.tensor([2])}, metadata=self.trainer.metadata())
            answer = self.post(body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (409, "BaseMismatch")
            assert names[0] in answer.json()["error"]["message"]
        self.trainer.version = version
        back = self.engine.post("/delta_rollback")
        assert (back.status_code, back.json()["error"]["type"]) == (409, "BaseMismatch")
        assert self.engine.complete("a", max_tokens=2)["choices"]

    def next(self, density: float = 0.02, **metadata: str) -> bytes:
        changed = self.trainer.step(density)
        metadata = {**self.trainer.metadata(), **metadata}
        return container(self.trainer.tensors, changed, metadata=metadata)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    base = checkpoint("qwen3")
    faults = tmp_path_factory.mktemp("faults")
    environment = {"DELTA_FAULTS": str(faults)}
    metrics = ["--enable-metrics"] if request.param == "sglang" else []
    scrub = ["--delta-scrub-interval", str(SCRUB_S)]
    options = {"python_path": [SHIM], "extra_env": environment, "extra_args": [*scrub, *metrics]}
    engine = start(request.param, base, tp=2, **options)
    yield Server(engine, Trainer(tiny_models.load_tensors(base)), faults)
    engine.stop()


def change_of(
    changed: dict[str, torch.Tensor], old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]
) -> Digest:
    """The digest of the changed elements, new minus old."""
    total = Digest.ZERO
    for name, where in changed.items():
        indices = where.numpy()
        total += change_digest(name, indices, bits(old[name])[indices], bits(new[name])[indices])
    return total


def test_the_digest_is_the_trainers_on_two_ranks(server: Server) -> None:
    expected = model_digest(server.trainer.tensors).hex()
    assert server.digest()["digest"] == expected
    assert server.digest(scan=True) | {"tensors": None} == {
        "version": 0,
        "digest": expected,
        "digest_algorithm": "multilinear-1",
        "scanned": True,
        "tensors": None,
        "corrupted": [],
    }
    name, tensor = next(iter(server.trainer.tensors.items()))
    assert server.digest()["tensors"][name] == tensor_digest(name, bits(tensor)).hex()


def test_the_plan(server: Server) -> None:
    plan = server.engine.get("/delta_status", params={"plan": "true"}).json()["plan"]
    assert len(plan) == 2
    for rows in plan:
        assert {row["name"] for row in rows} == set(server.trainer.tensors)
        assert {row["status"] for row in rows} == {"exact"}
        assert all(row["digested"] for row in rows)


def test_a_write_that_fails_on_one_rank_is_taken_back_on_both(server: Server) -> None:
    server.arm("fail_write", 1)
    before = server.engine.checksums(), server.digest(scan=True), server.status()
    body = server.next()
    answer = server.post(body)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["engine_state"]) == ("WriteUndone", "unchanged")
    assert "rank 1" in error["message"]
    after = server.engine.checksums(), server.digest(scan=True), server.status()
    assert after == before
    assert server.engine.complete("a", max_tokens=2)["choices"]
    assert server.post(body).json()["status"] == "committed"


def test_an_exception_that_escapes_does_not_end_the_server(server: Server) -> None:
    """Both ranks raise unexpectedly: an error, no change, and the next sync is applied."""
    before = server.engine.checksums(), server.digest(scan=True)
    for rank in range(2):
        server.arm("raise_commit", rank)
    body = server.next()
    answer = server.post(body)
    assert answer.status_code == 500
    assert "the commit went away" in answer.text
    assert (server.engine.checksums(), server.digest(scan=True)) == before
    assert server.engine.complete("a", max_tokens=2)["choices"]
    assert server.post(body).json()["status"] == "committed"


def test_rollback(server: Server) -> None:
    """The version before is restored bit by bit; the version that was left can come again."""
    before = server.engine.checksums(), server.digest(scan=True)
    body = server.next()
    assert server.post(body).json()["rollback"] is True
    after = server.engine.checksums(), server.digest(scan=True)
    assert after[0] != before[0]
    answer = server.engine.post("/delta_rollback").json()
    assert answer["status"] == "rolled_back"
    assert (answer["version"], answer["rolled_back"]) == (
        server.trainer.version - 1,
        server.trainer.version,
    )
    assert (server.engine.checksums(), server.digest(scan=True)) == before
    assert server.engine.weight_version() == str(server.trainer.version - 1)
    again = server.engine.post("/delta_rollback")
    assert again.status_code == 409
    assert server.post(body).json()["status"] == "committed"
    assert (server.engine.checksums(), server.digest(scan=True)) == after


@pytest.mark.parametrize("touched", [True, False])
def test_a_corrupted_weight_is_found(server: Server, touched: bool) -> None:
    """By the change's digest if the delta touches it, otherwise by a scan and by scrubbing."""
    name = "model.norm.weight"
    assert server.scrubbed() == []
    counted = server.mismatches()
    server.arm("flip_a_bit", 0, f"{name} 3")
    old, version = server.trainer.tensors, server.trainer.version
    if touched:
        new = old[name].clone()
        new[2:4] += 1
        server.trainer.version += 1
        tensors, changed = {**old, name: new}, {name: torch.tensor([2, 3])}
        change = change_of(changed, old, tensors).hex()
        metadata = {**server.trainer.metadata(), "digest_part": change}
        answer = server.post(container(tensors, changed, metadata=metadata))
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "BaseMismatch")
        server.trainer.version = version
    else:
        assert server.digest(scan=True)["corrupted"] == [name]
        assert server.scrubbed() == [name]
        assert server.mismatches() == counted + 1
        server.refuses_deltas(name)
    assert server.engine.delta_status().version.number == version
    server.heal()


def test_a_moved_weight_is_found_and_healed(server: Server) -> None:
    """Its old memory holds what it held; a full sync is written to where it is now."""
    live = "model.layers.0.self_attn.qkv_proj.weight"  # three tensors of the checkpoint
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "kqv"]
    assert server.scrubbed() == []
    before = server.engine.checksums()
    server.post(server.next())
    kept = server.engine.checksums()
    assert kept != before
    for rank in range(2):
        server.arm("move_tensor", rank, live)
    assert server.digest(scan=True)["corrupted"] == names
    assert server.scrubbed() == names
    assert server.engine.checksums() != kept
    server.refuses_deltas(*names)
    server.heal()
    assert server.engine.checksums() == kept
    assert server.post(server.next()).json()["status"] == "committed"
    expected = model_digest(server.trainer.tensors).hex()
    assert server.digest(scan=True)["digest"] == expected
    assert server.engine.post("/delta_rollback").json()["status"] == "rolled_back"
    assert server.engine.checksums() == kept
    server.heal()


def test_replicas_that_differ_are_found(server: Server) -> None:
    """A norm is on both ranks, and one copy was changed."""
    name = "model.norm.weight"
    assert server.scrubbed() == []
    server.arm("flip_a_bit", 1, f"{name} 5")
    assert server.scrubbed() == [name]
    old = dict(server.trainer.tensors)
    new = old[name].clone()
    new[5] += 1
    server.trainer.version += 1
    body = container(
        {**old, name: new}, {name: torch.tensor([5])}, metadata=server.trainer.metadata()
    )
    answer = server.post(body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "BaseMismatch")
    server.trainer.version -= 1
    server.refuses_deltas(name)
    server.heal()


@pytest.mark.parametrize("syncs", [20, pytest.param(200, marks=pytest.mark.full)])
def test_many_random_syncs(server: Server, syncs: int) -> None:
    """The digest is the trainer's after each of them; some are refused, one is rolled back.

    Scrubbing runs meanwhile, and finds nothing.
    """
    assert server.scrubbed() == []
    counted = server.mismatches()
    digest = model_digest(server.trainer.tensors)
    rng = np.random.default_rng(5)
    for number in range(syncs):
        old = dict(server.trainer.tensors)
        changed = server.trainer.step(float(rng.choice([0.0005, 0.005, 0.03])))
        change = change_of(changed, old, server.trainer.tensors)
        metadata = {
            **server.trainer.metadata(),
            "digest_part": change.hex(),
            "digest_before": digest.hex(),
            "digest_after": (digest + change).hex(),
        }
        if number % 10 == 3:
            wrong = {**metadata, str(rng.choice(["digest_before", "digest_part"])): "0" * 32}
            refused = server.post(container(server.trainer.tensors, changed, metadata=wrong))
            assert refused.json()["error"]["type"] == "BaseMismatch", refused.text
        answer = server.post(container(server.trainer.tensors, changed, metadata=metadata)).json()
        assert answer["status"] == "committed", answer
        assert answer["digest"] == (digest + change).hex()
        if number == syncs // 2:
            assert server.engine.post("/delta_rollback").json()["digest"] == digest.hex()
            server.trainer.tensors, server.trainer.version = old, server.trainer.version - 1
        else:
            digest += change
    assert (server.scrubbed(), server.mismatches()) == ([], counted)
    assert server.digest(scan=True)["corrupted"] == []
    assert server.digest(scan=True)["digest"] == model_digest(server.trainer.tensors).hex()


FIRST: dict[str, Any] = {"run": "first", "run_epoch": "1", "run_owner": "first-host:11"}
SECOND: dict[str, Any] = {"run": "second", "run_epoch": "1", "run_owner": "second-host:22"}


def test_two_trainers_cannot_replace_each_other(server: Server) -> None:
    """The second is refused until it takes over; from then on the first is, for good."""

    def whole(version: int, **metadata: str) -> bytes:
        metadata = {"current_version": str(version), "full": "true", **metadata}
        tensors = server.trainer.tensors
        return container(tensors, dict.fromkeys(tensors), metadata=metadata)

    def refusal(answer: httpx.Response) -> tuple[int, str, str]:
        error = answer.json()["error"]
        return answer.status_code, error["type"], error["owner"]["host"]

    def ask(action: str, run: str, **keys: object) -> httpx.Response:
        body = {"action": action, "run": run, "host": f"{run}-host", **keys}
        return server.engine.post("/delta_run", json=body)

    def holds(run: str | None, owner: str | None) -> None:
        status = server.status()
        assert (status.version.number, status.version.run) == (server.trainer.version, run)
        assert (status.owner and status.owner.run) == owner
        assert server.engine.weight_version() == str(server.trainer.version)
        assert server.digest(scan=True)["digest"] == model_digest(server.trainer.tensors).hex()

    assert ask("claim", "first").status_code == 200
    assert server.post(server.next(**FIRST)).json()["run"] == "first"
    holds("first", "first")
    tensors, version = dict(server.trainer.tensors), server.trainer.version
    before = server.engine.checksums(), server.digest(scan=True), server.status()
    for other in (server.next(**SECOND), whole(999, **SECOND), server.next(), whole(1)):
        assert refusal(server.post(other)) == (409, "RunConflict", "first-host")
    assert refusal(ask("claim", "second")) == (409, "RunConflict", "first-host")
    assert (server.engine.checksums(), server.digest(scan=True), server.status()) == before

    # Another process takes over; its own numbers can be lower.
    assert ask("claim", "second", takeover=True).json()["owner"]["run"] == "second"
    assert server.status().version.run == "first"
    server.trainer.version = 1
    assert server.post(whole(1, **SECOND)).json()["run"] == "second"
    holds("second", "second")
    assert 'delta_updates_run_info{run="second"} 1.0' in server.engine.get("/metrics").text
    server.trainer.tensors, server.trainer.version = tensors, version
    for late in (server.next(**FIRST), whole(2000, **FIRST)):
        assert refusal(server.post(late)) == (409, "RunFenced", "second-host")
    assert refusal(ask("claim", "first", takeover=True)) == (409, "RunFenced", "second-host")
    server.trainer.version = 1
    server.trainer.tensors = tensors
    assert server.post(whole(1, **SECOND)).json()["error"]["highest"] == 1
    assert server.post(whole(2, **SECOND)).json()["status"] == "committed"

    # Without an owner, trainers that name no run are served; one starts over at version 1.
    assert ask("release", "second").json()["released"] is True
    server.trainer.version = 2
    nameless = server.post(server.next()).json()["run"]
    assert nameless.startswith("anonymous-")
    server.trainer.version = 1
    anew = server.post(whole(1)).json()["run"]
    assert anew.startswith("anonymous-")
    assert anew != nameless
    holds(anew, None)


def test_a_write_that_cannot_be_taken_back(server: Server) -> None:
    server.arm("fail_write", 0)
    server.arm("fail_undo", 0)
    answer = server.post(server.next())
    error = answer.json()["error"]
    assert (error["type"], error["engine_state"]) == ("CommitFailed", "uncertain")
    refused = server.engine.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert refused.status_code == 503
    metadata = {"current_version": str(server.trainer.version + 1), "full": "true"}
    server.trainer.version += 1
    dense = dict.fromkeys(server.trainer.tensors)
    healed = server.post(container(server.trainer.tensors, dense, metadata=metadata))
    assert healed.json()["status"] == "committed", healed.text
    assert server.digest(scan=True)["digest"] == model_digest(server.trainer.tensors).hex()
    assert server.engine.complete("a", max_tokens=2)["choices"]


def test_a_worker_killed_in_the_middle_of_a_commit(server: Server) -> None:
    """Last: the server never serves mixed weights; it answers errors or is gone."""
    server.arm("stall_write", 1)
    stalled = server.faults / "stalled-1"
    body = server.next()
    answers: list[object] = []

    def sync() -> None:
        try:
            answers.append(server.post(body).status_code)
        except httpx.HTTPError as error:
            answers.append(error)

    def generate() -> object:
        try:
            request = {"prompt": "a", "max_tokens": 2}
            return server.engine.post("/v1/completions", json=request, timeout=5).status_code
        except httpx.HTTPError as error:
            return error

    thread = threading.Thread(target=sync)
    thread.start()
    give_up = time.monotonic() + 60
    while not stalled.exists():
        assert time.monotonic() < give_up, "the commit never began"
        time.sleep(0.05)
    os.kill(int(stalled.read_text()), signal.SIGKILL)
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline:
        served = generate()
        assert served != 200
        if isinstance(served, httpx.ConnectError):
            break
    else:
        pytest.fail("the server of a dead worker is still there")
    thread.join(60)
    assert answers, "the sender was never answered"
    assert answers[0] != 200
    assert server.engine.wait(60), "the server does not exit"
