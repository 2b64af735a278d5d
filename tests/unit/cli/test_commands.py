"""What all commands have in common: help at once, versions, usage errors, Ctrl-C."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_ext import __version__
from engine_ext.log import open_log
from tests.unit.log.places import write

pytestmark = pytest.mark.slow

MODULES = {
    "delta-send": "delta_sender",
    "delta-conformance": "engine_ext.cli.conformance",
    "delta-log": "engine_ext.cli.log",
    "delta-plan": "engine_ext.cli.plan",
    "delta-top": "engine_ext.cli.top",
}

# Runs a command in which the first import of a module is interrupted, as by Ctrl-C.
INTERRUPTED = """
import os, runpy, signal, sys
command, module, *arguments = sys.argv[1:]
# A process that a shell has started in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = arguments
runpy.run_module(command, run_name="__main__", alter_sys=True)
"""


# Runs a command's entry point where a package is not installed.
WITHOUT = """
import importlib, sys
package, module, *arguments = sys.argv[1:]
sys.modules[package] = None
sys.argv[1:] = arguments
sys.exit(importlib.import_module(module).main())
"""


# Runs commands without a package, each in a fork of an interpreter that has imported torch.
FORKED = """
import gc, json, os, runpy, sys
package, commands, statuses = sys.argv[1], json.loads(sys.argv[2]), []
sys.modules[package] = None
import torch
gc.freeze()  # no fork collects what this has made
for number, (module, *arguments) in enumerate(commands):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"stderr{number}", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with open("statuses", "w") as file:
    json.dump(statuses, file)
"""


def run(
    *arguments: str, stdout: int = subprocess.PIPE, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=cwd,
        text=True,
        timeout=120,
        check=False,
    )


def run_unread(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program whose output nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return run(*arguments, stdout=writing, **options)
    finally:
        os.close(writing)


def forked(
    folder: Path,
    commands: Sequence[Sequence[str]],
    runs: Callable[..., subprocess.CompletedProcess[str]] = run,
    *,
    without: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[int, str]]:
    """Return the status of each command, and what it has said on standard error."""
    folder.mkdir(exist_ok=True)
    done = runs("-c", FORKED, without, json.dumps(commands), cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    said = [(folder / f"stderr{number}").read_text() for number in range(len(commands))]
    return list(zip(json.loads((folder / "statuses").read_text()), said, strict=True))


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[str]:
    """The options that name two checkpoints."""
    for number, name in enumerate(("base", "next")):
        (tmp_path / name).mkdir()
        model = {"a.weight": torch.full((64, 64), float(number)).bfloat16()}
        save_file(model, tmp_path / name / "model.safetensors")
    return ["--base", str(tmp_path / "base"), "--target", str(tmp_path / "next")]


def processor_s(*arguments: str) -> float:
    """Return the processor time of a Python program, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(*arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def torch_s() -> float:
    """The processor time of importing torch."""
    return processor_s("-c", "import torch")


def test_help_takes_fraction_of_importing_torch(torch_s: float) -> None:
    times = {name: processor_s("-m", module, "--help") for name, module in MODULES.items()}
    assert {name: taken for name, taken in times.items() if taken > torch_s / 4} == {}


def test_small_send_takes_little_more_than_importing_torch(
    checkpoints: list[str], torch_s: float
) -> None:
    assert processor_s("-m", "delta_sender", *checkpoints, "--dry-run") < 2.5 * torch_s


@pytest.mark.parametrize("name", MODULES)
def test_version(name: str) -> None:
    done = run("-m", MODULES[name], "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name} {__version__}\n", "")


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("delta-send", ["--target", "t", "--full", "--url", "host:8000"], "neither an engine nor"),
        ("delta-send", ["--target", "t", "--full", "--url", "http://h/v1"], "without the path of"),
        ("delta-log", ["list"], "required: LOG"),
        ("delta-plan", ["host:8000"], "neither a folder nor"),
        ("delta-top", ["host:8000"], "http://host:8000"),
        ("delta-conformance", ["--only", "no such loader"], "no case 'no such loader'"),
    ],
)
def test_usage_errors_are_one_line(name: str, wrong: list[str], says: str) -> None:
    done = run("-m", MODULES[name], *wrong)
    assert done.returncode == 2
    assert done.stderr.startswith(name)
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert "--help lists the options" in done.stderr


