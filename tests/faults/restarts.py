"""An engine that dies and is restarted, with its sender and their delta log.

The checkpoint, the log, the port, the spool's folder and the sender stay the same.
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
from engine_ext.log import open_log
from engine_ext.log.catalog import Listing
from scripts.live_engine.process import EngineProcess
from tests.faults.harness import PART_BYTES, STAGE_TIMEOUT, Harness
from tests.faults.observed import FIRST, KINDS, PLUGIN, wait_until

SHARED_MEMORY = Path("/dev/shm")
ANSWER_S = 15
DEATH_S = 90  # SGLang looks for core dumps for 65 s when its detokenizer has died
ENDS_S = 15
TERMINATES_S = 60  # vLLM's engine core gives its workers 20 s


class RestartHarness(Harness):
    """Restarts its engine; the sender is not notified.

    Args:
        start: starts an engine.
        kind: one of `KINDS`.
        base: the checkpoint.
        folder: an empty one.
        arguments: further arguments of the engine.
        environment: further environment variables of the engine.
        python_path: folders to put first in the engine's ``PYTHONPATH``.
        encoding: the sender's; the log has values even if it sends differences.

    Attributes:
        answers: HTTP statuses of the answers to the current sync.
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
        chosen = KINDS[kind]
        self._start = partial(
            start,
            chosen.engine,
            base,
            tp=chosen.tp,
            python_path=[PLUGIN, *chosen.python_path, *python_path],
            extra_env={
                "DELTA_FAULTS": str(folder),
                # Lets SGLang compile once for all starts.
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
                **chosen.environment,
                **(environment or {}),
            },
            extra_args=[
                *("--delta-tuning", f"spool-dir={spool}"),
                *("--delta-tuning", f"stage-timeout={STAGE_TIMEOUT}"),
                *("--delta-base-version", str(FIRST)),
                *("--delta-log", str(self.log)),
                *chosen.arguments,
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
        self._posted, self._counting = 0, threading.Lock()
        self._halts, self._go_on = False, threading.Event()
        super().__init__(
            self._start(),
            chosen,
            base,
            folder,
            spool,
            delta_log=self.log,
            encoding=encoding,
            bucket_bytes=PART_BYTES,
            client=self._client,
        )

    def close(self) -> None:
        """Stop the engine, and release the sender's log."""
        self.engine.stop()
        self.sender.close()
        self._client.close()

    # The sync during which the engine dies ---------------------------------------------------

    def begin(self, *, halts: bool = False) -> None:
        """Start the sync in a thread; with `halts` all of its parts but one wait for `go_on`."""
        self.answers.clear()
        self._posted, self._halts = 0, halts
        self._go_on.clear()
        self._syncing = threading.Thread(target=self._sync, daemon=True)
        self._syncing.start()

    def go_on(self) -> None:
        """Let the sender post the other parts."""
        self._go_on.set()

    def commits(self) -> bool:
        """Wait for the sync; return whether it was committed."""
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
        with self._counting:  # parts are posted side by side
            self._posted += request.url.path == "/update_weights_delta"
            waits = self._halts and self._posted >= 2
        if waits:
            assert self._go_on.wait(2 * DEATH_S)

    def _answered(self, response: httpx.Response) -> None:
        if response.request.method == "POST":
            self.answers.add(response.status_code)

    # Death -----------------------------------------------------------------------------------

    def kill_stalled(self, rank: int) -> None:
        """Send SIGKILL to a rank when it stalls."""
        file = self.folder / f"stalled-{rank}"
        wait_until(file.exists)
        self.kill(int(file.read_text()))
        file.unlink()

    def kill_server(self) -> None:
        """Send SIGKILL to the process that was started, which serves HTTP."""
        assert self.engine._process is not None
        self.kill(self.engine._process.pid)

    def kill_titled(self, title: str) -> None:
        """Send SIGKILL to the processes with a title."""
        self.kill(*self.titled(title))

    def titled(self, title: str) -> list[int]:
        """Return the engine's processes whose title starts with `title`."""
        found = []
        for process in self.engine.pids():
            with contextlib.suppress(psutil.Error):  # it ended just now
                # A process that starts at this moment has no arguments yet.
                if "".join(psutil.Process(process).cmdline()[:1]).startswith(title):
                    found.append(process)
        assert found
        return found

    def kill_all(self) -> None:
        """Send SIGKILL to every process of the engine."""
        self.kill(*self.engine.pids())

    def kill(self, *processes: int) -> None:
        """Send SIGKILL to some of the engine's processes."""
        found = self.engine.pids()
        assert set(processes) <= {*found}
        self._segments = _segments_of(found)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it has ended with another
                os.kill(process, signal.SIGKILL)

    def serves_nothing(self) -> None:
        """Check that nothing is generated, and wait until no process accepts requests."""
        deadline = time.monotonic() + DEATH_S
        gone = [False]
        while not all(gone):
            assert time.monotonic() < deadline, "the engine still accepts requests"
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
            return False  # it is about to end
        # Ranks that still run might answer status requests.
        assert answer.status_code >= 500 or method == "GET", (path, answer.text)
        return False

    def ends_by_itself(self) -> bool:
        """Return whether all processes end by themselves; SIGTERM must end the others."""
        if self._has_ended():
            return True
        # Workers first. vLLM's engine core closes a pipe to them as it begins to end; one that sees
        # that before its SIGTERM ignores it, and if it is stalled it is killed only after 20 s.
        for process in reversed(self.engine.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        ended = self._has_ended(TERMINATES_S)
        assert ended, [psutil.Process(process).name() for process in self.engine.pids()]
        return False

    def _has_ended(self, limit_s: float = ENDS_S) -> bool:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.engine.wait(0) and not self.engine.pids(), limit_s)
        return not self.engine.pids()

    # Restart ---------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start the engine again while the dead one's shared memory still exists.

        That is SGLang's message queue and load figures, and vLLM's queue between its ranks. It is
        removed afterwards, for the next tests.
        """
        self.engine.stop()
        left = self._segments
        self.engine = self._start(port=self.engine.port)
        for segment in left - _segments_of(self.engine.pids()):
            segment.unlink(missing_ok=True)

    def listing(self) -> Listing:
        """List the log."""
        return open_log(self.log).listing()

    def spools(self) -> list[Path]:
        """List the spools that exist, of every start."""
        return [*self._spool.iterdir()]

    def spool(self) -> Path:
        """Return the folder that contains the spools."""
        return self._spool


def _segments_of(processes: Iterable[int]) -> set[Path]:
    """Return the files in shared memory that some processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            maps = [Path(mapped.path) for mapped in psutil.Process(process).memory_maps()]
            found |= {path for path in maps if path.is_relative_to(SHARED_MEMORY)}
    return found
