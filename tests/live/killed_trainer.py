"""A trainer whose engines commit as one, and that is killed at one of its steps."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import httpx

from delta_sender import MultiSender
from scripts.live_engine import tiny_models

COMMIT = "/delta_commit"


class Killed(httpx.BaseTransport):
    """Passes requests on, and kills the process when it is to pass on a step of some number.

    Args:
        action: of the step.
        number: from 1, among those of the action.
    """

    def __init__(self, action: str, number: int) -> None:
        self._action, self._left, self._lock = action, number, threading.Lock()
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == COMMIT:
            with self._lock:
                self._left -= json.loads(request.read())["action"] == self._action
                if not self._left:
                    os.kill(os.getpid(), signal.SIGKILL)
                return self._inner.handle_request(request)
        return self._inner.handle_request(request)


def main() -> None:
    """Bring engines from one checkpoint to another: folders, step, its number, urls."""
    base, target, action, number, *urls = sys.argv[1:]
    client = httpx.Client(transport=Killed(action, int(number)), timeout=60.0)
    sender = MultiSender(
        urls,
        tiny_models.load_tensors(Path(base)).items(),
        client=client,
        commit="all_or_none",
        commit_window=1.0,
        lag_limit=5.0,
        takeover=True,
        flush_cache="salt",
    )
    sender.sync(tiny_models.load_tensors(Path(target)).items())


if __name__ == "__main__":
    main()
