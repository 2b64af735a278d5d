# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse weight updates: where vLLM calls the delta-updates package.

The package's own repository tests what it does with a loaded model.
"""

import pytest
from fastapi import FastAPI

from vllm.config import LoadConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.model_executor.model_loader import get_model_loader
from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import core
from vllm.v1.worker import worker_base

pytest.importorskip("engine_ext")
from engine_ext.adapters.vllm.checkpoint import register_load_format  # noqa: E402

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
    AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "."]))
    assert ENDPOINT not in routes()


@pytest.mark.parametrize("enabled", [[FLAG], ["--load-format", "delta"]])
def test_endpoint_is_attached_once(parser: FlexibleArgumentParser, enabled: list[str]):
    AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", ".", *enabled]))
    assert routes().count(ENDPOINT) == 1


def test_options_need_flag(parser: FlexibleArgumentParser):
    args = parser.parse_args(["--model", ".", "--delta-base-version", "3"])
    with pytest.raises(ValueError, match="needs --enable-delta-updates"):
        AsyncEngineArgs.from_cli_args(args)


def test_unsupported_option_is_refused(parser: FlexibleArgumentParser):
    args = parser.parse_args(["--model", ".", FLAG, "--enable-eplb"])
    with pytest.raises(ValueError, match="--enable-eplb"):
        AsyncEngineArgs.from_cli_args(args)


def test_worker_calls_hook_at_the_end(monkeypatch: pytest.MonkeyPatch):
    created = []
    hooks = worker_base.delta_hooks
    monkeypatch.setattr(hooks, "on_worker_created", lambda w: created.append(vars(w)))
    worker = worker_base.WorkerBase(
        vllm_config=VllmConfig(), local_rank=0, rank=0, distributed_init_method=""
    )
    assert created == [vars(worker)]
    assert created[0]["model_runner"] is None


def test_engine_core_calls_hook_before_model_is_loaded(monkeypatch: pytest.MonkeyPatch):
    def stop() -> None:
        raise InterruptedError

    monkeypatch.setattr(core.delta_hooks, "on_core_created", stop)
    with pytest.raises(InterruptedError):
        core.EngineCore(VllmConfig(), executor_class=None, log_stats=False)


def test_load_format_delta_reads_checkpoint_as_auto():
    register_load_format("delta")
    config = LoadConfig(load_format="delta")
    assert get_model_loader(config).load_config.load_format == "auto"
    assert config.load_format == "delta"
