"""``delta-plan``: show which tensors of a checkpoint an engine can update exactly, and why not.

``python -m engine_ext.cli.plan TARGET`` is the same command. TARGET is a checkpoint's folder, which
is loaded, traced and certified as by a server with ``--enable-delta-updates``, or the address of a
running server, whose plan is shown.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from engine_ext.answers import answer_in_words, failure_in_words
from engine_ext.commands import (
    CommandParser,
    leaving_at_once,
    output_may_be_unread,
    output_on_stderr,
    without_traceback,
)
from engine_ext.settings import API_KEY_ENVIRONMENT, Settings, bearer_headers

Row = dict[str, Any]
_ENGINES = ("vllm",)
_EPILOG = f"""\
examples:
  delta-plan /models/Qwen3-8B --tensor-parallel-size 2    load a checkpoint with the engine
  delta-plan http://localhost:8000 --uncertified          ask a running server

exit status:
  0  every tensor can be updated, or is ignored
  1  there is no plan: the engine did not load the checkpoint, or the server did not answer
  2  wrong usage
  3  some tensor is uncertified

The bearer token for a server is read from {API_KEY_ENVIRONMENT}.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit status."""
    return without_traceback("delta-plan", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options, engine_flags = parser.parse_known_args(argv)
    is_url = options.target.startswith(("http://", "https://"))
    if is_url and engine_flags:
        parser.error(f"engine flags are only for a folder: {' '.join(engine_flags)}")
    if not is_url and not os.path.isdir(options.target):
        parser.error(f"neither a folder nor an http:// address: {options.target}")
    try:
        ranks = _ask(options.target) if is_url else _load(options, engine_flags)
    except Exception as error:
        kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
        print(f"delta-plan: {kind}{error}", file=sys.stderr)
        return 1
    rows = merge(ranks)
    shown = [row for row in rows if not options.uncertified or "uncertified" in row["status"]]
    with output_may_be_unread():
        if options.json:
            print(json.dumps(shown, indent=1))
        else:
            _print(shown)
            print(summary(rows, len(ranks)))
    return 3 if any("uncertified" in row["status"] for row in rows) else 0


def merge(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the plans of all ranks into one row per checkpoint tensor.

    Each has the worst ``status`` of the ranks that hold the tensor, and the ``reason`` of the first
    rank that has one; see `engine_ext.placement.plan.Plan.table`.
    """
    return [_merged(rows) for rows in zip(*ranks, strict=True)]


def _merged(rows: Sequence[Row]) -> Row:
    statuses = [row["status"] for row in rows]
    order = ["uncertified", "cast", "rebuilt", "exact", "not on this rank", "ignored"]
    return {
        **rows[0],
        "status": min(statuses, key=order.index),
        "reason": next((row["reason"] for row in rows if row["reason"]), ""),
        "live": sorted({name for row in rows for name in row["live"]}),
        "repacked": any(row["repacked"] for row in rows),
        "recomputed": sorted({path for row in rows for path in row["recomputed"]}),
    }


def summary(rows: Iterable[Row], ranks: int) -> str:
    """Return one line with the number of tensors of each status."""
    counts = Counter(row["status"] for row in rows)
    found = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"{counts.total()} tensors on {ranks} rank{'s' if ranks > 1 else ''}: {found}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "delta-plan",
        description="Show for every tensor of a checkpoint whether delta updates reach it "
        "exactly.\nFlags that are not listed here are passed to the engine.",
        epilog=_EPILOG,
    )
    parser.add_argument("target", help="a checkpoint's folder, or http://HOST:PORT of a server")
    help = "the engine that loads a folder (default: vllm)"
    parser.add_argument("--engine", choices=_ENGINES, default="vllm", help=help)
    help = "show only the tensors that are refused"
    parser.add_argument("--uncertified", action="store_true", help=help)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    help = "load the folder as a server with this flag would"
    parser.add_argument("--delta-keep-plain", action="store_true", help=help)
    return parser


def _ask(url: str) -> list[list[Row]]:
    with leaving_at_once("delta-plan"):
        import httpx

        from engine_ext.ranks.status import decode_status

    asked, headers = f"{url.rstrip('/')}/delta_status", bearer_headers()
    try:
        answer = httpx.get(asked, params={"plan": "true"}, headers=headers, timeout=60)
    except (httpx.HTTPError, ImportError) as error:
        raise RuntimeError(f"{asked}: {failure_in_words(error, asked)}") from error
    if answer.status_code != httpx.codes.OK:
        who = answer.headers.get("Server")
        raise RuntimeError(answer_in_words(answer.status_code, answer.text, who, asked))
    try:
        plan = decode_status(answer.content).plan
    except ValueError as error:
        raise RuntimeError(f"{asked}: {error}") from error
    if not plan:
        raise RuntimeError("the engine waits for its weights; send a full sync first")
    return plan


def _load(options: argparse.Namespace, engine_flags: list[str]) -> list[list[Row]]:
    Settings(keep_plain=options.delta_keep_plain).export()
    offline = importlib.import_module(f"engine_ext.adapters.{options.engine}.offline_engine")
    try:
        with output_on_stderr():
            plan: list[list[Row]] = offline.load_plan(options.target, engine_flags)
    except ModuleNotFoundError as error:
        if error.name != options.engine:
            raise
        raise RuntimeError(
            f"loading a folder needs {options.engine}, which is not installed; start an engine "
            "with --enable-delta-updates elsewhere and give its address"
        ) from error
    return plan


def _print(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("tensor", "dtype", "shape", "status", "live", "reason")
    colours = {"exact": "green", "cast": "green", "rebuilt": "green", "uncertified": "red"}
    for row in rows:
        colour = colours.get(row["status"], "dim")
        status = row["status"] + (" (repacked)" if row["repacked"] else "")
        names = sorted({path.rpartition(".")[2] for path in row["recomputed"]})
        status += f" ({', '.join(names)} recomputed)" if names else ""
        status += f" (tied to {row['tied_to']})" if row.get("tied_to") else ""
        shape, live = "x".join(map(str, row["shape"])), ", ".join(row["live"])
        cells = row["dtype"], shape, Text(status, colour), live, row["reason"]
        table.add_row(row["name"], *cells)
    # Wide enough for whole names if the output is not a terminal.
    Console(width=None if sys.stdout.isatty() else 240, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
