# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse weight updates: where vLLM calls the delta-updates package.

What the package does with a loaded model is tested in its own repository.
"""

import pytest
from fastapi import FastAPI

from vllm.config import LoadConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.model_executor.model_loader import get_model_loader
from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker import worker_base

pytest.importorskip("engine_ext")

FLAG = "--enable-delta-updates"
ENDPOINT = "/update_weights_delta"
SETTINGS = "DELTA_UPDATES_SETTINGS"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch):
    """Start without settings, and remove those that a test has exported."""
    monkeypatch.setenv(SETTINGS, "")


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


def routes() -> list[str]:
    app = FastAPI()
    attach_endpoint_plugins(app, ("generate",))
    return [getattr(route, "path", "") for route in app.routes]


def test_flag_is_in_server_parser_once(parser: FlexibleArgumentParser):
    options = [action.option_strings for action in parser._actions]
    assert sum(FLAG in strings for strings in options) == 1
    offline = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert FLAG not in offline._option_string_actions


def test_nothing_is_attached_without_flag(parser: FlexibleArgumentParser):
    AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "m"]))
    assert ENDPOINT not in routes()


@pytest.mark.parametrize("enabled", [[FLAG], ["--load-format", "delta"]])
def test_endpoint_is_attached_once(parser: FlexibleArgumentParser, enabled: list[str]):
    AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "m", *enabled]))
    assert routes().count(ENDPOINT) == 1


def test_options_need_flag(parser: FlexibleArgumentParser):
    args = parser.parse_args(["--model", "m", "--delta-base-version", "3"])
    with pytest.raises(ValueError, match="needs --enable-delta-updates"):
        AsyncEngineArgs.from_cli_args(args)


def test_unsupported_option_is_refused(parser: FlexibleArgumentParser):
    args = parser.parse_args(["--model", "m", FLAG, "--enable-eplb"])
    with pytest.raises(ValueError, match="--enable-eplb"):
        AsyncEngineArgs.from_cli_args(args)


@pytest.mark.parametrize("load_format", ["auto", "delta"])
def test_worker_gets_receiver_if_enabled(
    monkeypatch: pytest.MonkeyPatch, load_format: str
):
    """The load format enables it without a server."""
    from vllm.platforms import current_platform

    config = VllmConfig(load_config=LoadConfig(load_format=load_format))
    monkeypatch.setattr(current_platform, "device_type", "cpu", raising=False)
    worker = worker_base.WorkerBase(
        vllm_config=config, local_rank=0, rank=0, distributed_init_method=""
    )
    assert callable(getattr(worker, "delta_updates", None)) == (load_format == "delta")
    if load_format == "delta":
        loader = get_model_loader(config.load_config)
        assert loader.load_config.load_format == "auto"
        assert config.load_config.load_format == "delta"
