"""Run ``delta-send`` with a command line that is parsed."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from delta_sender.diff.snapshot import MappedSnapshot, NamedTensors
from delta_sender.options import DEFAULTS, SenderOptions
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Destination
from delta_sender.publish.http_client import STARTING, EngineClient, is_lasting, open_client
from delta_sender.publish.log_destination import LogDestination
from delta_sender.publish.log_sender import is_led_to
from delta_sender.publish.notify import Notifier
from delta_sender.publish.publisher import Publisher
from delta_sender.results import EngineUnreachable, PartialSyncError, SyncError, SyncReport
from engine_ext.answers import failure_in_words
from engine_ext.commands import output_may_be_unread
from engine_ext.errors import DeltaError
from engine_ext.files import checkpoint_entries, read_entries
from engine_ext.log import open_log
from engine_ext.ranks.status import EngineStatus
from engine_ext.settings import HMAC_KEY_ENVIRONMENT, api_key, bearer_headers

logger = logging.getLogger(__name__)

_ASK_S = 10.0  # for one answer of an engine that might start
_POLL_S = 0.5


class DryRunDestination(Destination):
    """Count what an engine would be sent; ask it what it holds, and claim nothing."""

    def __init__(self, engine: EngineClient | None) -> None:
        self.name = "the engine" if engine is None else engine.name
        self.speed = LinkSpeed()
        self.highest_posted = 0  # nothing is posted
        self._engine = engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def plan(self) -> Any:
        return None if self._engine is None else self._engine.plan()

    def status(self) -> EngineStatus | None:
        return None if self._engine is None else self._engine.status()

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        return {"status": "dry run"}


def open_sender(arguments: argparse.Namespace, base: NamedTensors) -> Publisher:
    """Return the publisher of one sync of two mapped checkpoints, given the arguments.

    The engines hold `base`.
    """
    options, logs = options_of(arguments), list[LogDestination]()

    def connect(url: str, options: SenderOptions) -> Destination:
        engine = EngineClient(url, options) if url else None
        if arguments.dry_run:
            return DryRunDestination(engine)
        if arguments.log is not None:
            asked = [] if engine is None else [engine]
            asked += [EngineClient(one, options) for one in arguments.notify or ()]
            log = LogDestination(open_log(arguments.log), asked, options.hmac_key)
            _check_continues(log, options.base_version, sends_all=arguments.sends_all)
            log.warn_unproven(digest=options.digest)
            logs.append(log)
            return log
        return EngineClient(url, options)

    urls = arguments.url or [""]
    publisher = Publisher(urls, base, options, connect=connect, snapshot_type=MappedSnapshot)
    with ExitStack() as opened:
        opened.callback(publisher.close)
        for log in logs:
            if not arguments.sends_all:
                _check_base(publisher, log, options.base_version)
            # Again, as that takes long: in a store, a sender that is at work would lose its turn.
            _check_continues(log, options.base_version, sends_all=arguments.sends_all)
            log.take_turn()
        opened.pop_all()
    return publisher


def _check_continues(log: LogDestination, base_version: int, *, sends_all: bool) -> None:
    """Check that the next version continues a log; in a store, its writer would be out else.

    Raises:
        FileExistsError: The log has it, or a later one.
        ValueError: It is a delta, and the log does not lead to its base.
        LogDamaged: The log cannot be read.
    """
    newest = log.listing().newest
    if newest is not None and newest > base_version:
        raise FileExistsError(
            f"version {newest} exists in the log {log.log.location}: the next one has "
            f"--base-version {newest}, and as --base the weights that version {newest} leads to"
        )
    if not sends_all and not log.continues_from(base_version):
        raise ValueError(
            f"the log {log.log.location} does not lead to version {base_version}, which a delta "
            f"would start from: its newest version is {newest}"
        )


def _check_base(publisher: Publisher, log: LogDestination, base_version: int) -> None:
    """Check that the base is what a log's newest version leads to, as far as digests show it.

    Raises what `is_led_to` raises.
    """
    last = [entry for entry in log.listing().entries if entry.version == base_version]
    if last and not is_led_to(publisher, log, last[0]):
        logger.warning(
            "no digest shows whether --base is what version %d in the log leads to", base_version
        )


def options_of(arguments: argparse.Namespace) -> SenderOptions:
    """Return the senders' options that the command line's arguments and the environment give."""
    given = {name: getattr(arguments, name) for name in DEFAULTS if name in arguments}
    given["api_key"] = api_key(arguments.api_key)
    given["hmac_key"] = os.environ.get(HMAC_KEY_ENVIRONMENT)
    if arguments.dry_run:
        given["delta_log"] = given["state"] = None
    return SenderOptions(**given)


def tell(arguments: argparse.Namespace, version: int, console: Console) -> None:
    """Ask the engines of ``--notify`` to look at the log, and print what they answer."""
    options = options_of(arguments)
    notifier = Notifier(arguments.notify, options)
    try:
        notifier.poke(version)
        told = notifier.wait(options.lag_limit)
    finally:
        notifier.close()
    for url in arguments.notify:
        answer = told.get(url)
        if isinstance(answer, int):
            console.print(f"{url}: at version {answer}")
        else:
            why = answer or "an answer without a version"
            if url not in told:
                why = "no answer within the lag limit"
            console.print(f"{url}: {why}; it finds the version at its next look")


def read_checkpoint(folder: Path, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor), mapped from the files and not read; advance a progress bar."""
    entries = progress.track(checkpoint_entries(folder), description=folder.name)
    yield from read_entries(entries)


