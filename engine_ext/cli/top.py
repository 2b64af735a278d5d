"""``delta-top``: show the weight versions of running engines, and the outcomes of their last syncs.

With ``--delta-log`` also the engines that follow a log, by their heartbeats there.

``python -m engine_ext.cli.top URL...`` is the same command. It imports neither an engine nor torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_ext.answers import (
    answer_in_words,
    failure_in_words,
    is_own_error,
    proxy_variable,
    some_of,
)
from engine_ext.commands import (
    CommandParser,
    leaving_at_once,
    output_may_be_unread,
    positive_seconds,
    without_traceback,
)

with leaving_at_once("delta-top"):
    import httpx
    import msgspec
    from rich import box
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from engine_ext.errors import DeltaError
    from engine_ext.ranks.status import EngineStatus, decode_status
    from engine_ext.settings import API_KEY_ENVIRONMENT, bearer_headers

if TYPE_CHECKING:
    from engine_ext.log import Lag
    from engine_ext.ranks.operations import RunOwner, SyncRecord

_WIDE = 200  # columns if the output is not a terminal
_DENIED = (401, 403)  # HTTP statuses
_NARROW = 120  # columns below which the tables have fewer of them
_ENGINE = ("engine", "kind", "ranks", "version", "run", "state", "staged", "digest", "note")
_IN_NOTE = ("kind", "ranks", "run", "staged", "digest")  # of a narrow table
_PAUSE = "pause ms"
_COLOURS = dict.fromkeys(("committed", "already_applied", "certain"), "green")
_COLOURS |= dict.fromkeys(("rolled_back", "asleep", "refused"), "yellow")
_RUN = 12  # characters of a run that are shown
_PHASES = ("receive_ms", "stage_ms", "pause_ms", "commit_ms")
_EPILOG = f"""\
examples:
  delta-top http://host1:8000 http://host2:8000    watch two engines
  delta-top http://host1:8000 --once --syncs 3     print one table
  delta-top http://host1:8000 --json               print the engines' status as JSON
  delta-top --delta-log /mnt/log                   watch the engines that follow a log

exit status:
  0  every engine has answered
  1  some engine has not answered, or the log cannot be read
  2  wrong usage
  3  every engine has answered, and the weights of one are uncertain or mismatched

