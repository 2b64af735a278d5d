"""The reference sender as a program: the difference of two checkpoints, to engines or files."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open

from delta_sender.bandwidth import LinkSpeed
from delta_sender.destination import Destination
from delta_sender.encoding_policy import CHOICES, sparse_encoding
from delta_sender.http_client import EngineClient
from delta_sender.log_destination import LogDestination
from delta_sender.multi_sender import MultiSender
from delta_sender.results import PartialSyncError, SyncError, SyncReport
from delta_sender.snapshot import MappedSnapshot, NamedTensors, Snapshot
from engine_ext.wire.signature import HMAC_KEY_ENVIRONMENT


class DryRunDestination:
    """Counts what an engine would be sent.

    Args:
        engine: is only asked for its plan; None where there is none.
    """

    def __init__(self, engine: EngineClient | None) -> None:
        self.speed = LinkSpeed()
        self.tried = 0  # nothing is delivered
        self._engine = engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def plan(self) -> Any:
        return None if self._engine is None else self._engine.plan()

    def status(self) -> dict[str, Any]:
        return {}

    def catch_up(self) -> int | None:
        return None

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        return {"status": "dry run"}


class CheckpointSender(MultiSender):
    """Sends one sync between two checkpoints that are mapped from disk.

    Args:
        arguments: The command line's.
        base: What the engines hold.
    """

    def __init__(self, arguments: argparse.Namespace, base: NamedTensors) -> None:
        self._arguments = arguments
        super().__init__(
            arguments.url or [""],
            base,
            base_version=arguments.base_version,
            delta_log=None if arguments.dry_run else arguments.delta_log,
            state=None if arguments.dry_run else arguments.state,
            lag_limit=arguments.lag_limit if math.isfinite(arguments.lag_limit) else None,
            encoding=arguments.encoding,
            bucket_bytes=arguments.bucket_bytes,
            digest=not arguments.no_digest,
            api_key=arguments.api_key or os.environ.get("DELTA_API_KEY"),
            hmac_key=os.environ.get(HMAC_KEY_ENVIRONMENT),
            pause_mode=arguments.pause_mode,
            flush_cache=not arguments.no_flush_cache,
        )

    def _make_snapshot(self, base: NamedTensors) -> Snapshot:
        return MappedSnapshot(base, sparse_encoding(self._options.encoding))

    def _make_server(self, url: str) -> Destination:
        engine = EngineClient(url, self._options) if url else None
        if self._arguments.dry_run:
            return DryRunDestination(engine)
        if self._arguments.save is not None:
            asked = [] if engine is None else [engine]
            return LogDestination(self._arguments.save, asked, self._options.hmac_key)
        return super()._make_server(url)


def checkpoint_entries(folder: Path) -> list[tuple[Path, str]]:
    """The (file, tensor name) pairs of a Hugging Face checkpoint, ordered by file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted((folder / file, name) for name, file in weight_map.items())
    entries = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            entries += [(path, name) for name in file.offset_keys()]
    if not entries:
        raise FileNotFoundError(f"{folder}: no {index.name} and no tensors in *.safetensors")
    return entries


