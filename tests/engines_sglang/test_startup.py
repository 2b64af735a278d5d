"""A server that was asked for delta updates has them, or does not start; others have nothing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from sglang_process import SglangProcess, interpreter

SHIMS = Path(__file__).parents[1] / "shims" / "sglang_cpu"
ENABLE = "--enable-delta-updates"
REFUSED = {
    "dp": ([ENABLE, "--dp-size", "2"], "--dp-size above 1"),
    "pp": ([ENABLE, "--pp-size", "2"], "--pp-size above 1"),
    "nodes": ([ENABLE, "--nnodes", "2"], "several hosts"),
    "lora": ([ENABLE, "--enable-lora"], "--enable-lora"),
    "workers": ([ENABLE, "--tokenizer-worker-num", "2"], "--tokenizer-worker-num above 1"),
    "companion": (["--delta-read-workers", "2"], "needs --enable-delta-updates"),
}
# SGLang's own parser and config, without starting a process for each.
PROGRAM = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    try:
        prepare_server_args(["--model-path", "m", "--device", "cpu", *arguments])
        found[name] = "taken"
    except ValueError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run SGLang's Python."""
    env = {**os.environ, "PYTHONPATH": str(SHIMS), "SGLANG_USE_CPU_ENGINE": "1", **environment}
    return subprocess.run(
        [str(interpreter()), *arguments], env=env, capture_output=True, text=True, check=False
    )


def test_refuses_arguments() -> None:
    asked = json.dumps({name: arguments for name, (arguments, _) in REFUSED.items()})
    run = python("-c", PROGRAM, asked)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    wrong = {n: found[n] for n, (_, message) in REFUSED.items() if message not in found[n]}
    assert wrong == {}


def test_the_flags_stand_in_the_engines_help() -> None:
    run = python("-m", "sglang.launch_server", "--help")
    for flag in (ENABLE, "--delta-root", "--delta-base-version", "--delta-api-key"):
        assert flag in run.stdout, run.stderr[-2000:]


def test_sglang_serve_takes_the_flags_too() -> None:
    arguments = ["serve", "--model-type", "llm", "--model-path", "m", ENABLE, "--dp-size", "2"]
    program = "import sys; from sglang.cli.main import main; sys.exit(main())"
    run = python("-c", program, *arguments)
    assert run.returncode != 0
    assert "--enable-delta-updates does not work with --dp-size above 1" in run.stderr


def test_without_the_plugin_there_is_no_flag() -> None:
    run = python("-m", "sglang.launch_server", "--model-path", "m", ENABLE, SGLANG_PLUGINS="other")
    assert run.returncode != 0
    assert f"unrecognized arguments: {ENABLE}" in run.stderr


def test_without_the_flag_there_is_nothing(
    checkpoint: Callable[[str], Path], start: Callable[..., SglangProcess]
) -> None:
    engine = start(checkpoint("qwen3"), enable_delta=False)
    assert engine.get("/delta_status").status_code == 404
    assert engine.post("/update_weights_delta").status_code == 404
    assert engine.get("/delta_digest").status_code == 404
    engine.stop()
