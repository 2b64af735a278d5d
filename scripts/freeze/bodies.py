"""Record what the senders post and publish for fixed inputs: a hash of every body, in order.

Each sender gets the same seeded toy tensors for several steps, and posts to a sink that answers
like an engine. Run ids, hosts, process ids and times are fixed. `LogSender` has the files of its
log recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from unittest import mock
from urllib.parse import urlsplit

import httpx
import msgspec
import torch
import zstandard

from delta_sender import DeltaSender, LogSender, MultiSender, ShardedSender
from engine_ext.dtypes import torch_bits_dtype
from engine_ext.format import DIGEST_ALGORITHM, Digest, tensor_digest
from engine_ext.ranks.status import EngineStatus, HealthStatus, VersionStatus
from scripts.freeze.recording import Recording, add_options, bits_of, finish

ENCODINGS: Final = ("indices", "deltas", "deltas_zstd", "gap8_exp", "gap8_ulp")
# Per step: share of elements that change, and whether all are sent.
STEPS: Final = ((0.01, False), (0.2, False), (1.0, False), (0.0, False), (0.05, True))
_SHAPES: Final = {
    "model.embed_tokens.weight": ((96, 64), torch.bfloat16),
    "model.layers.0.mlp.down_proj.weight": ((64, 128), torch.bfloat16),
    "model.layers.0.self_attn.q_proj.weight": ((64, 64), torch.float16),
    "model.norm.weight": ((64,), torch.float32),
}
_RANKS: Final = 2
Weights = dict[str, torch.Tensor]


def toy_weights() -> Weights:
    """Return the base."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in _SHAPES.items()
    }


def step(weights: Weights, number: int, density: float) -> Weights:
    """Return the weights with some elements' lower bits changed, seeded by the step."""
    generator = torch.Generator().manual_seed(1000 + number)
    changed = {}
    for name, tensor in weights.items():
        tensor = changed[name] = tensor.clone()
        bits = tensor.view(-1).view(torch_bits_dtype(tensor.dtype))
        chosen = torch.rand(len(bits), generator=generator) < density
        flips = torch.randint(1, 16, (len(bits),), generator=generator).to(bits.dtype)
        bits[chosen] ^= flips[chosen]
    return changed


