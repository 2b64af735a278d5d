"""Answers to bad input: each row of the error table on a live server.

Each time the engine's checksums and version are what they were, and the next correct sync is
taken.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import zstandard

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import delta_routes
from tests.support.plain_trainer import Trainer, container, edited, xxh3_of

pytestmark = pytest.mark.versions

OCTETS = {"Content-Type": "application/octet-stream"}
STAGE_TIMEOUT = 2
MAX_BODY = 4 << 20
SPOOL = 1 << 20
NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


class Server:
    def __init__(self, engine: EngineProcess, trainer: Trainer, root: Path) -> None:
        self.engine = engine
        self.trainer = trainer
        self.root = root

    def post(self, content: Any, headers: dict[str, str] = OCTETS, **params: str) -> httpx.Response:
        return self.engine.post(
            "/update_weights_delta", content=content, headers=headers, params=params
        )

    def json(self, body: dict[str, Any], route: str = "/update_weights_delta") -> httpx.Response:
        return self.engine.post(route, json=body)

    def next(self, **overrides: Any) -> bytes:
        """A part that leads from the engine's version to the next one."""
        version = self.engine.delta_status().version.number
        metadata = {"current_version": str(version + 1), "sync_id": os.urandom(8).hex()}
        metadata |= overrides.pop("metadata", {})
        changed = overrides.pop("changed", {NORM: torch.arange(4)})
        tensors = {**self.trainer.tensors, **overrides.pop("tensors", {})}
        return container(tensors, changed, metadata=metadata, **overrides)

    def sync(self) -> None:
        """A correct sync is taken."""
        answer = self.post(self.next())
        assert answer.json().get("status") == "committed", answer.text


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("root")
    spool = tmp_path_factory.mktemp("spool")
    base = checkpoint("qwen3")
    engine = start(
        request.param,
        base,
        extra_args=[
            *("--delta-root", str(root)),
            *("--delta-tuning", f"spool-dir={spool}"),
            *("--delta-tuning", f"max-body-bytes={MAX_BODY}"),
            *("--delta-tuning", f"stage-timeout={STAGE_TIMEOUT}"),
        ],
        # The server gets a spool folder that is really too small, in a mount namespace of its own.
        command_prefix=[
            *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
            f'mount -t tmpfs -o size={SPOOL} tmpfs "{spool}" && exec "$@"',
            "sh",
        ],
    )
    yield Server(engine, Trainer(tiny_models.load_tensors(base)), root)
    engine.stop()


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """Around every test: nothing changes, and the next correct sync is taken."""
    before = server.engine.checksums()
    version = server.engine.delta_status().version.number
    yield
    assert server.engine.checksums() == before
    assert server.engine.delta_status().version.number == version
    server.sync()


