"""A server that was asked for delta updates has them, or does not start; others have nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_process import EngineError, EngineProcess

FLAGS = [
    "--enable-delta-updates",
    "--delta-chunk-bytes",
    "--delta-read-workers",
    "--delta-root",
    "--delta-spool-dir",
    "--delta-max-body-bytes",
    "--delta-stage-timeout",
    "--delta-base-version",
    "--delta-api-key",
]


def test_the_flags_stand_in_the_engines_help() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--help=DeltaUpdates"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [flag for flag in FLAGS if flag not in shown] == []


def test_without_the_flag_there_is_nothing(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess]
) -> None:
    engine = start(checkpoint("qwen3"), enable_delta=False)
    assert engine.get("/delta_status").status_code == 404
    assert engine.post("/update_weights_delta").status_code == 404
    assert engine.post("/update_weights_from_disk").status_code == 404
    rpc = engine.post("/collective_rpc", json={"method": "delta_updates"})
    assert rpc.status_code == 500
    engine.stop()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {"VLLM_PLUGINS": "another"}, "unrecognized arguments: --enable-delta-updates"),
        pytest.param(
            ["--data-parallel-size", "2"],
            {},
            "does not work with --data-parallel-size above 1",
            marks=pytest.mark.full,
        ),
    ],
    ids=["plugin-not-loaded", "data-parallel"],
)
def test_refuses_to_start(
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    arguments: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    with pytest.raises(EngineError) as failed:
        start(checkpoint("qwen3"), extra_args=arguments, extra_env=environment)
    assert "exited with code" in str(failed.value)
    log = Path(str(failed.value).split("end of ")[1].split(":\n")[0]).read_text()
    assert message in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--enable-delta-updates", "--data-parallel-size", "2"], "--data-parallel-size above 1"),
        (["--enable-delta-updates", "--nnodes", "2"], "several hosts"),
        (["--enable-delta-updates", "--headless"], "several hosts"),
        (["--enable-delta-updates", "--enable-lora"], "--enable-lora"),
        (
            ["--enable-delta-updates", "--distributed-executor-backend", "ray"],
            "--distributed-executor-backend",
        ),
        (["--delta-read-workers", "2"], "needs --enable-delta-updates"),
    ],
)
def test_refuses_arguments(arguments: list[str], message: str) -> None:
    """The same checks in vLLM's own parser and config, without starting a process for each."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", *arguments])
    with pytest.raises(ValueError, match=message):
        AsyncEngineArgs.from_cli_args(args)
