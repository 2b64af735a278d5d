"""Clients of an engine in a process of their own, which prints a line for each request."""

from __future__ import annotations

import abc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class ClientsProcess(abc.ABC):
    """Runs ``python -m MODULE ARGUMENT ...`` within the ``with`` block.

    The clients stop when their stdin is closed, at the end of the block.

    Attributes:
        exit_status: of the process, after the block.
    """

    exit_status: int | None = None

    def __init__(self, module: str, *arguments: object) -> None:
        self._command = [sys.executable, "-m", module, *map(str, arguments)]
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches this process only
        )
        self._reader.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        process = self._running()
        process.stdin.close()
        if exc_info[0] is not None:
            process.kill()
        self._reader.join()
        self.exit_status = process.wait()

    @abc.abstractmethod
    def heard(self, line: str) -> None:
        """Take a line that the clients have printed."""

    def say(self, line: str) -> None:
        """Send the clients a line."""
        print(line, file=self._running().stdin, flush=True)

    def _read(self) -> None:
        for line in self._running().stdout:
            self.heard(line)

    def _running(self) -> Any:
        assert self._process is not None
        return self._process


def run_clients(
    client: Callable[[int, threading.Event], None],
    count: int,
    heard: Callable[[str], None] = lambda line: None,
) -> None:
    """Run the clients of this process in threads, until its stdin is closed.

    Args:
        client: sends requests until the event is set, given its number.
        count: of the clients.
        heard: called with each line of stdin.
    """
    stop = threading.Event()
    threads = [threading.Thread(target=client, args=(number, stop)) for number in range(count)]
    for thread in threads:
        thread.start()
    for line in sys.stdin:
        heard(line)
    stop.set()
    for thread in threads:
        thread.join()
