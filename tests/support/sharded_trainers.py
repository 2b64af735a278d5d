"""Models whose parameters are sharded over a mesh, and an engine that several processes reach."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.fake_engine import Engine

_TENSOR_PARALLEL: dict[str, Callable[[], ParallelStyle]] = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def sharded(model: nn.Module, kind: str) -> nn.Module:
    """Shard a model of transformers over all ranks: "fsdp", "hsdp", "tp", or "fsdp+tp"."""
    ranks = dist.get_world_size()
    names, sizes = {
        "fsdp": (("fsdp",), (ranks,)),
        "hsdp": (("replicas", "fsdp"), (2, ranks // 2)),
        "tp": (("tp",), (ranks,)),
        "fsdp+tp": (("fsdp", "tp"), (ranks // 2, 2)),
    }[kind]
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    layers = list(model.get_submodule("model.layers").children())
    if "tp" in names:
        for layer in layers:
            has = {n for n, _ in layer.named_modules()}
            plan = {n: how() for n, how in _TENSOR_PARALLEL.items() if n in has}
            parallelize_module(layer, mesh["tp"], plan)
    if kind != "tp":
        inner = mesh["fsdp"] if "tp" in names else mesh
        for layer in layers:
            fully_shard(layer, mesh=inner)
        fully_shard(model, mesh=inner)
    return model


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """Serve an engine of this process over HTTP; yield its root."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: bytes) -> None:
            url = f"http://engine{self.path}"
            answer = engine.answer(httpx.Request(self.command, url, content=body))
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            for name, value in answer.headers.items():
                if name == "retry-after":
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def set_step(model: nn.Module, step: int, density: float = 0.1) -> None:
    """Give some elements of every parameter the values of a step, the same for any sharding."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * step + number)
            chosen = torch.rand(parameter.shape, generator=generator) < density
            noise = torch.randn(parameter.shape, generator=generator) * chosen
            if isinstance(parameter, DTensor):
                noise = distribute_tensor(
                    noise, parameter.device_mesh, parameter.placements, src_data_rank=None
                ).to_local()
                parameter.to_local().add_(noise.to(parameter.dtype))
            else:
                parameter.add_(noise.to(parameter.dtype))
