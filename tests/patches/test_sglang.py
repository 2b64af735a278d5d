"""SGLang, patched: a copy of the installed package, never the installed one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from scripts import apply_patches
from scripts.live_engine import tiny_models
from scripts.live_engine.sglang import SglangProcess
from tests.patches import copies, inspect_sglang
from tests.patches.copies import ROOT
from tests.patches.http_processes import one_client_each
from tests.support.plain_trainer import Trainer, container, model_digest, split, write_log

pytestmark = [pytest.mark.engine, pytest.mark.full]

OCTETS = {"Content-Type": "application/octet-stream"}
NO_PLUGIN = "other"  # SGLang takes an empty list for all


@pytest.fixture(scope="module")
def patched(patched_copy: Callable[[str], Path]) -> Path:
    """The folder of a patched copy of SGLang."""
    return patched_copy("sglang")


@pytest.mark.versions
@pytest.mark.parametrize("plugins", [NO_PLUGIN, None], ids=["without-plugins", "with-the-plugin"])
def test_everything_is_there_and_only_once(
    patched: Path, tmp_path: Path, plugins: str | None
) -> None:
    """Flag, endpoint, worker method, load format; the plugin adds no second one of any."""
    script, out = inspect_sglang.__file__, tmp_path / "facts.json"
    found = copies.facts("sglang", patched, script, out, plugins)
    assert found["package"] == str(patched / "sglang" / "__init__.py")
    assert found["flags"] == 1
    # The format asks for the flag, and the model is loaded as with "auto".
    assert (found["base_version"], found["load_format"]) == (3, "auto")
    assert found["attaches"] == 1
    assert found["wrapped"] == [False] * 4
    assert found["answer"].startswith("deltas are sent to the delta endpoints")
    assert found["choices"].count("delta") == 1


@pytest.mark.versions
def test_tests_of_the_series_pass(patched: Path) -> None:
    [file] = (apply_patches.PATCHES / "sglang" / "test").rglob("test_*.py")
    done = copies.run("sglang", patched, str(file), SGLANG_PLUGINS=NO_PLUGIN)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "skipped" not in done.stderr


class Live:
    """A patched SGLang with two HTTP processes, and the trainer that it follows."""

    def __init__(self, engine: SglangProcess, base: Path, root: Path, trainer: Trainer) -> None:
        self.engine = engine
        self.base = base
        self.root = root
        self.trainer = trainer
        self.clients: list[httpx.Client] = []

    def next(self) -> bytes:
        changed = self.trainer.step()
        return container(self.trainer.tensors, changed, metadata=self.trainer.metadata())

    def post(self, client: httpx.Client, **query: str) -> None:
        answer = client.post(
            "/update_weights_delta", content=self.next(), headers=OCTETS, params=query
        )
        assert (answer.status_code, answer.json()["status"]) == (200, "committed"), answer.text
        self.at_one_version()

    def at_one_version(self) -> None:
        """Every process reports the trainer's version, also where no delta endpoint is asked."""
        version = self.trainer.version
        for client in self.clients:
            # First: requests wait until their process knows the version.
            body = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
            answer = client.post("/generate", json=body).json()
            assert answer["meta_info"]["weight_version"] == str(version)
            assert client.get("/model_info").json()["weight_version"] == str(version)
            status = client.get("/delta_status").json()
            held = status["version"]
            assert (held["number"], held["published"]) == (version, str(version))
            assert held["digest"] == model_digest(self.trainer.tensors).hex()


