"""``delta-log``: list, verify, audit, fold and prune the versions in a delta log.

``python -m engine_ext.cli.log`` is the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from engine_ext import log as delta_log
from engine_ext import settings
from engine_ext.answers import answer_in_words, failure_in_words
from engine_ext.cli import audit
from engine_ext.commands import (
    INTERRUPTED,
    CommandParser,
    output_may_be_unread,
    without_traceback,
)
from engine_ext.errors import LogDamaged, PartUnavailable
from engine_ext.log import FOLLOWERS, CannotFold, DeltaLog, Entry, Listing, route

OK, DAMAGED, USAGE = 0, 1, 2

_EPILOG = """\
examples:
  delta-log list /mnt/log                     show the versions
  delta-log verify /mnt/log                   read and check every part
  delta-log fold /mnt/log 0 40                write one delta from version 0 to 40
  delta-log prune /mnt/log --keep 10          keep 10 versions, and those that engines need
  delta-log prune /mnt/log --url http://host:8000 --dry-run
  delta-log audit /mnt/log                    who has sent what; see delta-log audit --help
  delta-log list s3://bucket/run-7            the same for a log in an object store

exit status:
  0    done
  1    something is damaged or cannot be done, or there is nothing to verify
  2    wrong usage, an unreadable folder, or an engine that does not answer
  130  interrupted

