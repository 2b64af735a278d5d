"""Commit to a fleet many times under load, while engines and the trainer die.

    python -m scripts.fleet_soak                  # 2 vLLM and 2 SGLang, 200 commits
    python -m scripts.fleet_soak --vllm 1 --sglang 1 --commits 20

Starts engines with a small random Qwen3 and nginx in front of them. A trainer sends steps with
``MultiSender(commit="all_or_none")``. A loop asks each engine's ``/delta_ready?min_version=N`` for
the fleet's version twice a second, as a readiness probe does, and reloads nginx with the engines
that are ready. Clients ask through nginx without pause, with ``X-Weight-Version: N``, ``>=N``,
``N-M``, a version that nobody has, or without one; half of the answers are streamed.

Meanwhile an engine is killed in each phase of a commit, and one is replaced; a fresh engine takes
the place. The trainer is killed before and after the engines' decision, and another one continues.

The soak fails if
  an engine serves another version than the fleet's after a commit, or other bytes than its own;
  a version names the weights of two steps;
  an answer has a token of a version that its request excluded, or of none that was committed;
  an answer begins with an earlier version than the fleet's when it was asked for;
  a token's log probability is not that of the weights of its version (by transformers in float32);
  an engine that serves what is asked for refuses it, or a request fails while no engine has died;
  a fault ends otherwise than it must.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx
import msgspec
from rich.console import Console

from scripts import command_line
from scripts.fleet_soak.coordinator import CoordinatorDied
from scripts.fleet_soak.engines import Engines
from scripts.fleet_soak.load import Load
from scripts.fleet_soak.plan import by_turns, schedule
from scripts.fleet_soak.report import show
from scripts.fleet_soak.router import Router, RouterError
from scripts.fleet_soak.run import Figures, Soak
from scripts.live_engine.process import EngineError, free_port
from scripts.live_engine.tiny_models import build, load_tensors

_EPILOG: Final = """\
exit status: 0 passed; 1 something failed; 2 bad usage; 130 interrupted
"""


def run(options: argparse.Namespace, folder: Path, console: Console) -> Figures:
    """Start the engines and the router, and soak them."""
    members = by_turns([("vllm", options.vllm), ("sglang", options.sglang)])
    base = build("qwen3", folder / "base")
    tensors = load_tensors(base)
    end = time.monotonic() + 60 * options.minutes
    nginx = folder / "nginx"
    nginx.mkdir()

    def say(line: str) -> None:
        console.print(line)

    with contextlib.ExitStack() as opened:
        engines = Engines(members, base, folder)
        ports = {member.url: member.port for member in engines.members}
        router = opened.enter_context(Router(ports, free_port(), nginx))
        say(f"starting {', '.join(name for _, name in members)}")
        opened.enter_context(engines)
        router.require(0)
        with Load(router.url, str(base), options.clients, options.seed) as load:
            soak = Soak(
                engines,
                router,
                load,
                tensors,
                base,
                logs=folder,
                due=schedule(options.commits, len(members)),
                show=say,
            )
            soak.run(options.commits, end)
        return soak.finish()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("scripts.fleet_soak", __doc__, _EPILOG)
    add, at_least = parser.add_argument, command_line.at_least
    add("--vllm", type=at_least(0), metavar="N", default=2, help="vLLM engines (%(default)s)")
    add("--sglang", type=at_least(0), metavar="N", default=2, help="SGLang engines (%(default)s)")
    commits_help = "commits, more if faults are left then (%(default)s)"
    add("--commits", type=at_least(1), metavar="N", default=200, help=commits_help)
    minutes_help = "stop after so many, with the faults so far (%(default)s)"
    add("--minutes", type=at_least(1), metavar="N", default=60, help=minutes_help)
    add("--clients", type=at_least(1), metavar="N", default=2, help="(%(default)s)")
    add("--seed", type=int, metavar="N", default=0, help="of the requests (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--keep-logs", type=Path, metavar="FOLDER", help="for all files")
    options = parser.parse_args(arguments)
    if options.vllm + options.sglang < 2:
        parser.error("a fleet has two engines or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; return the exit status."""
    options = parse_arguments(arguments)

    def program() -> int:
        console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 200)
        with command_line.working_folder(options.keep_logs, "delta-fleet-") as folder:
            found = run(options, folder, console)
        show(found, console)
        if options.json is not None:
            options.json.write_text(json.dumps(msgspec.to_builtins(found), indent=2))
        for problem in found.problems:
            print(f"FAILED: {problem}", file=sys.stderr)
        if not found.problems:
            console.print("passed: every answer is of a version that was asked for")
        return 1 if found.problems else 0

    failures = (RouterError, EngineError, CoordinatorDied, httpx.HTTPError)
    return command_line.run(program, failures, "interrupted; all engines are stopped")


if __name__ == "__main__":
    sys.exit(main())
