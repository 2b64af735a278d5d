"""A live engine with two ranks, its trainer and its sender; and what must hold after a fault."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from delta_sender import DeltaSender, SyncReport
from scripts.live_engine import tiny_models
from scripts.live_engine.process import HOST, EngineProcess
from tests.faults.observed import FIRST, KINDS, PLUGIN, Kind, ObservedEngine, wait_until
from tests.support.plain_trainer import BITS, Trainer, container, split

ROUTE = "/update_weights_delta"
OCTETS = {"Content-Type": "application/octet-stream"}
STAGE_TIMEOUT = 2
PART_BYTES = 4 << 10  # a step of all tensors makes several parts, one of the norms a single one
SPOOL = 2 << 20

# A sender in a process of its own: it sends, can read the answer, and waits to be killed.
CHILD = """
import socket, sys, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(open(sys.argv[2], "rb").read())
if sys.argv[3] == "reads":
    assert b"200 OK" in connection.recv(1 << 16)
print("sent", flush=True)
time.sleep(600)
"""


class Harness(ObservedEngine):
    """One engine with its trainer and sender, which knows only what the engine acknowledged.

    Args:
        engine: serves `base`.
        kind: of the engine.
        base: the checkpoint.
        folder: for the files that arm faults.
        spool: the engine's spool folder.
        options: of the sender.

    Attributes:
        base_version: the engine's version before the fault.
        run: metadata of parts that stand for the sender's; empty if the engine has no owner.
        changed: name -> indices that the current step changes.
        sent: the last parts that were made.
    """

    def __init__(
        self,
        engine: EngineProcess,
        kind: Kind,
        base: Path,
        folder: Path,
        spool: Path,
        **options: Any,
    ) -> None:
        super().__init__(engine, kind, folder)
        self.trainer = Trainer(tiny_models.load_tensors(base), version=FIRST)
        self.sender = DeltaSender(
            engine.url,
            self.trainer.tensors.items(),
            base_version=FIRST,
            **{"bucket_bytes": PART_BYTES, **options},
        )
        self.base_version = FIRST
        self.run: dict[str, str] = {}
        self.changed: dict[str, torch.Tensor] = {}
        self.sent: list[bytes] = []
        self._spool = spool

    # What is sent ----------------------------------------------------------------------------

    def step(self, only: str = "") -> None:
        """Train one step; the fault happens during the sync to its weights."""
        self.base_version = self.version()
        self.changed = self.trainer.step(only=only)
        self.trainer.version = self.next_number()
        self.sent = []

    def next_number(self) -> int:
        """Return the next version of the run that owns the engine; what is posted is of it."""
        owner = self.engine.delta_status().owner
        if owner is None:
            self.run = {}
            return self.base_version + 1
        self.run = {"run": owner.run, "run_epoch": str(owner.epoch)}
        highest = self.ask("claim", **self.run)["highest"]
        return max(self.base_version, highest or 0) + 1

    def ask(self, action: str, run: str, run_epoch: str = "1", **keys: Any) -> dict[str, Any]:
        """Claim the engine for a run, or release it; return the answer."""
        body = {"action": action, "run": run, "epoch": int(run_epoch), **keys}
        answer = self.engine.post("/delta_run", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def parts(
        self,
        count: int = 1,
        *,
        encoding: str = "deltas",
        manifest_checksum: bool = False,
        **metadata: str,
    ) -> list[bytes]:
        """Make the parts of the sync to the trainer's weights."""
        common = {**self.trainer.metadata(), "base_version": str(self.base_version), **self.run}
        common |= {"num_parts": str(count), **metadata}
        self.sent = [
            container(
                self.trainer.tensors,
                some,
                encoding=encoding,
                metadata={**common, "part": str(number)},
                manifest_checksum=manifest_checksum,
            )
            for number, some in enumerate(split(self.changed, count))
        ]
        return self.sent

    def other_values(self) -> None:
        """Change the new values of half of the elements that the step changed."""
        for name, where in self.changed.items():
            fresh = self.trainer.tensors[name].clone()
            fresh.view(-1).view(BITS[fresh.element_size()])[where[::2]] ^= 8
            self.trainer.tensors[name] = fresh

    def post(self, body: bytes, **params: str) -> httpx.Response:
        return self.engine.post(ROUTE, content=body, headers=OCTETS, params=params)

    def outcome_of(self, response: httpx.Response) -> str:
        """Return the answer's status, or the HTTP status and type of its error."""
        answer = response.json()
        if response.status_code == 200:
            return str(answer["status"])
        return f"{response.status_code} {answer['error']['type']}"

    def expect(self, body: bytes, expected: str, **params: str) -> httpx.Response:
        """Post a part and check the answer."""
        response = self.post(body, **params)
        assert self.outcome_of(response) == expected, response.text
        return response

    def raw(self, body: bytes, *, chunked: bool = False) -> bytes:
        """Return the HTTP request that carries a part."""
        kind = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        if chunked:
            pieces = [body[k : k + 4096] for k in range(0, len(body), 4096)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: {OCTETS['Content-Type']}\r\n"
        return f"{head}{kind}\r\n\r\n".encode() + body

    def cut(self, tenths: int, *, reset: bool = False) -> None:
        """Send some tenths of a sync's body, then close the connection or reset it.

        With `reset` the body is chunked.
        """
        [body] = self.parts()
        request = self.raw(body, chunked=reset)
        head = request.index(b"\r\n\r\n") + 4
        with socket.create_connection((HOST, self.engine.port)) as connection:
            connection.sendall(request[: head + (len(request) - head) * tenths // 10])
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def killed_sender(self, data: bytes, *, reads: bool, when: Callable[[], bool]) -> None:
        """Let another process send `data`, and kill it when a condition holds."""
        file = self.folder / "request"
        file.write_bytes(data)
        command = [sys.executable, "-c", CHILD, str(self.engine.port), str(file)]
        child = subprocess.Popen(
            [*command, "reads" if reads else "deaf"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "sent\n"
            wait_until(when)
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()

    # What goes wrong -------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release the memory of the weights, with the engine's own route."""
        if self.engine.name == "vLLM":
            answer = self.engine.post("/sleep", params={"level": "1"})
        else:
            answer = self.engine.post("/release_memory_occupation", json={"tags": ["weights"]})
        assert answer.status_code == 200

    def wake(self) -> None:
        """Resume the memory of the weights, with the engine's own route."""
        if self.engine.name == "vLLM":
            answer = self.engine.post("/wake_up")
        else:
            answer = self.engine.post("/resume_memory_occupation", json={"tags": ["weights"]})
        assert answer.status_code == 200

    def spool(self) -> Path:
        """Return the spool folder, which is mounted in the engine's namespace only."""
        assert self.engine._process is not None
        return Path(f"/proc/{self.engine._process.pid}/root{self._spool}")

    # What is there ---------------------------------------------------------------------------

    def check_weights(self, before: object, *, new: bool) -> object:
        """Check that every rank holds the new or the old weights, bit by bit, and generates.

        New weights are rolled back, to the old ones.

        Args:
            before: what `prints` returned before the step.
            new: whether the engine must be at the new version.

        Returns:
            What `prints` returned before the rollback.
        """
        assert self.engine.weight_version() == str(self.version())
        assert self.holds(self.trainer.tensors if new else self.trainer.old)
        assert self.generates() == 200
        found = self.prints()
        assert (found == before) != new
        if new:
            assert self.engine.post("/delta_rollback").json()["status"] == "rolled_back"
            assert self.prints() == before
        return found

    def next_sync(self) -> SyncReport:
        """Sync another step with the sender, without help, and check the engine."""
        self.trainer.step()
        report = self.sender.sync(self.trainer.tensors.items())
        status = self.engine.delta_status()
        assert (status.version.number, status.health.state) == (report.version, "certain")
        assert self.engine.weight_version() == str(report.version)
        assert self.holds(self.trainer.tensors)
        assert self.generates() == 200
        return report

    def spooled(self) -> list[str]:
        """List the parts in the spool."""
        return [str(file) for file in self.spool().rglob("*.safetensors")]


def launch(
    start: Callable[..., EngineProcess], kind: str, base: Path, folder: Path, *arguments: str
) -> Harness:
    """Start an engine with two ranks and a small spool on a mount of its own."""
    spool = folder / "spool"
    spool.mkdir(exist_ok=True)
    chosen = KINDS[kind]
    engine = start(
        chosen.engine,
        base,
        tp=chosen.tp,
        python_path=[PLUGIN, *chosen.python_path],
        extra_env={"DELTA_FAULTS": str(folder), **chosen.environment},
        extra_args=[
            *("--delta-tuning", f"spool-dir={spool}"),
            *("--delta-tuning", f"stage-timeout={STAGE_TIMEOUT}"),
            *("--delta-base-version", str(FIRST)),
            *chosen.arguments,
            *arguments,
        ],
        command_prefix=[
            *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
            f'mount -t tmpfs -o size={SPOOL} tmpfs "{spool}" && exec "$@"',
            "sh",
        ],
    )
    return Harness(engine, chosen, base, folder, spool)
