"""A live engine with two ranks that follows a delta log in an object store, and its trainer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from delta_sender import LogSender, SyncReport
from engine_ext.log import Heartbeat, live_heartbeats, open_log
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.faults.observed import FIRST, KINDS, PLUGIN, ObservedEngine, wait_until
from tests.support.object_stores import StoreServer
from tests.support.plain_trainer import BITS, Trainer
from tests.support.present import following, present
from tests.support.store_proxy import Faults, StoreProxy

INTERVAL_S = 0.3  # between two looks at the log
BUCKET_BYTES = 17 << 10  # a version has three parts
CACHE_BYTES = 8 << 20
CACHE_DISK = 16 << 20
# The client gives up a request of another second; the docs name the variable.
TIMEOUT = {"AWS_TIMEOUT": "1s"}
SETTLES_S = 120.0


class ReadsOnly(httpx.HTTPTransport):
    """Lets a sender read an engine's plan, and ask it for nothing."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "GET":
            return httpx.Response(404, json={})
        return super().handle_request(request)


def open_sender(url: str, base: Path, engine_url: str) -> LogSender:
    """Open the log as its writer; no call notifies the engine, which only looks."""
    client = httpx.Client(transport=ReadsOnly())
    options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "base_version": FIRST}
    return LogSender(url, base, notify=[engine_url], client=client, **options)


