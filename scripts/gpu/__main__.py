"""Prove kinds of models on a GPU, several at once, and time a large one: ``python -m scripts.gpu``.

Prints a line per row as it ends, then a table, and writes all facts as JSON. This Python has vLLM
(or SGLang, with ``--engine sglang``) for CUDA, or a bundle (``make gpu-bundle``) brings vLLM: on a
host without network

    python3 -m scripts.gpu --bundle build/gpu-vllm --minutes 6
    python3 -m scripts.gpu --bundle build/gpu-vllm --minutes 7 none --timing 4b

Rows that have not been exact in any recorded run (``scripts/gpu/results``) come first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

# Whatever needs more than the standard library is imported once the bundle is unpacked.
from scripts.gpu import trees
from scripts.gpu.results import as_text, by_worth, is_exact, is_sound, recorded

_OF_BASE: Final = Path("engine_ext/conformance/random_weights.py")  # that scripts use
_LEAST_S: Final = {"cuda": 120, "cpu": 40}  # a row is not begun with less time left
_GRACE_S: Final = 25  # in which a row that is interrupted stops its engines
_ROWS_S: Final = 150  # that the timing leaves, if rows follow
_ROOM: Final = 25 << 30  # bytes, of the bundle, two checkpoints, and an engine's spool


def main() -> int:
    """Run the rows that the command line names, each in a process of its own."""
    parser = make_parser()
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        os.environ[trees.REHEARSAL] = "1"
    if chosen.one is not None:
        return _one(chosen)
    started = time.monotonic() - float(os.environ.pop(trees.SPENT, "0"))
    end = started + 60 * chosen.minutes
    if chosen.folder is None:
        chosen.folder = trees.work_folder(_ROOM)
        print(f"working in {chosen.folder}", flush=True)
    if chosen.bundle is not None:
        trees.restart_in_bundle(chosen.bundle, chosen.folder / "site", started)
    from scripts.gpu.rows import rows_of

    rows = rows_of(chosen.engine)
    names = [name for name in chosen.rows if name != "none"]
    if unknown := set(names) - set(rows):
        parser.error(f"no rows {sorted(unknown)}; there are: {', '.join(rows)}")
    if chosen.engine != "vllm" and (chosen.timing or chosen.bundle):
        parser.error("--timing and --bundle are vLLM's")
    if chosen.base is not None and not (chosen.base / _OF_BASE).exists():
        parser.error(f"--base: no {_OF_BASE} in {chosen.base}: no checkout, or an older one")
    if chosen.rows and not names and chosen.timing is None:
        parser.error("nothing to run: name rows, or --timing")
    if not chosen.rows:
        names = by_worth(rows, recorded(), chosen.engine)
    run = Run(chosen, end)
    if chosen.timing is not None:
        run.time(_ROWS_S if names else 0)
    with ThreadPoolExecutor(chosen.at_once) as pool:
        [*pool.map(run.prove, names)]
    print(f"\n{run.table()}", flush=True)
    return int(not run.is_exact)


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu", description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("rows", nargs="*", metavar="ROW", help="rows to run (default: all; none: only --timing)")
    add("--engine", choices=("vllm", "sglang"), default="vllm", help="to prove (%(default)s)")
    add("--minutes", type=float, default=9, help="for all together (%(default)s)")
    add("--at-once", type=int, default=6, metavar="N", help="rows (%(default)s)")
    add("--bundle", type=Path, metavar="DIR", help="pieces of a bundle to unpack and use")
    add("--timing", choices=("4b", "8b", "tiny"), help="first time a model of this size")
    add("--base", type=Path, metavar="TREE", help="a checkout of the product to time it against")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    add("--folder", type=Path, help="of work (default: gpu-rows in /dev/shm, or in /tmp)")
    add("--json", type=Path, default=Path("build/gpu-rows.json"), help="(%(default)s)")
    add("--one", metavar="ROW", help=argparse.SUPPRESS)
    add("--stock", action="store_true", help=argparse.SUPPRESS)
    add("--trees", nargs="*", default=(), help=argparse.SUPPRESS)
    return parser


def _one(chosen: argparse.Namespace) -> int:
    """Run one row, or the timing of one tree; the last line of the output has its facts."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    if chosen.timing is not None:
        from scripts.gpu import timing

        more = {"stock": chosen.stock, "trees": chosen.trees}
        found = timing.run(chosen.timing, chosen.folder, chosen.one, **more)
    else:
        from scripts.gpu.rows import run

        found = run(chosen.one, chosen.folder / chosen.one, chosen.engine)
    print("FACTS " + json.dumps(found), flush=True)
    return 0


