"""Tests that need the trainers' packages: they run in .venv-trainers only."""

import pytest

from tests.live.conftest import checkpoint, start

__all__ = ["checkpoint", "start"]


@pytest.fixture
def trl_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL's client look for no server; `use_deltas` is undone."""
    from trl.generation import vllm_client, vllm_generation

    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "VLLMClient", module.VLLMClient)
    stock = vllm_client.VLLMClient
    monkeypatch.setattr(stock, "check_server", lambda self, timeout: None)
    monkeypatch.setattr(stock, "_get", lambda self, url: {"data": [{"id": "tiny"}]})