@pytest.mark.parametrize(
    ("name", "module", "arguments"),
    [
        ("delta-send", "torch", ["--target", "t", "--full", "--dry-run"]),
        ("delta-send", "httpx", ["--target", "t", "--full", "--url", "http://127.0.0.1:9"]),
        ("delta-log", "rich.table", ["list", "."]),
        ("delta-plan", "httpx", ["http://127.0.0.1:9"]),
        ("delta-top", "rich.console", ["http://127.0.0.1:9"]),
        ("delta-conformance", "torch", []),
    ],
)
def test_ctrl_c_while_importing_prints_one_line(
    name: str, module: str, arguments: list[str]
) -> None:
    done = run("-c", INTERRUPTED, MODULES[name], module, *arguments)
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith(f"{name}: interrupted")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_unread_output_leaves_the_status(
    unbuffered: str, checkpoints: list[str], tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    commands = [
        (0, ["delta_sender", *checkpoints, "--log", log]),
        (0, ["engine_ext.cli.log", "list", log]),
        (0, ["engine_ext.cli.log", "verify", log]),
        (0, ["engine_ext.cli.log", "prune", log, "--keep", "1"]),
        (1, ["engine_ext.cli.log", "verify", str(tmp_path)]),  # no log
    ]
    asked = [command for _, command in commands]
    found = forked(
        tmp_path / "run", asked, run_unread, environment={"PYTHONUNBUFFERED": unbuffered}
    )
    for (status, command), (exit_status, said) in zip(commands, found, strict=True):
        assert exit_status == status, (command, said)
        assert "Error" not in said, command


@pytest.mark.parametrize("name", MODULES)
def test_unread_help_has_no_traceback(name: str) -> None:
    assert run_unread("-m", MODULES[name], "--help", PYTHONUNBUFFERED="").stderr == ""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("delta-send", ["--target", "t", "--full", "--dry-run"]),
        ("delta-top", ["http://127.0.0.1:9"]),
        ("delta-log", ["list", "."]),
        ("delta-plan", ["http://127.0.0.1:9"]),
        ("delta-conformance", ["--only", "a case"]),
    ],
)
@pytest.mark.parametrize("package", ["httpx", "rich"])
def test_missing_package_is_one_line(name: str, arguments: list[str], package: str) -> None:
    module = MODULES[name].replace("delta_sender", "delta_sender.cli")
    done = run("-c", WITHOUT, package, module, *arguments)
    if (name, package) == ("delta-log", "httpx"):  # it needs that to ask an engine only
        assert done.returncode == 0
        return
    if (name, package) == ("delta-plan", "rich"):  # no engine has answered
        assert done.returncode == 1
        return
    if (name, package) == ("delta-conformance", "httpx"):  # it asks no engine
        assert "no case 'a case'" in done.stderr
        return
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{name}: ")
    assert done.stderr.endswith("install this package with its extra 'sender'\n")
    assert done.stderr.count("\n") == 1


def test_socks_proxy_without_package_is_one_line(checkpoints: list[str], tmp_path: Path) -> None:
    log, url = str(tmp_path / "log"), "http://10.20.30.41:8000"
    (tmp_path / "log").mkdir()
    write(open_log(log), 1)
    proxies = {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
    commands = [
        (1, ["delta-send", *checkpoints, "--url", url]),
        (1, ["delta-send", *checkpoints, "--url", url, "--wait", "9"]),
        (1, ["delta-plan", url]),
        (1, ["delta-top", url, "--once"]),
        (2, ["delta-log", "prune", log, "--url", url]),
    ]
    asked = [[MODULES[name], *arguments] for _, (name, *arguments) in commands]
    found = forked(tmp_path / "run", asked, without="socksio", environment=proxies)
    for (status, command), (exit_status, text) in zip(commands, found, strict=True):
        assert exit_status == status, (command, text)
        assert "Traceback" not in text
        [said] = [line for line in text.splitlines() if "SOCKS" in line]
        assert "ALL_PROXY names a SOCKS proxy" in said
        assert said.endswith('pip install "httpx[socks]"; or unset ALL_PROXY')