@pytest.fixture(scope="module")
def live(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """No plugin is loaded, and the load format is all that asks for deltas; with a delta log."""
    folder = tmp_path_factory.mktemp("live")
    base = tiny_models.build("qwen3", folder / "model")
    root = folder / "deltas"
    root.mkdir()
    trainer = Trainer(tiny_models.load_tensors(base))
    write_log(folder / "log", trainer, 2)
    arguments = ["--load-format", "delta", "--tokenizer-worker-num", "2", "--enable-metrics"]
    arguments += ["--delta-log", str(folder / "log")]
    engine = SglangProcess(
        base,
        extra_args=[*arguments, "--delta-root", str(root)],
        extra_env={**copies.sglang_environment(patched), "SGLANG_PLUGINS": NO_PLUGIN},
        log_path=folder / "engine.log",
    )
    with engine, one_client_each(engine, 2) as clients:
        found = Live(engine, base, root, trainer)
        found.clients = clients
        yield found


def test_one_http_process_replays_and_all_know_it(live: Live) -> None:
    live.at_one_version()
    assert live.engine.log_path.read_text().count("versions replayed") == 1
    for client in live.clients:
        assert client.get("/delta_status").json()["log"]["newest"] == 2


def test_every_http_process_commits(live: Live) -> None:
    for client in [*live.clients, *live.clients]:
        live.post(client)


def test_the_parts_of_one_sync_come_to_several_http_processes(live: Live) -> None:
    groups = split(live.trainer.step(), 4)
    metadata = {**live.trainer.metadata(), "num_parts": "4"}
    statuses = []
    for part, changed in enumerate(groups):
        body = container(live.trainer.tensors, changed, metadata={**metadata, "part": str(part)})
        client = live.clients[part % 2]
        answer = client.post("/update_weights_delta", content=body, headers=OCTETS)
        statuses.append(answer.json()["status"])
    assert statuses == ["staged"] * 3 + ["committed"]
    live.at_one_version()


def test_every_http_process_tells_of_all_syncs(live: Live) -> None:
    query = {"history": "true"}
    before = len(live.clients[0].get("/delta_status", params=query).json()["history"])
    for client in live.clients:
        live.post(client)
    versions = [live.trainer.version - 1, live.trainer.version]
    for client in live.clients:
        history = client.get("/delta_status", params=query).json()["history"]
        assert len(history) == before + 2
        assert [sync["version"] for sync in history[-2:]] == versions
        committed = 'delta_updates_syncs_total{error="",outcome="committed"} '
        lines = client.get("/metrics").text.splitlines()
        [counted] = [line for line in lines if line.startswith(committed)]
        assert float(counted.removeprefix(committed)) == live.trainer.version
        assert f"delta_updates_version {float(live.trainer.version)}" in lines


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_of_another_http_process_in_flight(live: Live, mode: str) -> None:
    """They end as the pause mode says, whichever process has them."""
    first, second = live.clients
    answers = []

    def generate() -> None:
        body = {"prompt": "count", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        answers.append(second.post("/v1/completions", json={"model": "m", **body}).json())

    thread = threading.Thread(target=generate)
    thread.start()
    while not first.get("/v1/loads").json()["loads"][0]["num_running_reqs"]:
        assert thread.is_alive()
    body, query = live.next(), {"pause_mode": mode}
    answer = first.post("/update_weights_delta", content=body, headers=OCTETS, params=query)
    assert answer.json()["status"] == "committed", answer.text
    if mode == "wait":
        thread.join(1)
        assert not thread.is_alive()
    thread.join()
    [choice] = answers[0]["choices"]
    assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
    live.at_one_version()


def test_update_weights_from_disk(live: Live) -> None:
    """The format is the engine's own; the delta's folder does not become the model's path."""
    parts = split(live.trainer.step(), 2)
    folder = live.root / "weight_v1"
    folder.mkdir()
    for number, some in enumerate(parts):
        part = container(live.trainer.tensors, some, checksum="slime")
        (folder / f"rank0_flush{number:03d}.safetensors").write_bytes(part)
    version = {"weight_version": str(live.trainer.version), "load_format": "delta"}
    body = {"model_path": str(folder), **version}
    answer = live.clients[1].post("/update_weights_from_disk", json=body)
    assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text
    live.at_one_version()
    for client in live.clients:
        assert client.get("/model_info").json()["model_path"] == str(live.base)


def test_its_own_disk_updates_still_work(live: Live) -> None:
    """Their default format is that of a SGLang that was started with "auto"."""
    for client in live.clients:
        answer = client.post("/update_weights_from_disk", json={"model_path": str(live.base)})
        assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text
    live.trainer.version += 1
    metadata = {"current_version": str(live.trainer.version), "full": "true"}
    dense = dict.fromkeys(live.trainer.tensors)
    answer = live.clients[0].post(
        "/update_weights_delta",
        content=container(live.trainer.tensors, dense, metadata=metadata),
        headers=OCTETS,
    )
    assert answer.json()["status"] == "committed", answer.text
    live.at_one_version()


def test_live_memory_is_the_trainers(live: Live) -> None:
    found = live.engine.get("/delta_digest", params={"scan": "true"}).json()
    assert found["corrupted"] == []
    assert found["digest"] == model_digest(live.trainer.tensors).hex()


def test_equals_a_fresh_engine(live: Live, tmp_path: Path) -> None:
    """Last of those on the live engine; the fresh one is SGLang as it was installed."""
    updated = live.engine.checksums()
    live.engine.stop()
    target = tiny_models.save_checkpoint(live.base, tmp_path / "target", live.trainer.tensors)
    with SglangProcess(target, log_path=tmp_path / "fresh.log") as fresh:
        assert fresh.checksums() == updated


def test_the_endpoint_tests_pass_without_any_plugin(patched: Path) -> None:
    """The engine tests themselves, run again on the patched copy."""
    selection = ["tests/live/test_syncs.py", "-k", "sglang-qwen3-1-scatter"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
    environment = {**copies.sglang_environment(patched), "SGLANG_PLUGINS": NO_PLUGIN}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_with_the_plugin_too(patched: Path, tmp_path: Path) -> None:
    """The plugin is loaded, and stands back."""
    model = tiny_models.build("qwen3", tmp_path / "model")
    trainer = Trainer(tiny_models.load_tensors(model))
    with SglangProcess(
        model,
        enable_delta=True,
        extra_env=copies.sglang_environment(patched),
        log_path=tmp_path / "engine.log",
    ) as engine:
        body = container(trainer.tensors, trainer.step(), metadata=trainer.metadata())
        answer = engine.post("/update_weights_delta", content=body, headers=OCTETS)
        assert answer.json()["status"] == "committed", answer.text
        found = engine.get("/delta_digest", params={"scan": "true"}).json()
        assert found["digest"] == model_digest(trainer.tensors).hex()
