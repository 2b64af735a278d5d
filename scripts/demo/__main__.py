"""Train a small policy against a live engine, sync every step as a delta, and check every weight.

    python -m scripts.demo                        # vLLM, 12 steps
    python -m scripts.demo --engine sglang

Builds a small random Qwen3-style model, starts an engine with --enable-delta-updates, and runs
policy-gradient steps on completions sampled from the live engine. After each step only the
weights that changed are sent. At the end the trainer's checkpoint is loaded into a second, fresh
engine, and the checksums of every live parameter and buffer of the two engines are compared.

columns:
  step                    of training
  reward                  mean reward of the step's completions
  density                 changed elements / elements of the model
  full bytes, wire bytes  bytes of all weights, and bytes that were sent
  encode ms               time in which the sender found and encoded the changes
  stage ms                time in which the engine decoded, checked and staged them
  pause ms                time for which generation was paused
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from delta_sender import DeltaSender, SyncError, SyncReport
from delta_sender.options import CHOICES
from scripts import command_line
from scripts.demo.policy import Sample, Trainer, build_policy, reward
from scripts.live_engine.fingerprint import fingerprint, verify
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.live_engine.registry import ENGINES
from scripts.live_engine.tiny_models import load_tensors, save_checkpoint

PROMPTS: Final = (
    "the quick",
    "a reward is",
    "Once upon",
    "weights",
    "The trainer",
    "def add(",
    "In 2024",
    "a policy",
)
SAMPLES_PER_PROMPT: Final = 24
COMPLETION_TOKENS: Final = 8
_COLUMNS: Final = (
    "step",
    "reward",
    "density",
    "full bytes",
    "wire bytes",
    "encode ms",
    "stage ms",
    "pause ms",
)
_EPILOG: Final = """\
The last line on stdout is one JSON object: engine, steps, params (elements of the model),
mean_density (changed elements / params, mean of the steps), full_bytes and wire_bytes (totals of
all steps: what full syncs would have taken, and what was sent), verified.

exit status: 0 verified; 1 not verified, or an engine failed; 2 bad usage; 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    options = parse_arguments(arguments)

    def program() -> int:
        console = Console(markup=False, highlight=False, soft_wrap=not sys.stdout.isatty())
        with command_line.working_folder(options.keep, "delta-demo-") as folder:
            result = run(options, folder, console)
        print(json.dumps(result), flush=True)
        return 0 if result["verified"] else 1

    failures = (EngineError, SyncError, httpx.HTTPError)
    return command_line.run(program, failures, "interrupted; the engines are stopped")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("scripts.demo", __doc__, _EPILOG)
    add = parser.add_argument
    positive = command_line.at_least(1)
    add("--engine", choices=sorted(ENGINES), default="vllm", help="engine to update (%(default)s)")
    add("--steps", type=positive, metavar="N", default=12, help="training steps (%(default)s)")
    rate_help = "AdamW's; decides how many weights change per step (%(default)s)"
    add("--learning-rate", type=float, metavar="RATE", default=1e-6, help=rate_help)
    add("--seed", type=int, metavar="N", default=0, help="of model and sampling (%(default)s)")
    keep_help = "keep the checkpoints and the engines' logs in this new or empty folder"
    add("--keep", type=Path, metavar="DIR", help=keep_help)
    encoding_help = "encoding of the changes (%(default)s)"
    add("--encoding", choices=CHOICES, default="deltas_zstd", help=encoding_help)
    options = parser.parse_args(arguments)
    if options.keep and options.keep.exists() and not options.keep.is_dir():
        parser.error(f"--keep: {options.keep} is no folder")
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep: {options.keep} is not empty")
    return options


def run(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Train, sync and verify; return the object that is printed last."""
    base = build_policy(folder / "base", seed=options.seed)
    trainer = Trainer(base, learning_rate=options.learning_rate, seed=options.seed)
    kind = ENGINES[options.engine]
    console.print(f"starting {kind.name} on the base checkpoint")
    with kind(base, enable_delta=True, log_path=folder / "live-engine.log") as engine:
        before = fingerprint(engine)
        reports = train(engine, trainer, base, options, console)
        live = fingerprint(engine)
    version = reports[-1].version
    final = save_checkpoint(base, folder / f"version-{version}", trainer.tensors())
    console.print(f"starting a fresh {kind.name} on the trainer's checkpoint, version {version}")
    flag, log = ["--delta-base-version", str(version)], folder / "fresh-engine.log"
    with kind(final, enable_delta=True, extra_args=flag, log_path=log) as engine:
        fresh = fingerprint(engine)
    return {
        "engine": options.engine,
        "steps": len(reports),
        "params": reports[-1].numel,
        "mean_density": round(sum(r.density for r in reports) / len(reports), 6),
        "full_bytes": sum(report.full_bytes for report in reports),
        "wire_bytes": sum(report.wire_bytes for report in reports),
        "verified": verify(before, live, fresh, console),
    }


def train(
    engine: EngineProcess,
    trainer: Trainer,
    base: Path,
    options: argparse.Namespace,
    console: Console,
) -> list[SyncReport]:
    """Sample from the engine, train a step and send what changed, in a loop.

    Raises:
        SyncError: The engine refused a delta, or was not at the base version.
    """
    reports: list[SyncReport] = []
    started = time.perf_counter()
    sender = DeltaSender(engine.url, load_tensors(base).items(), encoding=options.encoding)
    seconds = time.perf_counter() - started
    console.print(f"the sender is ready after {seconds:.1f} s: it has compiled or loaded its loops")
    with sender, Progress(console) as progress:
        for step in range(1, options.steps + 1):
            samples = sample(engine, seed=options.seed * 1_000_003 + step)
            trainer.step(samples)
            report = sender.sync(trainer.tensors().items())
            if report.full:
                raise SyncError(f"step {step}: the engine was not at the base version")
            reports.append(report)
            mean_reward = sum(s.reward for s in samples) / len(samples)
            progress.add(step, mean_reward, report)
    return reports


def sample(engine: EngineProcess, *, seed: int) -> list[Sample]:
    """Sample completions of every prompt from the live engine, with their rewards."""
    answer = engine.complete(
        PROMPTS,
        n=SAMPLES_PER_PROMPT,
        max_tokens=COMPLETION_TOKENS,
        temperature=1.0,
        seed=seed,
        return_token_ids=True,
    )
    return [
        Sample(choice["prompt_token_ids"], choice["token_ids"], reward(choice["text"]))
        for choice in answer["choices"]
    ]


class Progress:
    """Prints one row per step: a live table on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for name in _COLUMNS:
            self._table.add_column(name, justify="right")
        self._live = Live(self._table, console=console) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        else:
            self._console.print("  ".join(f"{name:>10}" for name in _COLUMNS))
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:
            self._live.stop()

    def add(self, step: int, mean_reward: float, report: SyncReport) -> None:
        """Print one step."""
        timings = report.engine["timings_ms"]
        cells = [str(step), f"{mean_reward:.3f}", f"{report.density:.2%}"]
        cells += [f"{report.full_bytes:,}", f"{report.wire_bytes:,}", f"{report.encode_ms:.1f}"]
        cells += [f"{timings[name]:.1f}" for name in ("stage_ms", "pause_ms")]
        if self._live:
            self._table.add_row(*cells)
            self._live.refresh()
        else:
            self._console.print("  ".join(f"{cell:>10}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
