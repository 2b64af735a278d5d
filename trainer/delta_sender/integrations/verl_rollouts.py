"""Let verl know which weights have computed each token: ``weight_spans`` in its `extra_fields`.

Importing this does so; verl does for
``VERL_USE_EXTERNAL_MODULES=delta_sender.integrations.verl_rollouts`` in the environment of the
driver and of all Ray workers.

verl's servers get their answers from the engine in Python, and drop what they do not know.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any, Final

import ray
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import RolloutReplicaRegistry

from delta_sender import rollouts

FIELD: Final = "weight_spans"
_ROLLOUT: Final = "verl.workers.rollout"
# By the name of a rollout: the module and the class of its server; and what of it is asked for
# answers, by which method.
SERVERS: Final = {
    "vllm": (f"{_ROLLOUT}.vllm_rollout.vllm_async_server", "vLLMHttpServer", "engine", "generate"),
    "sglang": (
        f"{_ROLLOUT}.sglang_rollout.async_sglang_server",
        "SGLangHttpServer",
        "tokenizer_manager",
        "generate_request",
    ),
}

# The newest answer of the engine to what a server is asked.
_ANSWER: ContextVar[list[Any] | None] = ContextVar("answer", default=None)
# The pieces of an answer that syncs have interrupted: numbers of tokens, and spans.
_PIECES: ContextVar[list[tuple[int, Any]] | None] = ContextVar("pieces", default=None)


def install() -> None:
    """Replace verl's replicas and its clients' methods; safe to call more than once."""
    if not hasattr(RolloutReplicaRegistry.get, "stock"):
        RolloutReplicaRegistry.get = staticmethod(_with_spans(RolloutReplicaRegistry.get))
    resuming, client = llm_server.FullyAsyncLLMServerClient, llm_server.LLMServerClient
    if not hasattr(client.generate, "stock"):
        client.generate = _noting_pieces(client.generate)
        resuming.generate = _joining_pieces(resuming.generate)


def _with_spans(stock: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return verl's `get`, whose replicas have servers that add spans to what they return."""

    @functools.wraps(stock)
    def get(name: str) -> Any:
        replica = stock(name)
        if name not in SERVERS:
            return replica
        module, server, holder, method = SERVERS[name]
        stock_server = getattr(importlib.import_module(module), server)
        return _replica_of(replica, server_with_spans(stock_server, holder, method))

    get.stock = stock  # type: ignore[attr-defined]
    return get


def _replica_of(stock: Any, server: type) -> type:
    """Return a replica's class that starts another server."""

    class Replica(stock):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(server)

    return Replica


def server_with_spans(stock: Any, holder: str, method: str) -> type:
    """Return a server's class that adds spans to what it returns.

    Args:
        holder, method: The attribute of the server, and its method, that make an iterator over the
            engine's answers to a request.
    """

    class Server(stock):  # type: ignore[misc]
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            held = getattr(self, holder)
            if not hasattr(getattr(held, method), "stock"):
                setattr(held, method, _noting_answers(getattr(held, method)))
            newest: list[Any] = []
            token = _ANSWER.set(newest)
            try:
                output = await super().generate(*args, **kwargs)
            finally:
                _ANSWER.reset(token)
            found = rollouts.spans(newest)
            if found and found[0] is not None:
                output.extra_fields[FIELD] = found[0]
            return output

    return Server


def _noting_answers(stock: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
    """Return an engine's method that leaves its newest answer to the server that has asked."""

    @functools.wraps(stock)
    async def answers(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        newest = _ANSWER.get()
        async for answer in stock(*args, **kwargs):
            if newest is not None:
                newest[:] = [answer]
            yield answer

    answers.stock = stock  # type: ignore[attr-defined]
    return answers


def _noting_pieces(stock: Any) -> Any:
    @functools.wraps(stock)
    async def generate(client: Any, *args: Any, **kwargs: Any) -> Any:
        output = await stock(client, *args, **kwargs)
        if (pieces := _PIECES.get()) is not None:
            pieces.append((len(output.token_ids), output.extra_fields.get(FIELD)))
        return output

    generate.stock = stock  # type: ignore[attr-defined]
    return generate


def _joining_pieces(stock: Any) -> Any:
    """Return the method of the client that sends a request again when a sync has aborted it."""

    @functools.wraps(stock)
    async def generate(client: Any, *args: Any, **kwargs: Any) -> Any:
        pieces: list[tuple[int, Any]] = []
        token = _PIECES.set(pieces)
        try:
            output = await stock(client, *args, **kwargs)
        finally:
            _PIECES.reset(token)
        if (spans := rollouts.joined(pieces)) is not None:
            output.extra_fields[FIELD] = spans
        return output

    generate.stock = stock  # type: ignore[attr-defined]
    return generate


install()
