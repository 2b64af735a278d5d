"""``--delta-allow-from``: clients of a network that send no token, on a live engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.live_engine.process import EngineProcess
from tests.support.hosts import Host, two_hosts

_CLIENT = """
import sys, httpx
url, address = sys.argv[1:]
octets = {"Content-Type": "application/octet-stream"}
transport = httpx.HTTPTransport(local_address=address)
with httpx.Client(transport=transport, timeout=60.0) as client:
    answers = [
        client.get(f"{url}/delta_status"),
        client.post(f"{url}/update_weights_delta", content=b"no part", headers=octets),
    ]
for answer in answers:
    print(answer.status_code, answer.json().get("error", {}).get("type"))
"""


def asked_from(host: Host, address: str, url: str) -> list[str]:
    """Return how an engine answers a status and an empty part that come from an address."""
    return on(host, sys.executable, "-c", _CLIENT, url, address).splitlines()


def on(host: Host, *command: str) -> str:
    """Run a command on a host; return its output."""
    done = subprocess.run(
        [*host.prefix, *command],
        env={**os.environ, "TMPDIR": str(host.folder)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_clients_of_a_named_network_need_no_token(
    kind: str,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    with two_hosts(tmp_path) as (here, there):
        other = f"{there.address.rpartition('.')[0]}.77"
        on(there, "ip", "address", "add", f"{other}/24", "dev", there.interface)
        engine = start(
            kind,
            checkpoint("qwen3"),
            extra_args=["--host", "0.0.0.0", "--delta-allow-from", f"{there.address}/32"],
        )
        url = f"http://{here.address}:{engine.port}"
        named = asked_from(there, there.address, url)
        assert named == ["200 None", "400 MalformedPart"]
        assert asked_from(there, other, url) == ["403 AccessDenied"] * 2
        assert engine.delta_status().version.number == 0
        engine.stop()