class FollowHarness(ObservedEngine):
    """One engine that reads the store by way of a proxy, and a sender that writes past it.

    The weights of the versions are those of four checkpoints in turn, the first one the engine's.
    The first round records the observable state of an engine with each of them.

    Args:
        start: starts an engine.
        kind: one of `KINDS`.
        base: the checkpoint.
        folder: an empty one.
        store: the store, to which the environment leads.
        url: of an empty log in it.

    Attributes:
        store: the store.
        proxy: between the engine and the store.
        log: the log, past the proxy.
        newest: the newest version that the engine can reach once all is well.
        weights: the checkpoints' tensors by name.
        which: version -> the checkpoint that it leads to.
        sender: writes the log.
    """

    def __init__(
        self,
        start: Callable[..., EngineProcess],
        kind: str,
        base: Path,
        folder: Path,
        store: StoreServer,
        url: str,
    ) -> None:
        self.proxy, self.store, self.url = StoreProxy(store), store, url
        self._cache = folder / "cache"
        self._cache.mkdir()
        chosen = KINDS[kind]
        engine = start(
            chosen.engine,
            base,
            tp=chosen.tp,
            python_path=[PLUGIN],
            extra_env={
                "DELTA_FAULTS": str(folder),
                "DELTA_FAULTS_CLOCK": str(folder / "clock"),
                **self.proxy.server.environment,
                **TIMEOUT,
            },
            extra_args=[
                *("--delta-log", url, "--delta-follow"),
                *("--delta-tuning", f"follow-interval={INTERVAL_S}"),
                *("--delta-tuning", f"cache-dir={self._cache}"),
                *("--delta-tuning", f"cache-bytes={CACHE_BYTES}"),
                *("--delta-base-version", str(FIRST)),
            ],
            command_prefix=[
                *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
                f'mount -t tmpfs -o size={CACHE_DISK},mode=700 tmpfs "{self._cache}" && exec "$@"',
                "sh",
            ],
        )
        super().__init__(engine, chosen, folder)
        opened = open_log(url, scratch=str(folder))
        self.log = opened
        self.weights = four_checkpoints(tiny_models.load_tensors(base))
        self.folders = [
            tiny_models.save_checkpoint(base, folder / f"weights-{k}", tensors)
            for k, tensors in enumerate(self.weights)
        ]
        self.newest, self.which = FIRST, {FIRST: 0}
        self.known = [self.prints()]
        self.sender = self._open()
        for _ in self.weights[1:]:
            self.publish()
            wait_until(lambda: self.version() == self.newest)
            self.known.append(self.prints())
        for k, prints in enumerate(self.known):
            assert prints not in self.known[:k]

    def close(self) -> None:
        """Stop the engine, and release the log."""
        self.engine.stop()
        self.sender.close()
        self.proxy.close()

    # What is written -------------------------------------------------------------------------

    def next_weights(self, steps: int = 1) -> int:
        """Return the number of the checkpoint that comes some versions after the newest."""
        return (self.which[self.newest] + steps) % len(self.weights)

    def publish(self, *, full: bool = False) -> SyncReport:
        """Write the next version; whole with `full`."""
        number = self.next_weights()
        tensors = self.weights[number].items()
        report = self.sender.sync_full(tensors) if full else self.sender.sync(tensors)
        assert report.full == full
        self.wrote(report.version, number)
        return report

    def wrote(self, version: int, number: int) -> None:
        """Note that a version is in the log, and leads to a checkpoint."""
        self.newest, self.which[version] = version, number

    def take_over(self) -> None:
        """Write from now on, whoever did so before, from the newest version on."""
        self.sender.close()
        self.sender = self._open()

    def _open(self) -> LogSender:
        return open_sender(self.url, self.folders[self.which[self.newest]], self.engine.url)

    def visible(self) -> list[int]:
        """Return the versions that a reader of the log sees."""
        return [entry.version for entry in self.log.listing(anew=True).entries]

    # What goes wrong -------------------------------------------------------------------------

    @contextlib.contextmanager
    def answers(self, faults: Faults) -> Iterator[None]:
        """Let the store answer the engine with faults."""
        self.proxy.faults = faults
        try:
            yield
        finally:
            self.proxy.faults = lambda method, path, number: None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the engine from reading anything for a moment."""
        released = threading.Event()

        def hold(method: str, path: str, number: int) -> None:
            if method == "GET":
                released.wait(SETTLES_S)

        with self.answers(hold):
            yield
            released.set()

    def cache(self) -> Path:
        """Return the cache folder, which is mounted in the engine's namespace only."""
        assert self.engine._process is not None
        return Path(f"/proc/{self.engine._process.pid}/root{self._cache}")

    # What must hold --------------------------------------------------------------------------

    def stays(self, version: int, error: str | None, about: str, *, heard: bool) -> None:
        """Check that the engine serves a version, and says why it gets no further.

        Args:
            version: the engine's.
            error: type of the follower's error; None: it knows of nothing newer.
            about: what the error's message must have.
            heard: whether heartbeats get through.
        """
        if error is None:
            self._looks(2)
        else:
            wait_until(lambda: self._says(error, about), SETTLES_S)
        self._is_at(version)
        if error is None:
            status = self.engine.delta_status()
            assert (present(status.log).newest, self._error()) == (version, None)
        if heard:
            state = "following" if error is None else "failing"
            wait_until(lambda: self._beats(version, state, error or ""), SETTLES_S)
        assert self.version() == version

    def reaches(self, version: int, *, heard: bool = True) -> None:
        """Check that the engine reaches the newest version without a call."""
        wait_until(lambda: self.version() == version, SETTLES_S)
        wait_until(lambda: self._error() is None, SETTLES_S)
        self._is_at(version)
        assert present(self.engine.delta_status().log).problem is None
        if heard:
            wait_until(lambda: self._beats(version, "following"), SETTLES_S)

    def _is_at(self, version: int) -> None:
        """Check that every rank holds exactly one version, bit by bit, and generates."""
        status = self.engine.delta_status()
        assert (status.version.number, status.health.state) == (version, "certain")
        assert self.engine.weight_version() == str(version)
        assert self.generates() == 200
        assert self.prints() == self.known[self.which[version]]
        assert self.holds(self.weights[self.which[version]])
        assert self.version() == version

    def _error(self) -> Any:
        return following(self.engine.delta_status()).error

    def _says(self, error: str, about: str) -> bool:
        found = self._error()
        return found is not None and found["type"] == error and about in str(found)

    def _looks(self, count: int) -> None:
        """Wait until the engine has looked at the log some times more."""
        for _ in range(count):
            before = self._looked_at()
            wait_until(lambda before=before: self._looked_at() != before)  # type: ignore[misc]

    def _looked_at(self) -> Any:
        return following(self.engine.delta_status()).looked_at

    def heartbeat(self) -> Heartbeat:
        """Return the engine's heartbeat in the log."""
        [heartbeat] = live_heartbeats(self.log)
        return heartbeat

    def _beats(self, version: int, state: str, error: str = "") -> bool:
        found = self.heartbeat()
        return (found.version, found.state) == (version, state) and error in (found.error or "")

    def set_clock(self, seconds: float) -> None:
        """Move the wall clock of every process of the engine by some seconds from the real one."""
        unfinished = self.folder / "clock.new"
        unfinished.write_text(str(seconds))
        unfinished.rename(self.folder / "clock")
        wait_until(lambda: abs(self.heartbeat().at - time.time() - seconds) < 60.0)


def four_checkpoints(base: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return checkpoints that each differ by one step from the next; so do the last and first."""
    trainer = Trainer(dict(base))
    found = [base]
    for _ in range(2):
        trainer.step()
        found.append(dict(trainer.tensors))
    found.append({name: _xor(*(tensors[name] for tensors in found)) for name in base})
    return found


def _xor(*tensors: torch.Tensor) -> torch.Tensor:
    bits = [tensor.view(BITS[tensor.element_size()]) for tensor in tensors]
    return (bits[0] ^ bits[1] ^ bits[2]).view(tensors[0].dtype)