def read_checkpoint(folder: Path, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor), mapped from the files and not read; moves a progress bar on."""
    entries = progress.track(checkpoint_entries(folder), description=folder.name)
    for path, group in groupby(entries, key=lambda entry: entry[0]):
        with safe_open(path, framework="pt") as file:
            for _, name in group:
                yield name, file.get_tensor(name)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Send the difference between two Hugging Face checkpoints (safetensors) to "
        "engines that hold the first one, as a sparse weight update.",
        epilog="Exit status: 0 done, 1 an engine refused, could not be reached or was too late "
        "(the others have committed), 2 bad usage or unreadable or unlike checkpoints, 130 "
        f"interrupted. With a key in {HMAC_KEY_ENVIRONMENT} the parts are signed.",
    )
    add = parser.add_argument
    add("--base", type=Path, metavar="DIR", help="checkpoint that the engine holds now")
    add("--target", type=Path, metavar="DIR", required=True, help="checkpoint it is to hold")
    url_help = "root of an engine's server, http://host:port; repeatable, for several engines"
    add("--url", action="append", help=url_help)
    version_help = "version the engines are at (default: %(default)s)"
    add("--base-version", type=int, metavar="N", default=0, help=version_help)
    encoding_help = "how changes travel; auto: by density and speed of link (default: %(default)s)"
    add("--encoding", choices=CHOICES, default="deltas_zstd", help=encoding_help)
    add("--full", action="store_true", help="send all of --target, dense; needs no --base")
    bucket_help = "most bytes of a part before compression (default: %(default)s, 256 MiB)"
    add("--bucket-bytes", type=int, metavar="N", default=256 << 20, help=bucket_help)
    add("--no-digest", action="store_true", help="send no digests along")
    add("--api-key", metavar="KEY", help="bearer token (default: that in DELTA_API_KEY)")
    pause_help = "requests in flight go on with the new weights (default), finish first, or end"
    add("--pause-mode", choices=("keep", "wait", "abort"), default="keep", help=pause_help)
    add("--no-flush-cache", action="store_true", help="keep KV entries of the old weights")
    log_help = (
        "a folder that gets every version before an engine commits it, for engines that are "
        "started with --delta-log; see also the command delta-log"
    )
    add("--delta-log", type=Path, metavar="DIR", help=log_help)
    state_help = (
        "remember in FILE what each engine has acknowledged; where --base is what it is at, that "
        "version counts and not --base-version"
    )
    add("--state", type=Path, metavar="FILE", help=state_help)
    add(
        "--lag-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="go on without engines that need longer than the first and SECONDS (default: 60; inf "
        "waits for every engine)",
    )
    save_help = (
        "write the parts to DIR/weight_v<version>/, as a delta log or for the disk endpoint, and "
        "post nothing; with --url the engine is only asked which tensors it ignores and what its "
        "digest covers"
    )
    add("--save", type=Path, metavar="DIR", help=save_help)
    add("--dry-run", action="store_true", help="tell what would be sent; post and write nothing")
    return parser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line; exits with status 2 if it is wrong."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.full:
        options.base = options.target
    elif options.base is None:
        parser.error("--base is needed, except with --full")
    if options.url is None and options.save is None and not options.dry_run:
        parser.error("--url is needed, except with --save or --dry-run")
    if options.save is not None and (options.delta_log or options.state) is not None:
        parser.error("--save does not go with --delta-log or --state: it posts nothing")
    if options.save is not None and options.url is not None and len(options.url) > 1:
        parser.error("--save writes for one engine: give one --url at most")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse_arguments(arguments)
    console = Console(stderr=True, markup=False, soft_wrap=True)
    several = len(options.url or []) > 1
    reports: dict[str, SyncReport] = {}
    failures: dict[str, SyncError] = {}
    try:
        with Progress(console=console) as progress:
            with CheckpointSender(options, read_checkpoint(options.base, progress)) as sender:
                send = sender.sync_full if options.full else sender.sync
                try:
                    reports = send(read_checkpoint(options.target, progress))
                except PartialSyncError as some:
                    reports, failures = some.reports, some.failures
        versions = sender.versions  # those that lagged were waited for once more
    except (ValueError, KeyError, OSError, SafetensorError, httpx.InvalidURL) as error:
        console.print(f"{type(error).__name__}: {error}")
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; GET /delta_status tells which version the engine is at")
        return 130
    for url, report in reports.items():
        print((f"{url}: " if several else "") + describe(report))
    for url in set(options.url or ()) - reports.keys() - failures.keys():
        if (version := versions[url]) >= max(r.version for r in reports.values()):
            console.print(f"{url}: version {version}: committed late")
        else:
            failures[url] = SyncError("not done within the lag limit; it may have committed")
    for url, failed in failures.items():
        console.print(f"{url}: failed: {failed}" if several else f"failed: {failed}")
    return 1 if failures else 0


def describe(report: SyncReport) -> str:
    """One line about one sync."""
    return (
        f"version {report.base_version} -> {report.version}: {report.status}"
        f"{' (full)' if report.full else ''}; {report.nnz:,} of {report.numel:,} elements "
        f"({report.density:.3%}), {report.wire_bytes:,} of {report.full_bytes:,} bytes, "
        f"{report.parts} part(s){_ways(report.picked)}, encode {report.encode_ms:.0f} ms, "
        f"post {report.post_ms:.0f} ms"
    )


def _ways(picked: dict[str, int]) -> str:
    ways = ", ".join(f"{count} {pick}" for pick, count in sorted(picked.items()))
    return f" ({ways})" if ways else ""
