"""Prove kinds of models on a GPU, several at once: ``python -m scripts.gpu``.

Prints a line per row as it ends, and writes all facts as JSON. This Python needs a vLLM for CUDA.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

_LEAST_S = 40  # a row is not begun with less time left


def main() -> None:
    """Run the rows that the command line names, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to run (default: all)")
    parser.add_argument("--at-once", type=int, default=6, metavar="N")
    parser.add_argument("--seconds", type=float, default=540, help="for all rows together")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu-rows"))
    parser.add_argument("--json", type=Path, default=Path("gpu-rows.json"))
    parser.add_argument("--one", metavar="ROW", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one is not None:
        from scripts.gpu.rows import run

        print("ROW " + json.dumps(run(chosen.one, chosen.folder / chosen.one)), flush=True)
        return
    from scripts.gpu.rows import ROWS

    if unknown := set(chosen.rows) - set(ROWS):
        parser.error(f"no rows {sorted(unknown)}; there are: {', '.join(ROWS)}")
    end = time.monotonic() + chosen.seconds
    facts: list[dict[str, Any]] = []

    def one(name: str) -> None:
        facts.append(_in_process(name, chosen.folder, end))
        print(_line(facts[-1]), flush=True)
        chosen.json.write_text(json.dumps({**_machine(), "rows": facts}, indent=1) + "\n")

    with ThreadPoolExecutor(chosen.at_once) as pool:
        list(pool.map(one, chosen.rows or ROWS))


def _in_process(name: str, folder: Path, end: float) -> dict[str, Any]:
    left = end - time.monotonic()
    if left < _LEAST_S:
        return {"row": name, "error": "no time was left"}
    command = [sys.executable, "-m", "scripts.gpu", "--one", name, "--folder", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, _ = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.terminate()  # an interpreter that is terminated leaves engines behind
        text, _ = process.communicate()
    found = [line for line in text.splitlines() if line.startswith("ROW ")]
    if not found:
        return {"row": name, "error": f"no result: {text[-1500:]}"}
    return dict(json.loads(found[-1].removeprefix("ROW ")))


def _line(facts: dict[str, Any]) -> str:
    verdict = facts.get("verdict") or facts.get("refused") or facts.get("error", "")
    pauses = [facts[f"sync{n}"].get("pause_ms") for n in (1, 2, 3) if f"sync{n}" in facts]
    rest = f"rollback {facts.get('rollback')}, full {facts.get('full', {}).get('verdict')}"
    shown = {k: v for k, v in facts.items() if k.startswith(("sleep", "keep", "load", "resumed"))}
    if "error" in facts and facts["error"] not in str(verdict):
        shown["error"] = facts["error"][-400:]
    return (
        f"{facts['row']:16} {facts.get('seconds', 0):6.1f} s  {str(verdict)[-700:]}\n"
        f"    plan {facts.get('certification')} {facts.get('uncertified')}\n"
        f"    pause {pauses} ms; {rest}; GPU MiB {facts.get('gpu_mib')}; {shown}"
    )


def _machine() -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    import vllm

    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": name,
        "engine": f"vLLM {vllm.__version__}",
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


if __name__ == "__main__":
    main()
