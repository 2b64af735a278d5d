"""The command ``delta-send``: send the difference of two checkpoints to engines or files."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.progress import Progress

from delta_sender.arguments import log_location, log_of
from delta_sender.diff.snapshot import MappedSnapshot, NamedTensors
from delta_sender.options import DEFAULTS, FLAGS, SenderOptions
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Destination
from delta_sender.publish.http_client import EngineClient
from delta_sender.publish.log_destination import LogDestination
from delta_sender.publish.notify import Notifier
from delta_sender.publish.publisher import Publisher
from delta_sender.results import PartialSyncError, SyncError, SyncReport
from engine_ext.files import checkpoint_entries, read_entries
from engine_ext.format import HMAC_KEY_ENVIRONMENT
from engine_ext.log import open_log
from engine_ext.ranks.status import EngineStatus

_DESCRIPTION = """\
Send the difference between two Hugging Face checkpoints (safetensors) to engines that hold the
first one, as a sparse weight update. Each engine applies it bit-exactly on every rank, or refuses
it and stays as it was."""

_EPILOG = f"""\
examples:
  delta-send --base CHECKPOINT --target NEXT --url http://engine:8000
  delta-send --base CHECKPOINT --target NEXT --dry-run --encoding auto
  delta-send --target NEXT --full --url http://engine:8000
  delta-send --base CHECKPOINT --target NEXT --log s3://BUCKET/RUN --notify http://engine:8000
  delta-send --base FP8_CHECKPOINT --target NEXT --quantize fp8_block --url http://engine:8000

environment:
  DELTA_API_KEY    bearer token, if --api-key is not given
  {HMAC_KEY_ENVIRONMENT}   key that the parts are signed with

exit status:
  0    done
  1    an engine refused, could not be reached or was too late; the others have committed. An engine
       of another run refuses: close that sender, or --takeover. One with other weights than --base
       is left as it is: give the base that it holds, or --allow-full or --full
  2    bad usage, or checkpoints that are unreadable or do not match
  130  interrupted (143: terminated); what was staged in engines is dropped"""


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
    options = options_of(arguments)

    def connect(url: str, options: SenderOptions) -> Destination:
        engine = EngineClient(url, options) if url else None
        if arguments.dry_run:
            return DryRunDestination(engine)
        if arguments.log is not None:
            asked = [] if engine is None else [engine]
            asked += [EngineClient(one, options) for one in arguments.notify or ()]
            log = LogDestination(open_log(arguments.log), asked, options.hmac_key)
            log.take_turn()
            return log
        return EngineClient(url, options)

    urls = arguments.url or [""]
    return Publisher(urls, base, options, connect=connect, snapshot_type=MappedSnapshot)


def options_of(arguments: argparse.Namespace) -> SenderOptions:
    """Return the senders' options that the command line's arguments and the environment give."""
    given = {name: getattr(arguments, name) for name in DEFAULTS if name in arguments}
    given["api_key"] = arguments.api_key or os.environ.get("DELTA_API_KEY")
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
            why = "no answer within the lag limit" if answer is None else answer
            console.print(f"{url}: {why}; it finds the version at its next look")


def read_checkpoint(folder: Path, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor), mapped from the files and not read; advance a progress bar."""
    entries = progress.track(checkpoint_entries(folder), description=folder.name)
    yield from read_entries(entries)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; options come from `SenderOptions`."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "delta-send", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=layout
    )
    add = parser.add_argument
    add("--base", type=Path, metavar="DIR", help="checkpoint that the engines hold now")
    add("--target", type=Path, metavar="DIR", required=True, help="checkpoint to send")
    url_help = (
        "root of an engine's server, http://host:port; repeatable, for several engines; or a delta "
        "log that engines follow (s3://BUCKET/PREFIX, file:///PATH), as --log"
    )
    add("--url", action="append", help=url_help)
    full_help = "send all of --target, dense, whatever the engine holds; needs no --base"
    add("--full", action="store_true", dest="sends_all", help=full_help)
    log_help = (
        "write the parts to LOG/weight_v<version>/, as a delta log or for the disk endpoint, and "
        "post nothing; a folder, or a URL in an object store. With --url, the engine is only asked "
        "which tensors it ignores and what its digest covers"
    )
    add("--log", "--save", dest="log", metavar="LOG", help=log_help)
    notify_help = (
        "root of an engine that follows the log of --log, or of --url: it is asked to look there "
        "at once, and what --log says of an engine's --url; repeatable"
    )
    add("--notify", action="append", metavar="URL", help=notify_help)
    add("--dry-run", action="store_true", help="print what would be sent; post and write nothing")
    group = parser.add_argument_group("sync options")
    for name, default in DEFAULTS.items():
        if name in FLAGS:
            _add_flag(group, name, default, FLAGS[name])
        elif name == "full":
            allow_help = "send all of --target if the engine holds something else than --base"
            flag: dict[str, Any] = {"action": "store_const", "const": "allow"}
            group.add_argument("--allow-full", dest=name, default=default, help=allow_help, **flag)
    return parser


