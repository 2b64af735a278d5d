"""Record what syncs really change in live memory, and compare with an earlier recording.

The weights of an engine are copied before and after each commit. For every tensor that changed, the
recording has a count and one hash of all (flat index, old bits, new bits), by rank and live name.
Nothing of the receiver is known here but its HTTP interface:

- ``toys``: every toy model and sync of the conformance suite, in every encoding, with the ranks in
  one process (``tests.conformance.written``, which is run as a program).
- real models on a live vLLM, with one rank and two: a seeded step in every encoding, a dense step,
  a rollback, and a full sync.

Start-ups of real engines take a minute each; ``--only`` records one of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from delta_sender import DeltaSender
from scripts.freeze.bodies import ENCODINGS
from scripts.freeze.recording import Recording, add_options, finish
from scripts.freeze.worker_memory import EXTENSION
from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.vllm import VllmProcess

# Architectures of `tiny_models`, and formats of `quantised_checkpoints`.
MODELS: Final = ("llama_tied", "qwen3_moe", "gemma3", "qwen3_next", "mamba2", "deepseek_v3")
QUANTISED: Final = ("w8a8", "fp8_channel")
_TPS: Final = (1, 2)
_TOYS: Final = "tests.conformance.written"
Weights = dict[str, torch.Tensor]


def recorders() -> dict[str, Callable[[], Recording]]:
    """Return the recordings, by name."""
    found: dict[str, Callable[[], Recording]] = {"toys": toys}
    for model in (*MODELS, *QUANTISED):
        for tp in _TPS:
            found[f"{model} tp{tp}"] = partial(live, model, tp)
    return found


def toys() -> Recording:
    """Record the toy models of the conformance suite."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        subprocess.run([sys.executable, "-m", _TOYS, str(out)], check=True)
        found: Recording = json.loads(out.read_text())
        return found


def live(model: str, tp: int) -> Recording:
    """Record one model on a live vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "model")
        build = quantised_checkpoints if model in quantised_checkpoints.FORMATS else tiny_models
        build.build(model, checkpoint)
        dtype = quantised_checkpoints.serving_dtype(model)
        arguments = ["--worker-extension-cls", EXTENSION, "--dtype", dtype]
        with VllmProcess(checkpoint, tp=tp, enable_delta=True, extra_args=arguments) as engine:
            refused = sorted(engine.delta_status().health.uncertified)
            found: Recording = {"refused": refused}
            for name, sync in syncs(engine, tiny_models.load_tensors(checkpoint), set(refused)):
                _call(engine, "freeze_remember")
                sync()
                found[name] = _call(engine, "freeze_changes")
            return found


def syncs(
    engine: EngineProcess, weights: Weights, refused: set[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the steps done with an engine, and the name by which each is recorded."""
    for seed, encoding in enumerate(ENCODINGS):
        old, weights = weights, stepped(weights, seed, refused)
        yield encoding, partial(send, engine, old, weights, encoding=encoding)
    old, weights = weights, stepped(weights, 98, refused, everything=True)
    yield "dense", partial(send, engine, old, weights, encoding="gap8_exp")
    yield "rollback", lambda: engine.post("/delta_rollback", json={}).raise_for_status()
    weights = old
    if not refused:
        full = stepped(weights, 99, refused)
        yield "full", partial(send, engine, weights, full, is_full=True)


def stepped(weights: Weights, seed: int, refused: set[str], *, everything: bool = False) -> Weights:
    """Return the weights after a seeded step; those that an engine refuses stay as they are.

    Args:
        everything: Take the values of ten steps, so that much more changes.
    """
    found = weights
    for turn in range(10 if everything else 1):
        found = quantised_checkpoints.step(found, 1000 * (turn + 1) + seed)
    return {name: weights[name] if name in refused else one for name, one in found.items()}


def send(
    engine: EngineProcess, old: Weights, new: Weights, *, is_full: bool = False, **options: Any
) -> None:
    """Bring an engine from some weights to others with a sender of its own."""
    with DeltaSender(engine.url, old.items(), full="allow", takeover=True, **options) as sender:
        report = sender.sync_full(new.items()) if is_full else sender.sync(new.items())
    if report.full != is_full:
        raise RuntimeError(f"the sync was full: {report.full}")


def _call(engine: EngineProcess, method: str) -> dict[str, Any]:
    answer = engine.post("/collective_rpc", json={"method": method}).raise_for_status().json()
    rows = [rank for rank in answer["results"] if isinstance(rank, dict)]
    return {name: row for rank in rows for name, row in rank.items()}


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="scripts.freeze.writes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser)
    every = recorders()
    parser.add_argument(
        "--only", action="append", default=[], choices=every, help="record this one; repeatable"
    )
    arguments = parser.parse_args(given)
    recording: Recording = {}
    for name in arguments.only or every:
        recording[name] = every[name]()
        print(f"{name}: {len(recording[name])} recorded", flush=True)
    return finish(recording, arguments, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
