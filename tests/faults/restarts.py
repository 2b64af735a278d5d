"""An engine that dies and is started again, as a supervisor does; its sender, and their delta log.

The checkpoint, the log, the port and the spool's folder stay, and so does the sender.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import httpx
import psutil

from delta_sender import SyncError, SyncReport
from engine_ext.delta_log.catalog import Listing, list_log
from scripts.live_engine.process import EngineProcess
from tests.faults.harness import FIRST, PLUGIN, RANKS, STAGE_TIMEOUT, Scene, wait_until

SHARED_MEMORY = Path("/dev/shm")
PART_BYTES = 4 << 10  # a step of all tensors makes several parts, one of the norms a single one
ANSWER_S = 15
DEATH_S = 90  # SGLang looks for core dumps for 65 s when its detokenizer has died
ENDS_S = 15


class Lives(Scene):
    """One life of an engine after the other; the sender is told of none.

    Args:
        start: starts an engine.
        kind: of the engine.
        base: the checkpoint.
        folder: an empty one.
        arguments: further ones of the engine's.
        environment: further variables of the engine's.
        python_path: where the engine's Python looks before its own folders.
        encoding: the sender's; where it sends differences, the log has values.

    Attributes:
        answers: statuses of the answers to the sync under way.
    """

    def __init__(
        self,
        start: Callable[..., EngineProcess],
        kind: str,
        base: Path,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python_path: Sequence[Path] = (),
        encoding: str = "gap8_ulp",
    ) -> None:
        self.log, spool = folder / "log", folder / "spool"
        self.log.mkdir()
        spool.mkdir()
        self._start = partial(
            start,
            kind,
            base,
            tp=RANKS,
            python_path=[PLUGIN, *python_path],
            extra_env={
                "DELTA_FAULTS": str(folder),
                # What SGLang compiles at each start, once for all lives.
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
                **(environment or {}),
            },
            extra_args=[
                *("--delta-spool-dir", str(spool)),
                *("--delta-stage-timeout", str(STAGE_TIMEOUT)),
                *("--delta-base-version", str(FIRST)),
                *("--delta-log", str(self.log)),
                *arguments,
            ],
        )
        self.answers: set[int] = set()
        self._client = httpx.Client(
            timeout=60, event_hooks={"request": [self._asked], "response": [self._answered]}
        )
        self._segments: set[Path] = set()
        self._syncing: threading.Thread | None = None
        self._outcome: object = None
        self._posted = 0
        self._halts, self._go_on = False, threading.Event()
        super().__init__(
            self._start(),
            base,
            folder,
            spool,
            delta_log=self.log,
            encoding=encoding,
            bucket_bytes=PART_BYTES,
            client=self._client,
        )

    def close(self) -> None:
        """The engine ends, and the sender lets go of the log."""
        self.engine.stop()
        self.sender.close()
        self._client.close()

    # The sync that meets its engine's death --------------------------------------------------

    def begin(self, *, halts: bool = False) -> None:
        """Let the sender begin its sync; with `halts` its second part waits for `go_on`."""
        self.answers.clear()
        self._posted, self._halts = 0, halts
        self._go_on.clear()
        self._syncing = threading.Thread(target=self._sync, daemon=True)
        self._syncing.start()

    def go_on(self) -> None:
        """Let the sender post its second part."""
        self._go_on.set()

    def commits(self) -> bool:
        """Whether the sync ends as committed; it is waited for."""
        assert self._syncing is not None
        self._syncing.join(2 * DEATH_S)
        assert not self._syncing.is_alive(), "the sender does not give up"
        if isinstance(self._outcome, SyncError):
            return False
        assert isinstance(self._outcome, SyncReport), self._outcome
        return True

    def _sync(self) -> None:
        try:
            self._outcome = self.sender.sync(self.trainer.tensors.items())
        except BaseException as error:
            self._outcome = error

    def _asked(self, request: httpx.Request) -> None:
        self._posted += request.method == "POST"
        if self._halts and self._posted == 2:
            assert self._go_on.wait(2 * DEATH_S)

    def _answered(self, response: httpx.Response) -> None:
        if response.request.method == "POST":
            self.answers.add(response.status_code)

    # Death -----------------------------------------------------------------------------------

    def kill_stalled(self, rank: int) -> None:
        """SIGKILL the rank that stalls, once it does."""
        file = self.folder / f"stalled-{rank}"
        wait_until(file.exists)
        self.kill(int(file.read_text()))
        file.unlink()

    def kill_server(self) -> None:
        """SIGKILL the process that was started, which serves HTTP."""
        assert self.engine._process is not None
        self.kill(self.engine._process.pid)

    def kill_titled(self, title: str) -> None:
        """SIGKILL the processes that call themselves so."""
        self.kill(*self.titled(title))

    def titled(self, title: str) -> list[int]:
        """The engine's processes that call themselves so."""
        found = []
        for process in self.engine.pids():
            with contextlib.suppress(psutil.Error):  # it ended just now
                # One that begins just now has no arguments yet.
                if "".join(psutil.Process(process).cmdline()[:1]).startswith(title):
                    found.append(process)
        assert found
        return found

    def kill_all(self) -> None:
        """SIGKILL every process of the engine."""
        self.kill(*self.engine.pids())

    def kill(self, *processes: int) -> None:
        """SIGKILL these, of the engine's."""
        found = self.engine.pids()
        assert set(processes) <= {*found}
        self._segments = _segments_of(found)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it has ended with another
                os.kill(process, signal.SIGKILL)

    def serves_nothing(self) -> None:
        """Nothing is generated any more, and soon nobody takes a request."""
        deadline = time.monotonic() + DEATH_S
        gone = [False]
        while not all(gone):
            assert time.monotonic() < deadline, "somebody still takes requests"
            gone = [self._is_gone(*request) for request in self._requests()]

    def _requests(self) -> list[tuple[str, str, object]]:
        small = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
        return [
            ("GET", "/delta_status", None),
            ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}),
            *([("POST", "/generate", small)] if self.engine.name == "SGLang" else []),
        ]

    def _is_gone(self, method: str, path: str, body: object) -> bool:
        try:
            answer = httpx.request(method, self.engine.url + path, json=body, timeout=ANSWER_S)
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            return False  # it is about to go
        # Ranks that live may still tell what they hold.
        assert answer.status_code >= 500 or method == "GET", (path, answer.text)
        return False

    def ends_by_itself(self) -> bool:
        """Whether no process is left; those that are end when they are told to, as a supervisor
        does."""
        if self._has_ended():
            return True
        for process in self.engine.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        assert self._has_ended(), self.engine.pids()
        return False

    def _has_ended(self) -> bool:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.engine.wait(0) and not self.engine.pids(), ENDS_S)
        return not self.engine.pids()

    # And life --------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start the engine again, beside what the dead one has left in shared memory: SGLang's
        message queue and load figures, vLLM's queue between its ranks. That is removed then, for
        the tests that follow."""
        self.engine.stop()
        left = self._segments
        self.engine = self._start(port=self.engine.port)
        for segment in left - _segments_of(self.engine.pids()):
            segment.unlink(missing_ok=True)

    def listing(self) -> Listing:
        """What is in the log."""
        return list_log(self.log)

    def spools(self) -> list[Path]:
        """The spools of all lives that are there."""
        return [*self._spool.iterdir()]

    def spool(self) -> Path:
        """Where the spools lie."""
        return self._spool


def _segments_of(processes: Iterable[int]) -> set[Path]:
    """The files in shared memory that some processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text().splitlines()
            names = {line.split(maxsplit=5)[-1] for line in maps if f" {SHARED_MEMORY}/" in line}
            found |= {Path(name.removesuffix(" (deleted)")) for name in names}
    return found
