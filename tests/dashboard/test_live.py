"""A live engine that takes syncs, scraped by a Prometheus and watched in Chromium."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from playwright.sync_api import expect

from delta_sender import DeltaSender
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.dashboard.conftest import Opened
from tests.dashboard.examples import EXAMPLES, RULES, panel_expressions

pytestmark = pytest.mark.engine

DELTAS = 24
DEADLINE_S = 60.0


@dataclass
class Prometheus:
    """A running Prometheus with the example's alerts."""

    url: str

    def ask(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params).raise_for_status().json()
        assert answer["status"] == "success"
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The result of an expression, as soon as it has one."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, expression
            time.sleep(0.5)
        return found


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess]) -> EngineProcess:
    return start("vllm", checkpoint("qwen3"), extra_args=["--delta-scrub-interval", "2"])


@pytest.fixture(scope="module")
def prometheus(
    engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """One with the example's configuration, but for the engine's address and shorter intervals."""
    folder = tmp_path_factory.mktemp("prometheus")
    configuration = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(RULES)]
    [job] = configuration["scrape_configs"]
    job["static_configs"] = [{"targets": [engine.url.removeprefix("http://")]}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(f"{found.url}/-/ready").status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        assert process.poll() is None, (folder / "log").read_text()
        yield found
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def status(engine: EngineProcess, prometheus: Prometheus) -> dict[str, Any]:
    """The engine's answers after many deltas, two refusals and a full sync, all scraped."""
    prometheus.wait_for("delta_updates_version")
    tensors = tiny_models.load_tensors(engine.model)
    generator = torch.Generator().manual_seed(3)
    with DeltaSender(engine.url, base=tensors.items()) as sender:
        for step in range(DELTAS):
            for tensor in tensors.values():
                bits = tensor.view(-1).view(torch.int16)
                density = 0.01 + 0.02 * (step % 7) / 7
                bits[torch.rand(bits.numel(), generator=generator) < density] ^= 1
            assert sender.sync(tensors.items()).status == "committed"
            if step == DELTAS // 2:
                sender.sync_full(tensors.items())
            if step in (1, DELTAS - 3):
                octets = {"Content-Type": "application/octet-stream"}
                refused = engine.post("/update_weights_delta", content=b"{}", headers=octets)
                assert refused.status_code == 400
                # An increase is seen from the second one on.
                prometheus.wait_for("delta_updates_syncs_total{outcome='refused'}")
    answer: dict[str, Any] = engine.get("/delta_status", params={"history": "true"}).json()
    prometheus.wait_for(f"delta_updates_version == {answer['version']['number']}")
    return answer


def test_every_panel_has_data(prometheus: Prometheus, status: dict[str, Any]) -> None:
    empty = [panel for panel, query in panel_expressions() if not prometheus.query(query)]
    assert empty == []


def test_panels_show_what_has_happened(prometheus: Prometheus, status: dict[str, Any]) -> None:
    shown = {}
    for panel, expression in panel_expressions():
        shown[panel] = [
            (one["metric"], float(one["value"][1])) for one in prometheus.query(expression)
        ]
    assert [value for _, value in shown["Newest version"]] == [status["version"]["number"]]
    assert [value for _, value in shown["Largest version lag"]] == [0]
    assert [value for _, value in shown["Engines with uncertain weights"]] == [0]
    assert [value for _, value in shown["Wrong bits found in the range"]] == [0]
    [(labels, _)] = [
        (labels, value)
        for labels, value in shown["Syncs that did not commit, by error"]
        if labels["outcome"] == "refused"
    ]
    assert labels["error"] == "MalformedPart"
    assert 0 < shown["Pause of generation"][-1][1] < 10


def test_the_alerts_are_evaluated_and_silent(
    prometheus: Prometheus, status: dict[str, Any]
) -> None:
    [group] = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == RULES.read_text().count("alert:")
    for rule in group["rules"]:
        assert (rule["health"], rule["state"]) == ("ok", "inactive"), rule


def test_the_page_shows_the_engine(
    engine: EngineProcess,
    status: dict[str, Any],
    open_page: Callable[..., Opened],
    tmp_path: Path,
) -> None:
    opened = open_page(engine.url, viewport={"width": 1180, "height": 800})
    page = opened.page
    expect(page.locator("#state")).to_have_text("certain")
    expect(page.locator("#facts dd").first).to_have_text(str(status["version"]["number"]))
    expect(page.locator("#syncs tbody tr")).to_have_count(len(status["history"]))
    expect(page.locator("#syncs .warn")).to_have_text(["refused"] * 2)
    committed = DELTAS + 1
    expect(page.locator("#pause-plot rect")).to_have_count(committed)
    expect(page.get_by_role("alert")).to_be_hidden()
    picture = page.screenshot(path=tmp_path / "dashboard.png")
    assert len(picture) < 150_000
