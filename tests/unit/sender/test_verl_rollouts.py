"""Spans in verl's extra fields, with stand-ins for verl's servers, clients and Ray."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from delta_sender import rollouts

NAME = "delta_sender.integrations.verl_rollouts"
ROLLOUT = "verl.workers.rollout"


@dataclass
class TokenOutput:
    token_ids: list[int]
    extra_fields: dict[str, Any] = field(default_factory=dict)


def labelled(*labels: tuple[int, str]) -> list[SimpleNamespace]:
    return [SimpleNamespace(start=start, version=version) for start, version in labels]


class Engine:
    """vLLM's: each answer has the tokens by then; labels are known at the end."""

    def __init__(self) -> None:
        self.labels: list[SimpleNamespace] | None = labelled((0, "7"), (2, "8"))

    async def generate(self, prompt: list[int]) -> AsyncIterator[Any]:
        for count in (1, 3):
            await asyncio.sleep(0)
            labels = self.labels if count == 3 else None
            ids = [prompt[0]] * count
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, weight_versions=labels)])


class VllmServer:
    def __init__(self) -> None:
        self.engine = Engine()

    async def generate(self, prompt_ids: list[int]) -> TokenOutput:
        last: Any = None
        async for answer in self.engine.generate(prompt_ids):
            last = answer
        return TokenOutput(last.outputs[0].token_ids, {"global_steps": 1})


class TokenizerManager:
    async def generate_request(self, prompt: list[int], request: None) -> AsyncIterator[Any]:
        labels = [{"version": "7", "start": 0, "end": 2}]
        yield {"output_ids": prompt * 2, "meta_info": {"weight_versions": labels}}


class SglangServer:
    def __init__(self) -> None:
        self.tokenizer_manager = TokenizerManager()

    async def generate(self, prompt_ids: list[int]) -> TokenOutput:
        answer = await self.tokenizer_manager.generate_request(prompt_ids, None).__anext__()
        return TokenOutput(answer["output_ids"])


class Registry:
    known: ClassVar[dict[str, Any]] = {}

    @classmethod
    def get(cls, name: str) -> Any:
        return cls.known[name]


class Client:
    """Reaches servers that the test gives it, each once."""

    def __init__(self, *servers: Any) -> None:
        self.servers = list(servers)

    async def generate(self, prompt_ids: list[int]) -> TokenOutput:
        output: TokenOutput = await self.servers.pop(0).generate(prompt_ids)
        return output


class ResumingClient(Client):
    async def generate(self, prompt_ids: list[int]) -> TokenOutput:
        final = TokenOutput([])
        while self.servers:
            output = await super().generate(prompt_ids + final.token_ids)
            final.token_ids += output.token_ids
        return final


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The classes of verl's replicas by rollout, once the module is imported."""
    for client in (Client, ResumingClient):
        monkeypatch.setattr(client, "generate", client.generate)

    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    def replica_of(server: type) -> type:
        class Replica:
            def __init__(self, rank: int) -> None:
                self.rank, self.server_class = rank, server

        return Replica

    module("ray", remote=lambda cls: cls)
    for name in ("verl", "verl.workers"):
        module(name)
    llm_server = SimpleNamespace(LLMServerClient=Client, FullyAsyncLLMServerClient=ResumingClient)
    module(ROLLOUT, llm_server=llm_server)
    module(f"{ROLLOUT}.replica", RolloutReplicaRegistry=Registry)
    module(f"{ROLLOUT}.vllm_rollout.vllm_async_server", vLLMHttpServer=VllmServer)
    module(f"{ROLLOUT}.sglang_rollout.async_sglang_server", SGLangHttpServer=SglangServer)
    servers = {"vllm": VllmServer, "sglang": SglangServer, "trtllm": object}
    known = {name: replica_of(server) for name, server in servers.items()}
    monkeypatch.setattr(Registry, "known", known)
    monkeypatch.setattr(Registry, "get", Registry.get)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    importlib.import_module(NAME).install()  # a second time
    monkeypatch.delitem(sys.modules, NAME)
    assert Registry.get("trtllm") is known["trtllm"]
    return {name: Registry.get(name) for name in known}


def server_of(replicas: dict[str, Any], rollout: str) -> Any:
    replica = replicas[rollout](3)
    assert replica.rank == 3
    return replica.server_class()


@pytest.mark.parametrize(("rollout", "spans"), [("vllm", [[0, 7], [2, 8]]), ("sglang", [[0, 7]])])
def test_each_answer_has_its_spans(replicas: dict[str, Any], rollout: str, spans: Any) -> None:
    server = server_of(replicas, rollout)

    async def generate() -> list[TokenOutput]:
        return list(await asyncio.gather(*(server.generate([token]) for token in range(3))))

    for token, output in enumerate(asyncio.run(generate())):
        assert {*output.token_ids} == {token}
        assert output.extra_fields["weight_spans"] == spans


def test_an_engine_without_deltas_has_none(replicas: dict[str, Any]) -> None:
    server = server_of(replicas, "vllm")
    server.engine.labels = None
    assert asyncio.run(server.generate([1])).extra_fields == {"global_steps": 1}


@pytest.mark.parametrize("is_labelled", [True, False])
def test_spans_of_an_interrupted_answer_are_joined(
    replicas: dict[str, Any], is_labelled: bool
) -> None:
    first, second = server_of(replicas, "vllm"), server_of(replicas, "vllm")
    second.engine.labels = labelled((0, "8"), (1, "9")) if is_labelled else None
    output = asyncio.run(ResumingClient(first, second).generate([5]))
    assert output.token_ids == [5] * 6
    found = output.extra_fields.get("weight_spans")
    assert found == ([[0, 7], [2, 8], [4, 9]] if is_labelled else None)


def test_pieces_without_tokens_have_no_spans() -> None:
    assert rollouts.joined([(2, [[0, 7]]), (0, None), (1, [[0, 7]])]) == [[0, 7]]
    assert rollouts.joined([(0, [[0, 7]]), (1, [[0, 8]])]) == [[0, 8]]
    assert rollouts.joined([]) == []