def refused(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The error of a response that must have this status and type."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == kind, error
    assert error["engine_state"] == "unchanged"
    assert error["message"]
    return error


def test_400_truncated(server: Server) -> None:
    part = server.next()
    for length in (0, 7, 100, len(part) - 1):
        refused(server.post(part[:length]), 400, "MalformedPart")


def test_400_trailing_bytes(server: Server) -> None:
    refused(server.post(server.next() + b"x"), 400, "MalformedPart")


def test_400_not_a_container(server: Server) -> None:
    refused(server.post((8).to_bytes(8, "little") + b"not json"), 400, "MalformedPart")
    refused(server.post(zstandard.compress(bytes(8) + b"nor is this")), 400, "MalformedPart")
    refused(server.post(server.next(encoding="deltas_zstd")[:-3]), 400, "MalformedPart")


def test_400_unknown_encoding(server: Server) -> None:
    refused(server.post(edited(server.next(), encoding="telepathy")), 400, "MalformedPart")


def test_400_checksums(server: Server) -> None:
    part = server.next()
    flipped = part[:-1] + bytes([part[-1] ^ 1])
    refused(server.post(flipped), 400, "ChecksumMismatch")
    slime = server.next(checksum="slime")
    refused(server.post(slime[:-1] + bytes([slime[-1] ^ 1])), 400, "ChecksumMismatch")
    part = server.next(manifest_checksum=True)
    refused(server.post(edited(part, sync_id="another")), 400, "ChecksumMismatch")


@pytest.mark.parametrize("version", ["-1", "x", "", "1.0", str(1 << 63), "0x10", "٣"])
def test_400_bad_version(server: Server, version: str) -> None:
    part = edited(server.next(), current_version=version)
    refused(server.post(part), 400, "MalformedPart")
    part = edited(server.next(), current_version=None)
    refused(server.post(part, weight_version=version), 400, "MalformedPart")


def test_400_versions_that_disagree(server: Server) -> None:
    refused(server.post(server.next(), weight_version="999"), 400, "MalformedPart")
    based = server.next(metadata={"base_version": "7"})
    refused(server.post(based, base_version="999"), 400, "MalformedPart")
    refused(server.post(edited(server.next(), current_version=None)), 400, "MalformedPart")


def test_400_bad_parameters(server: Server) -> None:
    refused(server.post(server.next(), pause_mode="sometimes"), 400, "MalformedPart")
    refused(server.post(server.next(), flush_cache="perhaps"), 400, "MalformedPart")
    refused(server.json({"files": []}), 400, "MalformedPart")
    body = {"model_path": str(server.root), "load_format": "delta", "files": []}
    answer = server.json(body, "/update_weights_from_disk")
    refused(answer, 400, "MalformedPart")
    assert answer.json()["success"] is False


@pytest.mark.parametrize(("method", "path"), delta_routes())
def test_403_forwarded(server: Server, method: str, path: str) -> None:
    """There is no token, and a proxy on this host speaks for somebody else."""
    headers = {"X-Forwarded-For": "192.0.2.7"}
    disk = {"model_path": "/", "load_format": "delta", "method": "apply_delta_from_disk"}
    body = {} if method == "GET" else {"json": disk}
    call = server.engine.get if method == "GET" else server.engine.post
    refused(call(path, headers=headers, **body), 403, "AccessDenied")


def test_403_paths(server: Server, tmp_path: Path) -> None:
    (tmp_path / "outside.safetensors").write_bytes(server.next())
    (server.root / "link").symlink_to(tmp_path)
    (server.root / "device").symlink_to("/dev/zero")
    inside, outside = str(server.root), str(tmp_path)
    for model_path, name in [
        (outside, "outside.safetensors"),
        (inside, str(tmp_path / "outside.safetensors")),
        (inside, f"../{tmp_path.name}/outside.safetensors"),
        (inside, "link/outside.safetensors"),
        (f"{inside}/link", "outside.safetensors"),
        ("/etc", "passwd"),
        (inside, "/dev/zero"),
        (inside, "device"),
    ]:
        answer = server.json({"model_path": model_path, "files": [name], "weight_version": "1"})
        refused(answer, 403, "PathForbidden")


def test_400_missing_or_special_files(server: Server) -> None:
    os.mkfifo(server.root / "pipe")
    for name in ("absent.safetensors", "pipe", "."):
        body = {"model_path": str(server.root), "files": [name], "weight_version": "1"}
        refused(server.json(body), 400, "MalformedPart")


def test_408_slow_upload(server: Server) -> None:
    head = (
        f"POST /update_weights_delta HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {MAX_BODY}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.engine.port)) as connection:
        connection.settimeout(30)
        connection.sendall(head.encode() + server.next()[:50])
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b" 408 " in answer.split(b"\r\n", 1)[0]
    assert b"UploadTooSlow" in answer


def test_a_connection_that_is_cut(server: Server) -> None:
    head = (
        f"POST /update_weights_delta HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {MAX_BODY}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.engine.port)) as connection:
        connection.sendall(head.encode() + server.next()[:50])


def big_part(server: Server, nbytes: int) -> bytes:
    """A well-formed part with a tensor of this size that the engine does not know."""
    tensor = torch.randint(0, 2**15, (nbytes // 2,), dtype=torch.int16).view(torch.bfloat16)
    return server.next(tensors={"big": tensor}, changed={"big": None})


def test_413_declared_too_large(server: Server) -> None:
    refused(server.post(big_part(server, MAX_BODY + 2)), 413, "TooLarge")


def test_413_chunked_too_large(server: Server) -> None:
    body = big_part(server, MAX_BODY + 2)
    chunks = (body[k : k + 65536] for k in range(0, len(body), 65536))
    refused(server.post(chunks), 413, "TooLarge")


def test_413_zstd_bomb(server: Server) -> None:
    refused(server.post(zstandard.compress(bytes(MAX_BODY * 4))), 413, "TooLarge")


def test_415(server: Server) -> None:
    part = server.next()
    refused(server.post(part, {"Content-Type": "text/plain"}), 415, "UnsupportedMedia")
    refused(server.post(part, {**OCTETS, "Content-Encoding": "gzip"}), 415, "UnsupportedMedia")


def test_507_spool_full(server: Server) -> None:
    refused(server.post(big_part(server, 2 * SPOOL)), 507, "SpoolFull")


@pytest.mark.parametrize("base", [0, 10**6])
def test_409_wrong_base_version(server: Server, base: int) -> None:
    metadata = {"current_version": str(base + 10**7), "base_version": str(base)}
    error = refused(server.post(server.next(metadata=metadata)), 409, "VersionConflict")
    assert error["expected"] == base
    assert error["actual"] == server.engine.delta_status().version.number


def test_409_another_sync_in_progress(server: Server) -> None:
    """A sync that is staged keeps another one out, until it is too old."""
    half = server.next(metadata={"part": "0", "num_parts": "2"})
    assert server.post(half).json()["status"] == "staged"
    answer = server.post(server.next())
    error = refused(answer, 409, "SyncInProgress")
    assert 1 <= int(answer.headers["Retry-After"]) <= STAGE_TIMEOUT
    assert error["retry_after"] == int(answer.headers["Retry-After"])
    drop_staged(server)


def test_409_same_number_other_bytes(server: Server) -> None:
    sync = {"sync_id": "s", "part": "0", "num_parts": "2"}
    assert server.post(server.next(metadata=sync)).json()["status"] == "staged"
    other = server.next(metadata=sync, changed={NORM: torch.arange(8)})
    refused(server.post(other), 409, "Conflict")
    drop_staged(server)


def drop_staged(server: Server) -> None:
    """Let the staged sync grow old, then push it out with a part that is refused."""
    time.sleep(STAGE_TIMEOUT + 0.1)
    unknown = server.next(tensors={"nobody": torch.zeros(2)}, changed={"nobody": None})
    refused(server.post(unknown), 422, "NotUpdatable")
    assert server.engine.delta_status().staged is None


def test_two_senders_at_once(server: Server) -> None:
    """Two senders send two parts each: the first one wins; the other gets 409."""
    bodies = [
        [
            server.next(metadata={"sync_id": name, "part": str(part), "num_parts": "2"})
            for part in range(2)
        ]
        for name in ("one", "two")
    ]
    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda sender: server.post(sender[0]), bodies))
    statuses = sorted(response.status_code for response in first)
    assert statuses == [200, 409]
    drop_staged(server)


@pytest.mark.parametrize(
    ("tensors", "changed", "word"),
    [
        ({"nobody.weight": torch.zeros(8)}, {"nobody.weight": None}, "no such tensor"),
        ({"lm_head.weight.": torch.zeros(8)}, {"lm_head.weight.": None}, "no such tensor"),
        ({NORM: torch.zeros(64, 2, dtype=torch.bfloat16)}, {NORM: torch.arange(3)}, "[64, 2]"),
        ({NORM: torch.zeros(128)}, {NORM: torch.arange(3)}, "float32"),
    ],
)
def test_422_not_this_tensor(
    server: Server, tensors: dict[str, torch.Tensor], changed: dict[str, Any], word: str
) -> None:
    error = refused(server.post(server.next(tensors=tensors, changed=changed)), 422, "NotUpdatable")
    assert error["tensor"] == next(iter(tensors))
    assert word in error["message"]


def test_422_positions(server: Server) -> None:
    numel = server.trainer.tensors[NORM].numel()
    part = server.next(changed={NORM: torch.tensor([1, 2, 3])}, encoding="indices")
    good = torch.tensor([1, 2, 3], dtype=torch.int32).numpy().tobytes()
    for bad in ([1, 2, numel], [1, 1, 2], [3, 2, 1], [-1, 2, 3]):
        raw = torch.tensor(bad, dtype=torch.int32).numpy().tobytes()
        checksum = xxh3_of(
            torch.frombuffer(bytearray(raw), dtype=torch.uint8), server.trainer.tensors[NORM][1:4]
        )
        forged = edited(part.replace(good, raw), checksum=checksum)
        error = refused(server.post(forged), 422, "NotUpdatable")
        assert error["tensor"] == NORM


def test_422_full_sync_with_tensors_missing(server: Server) -> None:
    part = server.next(metadata={"full": "true"}, changed={NORM: None})
    error = refused(server.post(part), 422, "NotUpdatable")
    assert EMBED in error["tensors"]
    assert NORM not in error["tensors"]
