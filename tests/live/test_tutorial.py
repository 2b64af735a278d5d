"""The tutorial's files and commands, from an empty folder, as pasted; only the port is another."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.live_engine.process import free_port
from tests.live.quantised_cases import cpu_has
from tests.unit.docs.test_tutorial import PAGE, files

pytestmark = pytest.mark.full

_COMMANDS = re.compile(
    r"(?:<!-- (?P<kind>server|fails) -->\n)?```bash\n(?P<text>.*?)```\n"
    r"(?:\n```text\n(?P<shown>.*?)```)?",
    re.S,
)

_SHOWN = "30 rebuilt, 17 exact"  # on a CPU with AVX-512


class Command(NamedTuple):
    kind: str
    text: str
    shown: str


def commands() -> list[Command]:
    """Return the commands of the sections after the installation, and the output below each."""
    page = PAGE.read_text()
    sections = page[page.index("## 2.") :]
    return [Command(*(one or "" for one in found)) for found in _COMMANDS.findall(sections)]


class Shell:
    """Runs commands in a folder of its own, with this environment's programs first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": path}

    def start(self, text: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                f"{text.strip()} --port {self.port}",
                shell=True,
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            text.replace("localhost:8000", f"localhost:{self.port}"),
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Return a shell in an empty folder; the engine that it has started is stopped at the end."""
    shell = Shell(tmp_path)
    for name, text in files().items():
        (tmp_path / name).write_text(text.replace("localhost:8000", f"localhost:{shell.port}"))
    [server] = [one.text for one in commands() if one.kind == "server"]
    made = shell.run(commands()[0].text)
    assert made.returncode == 0, made.stderr
    process = shell.start(server, tmp_path / "engine.log")
    yield shell
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)


def shape(line: str) -> str:
    """Return a line of output without what differs from run to run."""
    return re.sub(r"\s+", " ", re.sub(r"[\da-f]{32}|\d+(?:[.,]\d+)*", "#", line)).strip()


@pytest.mark.timeout(900)
def test_the_tutorial_runs_as_pasted(shell: Shell) -> None:
    counts = _SHOWN if cpu_has("avx512_bw") else "47 exact"
    rewards: list[float] = []
    texts: list[str] = []
    for kind, text, shown in commands()[1:]:
        if kind == "server":
            continue
        done = shell.run(text)
        output = done.stdout + done.stderr
        assert (done.returncode != 0) == (kind == "fails"), output
        if shown:
            lines = {shape(line.replace(f":{shell.port}", ":8000")) for line in output.splitlines()}
            expected = shown.replace(_SHOWN, counts).splitlines()
            assert {shape(line) for line in expected} <= lines, output
        if text == "python train.py\n" and not kind:
            rewards = [float(line.split()[1]) for line in done.stdout.splitlines()[1:]]
        if "/v1/completions" in text:
            texts.append(json.loads(done.stdout)["choices"][0]["text"])
        if "/delta_status" in text:
            assert json.loads(done.stdout)["version"]["by_rank"] == [20]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > 1.1 * sum(rewards[:5])
    assert texts[0] != texts[1]
    log = (shell.folder / "engine.log").read_text()
    assert f"delta updates: 47 tensors: {counts}" in log
