"""Real object stores on this host: SeaweedFS, and rclone's S3 gateway."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

BUCKET = "test"
_START_S = 90.0
_TRIES = 3


@dataclass(frozen=True, slots=True)
class StoreServer:
    """An S3 server that has the bucket `BUCKET` and takes any credentials."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """The client's environment variables."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_SKIP_SIGNATURE": "true",
        }


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[StoreServer]:
    """Run SeaweedFS, with its data in a folder."""
    for attempt in range(_TRIES):
        data = folder / f"try{attempt}"
        data.mkdir()
        with contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(_seaweed(data))
            except AssertionError:  # another process has taken one of its ports
                if attempt + 1 == _TRIES:
                    raise
                continue
            yield server
            return


@contextlib.contextmanager
def _seaweed(folder: Path) -> Iterator[StoreServer]:
    names = ["master", "volume", "filer", "s3"]
    ports = dict(zip([*names, *(f"{name}.grpc" for name in names)], _free_ports(8), strict=True))
    flags = [f"-{name}.port={ports[name]}" for name in names]
    flags += [f"-{name}.port.grpc={ports[f'{name}.grpc']}" for name in names]
    command = [
        *(_program("weed"), "-logtostderr", "server", f"-dir={folder}", "-ip=127.0.0.1"),
        *("-ip.bind=127.0.0.1", "-s3", "-filer", "-s3.iam=false", "-volume.max=20"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
        *("-master.volumeSizeLimitMB=64", *flags),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_sockets, [*ports.values()])
        yield stack.enter_context(_served(command, folder / "log", ports["s3"]))


def _remove_sockets(ports: list[int]) -> None:
    """Remove the Unix sockets that SeaweedFS makes for its ports."""
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        if any(path.stem.endswith(f"-{port}") for port in ports):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def rclone_gateway(folder: Path) -> Iterator[StoreServer]:
    """Run ``rclone serve s3`` on a folder; it lets an object be created twice."""
    (folder / BUCKET).mkdir()
    [port] = _free_ports(1)
    command = [_program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    with _served([*command, str(folder)], folder / "log", port) as server:
        yield server


@contextlib.contextmanager
def _served(command: list[str], log: Path, port: int) -> Iterator[StoreServer]:
    server = StoreServer(f"http://127.0.0.1:{port}")
    # With credentials in its environment, SeaweedFS would want them of everybody.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        _make_bucket(server, process, log)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _make_bucket(server: StoreServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.put(f"{server.endpoint}/{BUCKET}", timeout=5)
            # A server that is not whole yet might have the bucket, and no room for an object.
            probe = f"{server.endpoint}/{BUCKET}/started"
            if httpx.put(probe, content=b"yes", timeout=5).is_success:
                return
        time.sleep(0.2)
    raise AssertionError(f"the store has not started:\n{log.read_text()[-4000:]}")


def _program(name: str) -> str:
    """Return the path of a program that the environment's packages have installed."""
    # The environments that see .venv have its packages, but not its programs.
    folders = [sysconfig.get_path("scripts"), str(Path(__file__).parents[2] / ".venv" / "bin")]
    found = shutil.which(name, path=os.pathsep.join(folders)) or shutil.which(name)
    assert found, f"{name} is not installed"
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
