"""Refusals at start-up, by the tables of both adapters."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.adapters.refusals import Refusal, first, refuse
from engine_ext.adapters.sglang import hooks as sglang_hooks
from engine_ext.adapters.sglang import refusals as sglang
from engine_ext.adapters.vllm import hooks as vllm_hooks
from engine_ext.adapters.vllm import refusals as vllm
from tests.support.cases import in_one_test

ARGUMENTS = {
    "vllm": vllm.ARGUMENTS,
    "vllm's configuration": vllm.RESOLVED,
    "sglang": sglang.ARGUMENTS,
}
CASES = [(engine, refusal) for engine, refusals in ARGUMENTS.items() for refusal in refusals]


@in_one_test(("engine", "refusal"), CASES)
def test_a_command_line_that_meets_all_conditions_is_refused(engine: str, refusal: Refusal) -> None:
    example = refusal.example()
    example.patched = getattr(example, "patched", True)
    assert first(example, ARGUMENTS[engine]) is refusal
    with pytest.raises(ValueError, match=r"^--enable-delta-updates does not") as raised:
        refuse(example, ARGUMENTS[engine])
    assert refusal.what in str(raised.value)
    if refusal.shown is not None:
        assert f"({getattr(example, refusal.shown)})" in str(raised.value)
    assert refusal.why in str(raised.value)


@in_one_test(("engine", "refusal"), CASES)
def test_every_condition_counts(engine: str, refusal: Refusal) -> None:
    for missing in refusal.conditions:
        rest: dict[str, Any] = {c.name: c.example for c in refusal.conditions if c is not missing}
        rest.setdefault("patched", True)
        assert first(argparse.Namespace(**rest), ARGUMENTS[engine]) is None


@pytest.mark.parametrize("engine", ARGUMENTS)
def test_an_ordinary_command_line_is_taken(engine: str) -> None:
    ordinary = {
        "tensor_parallel_size": 2,
        "data_parallel_size": 1,
        "data_parallel_external_lb": True,  # of one replica: nothing is balanced
        "distributed_executor_backend": "mp",
        "api_server_count": 2,
        "tokenizer_worker_num": 2,
        "weight_cache_mode": "off",
        "elastic_ep_backend": "none",
        "load_format": "auto",
        "speculative_algorithm": "NGRAM",
        "disaggregation_mode": "null",
        "offload_group_size": -1,
        "patched": True,
    }
    assert first(argparse.Namespace(**ordinary), ARGUMENTS[engine]) is None


@pytest.mark.parametrize("name", [None, "some.Class"])
def test_a_parsed_configuration_of_the_encoder_cache_is_read(name: str | None) -> None:
    args = argparse.Namespace(ec_manager_config=SimpleNamespace(encoder_cache_manager_cls=name))
    assert (first(args, vllm.ARGUMENTS) is not None) == (name is not None)


@pytest.mark.parametrize(
    ("config", "variable", "freezes"),
    [
        (None, "", False),
        (SimpleNamespace(inductor_compile_config={"freezing": True}), "", True),
        ({"inductor_compile_config": {"freezing": True}}, "", True),
        ({"inductor_compile_config": {"freezing": False, "max_autotune": True}}, "", False),
        ({"level": 3}, "", False),
        (SimpleNamespace(inductor_compile_config={}), "1", True),
    ],
)
def test_freezing_is_found(
    config: Any, variable: str, freezes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command line or a parsed configuration, or by torch's variable."""
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", variable)
    assert vllm_hooks.freezes_weights(config) == freezes


@pytest.mark.parametrize(
    ("device", "environment", "refused"), [("cuda", "", False), ("cpu", "", True), ("", "1", True)]
)
def test_compiled_graphs_are_refused_on_cpu(
    device: str, environment: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", environment)
    monkeypatch.setattr(sglang_hooks, "is_patched", lambda *_: True)
    args = argparse.Namespace(device=device, enable_torch_compile=True)
    assert (first(sglang_hooks._set_up(args), sglang.ARGUMENTS) is not None) == refused


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("True", True), ("0", False)])
def test_graphs_of_vision_towers_are_refused(
    value: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_VIT_ENABLE_CUDA_GRAPH", value)
    monkeypatch.setattr(sglang_hooks, "is_patched", lambda *_: True)
    found = first(sglang_hooks._set_up(argparse.Namespace()), sglang.ARGUMENTS)
    assert (found is not None) == refused