The bearer token is read from {API_KEY_ENVIRONMENT}.
"""
_TIMES = "ms r/s/p/c"  # the columns of _PHASES


@dataclass(frozen=True)
class Answer:
    """The answer of one engine."""

    url: str  # the engine's root
    status: EngineStatus | None  # of ``GET /delta_status?history=true``
    error: str | None = None  # why there is no status
    http_status: int | None = None  # of an answer that was refused, or that no engine gives
    has_failed: bool = False  # the delta endpoint has answered with an error

    @property
    def state(self) -> str:
        """The state in a word or two."""
        if self.status is None:
            if self.http_status is None:
                return "unreachable"
            if self.http_status in _DENIED:
                return "denied"
            return "failing" if self.has_failed else "no engine"
        health = self.status.health
        return "asleep" if health.state == "certain" and health.asleep else health.state


def main(argv: Sequence[str] | None = None) -> int:
    """Show the engines until Ctrl-C, or once; return the exit status."""
    return without_traceback("delta-top", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    if not options.urls and options.delta_log is None:
        parser.error("name an engine's URL, or a log with --delta-log")
    answers: list[Answer] = []
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_show(options, answers))
    except BrokenPipeError:  # of the output
        raise
    except (DeltaError, OSError, ValueError) as error:
        where = "" if options.delta_log is None else f"{options.delta_log}: "
        print(f"delta-top: {where}{error}", file=sys.stderr)
        return 1
    return exit_status(answers) if options.urls else 0


def exit_status(answers: Sequence[Answer]) -> int:
    """Return the exit status for the last answers of the engines."""
    if not answers or any(answer.status is None for answer in answers):
        return 1
    return 3 if any(answer.state in ("uncertain", "mismatched") for answer in answers) else 0


async def ask(client: httpx.AsyncClient, url: str) -> Answer:
    """Ask one engine; errors of the engine or the network are part of the answer."""
    try:
        response = await client.get(f"{url}/delta_status", params={"history": "true"})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Answer(url, None, failure_in_words(error, url))
    if response.status_code != httpx.codes.OK:
        who = response.headers.get("Server")
        said = answer_in_words(response.status_code, response.text, who, f"{url}/delta_status")
        failed, status = is_own_error(response.text), response.status_code
        if status in _DENIED and not failed and proxy_variable(url):
            return Answer(url, None, said)  # as far as is known, the proxy's
        return Answer(url, None, said, status, has_failed=failed)
    try:
        return Answer(url, decode_status(response.content))
    except ValueError as error:  # another kind of server
        return Answer(url, None, str(error), response.status_code)


def table(answers: Sequence[Answer], syncs: int, columns: int = _WIDE) -> RenderableType:
    """Return a table of the engines, and below it their last syncs (so many each), newest first.

    Args:
        answers: Of the engines.
        syncs: How many of each engine.
        columns: Of the terminal.
    """
    if columns < _NARROW:
        return _narrow_tables(answers, syncs)
    engines = _table(*_ENGINE)
    history = _table("engine", "at", "outcome", "version", "nnz", "density", "bytes", _TIMES, "why")
    for answer in answers:
        state = _text(answer.state, _COLOURS.get(answer.state, "red"))
        if answer.status is None:
            engines.add_row(_host(answer), *[""] * 4, state, "", "", _text(answer.error))
            continue
        engines.add_row(_host(answer), *_engine_cells(answer.status, state))
        for record in (answer.status.history or [])[: -syncs - 1 : -1]:
            history.add_row(_host(answer), *_sync_cells(record))
    return Group(engines, history) if history.row_count else engines


def _narrow_tables(answers: Sequence[Answer], syncs: int) -> RenderableType:
    """Return what a terminal of 80 columns has room for: a table for the syncs of each engine."""
    engines = _table("engine", "version", "state", "note")
    shown: list[RenderableType] = [engines]
    for answer in answers:
        state = _text(answer.state, _COLOURS.get(answer.state, "red"))
        if answer.status is None:
            engines.add_row(_host(answer), "", state, _text(answer.error))
            continue
        cells = dict(zip(_ENGINE[1:], _engine_cells(answer.status, state), strict=True))
        words = [f"{name} {cells[name].plain}" for name in _IN_NOTE if cells[name].plain]
        note = "; ".join([*words, *filter(None, [cells["note"].plain])])
        engines.add_row(_host(answer), cells["version"], state, _text(note))
        history = _table("at", "outcome", "version", "bytes", _PAUSE, "why")
        history.title, history.title_justify = _host(answer), "left"
        for record in (answer.status.history or [])[: -syncs - 1 : -1]:
            at, outcome, versions, _, _, size, _, why = _sync_cells(record)
            pause = _text(_milliseconds(record.timings_ms.get("pause_ms")))
            history.add_row(at, outcome, versions, size, pause, why)
        if history.row_count:
            shown.append(history)
    return Group(*shown)


def follower_table(lags: Sequence[Lag]) -> RenderableType:
    """Return a table of the engines that follow a log."""
    followers = _table(
        *("follower", "kind", "version", "state", "behind", "waiting", "for", "seen", "failures"),
        "note",
    )
    for lag in lags:
        beat = lag.heartbeat
        state = "expired" if lag.expired else beat.state
        colour = {"failing": "red", "diverged": "red", "expired": "yellow", "asleep": "yellow"}.get(
            state, "green"
        )
        followers.add_row(
            *map(_text, (beat.name, beat.engine, beat.version)),
            _text(state, colour),
            *map(_text, (lag.versions, _size(lag.nbytes), f"{lag.seconds:.0f} s")),
            *map(_text, (f"{lag.seen_s:.0f} s ago", beat.failures, beat.error)),
        )
    return followers


def _table(*names: str) -> Table:
    """Return an empty table, whose last column wraps first on a narrow terminal."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        made.add_column(name, no_wrap=name != names[-1])
    return made


def _engine_cells(status: EngineStatus, state: Text) -> list[Text]:
    version, health, staged = status.version, status.health, status.staged
    parts = ""
    if staged is not None:
        parts = f"{len(staged.parts)}/{staged.num_parts or '?'} of {staged.version}"
    uncertified = len(health.uncertified)
    notes = [f"{uncertified} tensors cannot be updated"] if uncertified else []
    if (paused := health.paused) is not None:
        since = paused.since and time.strftime("%d %b %H:%M", time.localtime(paused.since))
        notes.append(f"paused since {since or '?'} by {paused.by or 'an unknown client'}")
    if health.mismatched:
        notes.append(f"other bits than written in {some_of(health.mismatched)}; send a full sync")
    if status.scrub is not None and status.scrub.mismatched:
        notes.append(f"scrubbing found other bits in {some_of(status.scrub.mismatched)}")
    if status.scrub is not None and status.scrub.error:
        notes.append(f"scrubbing fails: {status.scrub.error}")
    if status.owner is not None:
        notes.append(_owned(status.owner, version.run))
    note, run = "; ".join(notes), (version.run or "")[:_RUN]
    identity = map(_text, (status.engine, status.ranks, version.number, run))
    return [*identity, state, *map(_text, (parts, version.digest[:12], note))]


