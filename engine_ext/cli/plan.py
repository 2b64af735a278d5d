"""``delta-plan``: what an engine can update exactly, and why not the rest.

``python -m engine_ext.cli.plan TARGET`` is the same command. TARGET is a checkpoint's
folder, which is loaded, traced and certified as a server with ``--enable-delta-updates`` would do
it, or the address of a running server, which is asked.

Exit status: 0 every tensor can be updated or is ignored, 3 some tensor is uncertified, 1 there is
no plan to show, 2 wrong usage.
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

from engine_ext.settings import API_KEY_ENVIRONMENT, Settings

Row = dict[str, Any]
_ENGINES = ("vllm",)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = _parser()
    options, engine_flags = parser.parse_known_args(argv)
    is_url = options.target.startswith(("http://", "https://"))
    if is_url and engine_flags:
        parser.error(f"a running server takes no engine flags: {' '.join(engine_flags)}")
    if not is_url and not os.path.isdir(options.target):
        parser.error(f"neither a folder nor an http:// address: {options.target}")
    try:
        ranks = _ask(options.target) if is_url else _load(options, engine_flags)
    except Exception as error:
        print(f"delta-plan: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    rows = merge(ranks)
    shown = [row for row in rows if not options.uncertified or "uncertified" in row["status"]]
    if options.json:
        print(json.dumps(shown, indent=1))
    else:
        _print(shown)
        print(summary(rows, len(ranks)))
    return 3 if any("uncertified" in row["status"] for row in rows) else 0


def merge(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """One row per checkpoint tensor from the plans of all ranks.

    Args:
        ranks: `engine_ext.placement.plan.Plan.table` of every rank, in rank order.

    Returns:
        Rows like the ranks', but for ``status``: the worst of the ranks that hold the tensor, and
        ``reason``: the first rank's that has one.
    """
    return [_merged(list(rows)) for rows in zip(*ranks, strict=True)]


def _merged(rows: Sequence[Row]) -> Row:
    statuses = [row["status"] for row in rows]
    order = ["uncertified", "cast", "exact", "not on this rank", "ignored"]
    return {
        **rows[0],
        "status": min(statuses, key=order.index),
        "reason": next((row["reason"] for row in rows if row["reason"]), ""),
        "live": sorted({name for row in rows for name in row["live"]}),
        "repacked": any(row["repacked"] for row in rows),
        "recomputed": sorted({path for row in rows for path in row["recomputed"]}),
    }


def summary(rows: Iterable[Row], ranks: int) -> str:
    """One line: how many tensors have each status."""
    counts = Counter(row["status"] for row in rows)
    found = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"{counts.total()} tensors on {ranks} rank{'s' if ranks > 1 else ''}: {found}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="delta-plan",
        description="Show for every tensor of a checkpoint whether delta updates reach it exactly.",
        epilog="Other flags go to the engine (--tensor-parallel-size 2, --dtype bfloat16, ...). "
        "Exit status: 0 nothing is uncertified, 3 something is, 1 no plan, 2 wrong usage.",
    )
    parser.add_argument("target", help="a checkpoint's folder, or http://HOST:PORT of a server")
    parser.add_argument("--engine", choices=_ENGINES, default="vllm", help="what loads a folder")
    parser.add_argument("--uncertified", action="store_true", help="only tensors that are refused")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _ask(url: str) -> list[list[Row]]:
    import httpx

    token = os.environ.get(API_KEY_ENVIRONMENT)
    answer = httpx.get(
        f"{url.rstrip('/')}/delta_status",
        params={"plan": "true"},
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=60,
    )
    answer.raise_for_status()
    plan: list[list[Row]] | None = answer.json()["plan"]
    if plan is None:
        raise RuntimeError("the engine has no checkpoint's weights yet; send it a full sync first")
    return plan


def _load(options: argparse.Namespace, engine_flags: list[str]) -> list[list[Row]]:
    Settings().export()
    offline = importlib.import_module(f"engine_ext.adapters.{options.engine}.offline_plan")
    # The engine and its processes print to standard output; nothing of that belongs to the plan.
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        plan: list[list[Row]] = offline.load_plan(options.target, engine_flags)
    except ModuleNotFoundError as error:
        if error.name != options.engine:
            raise
        raise RuntimeError(
            f"a folder is loaded by {options.engine}, which is not installed here; start an engine "
            "with --enable-delta-updates and give its address"
        ) from error
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    return plan


def _names(paths: Sequence[str]) -> str:
    """The last parts of some paths in the model, each once."""
    return ", ".join(sorted({path.rpartition(".")[2] for path in paths}))


def _print(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("tensor", "dtype", "shape", "status", "live", "reason")
    colours = {"exact": "green", "cast": "green", "uncertified": "red"}
    for row in rows:
        colour = colours.get(row["status"], "dim")
        status = row["status"] + (" (repacked)" if row["repacked"] else "")
        status += f" ({_names(row['recomputed'])} recomputed)" if row["recomputed"] else ""
        table.add_row(
            row["name"],
            row["dtype"],
            "x".join(map(str, row["shape"])),
            f"[{colour}]{status}[/]",
            ", ".join(row["live"]),
            row["reason"],
        )
    # Wide enough for whole names where the output is no terminal.
    Console(width=None if sys.stdout.isatty() else 240).print(table)


if __name__ == "__main__":
    sys.exit(main())