class Run:
    """The facts that were found so far; they are written after each row."""

    def __init__(self, chosen: argparse.Namespace, end: float) -> None:
        self._chosen, self._end = chosen, end - _GRACE_S
        self._lock = threading.Lock()
        self._not_begun: list[str] = []
        self.facts: dict[str, Any] = {**machine(chosen.engine), "rows": []}

    def prove(self, name: str) -> None:
        """Run a row, unless too little time is left."""
        left = self._end - time.monotonic()
        if left < _LEAST_S[self._chosen.device]:
            self._not_begun.append(name)
            return
        found = {"row": name, **self._process(name, left)}
        print(_line(found), flush=True)
        with self._lock:
            self.facts["rows"].append(found)
            self._write()

    def time(self, rest_s: float) -> None:
        """Time the trees, with nothing else on the machine, and leave some seconds."""
        left = self._end - time.monotonic() - rest_s
        if left <= 0:
            self._not_begun.append("the timing")
            return
        from scripts.gpu.timing import is_up

        folder, old = self._chosen.folder, self._chosen.base
        folder.mkdir(parents=True, exist_ok=True)
        timed: dict[str, Path | None] = {"new": None, **({"base": old} if old else {})}
        for name in timed:
            is_up(folder, name).unlink(missing_ok=True)  # of an earlier run

        def process(name: str) -> dict[str, Any]:
            try:
                return {"tree": name, **self._process(name, left, timed[name], timed=[*timed])}
            finally:
                is_up(folder, name).touch()  # the other tree waits for it no longer

        with ThreadPoolExecutor(2) as pool:
            self.facts["timing"] = [*pool.map(process, timed)]
        for one in self.facts["timing"]:
            print(_timing_lines(one), flush=True)
        self._write()

    @property
    def is_exact(self) -> bool:
        """Whether all rows were exact, and all timings sound."""
        sound = all(is_sound(one) for one in self.facts.get("timing", ()))
        exact = all(is_exact(row) for row in self.facts["rows"])
        return sound and exact and not self._not_begun

    def table(self) -> str:
        """Return one line per row, and which ones have not begun."""
        lines = [f"{'row':18} {'outcome':60} rollback  pauses ms"]
        for row in self.facts["rows"]:
            pauses = ", ".join(f"{one:.0f}" for one in _pauses(row))
            outcome = str(row.get("verdict") or row.get("error", "")).partition("\n")[0]
            lines.append(f"{row['row']:18} {outcome[:60]:60} {row.get('rollback', ''):8}  {pauses}")
        if self._not_begun:
            lines.append(f"no time was left for: {', '.join(self._not_begun)}")
        return "\n".join(lines)

    def _process(
        self, name: str, left: float, tree: Path | None = None, *, timed: Sequence[str] = ()
    ) -> dict[str, Any]:
        chosen, folder = self._chosen, self._chosen.folder
        command = [sys.executable, "-m", "scripts.gpu", "--one", name, "--folder", str(folder)]
        command += ["--device", chosen.device, "--engine", chosen.engine]
        if timed:
            command += ["--timing", chosen.timing, *(["--stock"] if tree is None else [])]
            command += ["--trees", *timed]
        environment = trees.environment(tree, folder)
        process = subprocess.Popen(
            *(command,),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            text, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            text = _interrupted(process)
        found = [line for line in text.splitlines() if line.startswith("FACTS ")]
        if not found:
            return {"error": f"no result: {text[-1500:]}"}
        return dict(json.loads(found[-1].removeprefix("FACTS ")))

    def _write(self) -> None:
        path = self._chosen.json
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f"{path.name}.tmp")
        whole.write_text(as_text(self.facts), encoding="utf-8")
        whole.replace(path)  # whatever ends this process, the file is whole


def _interrupted(process: subprocess.Popen[str]) -> str:
    """Let a process stop its engines, which are in other process groups; return its output.

    If it takes too long, it is killed, and so are they.
    """
    import psutil

    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=_GRACE_S)[0]
    except subprocess.TimeoutExpired:
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        return process.communicate()[0]


def _pauses(facts: dict[str, Any]) -> list[float]:
    syncs = [facts[f"sync{number}"] for number in (1, 2, 3) if f"sync{number}" in facts]
    return [sync["pause_ms"] for sync in syncs if "pause_ms" in sync]


def _line(facts: dict[str, Any]) -> str:
    verdict = facts.get("verdict") or facts.get("refused") or facts.get("error", "")
    rest = f"rollback {facts.get('rollback')}, full {facts.get('full', {}).get('verdict')}"
    shown = {k: v for k, v in facts.items() if k.startswith(("sleep", "keep", "load", "resumed"))}
    if "error" in facts and facts["error"] not in str(verdict):
        shown["error"] = facts["error"][-400:]
    return (
        f"{facts['row']:16} {facts.get('seconds', 0):6.1f} s  {str(verdict)[-700:]}\n"
        f"    plan {facts.get('certification')} {facts.get('uncertified')}\n"
        f"    pause {_pauses(facts)} ms; {rest}; GPU MiB {facts.get('gpu_mib')}; {shown}"
    )


def _timing_lines(facts: dict[str, Any]) -> str:
    heads = ["tree", "model", "start_s", "stock_start_s", "read_both_ms", "scan_s", "gpu_mib"]
    heads += ["kernels_tried_s", "seconds", "alone", "verdict", "stock_error", "error"]
    lines = [f"timing: { {name: facts.get(name) for name in heads if facts.get(name)} }"]
    lines += [f"    {sync}" for sync in facts.get("syncs", ())]
    lines += [f"    {one}" for one in facts.get("own_ways", ())]
    return "\n".join(lines)


def machine(engine: str) -> dict[str, Any]:
    """Return what the rows run on: device, engine and libraries.

    Raises:
        SystemExit: the engine is not installed, or its server cannot be imported: each row would
            take long to find that out.
    """
    import torch

    from scripts.gpu.engine import ENGINES

    kind = ENGINES[engine]
    # The package of vLLM for CPUs has another name.
    ask = (
        "from importlib.metadata import packages_distributions, version; "
        f"import {kind.program}; "
        f"names = packages_distributions()[{engine!r}][0], 'torch', 'transformers'; "
        "print(*map(version, names))"
    )
    command = [str(kind.interpreter()), "-c", ask]
    paths = filter(None, [*map(str, kind.shims()), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"{command[0]} cannot run {kind.name}: {answer.stderr[-1500:]}")
    own, of_torch, of_transformers = answer.stdout.splitlines()[-1].split()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": name,
        "engine": f"{kind.name} {own}",
        "torch": of_torch,
        "transformers": of_transformers,
    }


if __name__ == "__main__":
    sys.exit(main())
