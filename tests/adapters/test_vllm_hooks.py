"""vLLM's hooks, as far as they need no vLLM."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext import settings
from engine_ext.adapters.vllm import hooks


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.ENVIRONMENT, raising=False)


def worker(**fields: Any) -> SimpleNamespace:
    """A worker at the end of its constructor."""
    config = SimpleNamespace(load_format="auto")
    return SimpleNamespace(**{"load_config": config, "lora_config": None, **fields})


def test_only_the_servers_parser_gets_the_flags() -> None:
    server, other = argparse.ArgumentParser(), argparse.ArgumentParser()
    server.add_argument("--uvicorn-log-level")
    for parser in (server, other):
        hooks.add_arguments(parser)
    assert "--enable-delta-updates" in server.format_help()
    assert "delta" not in other.format_help()


def test_nothing_happens_where_nobody_asks() -> None:
    assert hooks.read_arguments(argparse.Namespace(load_format="auto")) is False
    # A command without the flags: the load format alone exports nothing.
    assert hooks.read_arguments(argparse.Namespace(load_format="delta")) is False
    assert settings.from_environment() is None
    assert hooks.endpoint_plugins() == []
    bare = worker()
    before = dict(vars(bare))
    hooks.worker_made(bare)
    assert vars(bare) == before


def test_the_endpoints_are_there_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ENVIRONMENT, "{}")
    (plugin,) = hooks.endpoint_plugins()
    assert (plugin.name, plugin.required_tasks) == ("delta_updates", None)


@pytest.mark.parametrize("asked", ["by the flag", "by the load format"])
def test_a_worker_with_lora_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    load_format = "auto"
    if asked == "by the flag":
        monkeypatch.setenv(settings.ENVIRONMENT, "{}")
    else:
        load_format = "delta"
    config = SimpleNamespace(load_format=load_format)
    with pytest.raises(RuntimeError, match="LoRA"):
        hooks.worker_made(worker(load_config=config, lora_config=object()))
