"""What all commands have in common: help at once, versions, usage errors, Ctrl-C."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_ext import __version__

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


def run(
    *arguments: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def run_unread(*arguments: str, unbuffered: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose output nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return run(*arguments, stdout=writing, PYTHONUNBUFFERED=unbuffered)
    finally:
        os.close(writing)


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


def test_help_takes_fraction_of_importing_torch() -> None:
    limit = processor_s("-c", "import torch") / 4
    times = {name: processor_s("-m", module, "--help") for name, module in MODULES.items()}
    assert {name: taken for name, taken in times.items() if taken > limit} == {}


def test_small_send_takes_little_more_than_importing_torch(checkpoints: list[str]) -> None:
    sent = processor_s("-m", "delta_sender", *checkpoints, "--dry-run")
    assert sent < 2.5 * processor_s("-c", "import torch")


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
        (0, "delta_sender", *checkpoints, "--log", log),
        (0, "engine_ext.cli.log", "list", log),
        (0, "engine_ext.cli.log", "verify", log),
        (0, "engine_ext.cli.log", "prune", log, "--keep", "1"),
        (1, "engine_ext.cli.log", "verify", str(tmp_path)),  # no log
    ]
    for status, *command in commands:
        done = run_unread("-m", *map(str, command), unbuffered=unbuffered)
        assert done.returncode == status, (command, done.stderr)
        assert "Error" not in done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_unread_help_has_no_traceback(name: str) -> None:
    assert run_unread("-m", MODULES[name], "--help", unbuffered="").stderr == ""


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
    assert run("-m", "delta_sender", *checkpoints, "--log", log).returncode == 0
    proxies: dict[str, Any] = {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
    commands: list[tuple[int, list[str]]] = [
        (1, ["delta-send", *checkpoints, "--url", url]),
        (1, ["delta-send", *checkpoints, "--url", url, "--wait", "9"]),
        (1, ["delta-plan", url]),
        (1, ["delta-top", url, "--once"]),
        (2, ["delta-log", "prune", log, "--url", url]),
    ]
    for status, (name, *arguments) in commands:
        module = MODULES[name].replace("delta_sender", "delta_sender.cli")
        done = run("-c", WITHOUT, "socksio", module, *arguments, **proxies)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        [said] = [line for line in done.stderr.splitlines() if "SOCKS" in line]
        assert "ALL_PROXY names a SOCKS proxy" in said
        assert said.endswith('pip install "httpx[socks]"; or unset ALL_PROXY')