def _owned(owner: RunOwner, run: str | None) -> str:
    """Return who owns an engine, as text."""
    process = "" if owner.host is None else f"{owner.host}:{owner.pid or '?'} "
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner.since))
    other = "" if owner.run == run else f" of run {owner.run[:_RUN]}"
    return f"owned by {process}since {since}, epoch {owner.epoch}{other}"


def _sync_cells(record: SyncRecord) -> list[Text]:
    at, outcome = time.strftime("%H:%M:%S", time.localtime(record.at)), record.outcome
    nnz, elements, timings = record.nnz, record.elements, record.timings_ms
    density = f"{100 * nnz / elements:.3g} %" if nnz is not None and elements else ""
    base, version = record.base_version, record.version
    versions = version if base is None else f"{base} -> {version}"
    times = "/".join(_milliseconds(timings.get(phase)) for phase in _PHASES)
    full = f"full: {record.reason}" if record.reason else ""
    why = f"{record.error}: {record.message}" if record.error else full
    facts = (versions, nnz, density, _size(record.bytes), times, why)
    return [_text(at), _text(outcome, _COLOURS.get(outcome, "red")), *map(_text, facts)]


def _host(answer: Answer) -> Text:
    return _text(answer.url.partition("://")[2])


def _text(value: Any, style: str = "") -> Text:
    """Return a cell; an engine's text must neither style the table nor control the terminal."""
    text = "" if value is None else str(value)
    shown = (c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return Text("".join(shown), style)


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


async def _show(options: argparse.Namespace, answers: list[Answer]) -> None:
    """Ask all engines at once, repeatedly; `answers` always holds the last answers."""
    urls = [url.rstrip("/") for url in options.urls]
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    # Imported only if a log is asked for.
    if options.delta_log is not None:
        from engine_ext.log import follower_lags, open_log

        log = await asyncio.to_thread(open_log, options.delta_log)
    try:
        asking = httpx.AsyncClient(headers=bearer_headers(), timeout=options.timeout)
    except ImportError as error:
        raise OSError(failure_in_words(error, "")) from error
    async with asking as client:
        lags: list[Lag] = []

        async def look() -> RenderableType:
            answers[:] = await asyncio.gather(*(ask(client, url) for url in urls))
            shown = [table(answers, options.syncs, console.width)] if urls else []
            if options.delta_log is not None:
                lags[:] = await asyncio.to_thread(follower_lags, log)
                shown.append(follower_table(lags))
            return Group(*shown)

        if options.json:
            await look()
            engines = [msgspec.to_builtins(answer) for answer in answers]
            followers = [msgspec.to_builtins(lag) for lag in lags]
            both = {"engines": engines, "followers": followers}
            with output_may_be_unread():
                print(json.dumps(engines if options.delta_log is None else both, indent=1))
        elif options.once or not console.is_terminal:
            shown = await look()
            with output_may_be_unread():
                console.print(shown)
        else:
            with Live(await look(), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(options.interval)
                    live.update(await look(), refresh=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "delta-top",
        description="Show the weight versions of running engines, and the outcomes of their last "
        "syncs,\nuntil Ctrl-C. The column 'ms r/s/p/c' has the milliseconds in which a sync was "
        "received,\nwas staged, paused generation, and was committed. Below 120 columns the tables "
        "are\nshorter.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("urls", nargs="*", type=_url, metavar="URL", help="http://HOST:PORT")
    help = "show the engines that follow this delta log (folder or URL) too, by their heartbeats"
    add("--delta-log", metavar="LOG", help=help)
    help = "print one table and exit (the default without a terminal)"
    add("--once", action="store_true", help=help)
    add("--json", action="store_true", help="print the engines' status as JSON and exit")
    help = "between two requests (default: %(default)g)"
    add("--interval", type=positive_seconds, default=2.0, metavar="SECONDS", help=help)
    help = "how long to wait for an engine's answer (default: %(default)g)"
    add("--timeout", type=positive_seconds, default=5.0, metavar="SECONDS", help=help)
    help = "syncs to show of each engine (default: 10)"
    add("--syncs", type=_count, default=10, metavar="N", help=help)
    return parser


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"not a URL: {text!r} (example: http://host:8000)")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"not a number: {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
