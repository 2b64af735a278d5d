"""Time how vLLM's modules are rebuilt after a sync, against vLLM's own reload of the model.

    python -m scripts.bench.rebuild
    python -m scripts.bench.rebuild --layers 1 --runs 1      # to see whether it works

Loads a random Qwen3 with bf16 weights, in turns with its linear weights packed for oneDNN (where
vLLM does so: CPUs with AVX-512 or AMX) and quantised online, with delta updates enabled. Every
module is rebuilt with random changes of its shadow, as a sync does before its pause, and nothing is
written. The reload is vLLM's `reload_weights` of the same checkpoint from memory. Each time is the
shortest of --runs.

columns:
  modules     that are rebuilt
  ms          to rebuild all of them, and per module
  scratch     memory that one rebuild needs besides the shadow, as a share of the module's shadow:
              the largest growth of resident memory, of the modules with the largest shadow
  shadow      bytes kept of all modules, as a share of the checkpoint's
  reload ms   vLLM's own, of the whole model

A second table compares two forms of the shadow: as the loader left the weights, which a rebuild
copies, or the checkpoint's files mapped read-only with the changes since start-up beside them, from
which a rebuild loads the module again. Times are of this step alone, for all modules.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine_ext.resources import usable_cores
from scripts import command_line

_FORMS: Final = {"packed": [], "fp8_per_channel": ["--quantization", "fp8_per_channel"]}
_DENSITY: Final = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = command_line.make_parser("scripts.bench.rebuild", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    cores = usable_cores()
    add("--threads", type=positive, metavar="N", default=cores, help="(%(default)s)")
    add("--runs", type=positive, metavar="N", default=5, help="of each module (%(default)s)")
    add("--layers", type=positive, metavar="N", default=6, help="of the model (%(default)s)")
    add("--json", action="store_true", help="end with one line of JSON")
    add("--measure", nargs=2, metavar=("FORM", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ.update(
        OMP_NUM_THREADS=str(options.threads),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    if options.measure:
        print(json.dumps(_measure(options.measure[0], options.measure[1], options.runs)))
        return 0

    def program() -> int:
        with tempfile.TemporaryDirectory(prefix="delta-bench-") as folder:
            found = _run(options, Path(folder))
        _print(options, found)
        if options.json:
            print(json.dumps(found), flush=True)
        return 0

    return command_line.run(program, (RuntimeError, OSError), "interrupted; the model is deleted")


def _run(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Measure every form in a process of its own: one vLLM fits into each."""
    from scripts.bench.synthetic_weights import QWEN3_SIZES
    from scripts.live_engine.tiny_models import build

    sizes = {**QWEN3_SIZES, "num_hidden_layers": options.layers}
    model = build("qwen3", folder / "model", **sizes)
    command = [sys.executable, "-m", "scripts.bench.rebuild", "--runs", str(options.runs)]
    command += ["--threads", str(options.threads), "--measure"]
    found = {}
    for form in track(_FORMS, "measuring", console=Console(stderr=True)):
        ran = [*command, form, str(model)]
        done = subprocess.run(ran, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{form}: vLLM failed:\n{done.stderr[-2000:]}")
        found[form] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(form: str, folder: str, runs: int) -> dict[str, Any]:
    """Load the model in this process, and rebuild its modules one by one."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from engine_ext.settings import Settings
    from scripts.bench.rebuilt_modules import Modules

    Settings().export()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", folder, "--enforce-eager", "--max-model-len", "256", *_FORMS[form]]
    llm: Any = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(flags)))
    modules = Modules(llm.llm_engine.model_executor.driver_worker.worker, _DENSITY)
    found = modules.figures(runs)
    start = time.perf_counter()
    modules.reload()
    found["reload_ms"] = (time.perf_counter() - start) * 1e3
    return found | modules.shadow_forms(Path(folder)).figures(runs)


def _print(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(
        f"Qwen3, {found['packed']['parameters'] / 1e6:.0f} million parameters, {_DENSITY:.0%} of "
        f"the shadow changed; {options.threads} threads, fastest of {options.runs} runs"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("linear weights", "modules", "ms", "each", "scratch", "shadow", "reload ms"):
        table.add_column(column, justify="right")
    for form, row in found.items():
        table.add_row(
            *(form, f"{row['modules']:.0f}", f"{row['ms']:.0f}"),
            *(f"{row['ms'] / row['modules']:.1f}", f"{row['scratch']:.1f} x"),
            *(f"{row['shadow']:.2f} x", f"{row['reload_ms']:.0f}"),
        )
    console.print(table)
    _print_forms(console, found["fp8_per_channel"])


def _print_forms(console: Console, found: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("shadow", "changed", "ms", "file on disk", "bytes/weight", "page cache"):
        table.add_column(column, justify="right")
    table.add_row("loader layout", "any", f"{found['layout_ms']:.0f}", "-", "2.0", "0")
    for row in found["mapped"]:
        table.add_row(
            *("mapped", f"{row['changed']:.0%}", f"{row['ms']:.0f}", f"{row['cold_ms']:.0f}"),
            *(f"{row['overlay']:.1f}", "2.0"),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