All commands are safe while a sender and engines use the log, but prune while an engine
replays that neither follows nor is given with --url.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    return without_traceback("delta-log", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except BrokenPipeError:  # of the output
        raise
    except (LogDamaged, PartUnavailable, CannotFold, FileExistsError, BlockingIOError) as error:
        status, problem = DAMAGED, str(error)
    except (OSError, ValueError) as error:
        status, problem = USAGE, str(error)
    except KeyboardInterrupt:
        status, problem = INTERRUPTED, "interrupted; every version is complete or absent"
    print(f"delta-log: {problem}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "delta-log",
        description="Maintain a delta log: the folder, or the prefix of an object store, that a "
        "sender writes\nits versions to, and that engines replay when they start (--delta-log of "
        "both).",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> Any:
        added = commands.add_parser(name, help=help, description=help)
        help = "the log's folder, or its URL in an object store (s3://BUCKET/PREFIX)"
        added.add_argument("log", type=_open, metavar="LOG", help=help)
        added.set_defaults(run=run)
        return added

    add = command(
        "list",
        _list,
        "Show the content of a log, from the file names and sizes alone: a part that is missing or "
        "too short is named, a changed byte is not (see verify).",
    )
    add.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add = command(
        "verify",
        _verify,
        "Read every part, verify and decode it as an engine would (its signature too if "
        "DELTA_HMAC_KEY has a key), and check that each version starts at the weights "
        "that the previous one leads to: versions without digests are counted, as that is not "
        "known of them. Checksums in another trainer's folder are of whole new tensors, which only "
        "an engine can verify.",
    )
    add.add_argument("versions", nargs="*", type=int, metavar="VERSION", help="only these")
    add = command(
        "fold",
        _fold,
        "Add one delta that leads from version FROM to version TO, and keep those in between; "
        "engines take it if it has fewer bytes. If several versions write an element, the last "
        "value is kept. Versions that send differences (gap8_ulp) become values, for which the "
        "checkpoint is needed that the log starts from (--base). Refused if a version is another "
        "trainer's.",
    )
    add.add_argument("base", type=int, metavar="FROM", help="the version that it starts from")
    add.add_argument("target", type=int, metavar="TO", help="the version that it leads to")
    add.add_argument(
        "--base",
        dest="base_folder",
        type=Path,
        metavar="CHECKPOINT",
        help="folder of the checkpoint that the log starts from",
    )
    add.add_argument(
        "--base-version",
        type=int,
        metavar="N",
        help="version of that checkpoint (default: the log's oldest base)",
    )
    add = command(
        "prune",
        _prune,
        "Delete old versions. The newest one stays reachable from the version that engines start "
        "with, by a full version if the log has one and --base-version is not given, and from the "
        "version of every engine given with --url: no delta on those routes is deleted. Fold first "
        "to shorten a route.",
    )
    add.add_argument("--keep", type=_count, metavar="N", help="keep the newest N versions")
    add.add_argument(
        "--before", type=int, metavar="VERSION", help="delete only versions older than this one"
    )
    add.add_argument(
        "--base-version",
        type=int,
        metavar="N",
        help="version of the checkpoint that engines start with (default: the log's oldest base)",
    )
    add.add_argument(
        "--url", action="append", default=[], help="root of a running engine's server; repeatable"
    )
    add.add_argument(
        "--api-key",
        metavar="TOKEN",
        help=f"bearer token (default: that in {settings.API_KEY_ENVIRONMENT})",
    )
    add.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    add = commands.add_parser(
        "audit",
        help=audit.HELP,
        description=audit.HELP,
        epilog=audit.EPILOG,
    )
    audit.add_options(add)
    add.set_defaults(run=audit.run)
    return parser


def _open(text: str) -> DeltaLog:
    try:
        return delta_log.open_log(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _listing(log: DeltaLog) -> Listing:
    """List a log; OSError, with its location, if it cannot be read."""
    try:
        return log.listing()
    except LogDamaged as error:
        raise OSError(f"{log.location}: {error.message}") from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return int(text)


def _list(options: argparse.Namespace) -> int:
    listed = _listing(options.log)
    listing = options.log.checked(listed)
    rows = [
        {
            "folder": entry.folder.name,
            "version": entry.version,
            "base_version": entry.base_version,
            "parts": len(entry.files),
            "bytes": entry.nbytes,
            "state": "full" if entry.full else "delta",
        }
        for entry in listing.entries
    ]
    rows += [{"folder": folder.name, "state": "refused"} for folder in listing.refused]
    rows += [
        {"folder": name, "state": "damaged", "reason": why}
        for name, why in sorted(listing.damaged.items())
    ]
    start = _oldest_base(listing)
    steps = route(listing.entries, start)
    reached = steps[-1].version if steps else start
    groups = _groups(options.log, listed)
    with output_may_be_unread():
        if options.json:
            found = {"base_version": start, "reached": reached, "newest": listing.newest}
            more = {"groups": groups} if groups else {}
            print(json.dumps({**found, **more, "folders": rows}, indent=2))
        else:
            _print_table(rows)
            if steps:
                way = f"in {len(steps)} step(s) of {sum(entry.nbytes for entry in steps):,} bytes"
                print(f"version {start} leads to {reached} {way}")
            for group in groups:
                _print_group(group)
    why = delta_log.why_not_newer(listing, reached)
    if why is not None:
        print(f"delta-log: {why}", file=sys.stderr)
    return DAMAGED if listing.damaged or why else OK


def _groups(log: DeltaLog, listing: Listing) -> list[dict[str, Any]]:
    """Return what the groups of followers have completed, and where their live members are."""
    complete: dict[str, int | None] = {**delta_log.complete_versions(log, listing)}
    members = [beat for beat in delta_log.live_heartbeats(log) if beat.group is not None]
    names = sorted({*complete, *(beat.group for beat in members if beat.group is not None)})
    return [
        {
            "group": name,
            "complete": complete.get(name),
            "members": [
                {
                    "name": beat.name,
                    "version": beat.version,
                    "prepared": delta_log.version_of_key(beat.prepared or ""),
                    "state": beat.state,
                    "error": beat.error,
                }
                for beat in members
                if beat.group == name
            ],
        }
        for name in names
    ]


def _print_group(group: dict[str, Any]) -> None:
    complete = group["complete"]
    newest = "no version is" if complete is None else f"version {complete} is"
    print(f"group {group['group']}: {newest} complete, {len(group['members'])} live member(s)")
    for one in group["members"]:
        prepared = "" if one["prepared"] is None else f", has prepared {one['prepared']}"
        why = "" if one["error"] is None else f": {one['error']}"
        print(f"  {one['name']}: at version {one['version']}{prepared}, {one['state']}{why}")


def _print_table(rows: Iterable[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("folder", "from", "to", "parts", "bytes", "state")
    colours = {"damaged": "red", "refused": "dim", "full": "cyan"}
    for row in rows:
        state = row["state"] + (f": {row['reason']}" if "reason" in row else "")
        cells = [row.get(key) for key in ("base_version", "version", "parts")]
        table.add_row(
            row["folder"],
            *("" if cell is None else str(cell) for cell in cells),
            f"{row['bytes']:,}" if "bytes" in row else "",
            Text(state, colours.get(row["state"], "green")),
        )
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)


def _verify(options: argparse.Namespace) -> int:
    listing = _listing(options.log)
    wanted = set(options.versions)
    entries = [entry for entry in listing.entries if not wanted or entry.version in wanted]
    if missing := wanted - {entry.version for entry in entries}:
        raise LogDamaged(f"not in the log: version {', '.join(map(str, sorted(missing)))}")
    problems = [] if wanted else [f"{name}: {why}" for name, why in listing.damaged.items()]
    if not entries and not listing.damaged:
        with output_may_be_unread():
            print("there are no versions")
        return DAMAGED
    sound: list[Entry] = []
    unknown = 0
    after: dict[int, set[str]] = {}
    before: list[tuple[Entry, str]] = []
    for entry in _with_progress(entries, "verifying"):
        try:
            with options.log.fetched(entry):
                digests = delta_log.verify_version(entry)
        except LogDamaged as damaged:
            problems.append(f"{entry.folder.name}: {damaged.message}")
            continue
        sound.append(entry)
        unknown += digests.after is None or (digests.before is None and not entry.full)
        if digests.after is not None:
            after.setdefault(entry.version, set()).add(digests.after)
        if digests.before is not None:
            before.append((entry, digests.before))
    for entry, digest in before:
        if entry.base_version is None:
            continue
        # The first one that starts from a version says its digest, if the log does not have it.
        if digest not in after.setdefault(entry.base_version, {digest}):
            problems.append(f"{entry.folder.name}: starts at other weights than the log leads to")
    if not wanted:
        start = _oldest_base(listing)
        steps = route(sound, start)
        why = delta_log.why_not_newer(listing, steps[-1].version if steps else start)
        problems += [] if why is None else [why]
    with output_may_be_unread():
        for problem in problems:
            print(problem)
        if unknown:
            print(f"{unknown} version(s) have no digest: whether they join is not known")
        print(f"{len(sound)} of {len(entries)} folder(s) are sound")
    return DAMAGED if problems else OK


def _fold(options: argparse.Namespace) -> int:
    base, target = options.base, options.target
    if base >= target:
        raise ValueError(f"FROM must be below TO: {base}, {target}")
    listing = _listing(options.log)
    between = [entry for entry in listing.entries if entry.version <= target]
    steps = route(between, base)
    if not steps or steps[-1].version != target:
        only = f", only to {steps[-1].version}" if steps else ""
        raise CannotFold(f"the log does not lead from version {base} to {target}{only}")
    folder = delta_log.fold_versions(
        options.log,
        steps,
        base,
        checkpoint=options.base_folder,
        before=_before(listing, options),
        progress=lambda entries: _with_progress(entries, "reading"),
    )
    found = [entry for entry in _listing(options.log).entries if entry.folder == folder]
    if not found:
        raise CannotFold(f"version {target} was refused meanwhile; nothing takes the folded one")
    [folded] = found
    with options.log.fetched(folded):
        delta_log.verify_version(folded)
    old = sum(entry.nbytes for entry in steps)
    with output_may_be_unread():
        size = f"{old:,} bytes into {folded.nbytes:,}"
        print(f"{folder.name}: folded {len(steps)} version(s), {size}")
    return OK


def _before(listing: Listing, options: argparse.Namespace) -> list[Entry]:
    """Return the versions that lead from the checkpoint to the first of the folded ones."""
    start = options.base_version if options.base_version is not None else _oldest_base(listing)
    if options.base_folder is None or start == options.base:
        return []
    found = route([entry for entry in listing.entries if entry.version <= options.base], start)
    if not found or found[-1].version != options.base:
        raise CannotFold(f"the log does not lead from version {start} to {options.base}")
    return found


def _prune(options: argparse.Namespace) -> int:
    if options.keep is None and options.before is None and not options.url:
        raise ValueError("nothing selects versions to delete: give --keep, --before or --url")
    listing = _listing(options.log)
    versions = sorted({entry.version for entry in listing.entries})
    if not versions:
        with output_may_be_unread():
            print("the log is empty")
        return OK
    start = options.base_version if options.base_version is not None else _oldest_base(listing)
    engines = {url: _engine_version(url, options.api_key) for url in options.url}
    limits = [version for version in (options.before,) if version is not None]
    limits += [versions[-min(options.keep, len(versions))]] if options.keep else []
    # A running engine needs newer versions, and its own to see that they continue its history;
    # older ones serve engines that start.
    limits += engines.values()
    # Engines that follow can be held at any of the versions after theirs.
    is_followed = bool(options.log.store.list(FOLLOWERS))
    followers = delta_log.live_heartbeats(options.log, strict=is_followed and not options.dry_run)
    limits += [follower.version for follower in followers]
    candidates = [entry for entry in listing.entries if entry.version < min(limits)]
    newest = versions[-1]
    starts: list[int | None] = [*engines.values(), *([] if start is None else [start])]
    whole = route(listing.entries, None)
    if options.base_version is None and whole and whole[-1].version == newest:
        starts.append(None)  # what leads to the oldest base might have been deleted before
    gone, stranded = delta_log.removable(listing.entries, candidates, starts, newest)
    if start in stranded:
        problem = f"the log does not lead from version {start} to {newest}"
        raise LogDamaged(f"nothing is deleted: {problem}")
    for url, version in engines.items():
        if version in stranded:
            problem = f"{url} is at version {version}, which the log does not lead on from"
            print(f"delta-log: {problem}", file=sys.stderr)
    if not options.dry_run:
        if gone:
            delta_log.keep_publications(options.log.store, gone)
            options.log.store.delete([entry.folder.name for entry in gone])
        options.log.tidy(listing)
    size = sum(entry.nbytes for entry in gone)
    verb = "would be deleted" if options.dry_run else "deleted"
    with output_may_be_unread():
        print(f"{len(gone)} of {len(listing.entries)} version(s) {verb}, {size:,} bytes")
        if followers:
            oldest = min(follower.version for follower in followers)
            print(f"{len(followers)} engine(s) follow the log, the oldest at version {oldest}")
        if len(gone) < len(candidates):
            where = "the full version" if None in starts else f"version {start}"
            kept = f"{len(candidates) - len(gone)} more are on the route from {where}"
            print(
                f"{kept}; fold them first, or give the version engines start with as --base-version"
            )
    return OK


def _oldest_base(listing: Listing) -> int | None:
    """Return the oldest version that a delta starts from; None if all are full."""
    bases = [entry.base_version for entry in listing.entries if entry.base_version is not None]
    return min(bases, default=None)


def _engine_version(url: str, api_key: str | None) -> int:
    import httpx

    from engine_ext.ranks.status import decode_status

    asked, headers = f"{url.rstrip('/')}/delta_status", settings.bearer_headers(api_key)
    try:
        answer = httpx.get(asked, headers=headers, timeout=60)
        if answer.status_code == httpx.codes.OK:
            return decode_status(answer.content).version.number
        who = answer.headers.get("Server")
        why = answer_in_words(answer.status_code, answer.text, who, asked)
    except ValueError as error:
        raise OSError(f"{url} does not report its version: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ImportError) as error:
        why = failure_in_words(error, asked)
        raise OSError(f"{url} does not report its version: {why}") from error
    raise OSError(f"{url} does not report its version: {why}")


def _with_progress(entries: Sequence[Entry], what: str) -> Iterable[Entry]:
    """Iterate over the entries, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(entries, what, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    sys.exit(main())