class Sink:
    """Answers like an engine that takes everything, and records what was posted to it."""

    def __init__(self, base: Weights) -> None:
        digests = (tensor_digest(name, bits_of(tensor)) for name, tensor in base.items())
        self._digest = sum(digests, start=Digest.ZERO).hex()
        self._names = sorted(base)
        self._version = 0
        self._run: str | None = None
        self._lock = threading.Lock()
        self.posted: list[dict[str, Any]] = []

    def answer(self, method: str, path: str, content: bytes, signature: str | None) -> Any:
        """Return the JSON object of an answer."""
        with self._lock:
            if method == "GET":
                return self._status()
            if path == "/delta_run":
                return self._claimed(json.loads(content))
            return self._taken(path, content, signature)

    def mock(self, request: httpx.Request) -> httpx.Response:
        """Answer as a transport of httpx."""
        signature = request.headers.get("X-Delta-Signature")
        answer = self.answer(request.method, request.url.path, request.content, signature)
        return httpx.Response(200, json=answer)

    def _status(self) -> dict[str, Any]:
        rows = [{"name": n, "status": "exact", "digested": True} for n in self._names]
        version = VersionStatus(
            number=self._version,
            published=str(self._version),
            run=self._run,
            by_rank=[self._version],
            digest=self._digest,
            digest_algorithm=DIGEST_ALGORITHM,
            complete=True,
            loaded=self._run is None,
            can_roll_back=False,
        )
        health = HealthStatus(
            state="certain",
            mismatched=[],
            asleep=False,
            changed_externally=None,
            paused=None,
            resume_owed=False,
            awaits_full_sync=False,
            certification=[{"exact": len(rows)}],
            uncertified={},
        )
        status = EngineStatus(
            engine="sink",
            adapter=None,
            ranks=1,
            apply="scatter",
            version=version,
            health=health,
            owner=None,
            staged=None,
            last_sync=None,
            scrub=None,
            log=None,
            adapters=None,
            plan=[rows],
        )
        return dict(msgspec.to_builtins(status))

    def _claimed(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["action"] == "release":
            return {"released": True}
        return {"owner": {**body, "since": 1.0}, "run": self._run, "highest": None}

    def _taken(self, path: str, content: bytes, signature: str | None) -> dict[str, Any]:
        manifest = manifest_of(content)
        version, number = int(manifest["current_version"]), int(manifest["part"])
        row = {"path": path, "version": version, "part": number, "bytes": len(content)}
        row |= {"sha256": hashlib.sha256(content).hexdigest()}
        self.posted.append(row if signature is None else {**row, "signature": signature})
        if "num_parts" not in manifest:  # the last part has it, and is posted alone
            return {"status": "staged", "version": self._version}
        base_version, self._version = self._version, version
        self._run = manifest.get("run")
        self._digest = manifest.get("digest_after", self._digest)
        return {
            "status": "committed",
            "version": version,
            "digest": self._digest,
            "base_version": base_version,
        }


def manifest_of(body: bytes) -> dict[str, Any]:
    """Return the metadata of a part; of a compressed one, too."""
    if body[:4] == b"\x28\xb5\x2f\xfd":
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    metadata: dict[str, Any] = header["__metadata__"]
    return metadata


@contextlib.contextmanager
def fixed_identity() -> Iterator[None]:
    """Fix what names this process, and every id that the project draws.

    Others draw, too: numba names the files of its cache so, the first time.
    """
    count = iter(range(1, 1 << 30))
    lock, random_id = threading.Lock(), uuid.uuid4

    def drawn() -> uuid.UUID:
        module = sys._getframe(1).f_globals["__name__"]
        if not module.startswith(("delta_sender", "engine_ext")):
            return random_id()
        with lock:
            return uuid.UUID(int=next(count), version=4)

    with (
        mock.patch("uuid.uuid4", drawn),
        mock.patch("socket.gethostname", return_value="trainer"),
        mock.patch("os.getpid", return_value=4242),
        mock.patch("time.time", return_value=1_700_000_000.0),
    ):
        yield


def steps_of(sender: Any, base: Weights, steps: Sequence[tuple[float, bool]] = STEPS) -> None:
    """Take the steps; a refusal of a sender is an error of this recorder."""
    weights = base
    for number, (density, full) in enumerate(steps):
        weights = step(weights, number, density)
        sync = sender.sync_full if full else sender.sync
        sync(weights.items())


def ordered(posted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by version and part; the parts of a version can come in any order."""
    return sorted(posted, key=lambda row: (row["version"], row["part"]))


def engine_bodies(**options: Any) -> list[dict[str, Any]]:
    """Return the bodies that `DeltaSender` posts."""
    base = toy_weights()
    sink = Sink(base)
    client = httpx.Client(transport=httpx.MockTransport(sink.mock))
    with (
        fixed_identity(),
        DeltaSender(
            "http://engine", base.items(), client=client, full="allow", posts_in_flight=1, **options
        ) as sender,
    ):
        steps_of(sender, base)
    return ordered(sink.posted)


def quantised_bodies(form: str) -> list[dict[str, Any]]:
    """Return the bodies of a `DeltaSender` that quantises, over a base of zeros."""
    base = {n: t for n, t in toy_weights().items() if t.dtype == torch.bfloat16}
    scale, dtype = {
        "fp8_block": ("weight_scale_inv", torch.float8_e4m3fn),
        "fp8_channel": ("weight_scale", torch.float8_e4m3fn),
        "int8_channel": ("weight_scale", torch.int8),
    }[form]
    stored: Weights = {}
    for name, tensor in base.items():
        rows, columns = tensor.shape
        blocks = (-(-rows // 128), -(-columns // 128)) if form == "fp8_block" else (rows, 1)
        stored[name] = torch.zeros_like(tensor, dtype=dtype)
        stored[f"{name.removesuffix('weight')}{scale}"] = torch.ones(blocks)
    sink = Sink(stored)
    client = httpx.Client(transport=httpx.MockTransport(sink.mock))
    with (
        fixed_identity(),
        DeltaSender(
            "http://engine",
            stored.items(),
            client=client,
            quantize=form,
            full="allow",
            encoding="deltas",
            posts_in_flight=1,
        ) as sender,
    ):
        steps_of(sender, base, STEPS[:3])
    return ordered(sink.posted)


def engines_bodies() -> list[Any]:
    """Return the bodies that `MultiSender` posts to each of two engines."""
    base = toy_weights()
    sinks = {f"engine-{number}": Sink(base) for number in range(2)}
    client = httpx.Client(
        transport=httpx.MockTransport(lambda request: sinks[request.url.host].mock(request))
    )
    urls = [f"http://{name}" for name in sinks]
    with (
        fixed_identity(),
        MultiSender(urls, base.items(), client=client, full="allow", encoding="deltas") as sender,
    ):
        steps_of(sender, base)
    return [ordered(sink.posted) for sink in sinks.values()]


def log_files(encoding: str) -> list[dict[str, Any]]:
    """Return the files of the log that `LogSender` writes."""
    base = toy_weights()
    with tempfile.TemporaryDirectory() as folder:
        with fixed_identity(), LogSender(folder, base.items(), encoding=encoding) as sender:
            steps_of(sender, base)
        return [
            {
                "path": str(file.relative_to(folder)),
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for file in sorted(Path(folder).rglob("*"))
            if file.is_file()
        ]


def _shards(weights: Weights, rank: int) -> list[Any]:
    """Rank 0 holds the first rows of every tensor, rank 1 the others."""
    found = []
    for name, tensor in weights.items():
        half = tensor.shape[0] // _RANKS
        rows = slice(rank * half, (rank + 1) * half)
        slices = (rows, *(slice(0, size) for size in tensor.shape[1:]))
        found.append((name, tensor[rows].clone(), tuple(tensor.shape), slices))
    return found


def _send_shards(rank: int, url: str, store: str, encoding: str) -> None:
    """Send as one rank of a trainer, in a process of its own."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_RANKS)
    weights = toy_weights()
    with (
        fixed_identity(),
        ShardedSender(
            url, _shards(weights, rank), full="allow", encoding=encoding, posts_in_flight=1
        ) as sender,
    ):
        for number, (density, full) in enumerate(STEPS):
            weights = step(weights, number, density)
            (sender.sync_full if full else sender.sync)(_shards(weights, rank))
    dist.destroy_process_group()


@contextlib.contextmanager
def served(sink: Sink) -> Iterator[str]:
    """Serve a sink over HTTP; yield its root."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            signature = self.headers.get("X-Delta-Signature")
            answer = sink.answer(self.command, urlsplit(self.path).path, content, signature)
            raw = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def sharded_bodies(encoding: str) -> list[dict[str, Any]]:
    """Return the bodies that the ranks of a `ShardedSender` post.

    Raises:
        RuntimeError: a rank has failed.
    """
    sink = Sink(toy_weights())
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, served(sink) as url:
        store = os.path.join(folder, "ranks")
        ranks = [
            spawn.Process(target=_send_shards, args=(rank, url, store, encoding))
            for rank in range(_RANKS)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(120)
        if any(one.exitcode != 0 for one in ranks):
            raise RuntimeError(f"ranks ended with {[one.exitcode for one in ranks]}")
    return ordered(sink.posted)


def recorders() -> dict[str, Callable[[], Any]]:
    """Return the recordings, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for encoding in ENCODINGS:
        found[f"DeltaSender {encoding}"] = partial(engine_bodies, encoding=encoding)
    found["DeltaSender small parts"] = partial(engine_bodies, encoding="deltas", bucket_bytes=4096)
    found["DeltaSender signed"] = partial(engine_bodies, encoding="deltas", hmac_key="secret")
    for form in ("fp8_block", "fp8_channel", "int8_channel"):
        found[f"DeltaSender {form}"] = partial(quantised_bodies, form)
    found["MultiSender deltas"] = engines_bodies
    for encoding in ("deltas", "gap8_exp", "gap8_ulp"):
        found[f"ShardedSender {encoding}"] = partial(sharded_bodies, encoding)
        found[f"LogSender {encoding}"] = partial(log_files, encoding)
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="scripts.freeze.bodies", description=__doc__)
    add_options(parser)
    parser.add_argument("--only", action="append", default=[], help="name of one recorder")
    arguments = parser.parse_args(given)
    every = recorders()
    names = arguments.only or list(every)
    recording: Recording = {}
    for name in names:
        recording[name] = every[name]()
        print(f"{name}: {len(recording[name])} recorded")
    return finish(recording, arguments, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
