"""The shell's lines of README and pages run as pasted, against servers over a plain model.

Hosts, folders and stores of a line become those of the test; so do the numbers of a version.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from safetensors.torch import save_file

from delta_sender import DeltaSender, LogSender, Quantizer
from delta_sender.cli import main as send
from engine_ext.cli import log, plan, top
from tests.support.fake_engine import Model
from tests.support.plain_servers import PlainServer
from tests.support.plain_trainer import model_digest
from tests.support.quantised_models import quantised
from tests.support.toy_adapters import fresh_adapter
from tests.support.trainer_models import make_model, saved
from tests.unit.docs.test_commands import LINES, named

pytestmark = pytest.mark.slow

COMMANDS: Final = {
    "delta-send": send,
    "delta-plan": plan.main,
    "delta-log": log.main,
    "delta-top": top.main,
}
HOSTS: Final = {
    "http://engine:8000": 0,
    "http://localhost:8000": 0,
    "http://a:8000": 0,
    "http://engine-a:8000": 0,
    "http://b:30000": 1,
    "http://engine-b:8000": 1,
}
KEY = "secret"


def next_of(tensors: Model) -> Model:
    """Return other values of some elements."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in found.values():
        tensor.view(-1)[::7] = 1
    return found


class Scene:
    """Two engines that hold the checkpoint BASE, and the folders that a line names."""

    def __init__(self, line: str, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        model = make_model("dense")
        self.base = quantised(model, "fp8_block") if "FP8_CHECKPOINT" in line else saved(model)
        self.next = next_of(saved(model))
        adapter = fresh_adapter()
        for name, tensors in {
            "BASE": self.base,
            "NEXT": self.next,
            "AFTER": {name: -tensor for name, tensor in self.next.items()},
            "ADAPTER": adapter,
            "NEXT_ADAPTER": next_of(adapter),
        }.items():
            (folder / name).mkdir()
            save_file(tensors, folder / name / "model.safetensors")
        for name in ("NEXT_ADAPTER", "ADAPTER"):
            file = folder / name / "model.safetensors"
            file.rename(file.with_name("adapter_model.safetensors"))
        self.log = folder / "log"
        self.log.mkdir()
        self.audit = folder / "audit.jsonl"
        self.numbers = {"120": "1"}
        self.words = {
            "BASE": folder / "BASE",
            "FP8_CHECKPOINT": folder / "BASE",
            "$MODEL": folder / "BASE",
            "NEXT": folder / "NEXT",
            "AFTER": folder / "AFTER",
            "/path/to/next": folder / "NEXT",
            "ADAPTER": folder / "ADAPTER",
            "NEXT_ADAPTER": folder / "NEXT_ADAPTER",
            "DIR": folder / "files",
            "/shared/log": self.log,
            "s3://weights/run-7": self.log,
            "/var/log/delta-audit.jsonl": self.audit,
        }
        self.engines: list[PlainServer] = []

    def start(self, **settings: Any) -> None:
        """Start the engines; the settings are of the first."""
        for given in (settings, {}):
            engine = PlainServer(self.base, fresh_adapter(), **given)
            self._stack.callback(engine.close)
            self.engines.append(engine)

    def publish(self) -> None:
        """Write version 1 into the log."""
        with LogSender(self.log, self.base.items()) as sender:
            sender.sync(self.next.items())

    def own(self, words: Sequence[str]) -> list[str]:
        """Return a line's words with this scene's hosts, folders and numbers."""
        found = []
        for word in words:
            word = str(self.words.get(word, self.numbers.get(word, word)))
            for host, number in HOSTS.items():
                word = word.replace(host, self.engines[number].url)
            found.append(word.replace("version=120", "version=1"))
        return found

    def status(self, number: int = 0, **query: str) -> dict[str, Any]:
        answer = httpx.get(f"{self.engines[number].url}/delta_status", params=query)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


@pytest.fixture
def scene(
    line: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        yield Scene(" ".join(line[1]), tmp_path, stack)


def of(program: str) -> Callable[[Any], Any]:
    """Give a test each line of a program; those that load a model run in tests/live."""
    chosen = [
        one
        for one in LINES
        if one[1][0] == program and one[0] != "tutorial.md" and one[1][1] != "MODEL_DIR"
    ]
    assert chosen
    return pytest.mark.parametrize("line", chosen, ids=named)


@of("delta-send")
def test_a_sending_line_runs(
    line: tuple[str, list[str]], scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line[1]
    follows = "--notify" in words
    scene.start(**({"log": str(scene.log), "follow": True} if follows else {}))
    before = 0
    if "--takeover" in words:
        other = DeltaSender(scene.engines[0].url, scene.base.items())
        other.sync(scene.base.items())
        before = other.version
    if "AFTER" in words:
        assert send(scene.own(["--base", "BASE", "--target", "NEXT", "--log", "DIR"])) == 0
    assert COMMANDS["delta-send"](scene.own(words)[1:]) == 0, capsys.readouterr().err
    query, held = {}, scene.next
    if "--adapter" in words:
        query, held = {"adapter": "tiny"}, next_of(fresh_adapter())
    if "--quantize" in words:
        dtypes = {name: tensor.dtype for name, tensor in scene.base.items()}
        held = dict(Quantizer("fp8_block", dtypes)(held.items()))
    for number in [HOSTS[word] for word in words if word in HOSTS]:
        version = scene.status(number, **query)["version"]
        assert (version["number"], version["digest"]) == (before + 1, model_digest(held).hex())
    if "--log" in words or "--delta-log" in words:
        folder = scene.folder / "files" if "DIR" in words else scene.log
        assert any(path.is_file() for path in folder.rglob("*"))
    if "--dry-run" in words:
        assert scene.status()["version"]["number"] == 0
        assert "bytes" in capsys.readouterr().out


@of("delta-plan")
def test_a_line_that_shows_a_plan_runs(
    line: tuple[str, list[str]], scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.start()
    assert COMMANDS["delta-plan"](scene.own(line[1])[1:]) == 0
    assert f"{len(scene.base)} tensors on 1 rank" in capsys.readouterr().out


@of("delta-top")
def test_a_line_that_watches_runs(
    line: tuple[str, list[str]], scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once; and with the heartbeat of an engine that follows the log."""
    scene.publish()
    scene.start(log=str(scene.log), follow=True)
    httpx.post(f"{scene.engines[0].url}/delta_catch_up").raise_for_status()
    assert COMMANDS["delta-top"]([*scene.own(line[1])[1:], "--once"]) == 0
    shown = capsys.readouterr().out
    watched = [scene.engines[HOSTS[word]] for word in line[1] if word in HOSTS]
    assert all(engine.url.removeprefix("http://") in shown for engine in watched)
    assert len(re.findall(r"\bcertain\b", shown)) == len(watched)
    assert ("following" in shown) == ("--delta-log" in line[1])


@of("delta-log")
def test_a_line_about_a_log_runs(
    line: tuple[str, list[str]],
    scene: Scene,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELTA_HMAC_KEY", KEY)
    scene.start(audit_file=str(scene.audit))
    scene.numbers[line[1][-1]] = scene.status()["version"]["digest"]  # of the base
    url, base = scene.engines[0].url, scene.base.items()
    with DeltaSender(url, base, delta_log=scene.log, hmac_key=KEY) as sender:
        sender.sync(scene.next.items())
    assert COMMANDS["delta-log"](scene.own(line[1])[1:]) == 0
    found = {"audit": "version 1 (", "list": "weight_v000001"}
    assert found[line[1][1]] in capsys.readouterr().out


@of("curl")
def test_a_request_is_answered(line: tuple[str, list[str]], scene: Scene) -> None:
    words = line[1]
    follows = any("delta_catch_up" in word or "delta_pin" in word for word in words)
    if follows:
        scene.publish()
    scene.start(**({"log": str(scene.log), "follow": True} if follows else {}))
    if "delta_rollback" in words[-1]:
        with DeltaSender(scene.engines[0].url, scene.base.items()) as sender:
            sender.sync(scene.next.items())
    command = [*scene.own(words), "--silent", "--show-error", "--fail-with-body"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert scene.status()["version"]["number"] == int(follows)


@pytest.mark.parametrize(
    "line", [one for one in LINES if one[1][:2] == ["python", "-c"]], ids=named
)
def test_the_signature_of_a_part_is_computed(
    line: tuple[str, list[str]], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTA_HMAC_KEY", KEY)
    scene.start()
    (scene.folder / "part").write_bytes(b"a body")
    done = subprocess.run(
        [sys.executable, *line[1][1:]], capture_output=True, text=True, check=True
    )
    signature = done.stdout.split()[-1]
    for given, status in ((signature, 400), (signature[::-1], 401)):
        answer = httpx.post(
            f"{scene.engines[0].url}/update_weights_delta",
            content=b"a body",
            headers={"X-Delta-Signature": given, "Content-Type": "application/octet-stream"},
        )
        assert answer.status_code == status, answer.text
