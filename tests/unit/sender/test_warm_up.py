"""Nothing is left to compile for a sync once the sender is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
import torch

from delta_sender import DeltaSender
from delta_sender.diff import compare as diff_host
from delta_sender.options import CHOICES
from engine_ext.format import digest, exponent_planes, gap_streams, ulp_differences
from engine_ext.kernels import gather_scatter
from tests.support.statuses import engine_status

LOOPS: dict[Any, list[Any]] = {
    diff_host: [diff_host.batch_loop_of, diff_host.loop_of],
    digest: [digest._kernel],
    gather_scatter: [gather_scatter._loops, gather_scatter._loop_of_table],
    gap_streams: [gap_streams._loops, gap_streams._match],
    exponent_planes: [exponent_planes._loops],
    ulp_differences: [ulp_differences._loops],
}


def engine(request: httpx.Request) -> httpx.Response:
    """It has no plan, takes whatever comes, and has nothing compiled for itself."""
    if request.method == "GET":
        status = engine_status()
        return httpx.Response(200, content=msgspec.json.encode(status))
    return httpx.Response(200, json={"status": "committed", "version": 1, "digest": None})


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [
        *((choice, torch.bfloat16) for choice in CHOICES),
        *((choice, torch.float32) for choice in ("auto", "gap8_ulp")),
    ],
)
def test_no_sync_waits_for_the_compiler(
    encoding: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    made: list[str] = []

    def counted(compile_loop: Callable[..., Any]) -> Callable[..., Any]:
        def count(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
            made.append(function.__name__)
            return compile_loop(function, signature)

        return count

    for module, loops in LOOPS.items():
        monkeypatch.setattr(module, "compile_loop", counted(module.compile_loop))
        for known in loops:
            known.cache_clear()
    base = {"near": torch.zeros(4000, dtype=dtype), "far": torch.zeros(300_000, dtype=dtype)}
    client = httpx.Client(transport=httpx.MockTransport(engine))
    with DeltaSender("http://engine", base.items(), encoding=encoding, client=client) as sender:
        assert made
        made.clear()
        base["near"][::50] += 1
        base["far"][::9000] += 1
        assert sender.sync(base.items()).nnz == 80 + 34
    assert not made
