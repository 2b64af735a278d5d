"""What the sender posts, as a server gets it."""

from __future__ import annotations

import sys

import httpx
import pytest
import torch

from delta_sender import DeltaSender
from delta_sender.options import SenderOptions
from delta_sender.publish.http_client import _CHUNK, EngineClient
from delta_sender.results import EngineUnreachable


@pytest.mark.parametrize(("key", "sent"), [("secret\n", "Bearer secret"), ("", None), (" ", None)])
def test_sender_sends_token_without_white_space(key: str, sent: str | None) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers.get("Authorization") == sent
        return httpx.Response(404)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    assert EngineClient("http://engine", SenderOptions(client=client, api_key=key)).status() is None


@pytest.mark.parametrize("key", ["sec\nret", "secrét"])
def test_sender_refuses_other_tokens_unseen(key: str) -> None:
    with pytest.raises(ValueError, match="bearer token") as caught:
        SenderOptions(api_key=key)
    assert (type(caught.value), "sec" in str(caught.value)) == (ValueError, False)


def test_sender_names_socks_proxy_without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    base = {"a": torch.zeros(2)}
    with pytest.raises(EngineUnreachable, match="all_proxy names a SOCKS proxy"):
        DeltaSender("http://engine", base.items())


@pytest.mark.parametrize("size", [0, 1, _CHUNK - 1, _CHUNK, _CHUNK + 1, 3 * _CHUNK + 5])
def test_a_body_comes_whole_and_with_its_length_also_again(size: int, naps: list[float]) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    seen: list[tuple[int, bytes]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert "Transfer-Encoding" not in request.headers
        seen.append((int(request.headers["Content-Length"]), request.read()))
        if len(seen) == 1:
            raise httpx.ReadError("gone", request=request)
        return httpx.Response(200, json={"status": "committed", "version": 3})

    client = httpx.Client(transport=httpx.MockTransport(answer))
    server = EngineClient("http://engine", SenderOptions(client=client))
    assert server.deliver(body, 3, 0, last=True)["version"] == 3
    assert seen == [(size, body)] * 2