def _add_flag(group: Any, name: str, default: Any, keywords: Mapping[str, Any]) -> None:
    flag = name.replace("_", "-")
    if default is True:
        group.add_argument(f"--no-{flag}", dest=name, action="store_false", **keywords)
        return
    help_text = keywords["help"] + ("" if default is None else " (default: %(default)s)")
    shown: dict[str, Any] = {**keywords, "help": help_text}
    group.add_argument(f"--{flag}", default=default, **shown)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line; a wrong one ends the process with status 2."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.sends_all and options.quantize is None:
        options.base = options.target
    elif options.base is None:
        parser.error("--base is needed, except with --full and without --quantize")
    _take_log(parser, options)
    if options.url is None and options.log is None and not options.dry_run:
        parser.error("--url or --log is needed, except with --dry-run")
    if options.log is not None and (options.delta_log or options.state) is not None:
        parser.error("--log cannot be combined with --delta-log or --state: it posts nothing")
    if options.log is not None and options.url is not None and len(options.url) > 1:
        parser.error("--log writes for one engine: give one --url at most")
    return options


def _take_log(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Take a log that is given as --url as --log."""
    try:
        if options.log is not None:
            options.log = log_of(options.log)
        logs = [log for url in options.url or () if (log := log_location(url)) is not None]
    except ValueError as error:
        parser.error(str(error))
    if logs and (len(options.url) > 1 or options.log is not None):
        parser.error("a delta log is the only --url, and not with --log; engines go to --notify")
    if logs:
        [options.log], options.url = logs, None
    if options.notify is not None and options.log is None:
        parser.error("--notify is for engines that follow a log: give --log, or a log's --url")


class _Printer(logging.Handler):
    """Prints what the senders warn of and wait for, above the progress bars."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), highlight=False)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: the sender is closed, as after Ctrl-C."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


@contextmanager
def _attended(console: Console) -> Iterator[None]:
    """Print the senders' warnings inside the block, and end it as Ctrl-C does on SIGTERM."""
    logger, printer = logging.getLogger("delta_sender"), _Printer(console)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if is_main else None
    logger.addHandler(printer)
    try:
        yield
    finally:
        logger.removeHandler(printer)
        if is_main:
            signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse_arguments(arguments)
    console = Console(stderr=True, markup=False, soft_wrap=True)
    with _attended(console):
        return _run(options, console)


def _run(options: argparse.Namespace, console: Console) -> int:
    several = len(options.url or []) > 1
    reports: dict[str, SyncReport] = {}
    failures: dict[str, Exception] = {}
    try:
        with Progress(console=console) as progress:
            with closing(open_sender(options, read_checkpoint(options.base, progress))) as sender:
                target = read_checkpoint(options.target, progress)
                try:
                    reports = sender.sync(target, full=options.sends_all)
                except PartialSyncError as some:
                    reports, failures = some.reports, {**some.failures}
        late = sender.late_outcomes  # closing has waited for engines that lagged
    except (ValueError, KeyError, OSError, httpx.InvalidURL) as error:
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
    if options.notify is not None and reports and not options.dry_run:
        tell(options, max(report.version for report in reports.values()), console)
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