class _Printer(logging.Handler):
    """Prints what the senders warn of and wait for, above the progress bars.

    The last bar says in a few words what is waited for now.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._bars = threading.Lock()  # engines that lag are waited for in threads
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), highlight=False)
        if waits_for := getattr(record, "waits_for", None):
            self.wait_for(waits_for)

    def wait_for(self, what: str) -> None:
        """Show what is waited for, if there is a bar."""
        with self._bars:
            if self._progress is None:
                return
            if self._bar is None:
                self._bar = self._progress.add_task("", total=None)
            self._progress.update(self._bar, description=f"waiting for {what}")

    def end_wait(self) -> None:
        """Remove the bar of what is waited for."""
        with self._bars:
            if self._progress is not None and self._bar is not None:
                self._progress.remove_task(self._bar)
            self._bar = None

    @contextmanager
    def bar(self, progress: Progress) -> Iterator[None]:
        """Have a bar for what is waited for, inside the block."""
        self._progress = progress
        try:
            yield
        finally:
            self.end_wait()
            with self._bars:
                self._progress = None

    def then_wait(self, tensors: NamedTensors, what: str) -> NamedTensors:
        """Yield what is sent; after the last one, something is waited for."""
        yield from tensors
        self.wait_for(what)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: the sender is closed, as after Ctrl-C."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


@contextmanager
def _attended(console: Console) -> Iterator[_Printer]:
    """Print the senders' warnings inside the block, and end it as Ctrl-C does on SIGTERM."""
    logger, printer = logging.getLogger("delta_sender"), _Printer(console)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if is_main else None
    logger.addHandler(printer)
    try:
        yield printer
    finally:
        logger.removeHandler(printer)
        if is_main:
            signal.signal(signal.SIGTERM, before)


def run(options: argparse.Namespace) -> int:
    """Run the command with its parsed arguments, and return the exit status."""
    console = Console(stderr=True, markup=False, soft_wrap=True)
    with _attended(console) as printer:
        try:
            return _run(options, console, printer)
        except _Terminated:  # after the sync
            return 143


