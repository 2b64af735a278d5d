"""Wrong arguments are refused in plain words, before anything is read or sent."""

from __future__ import annotations

import http.server
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from delta_sender import DeltaSender, LogSender, MultiSender, ShardedSender, SyncError
from tests.support.fake_engine import Engine, Model, model_of, train


def engine_sender(base: Any) -> DeltaSender:
    engine = Engine.of(model_of())
    sender = DeltaSender("http://e", base, client=engine.client())
    sender.engine = engine  # type: ignore[attr-defined]
    return sender


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_dict_is_taken_where_pairs_are(kind: type, tmp_path: Path) -> None:
    model = model_of()
    sender = engine_sender(kind(model))
    log = LogSender(tmp_path, kind(model))
    train(model)
    assert sender.sync(kind(model)).version == log.sync(kind(model)).version == 1
    assert sender.engine.holds(model)  # type: ignore[attr-defined]
    assert sender.sync_full(kind(model)).full
    log.close()


def arrays(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, tensor.float().numpy()) for name, tensor in model.items())


BAD: dict[str, tuple[Callable[[Model], Any], str]] = {
    "model": (lambda _: torch.nn.Linear(2, 2), r"named_tensors\(model, base\)"),
    "arrays": (lambda m: dict(arrays(m)), r": a torch.Tensor is needed, and not a numpy.ndarray"),
    "streamed arrays": (arrays, r": a torch.Tensor is needed, and not a numpy.ndarray"),
    "tensors": (lambda m: list(m.values()), "pairs, not as a torch.Tensor"),
    "streamed tensors": (lambda m: iter(m.values()), "pairs, not as a torch.Tensor"),
    "names": (list, "pairs, not as a str"),
    "numbers": (lambda m: [(3, tensor) for tensor in m.values()], "pairs, not as a tuple"),
    "number": (lambda _: 3, "pairs, not as a int"),
}


@pytest.mark.parametrize("kind", BAD)
def test_other_tensors_are_a_plain_type_error(kind: str) -> None:
    given, said = BAD[kind]
    with pytest.raises(TypeError, match=said):
        engine_sender(given(model_of()))
    sender = engine_sender(model_of())
    with pytest.raises(TypeError, match=said):
        sender.sync(given(model_of()))
    engine = sender.engine  # type: ignore[attr-defined]
    assert engine.version == 0
    model = model_of()
    train(model)
    sender.sync(model)
    assert engine.holds(model)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "localhost:8000",
            "n engine is given by the root of its server, http://host:port",
        ),
        ("engine", "n engine is given by the root"),
        ("http://", "'http://': an engine is given by"),
        ("http://engine:port", "'http://engine:port': Invalid port"),
        ("http://engine/v1", "http://host:port, without the path of the OpenAI API"),
        ("http://engine/v1/", "http://host:port, without the path of the OpenAI API"),
        ("http://engine/v1/models", "http://host:port, without the path of the OpenAI API"),
    ],
)
def test_a_url_that_is_no_root_is_refused_at_once(url: str, said: str, tmp_path: Path) -> None:
    def base() -> Iterator[tuple[str, torch.Tensor]]:
        yield pytest.fail("the base was read")

    makers: list[Callable[[], Any]] = [
        lambda: DeltaSender(url, base()),
        lambda: MultiSender([url], base()),
        lambda: ShardedSender(url, [], {}),
        lambda: LogSender(tmp_path, {}, notify=[url]),
    ]
    for make in makers:
        began = time.monotonic()
        with pytest.raises(ValueError, match=said):
            make()
        assert time.monotonic() - began < 5


def test_a_path_that_a_proxy_takes_away_is_kept() -> None:
    engine = Engine.of(model_of())

    def proxy(request: httpx.Request) -> httpx.Response:
        assert request.url.path.startswith("/engine-3/")
        request.url = request.url.copy_with(path=request.url.path.removeprefix("/engine-3"))
        return engine.answer(request)

    client = httpx.Client(transport=httpx.MockTransport(proxy))
    with DeltaSender("http://proxy/engine-3/", model_of(), client=client) as sender:
        assert sender.sync(model_of()).version == 1


def test_one_url_and_several_are_not_mixed_up() -> None:
    with pytest.raises(TypeError, match=r"takes one url, and not \['http://e'\]; MultiSender"):
        DeltaSender(["http://e"], {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="are a list; DeltaSender takes one url"):
        MultiSender("http://e", {})
    with pytest.raises(TypeError, match="an engine's url is a string, and not a int"):
        MultiSender([8000], {})  # type: ignore[list-item]


@pytest.mark.slow
def test_https_to_a_server_without_tls_is_not_retried() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        model = model_of()
        with DeltaSender(f"https://127.0.0.1:{server.server_port}", model) as sender:
            train(model)
            began = time.monotonic()
            with pytest.raises(SyncError, match="does not speak https: give http://"):
                sender.sync(model)
            assert time.monotonic() - began < 3
    finally:
        server.shutdown()
        server.server_close()


def test_a_key_that_no_header_can_carry_is_not_retried() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        raise httpx.LocalProtocolError("Illegal header value", request=request)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    with pytest.raises(SyncError, match="Illegal header value"):
        DeltaSender("http://e", model_of(), client=client).sync(model_of())
    assert len(seen) == 1
