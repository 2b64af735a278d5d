"""``delta-top``: the live versions of some engines, and what became of their last syncs.

``python -m engine_ext.cli.top URL...`` is the same command. It needs neither an engine nor torch,
only httpx and rich.

Exit status: 0 every engine has answered, 1 some engine has not, 3 all have, and the weights of one
are uncertain, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_TOKEN = "DELTA_API_KEY"
_WIDE = 200  # columns where the output is no terminal
_COLOURS = {
    "committed": "green",
    "already_applied": "green",
    "certain": "green",
    "rolled_back": "yellow",
    "asleep": "yellow",
    "refused": "yellow",
}
_PHASES = ("receive_ms", "stage_ms", "pause_ms", "commit_ms")
_TIMES = "ms r/s/p/c"  # of _PHASES


@dataclass(frozen=True)
class Seen:
    """What one engine has answered.

    Attributes:
        url: the engine's.
        status: the JSON of ``GET /delta_status?history=true``, or None.
        error: why there is none.
    """

    url: str
    status: dict[str, Any] | None
    error: str | None = None

    @property
    def state(self) -> str:
        """In a word."""
        if self.status is None:
            return "unreachable"
        if self.status["engine_state"] != "certain":
            return str(self.status["engine_state"])
        return "asleep" if self.status.get("asleep") else "certain"


def main(argv: Sequence[str] | None = None) -> int:
    """Show the engines until Ctrl-C, or once; returns the exit status."""
    options = _parser().parse_intermixed_args(argv)
    seen: list[Seen] = []
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(options, seen))
    return exit_status(seen)


def exit_status(seen: Sequence[Seen]) -> int:
    """By what the engines answered last."""
    if not seen or any(one.status is None for one in seen):
        return 1
    return 3 if any(one.state == "uncertain" for one in seen) else 0


async def ask(client: httpx.AsyncClient, url: str) -> Seen:
    """What one engine answers; never raises for what the engine or the network does."""
    try:
        answer = await client.get(f"{url}/delta_status", params={"history": "true"})
        body = answer.json() if answer.content else {}
        if answer.status_code == httpx.codes.OK:
            # Whatever else answers there is no engine of ours.
            body["version"], body["engine_state"], body["history"]
            return Seen(url, body)
        return Seen(url, None, f"{answer.status_code}: {_why(answer, body)}")
    except httpx.HTTPError as error:
        return Seen(url, None, str(error) or type(error).__name__)
    except (ValueError, KeyError, TypeError):
        return Seen(url, None, "it has no delta endpoints of this version")


def table(seen: Sequence[Seen], syncs: int) -> RenderableType:
    """The engines, and below them their last syncs, the newest one first.

    Args:
        seen: what they answered.
        syncs: how many syncs of each engine.
    """
    engines = _table("engine", "kind", "ranks", "version", "state", "staged", "digest", "note")
    history = _table("engine", "at", "outcome", "version", "nnz", "density", "bytes", _TIMES, "why")
    for one in seen:
        state = _text(one.state, _COLOURS.get(one.state, "red"))
        if one.status is None:
            engines.add_row(_host(one), *[""] * 3, state, "", "", _text(one.error))
            continue
        engines.add_row(_host(one), *_engine_cells(one.status, state))
        for record in one.status["history"][: -syncs - 1 : -1]:
            history.add_row(_host(one), *_sync_cells(record))
    return Group(engines, history) if history.row_count else engines


def _table(*names: str) -> Table:
    """Narrow terminals take from the last column first."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        made.add_column(name, no_wrap=name != names[-1])
    return made


def _engine_cells(status: dict[str, Any], state: Text) -> list[Text]:
    staged = status.get("staged")
    parts = ""
    if staged:
        parts = f"{len(staged['parts'])}/{staged['num_parts'] or '?'} of {staged['version']}"
    uncertified = len(status.get("uncertified") or ())
    return [
        _text(status.get("engine")),
        _text(status.get("ranks")),
        _text(status["version"]),
        state,
        _text(parts),
        _text((status.get("digest") or "")[:12]),
        _text(f"{uncertified} tensors cannot be updated" if uncertified else ""),
    ]


def _sync_cells(record: dict[str, Any]) -> list[Text]:
    outcome = str(record["outcome"])
    nnz, elements, timings = record["nnz"], record["elements"], record["timings_ms"]
    density = f"{100 * nnz / elements:.3g} %" if nnz is not None and elements else ""
    base, version = record["base_version"], record["version"]
    return [
        _text(time.strftime("%H:%M:%S", time.localtime(record["at"]))),
        _text(outcome, _COLOURS.get(outcome, "red")),
        _text(version if base is None else f"{base} -> {version}"),
        _text(nnz),
        _text(density),
        _text(_size(record["bytes"])),
        _text("/".join(_milliseconds(timings.get(phase)) for phase in _PHASES)),
        _text(f"{record['error']}: {record['message']}" if record["error"] else ""),
    ]


def _host(one: Seen) -> Text:
    return _text(one.url.partition("://")[2])


def _text(value: Any, style: str = "") -> Text:
    """A cell; what an engine says must neither style the table nor steer the terminal."""
    shown = "" if value is None else str(value)
    return Text(
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown), style
    )


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


def _why(answer: httpx.Response, body: Any) -> str:
    with contextlib.suppress(TypeError, KeyError):
        return str(body["error"]["message"])
    return answer.reason_phrase


async def _show(options: argparse.Namespace, seen: list[Seen]) -> None:
    """Ask all engines at once, again and again; `seen` has their last answers."""
    token = os.environ.get(_TOKEN)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    urls = [url.rstrip("/") for url in options.urls]
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    async with httpx.AsyncClient(headers=headers, timeout=options.timeout) as client:

        async def look() -> RenderableType:
            seen[:] = await asyncio.gather(*(ask(client, url) for url in urls))
            return table(seen, options.syncs)

        if options.json:
            await look()
            print(json.dumps([vars(one) for one in seen], indent=1))
        elif options.once or not console.is_terminal:
            console.print(await look())
        else:
            with Live(await look(), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(options.interval)
                    live.update(await look(), refresh=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="delta-top",
        description="Show the live weight version of engines with delta updates, and what became "
        "of their last syncs; 'ms r/s/p/c' are the milliseconds in which a sync was received, was "
        "staged, paused generation, and was written. Ctrl-C ends it.",
        epilog=f"The bearer token is read from {_TOKEN}. Exit status: 0 every engine has answered, "
        "1 some engine has not, 3 the weights of one are uncertain, 2 wrong usage.",
    )
    parser.add_argument("urls", nargs="+", type=_url, metavar="URL", help="http://HOST:PORT")
    parser.add_argument(
        "--once", action="store_true", help="print one table and end (also without a terminal)"
    )
    parser.add_argument("--json", action="store_true", help="print what the engines say, and end")
    parser.add_argument(
        "--interval", type=_positive, default=2.0, metavar="SECONDS", help="default: %(default)g"
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=5.0,
        metavar="SECONDS",
        help="how long an engine may take to answer (default: %(default)g)",
    )
    parser.add_argument(
        "--syncs", type=_count, default=10, metavar="N", help="syncs of each engine (default: 10)"
    )
    return parser


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"not an address: {text!r} (example: http://host:8000)")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"not a number: {text!r}")
    return int(text)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"not a number of seconds above 0: {text!r}")


if __name__ == "__main__":
    sys.exit(main())
