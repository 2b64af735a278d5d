"""The trainer of the fleet, in a process that can be killed: `Coordinator` starts it.

``python -m scripts.fleet_soak.coordinator OPTIONS`` sends the steps that it reads from stdin, one
line of JSON each. It kills an engine or itself at a step of the commit when a line says so.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import msgspec

from delta_sender import MultiSender, PartialSyncError, SyncError
from scripts.fleet_soak.reference import weights
from scripts.live_engine.tiny_models import load_tensors

_UNDER_WAY_S: Final = 0.02


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainer is started; `step` is what the engines hold, `quorum` is the sender's."""

    folder: str
    urls: list[str]
    step: int
    version: int
    quorum: int | None
    window: float
    lag_limit: float


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to kill, and when.

    Attributes:
        action: the step of the commit: ``stage`` a part, ``prepare``, ``record`` or ``commit``.
        when: before it is sent, while it is under way, or after its answer.
        number: of it, among those of `url`, or of all engines.
        url: of the engine whose step it is; None: any.
        group: process group to kill; None: the trainer.
    """

    action: Literal["stage", "prepare", "record", "commit"]
    when: Literal["before", "during", "after"] = "before"
    number: int = 1
    url: str | None = None
    group: int | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a step has ended; `states` and `versions` are by url, `error` is the sender's."""

    step: int
    seconds: float
    states: dict[str, str]
    versions: dict[str, int]
    error: str | None = None


class CoordinatorDied(Exception):
    """The trainer's process has ended before it had an outcome."""


class Coordinator:
    """A trainer's process, within the ``with`` block.

    Args:
        options: of it.
        evicted: called with the url of an engine that is left out, before the others commit.
        log: file for what it logs; appended to.
    """

    def __init__(self, options: Options, evicted: Callable[[str], None], log: Path) -> None:
        self._options, self._evicted, self._log = options, evicted, log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Coordinator:
        module = "scripts.fleet_soak.coordinator"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, msgspec.json.encode(self._options).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        if exc_info[0] is not None:
            process.kill()
        try:
            process.stdin.close()
            process.wait(30.0)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()

    def sync(self, step: int, kill: Kill | None = None) -> Outcome:
        """Send one step.

        Raises:
            CoordinatorDied: It was killed, or has failed.
        """
        self._say({"step": step, "kill": None if kill is None else msgspec.to_builtins(kill)})
        for said in self._heard():
            if "evict" in said:
                self._evicted(said["evict"])
                self._say({"evicted": said["evict"]})
            else:
                return msgspec.convert(said, Outcome)
        raise CoordinatorDied(f"the trainer's process has ended: {self._log}")

    def _say(self, line: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            print(json.dumps(line), file=self._process.stdin, flush=True)
        except OSError as error:
            raise CoordinatorDied(f"the trainer's process has ended: {self._log}") from error

    def _heard(self) -> Iterator[dict[str, Any]]:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)


class Killing(httpx.BaseTransport):
    """Passes requests on to another transport, and kills as it is asked to."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner, self._lock = inner, threading.Lock()
        self._next: Kill | None = None
        self._seen = 0

    def expect(self, kill: Kill | None) -> None:
        """Kill during the next step of the trainer, or not."""
        self._next, self._seen = kill, 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        action = _action(request)
        awaited = self._next
        if awaited is not None and awaited.url is None and action == awaited.action:
            with self._lock:  # one after another: those before it are done
                return self._passed(request)
        return self._passed(request)

    def _passed(self, request: httpx.Request) -> httpx.Response:
        kill = self._counted(request)
        if kill is None:
            return self._inner.handle_request(request)
        if kill.when == "before":
            _do(kill)
        elif kill.when == "during":
            threading.Timer(_UNDER_WAY_S, _do, [kill]).start()
        response = self._inner.handle_request(request)
        if kill.when == "after":
            response.read()
            _do(kill)
        return response

    def _counted(self, request: httpx.Request) -> Kill | None:
        kill = self._next
        if kill is None or _action(request) != kill.action:
            return None
        if kill.url is not None and not str(request.url).startswith(f"{kill.url}/"):
            return None
        self._seen += 1
        if self._seen != kill.number:
            return None
        self._next = None
        return kill


def _do(kill: Kill) -> None:
    if kill.group is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.killpg(kill.group, signal.SIGKILL)


def _action(request: httpx.Request) -> str | None:
    if request.url.path == "/update_weights_delta":
        return "stage"
    if request.url.path == "/delta_commit":
        action: str = json.loads(request.read())["action"]
        return action
    return None


def main() -> None:
    """Send the steps that stdin names until it is closed."""
    options = msgspec.json.decode(sys.argv[1], type=Options)
    base, transport = load_tensors(Path(options.folder)), Killing(httpx.HTTPTransport())
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    def evict(url: str, error: SyncError) -> None:
        _print({"evict": url})
        lines.get()  # the router has left it out

    threading.Thread(target=read, daemon=True).start()
    with MultiSender(
        options.urls,
        weights(base, options.step).items(),
        base_version=options.version,
        client=httpx.Client(transport=transport, timeout=60.0),
        commit="all_or_none",
        commit_window=options.window,
        lag_limit=options.lag_limit,
        quorum=options.quorum,
        evict=None if options.quorum is None else evict,
        takeover=True,
        full="allow",  # a fresh engine has the base, which this trainer might never have sent
    ) as sender:
        while (line := lines.get()) is not None:
            transport.expect(None if line["kill"] is None else msgspec.convert(line["kill"], Kill))
            _print(msgspec.to_builtins(_sync(sender, weights(base, line["step"]), line["step"])))


def _sync(sender: MultiSender, tensors: Any, step: int) -> Outcome:
    start, error = time.monotonic(), None
    try:
        reports = sender.sync(tensors.items())
    except PartialSyncError as failed:
        reports, error = failed.reports, type(failed).__name__
    return Outcome(
        step=step,
        seconds=time.monotonic() - start,
        states={url: found.state for url, found in sender.outcomes.items()},
        versions={url: report.version for url, report in reports.items()},
        error=error,
    )


def _print(line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