def await_engine(url: str, options: SenderOptions, seconds: float) -> None:
    """Wait until an engine's server answers, as it does once the engine has started.

    Raises:
        EngineUnreachable: It has not done so in time, or never will.
    """
    end, said = time.monotonic() + seconds, ""
    asked = f"{url.rstrip('/')}/delta_status"
    headers = bearer_headers(options.api_key)
    with open_client(_ASK_S) as client:
        while True:
            try:
                status = client.get(asked, headers=headers).status_code
                if status not in STARTING:
                    return
                why = f"HTTP {status}"
            except httpx.TransportError as error:
                why = failure_in_words(error, asked)
                if is_lasting(error):
                    raise EngineUnreachable(f"{asked}: {why}") from error
            left = end - time.monotonic()
            if left <= 0:
                raise EngineUnreachable(f"{asked}: no answer in {seconds:.0f} s: {why}")
            if why != said:
                waits = {"waits_for": f"{url} to answer"}
                logger.warning("%s: %s; waiting for %.0f s at most", url, why, left, extra=waits)
                said = why
            time.sleep(min(_POLL_S, left))


def _run(options: argparse.Namespace, console: Console, printer: _Printer) -> int:
    several = len(options.url or []) > 1
    reports: dict[str, SyncReport] = {}
    failures: dict[str, Exception] = {}
    try:
        with Progress(console=console) as progress, printer.bar(progress):
            for url in (options.url or ()) if options.wait is not None else ():
                await_engine(url, options_of(options), options.wait)
                printer.end_wait()
            with closing(open_sender(options, read_checkpoint(options.base, progress))) as sender:
                target: NamedTensors = read_checkpoint(options.target, progress)
                if not options.dry_run:
                    last = "the log to be written" if options.log else "the engines to commit"
                    target = printer.then_wait(target, last)
                try:
                    reports = sender.sync(target, full=options.sends_all)
                except PartialSyncError as some:
                    reports, failures = some.reports, {**some.failures}
        late = sender.lagging.outcomes  # closing has waited for engines that lagged
    except SyncError as error:  # before the sender was there
        console.print(f"failed: {error}")
        return 1
    except (ValueError, KeyError, OSError, DeltaError, httpx.InvalidURL) as error:
        console.print(f"{type(error).__name__}: {error}")
        return 2
    except _Terminated:
        console.print("terminated; what was staged in engines is dropped")
        return 143
    except KeyboardInterrupt:
        console.print(
            "interrupted; what was staged in engines is dropped. GET /delta_status returns the "
            "version that an engine is at"
        )
        return 130
    # Before anything is printed, which might end the command.
    if options.notify is not None and reports and not options.dry_run:
        tell(options, max(report.version for report in reports.values()), console)
    with output_may_be_unread():
        for url, report in reports.items():
            print((f"{url}: " if several else "") + describe(report))
    for url in set(options.url or ()) - reports.keys() - failures.keys():
        outcome = late.get(url) or SyncError(
            "not done within the lag limit; it might have committed"
        )
        if isinstance(outcome, SyncReport):
            console.print(f"{url}: version {outcome.version}: committed late")
        else:
            failures[url] = outcome
    for url, failed in failures.items():
        console.print(f"{url}: failed: {failed}" if several else f"failed: {failed}")
    return 1 if failures else 0


def describe(report: SyncReport) -> str:
    """Return one line about one sync."""
    counts = ", ".join(f"{count} {how}" for how, count in sorted(report.picked.items()))
    parts = f"{report.parts} part(s)" + (f" ({counts})" if counts else "")
    why = f" (full; {report.reason})" if report.full else ""
    return (
        f"version {report.base_version} -> {report.version}: {report.status}{why}; "
        f"{report.nnz:,} of {report.numel:,} elements "
        f"({report.density:.3%}), {report.wire_bytes:,} of {report.full_bytes:,} bytes, "
        f"{parts}, encode {report.encode_ms:.0f} ms, post {report.post_ms:.0f} ms"
    )
