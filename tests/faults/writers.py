"""Senders in processes of their own that write one log: killed at a request, or two of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file

from tests.faults.following import SETTLES_S, FollowHarness, open_sender
from tests.support.store_proxy import Fault, StoreProxy

# Its processes start in no time, from one that has imported everything.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


class Halt:
    """Faults of a proxy: the first PUT of an object waits.

    Args:
        part: of the object's path.
        when: it waits before it reaches the store; or ``after`` that, without the answer; or it is
            ``lost``, and never reaches it.
    """

    def __init__(self, part: str, when: Literal["before", "after", "lost"]) -> None:
        self._part, self._when = part, when
        self._reached, self._released = threading.Event(), threading.Event()

    def __call__(self, method: str, path: str, number: int) -> Fault | None:
        if method != "PUT" or self._part not in path or self._reached.is_set():
            return None
        if self._when == "after":
            return Fault(then=self._stop)
        self._stop()
        return Fault(status=503) if self._when == "lost" else None

    def _stop(self) -> None:
        self._reached.set()
        self._released.wait(SETTLES_S)

    def wait(self) -> None:
        """Wait for the PUT."""
        assert self._reached.wait(SETTLES_S), f"no PUT of {self._part}"

    def release(self) -> None:
        """Let it continue."""
        self._released.set()


class Writer:
    """A sender in a process of its own, which writes one version when `begin` is called.

    Attributes:
        number: of the checkpoint that it leads to.
        proxy: between it and the store.
    """

    def __init__(self, harness: FollowHarness, number: int) -> None:
        self.number, self.proxy = number, StoreProxy(harness.store)
        self._connection, other = multiprocessing.Pipe()
        base = harness.folders[harness.which[harness.newest]]
        self._process = _PROCESSES.Process(
            target=_write,
            args=(other, self.proxy.server.environment, harness.url, base),
            kwargs={"target": harness.folders[number], "engine_url": harness.engine.url},
        )
        self._process.start()
        other.close()
        assert self.next_event() == ("ready", 0)

    def open(self) -> None:
        """Open the log."""
        self._connection.send("open")
        assert self.next_event() == ("open", 0)

    def begin(self) -> None:
        """Write the version; if the log is not open yet, open it first."""
        self._connection.send("continue")
        self._connection.send("continue")

    def next_event(self) -> tuple[str, int]:
        """Return its next step: ``written`` and a version, or the type of its error and 0."""
        assert self._connection.poll(SETTLES_S), "the writer does not answer"
        what, version = self._connection.recv()
        return str(what), int(version)

    def outcome(self) -> tuple[str, int]:
        """Return its last step; see `next_event`."""
        while (found := self.next_event())[0] == "open":
            pass
        return found

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self.kill()
        self._connection.close()
        self.proxy.close()


@contextlib.contextmanager
def writers(harness: FollowHarness, *steps: int) -> Iterator[list[Writer]]:
    """Start senders that write the next version: the weights that come some versions later."""
    with contextlib.ExitStack() as stack:
        made = []
        for one in steps:
            made.append(Writer(harness, harness.next_weights(one)))
            stack.callback(made[-1].close)
        yield made


def _write(
    connection: Connection,
    environment: Mapping[str, str],
    url: str,
    base: Path,
    target: Path,
    engine_url: str,
) -> None:
    os.environ.update(environment)
    tensors = load_file(target / "model.safetensors")
    connection.send(("ready", 0))
    connection.recv()
    try:
        with open_sender(url, base, engine_url) as sender:
            connection.send(("open", 0))
            connection.recv()
            connection.send(("written", sender.sync(tensors.items()).version))
    except Exception as error:  # the test says which ones are expected
        connection.send((type(error).__name__, 0))
