"""Time what one rank does for a full sync, stage by stage, over three reads of the weights.

    python -m scripts.bench.full_sync
    python -m scripts.bench.full_sync --layers 2 --runs 1      # to see whether it works

Builds the model of `scripts.bench.startup` with random weights and applies full syncs of other
random weights, in parts of 64 MiB: decoded from memory, staged, and committed as a rank of an
engine does it, without an engine, HTTP or a link. Every time is the shortest of --runs runs; reads
of the weights take turns with the syncs. A full sync takes its old values into the undo log, as
engines do whose weights fit into it; all but the first one use the memory of the log before.

stages:
  read, three times     of all weights, by as many threads
  decode                verify the parts' checksums and headers, several parts at once
  stage                 find the places, digest the new values
  commit                checks, old values into the undo log, new ones into memory
columns:
  ms, x read            milliseconds, and over three reads
  CPU ms                of all threads, the least of the runs
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from scripts.bench import frame

_READ: Final = "read, three times"
_PART_BYTES: Final = 64 << 20  # a sender's default; a larger tensor is a part of its own
_EPILOG: Final = """\
With --json the last line on stdout is one JSON object: bytes, threads, seconds (by stage, on the
clock and of all processors), ratio (of decode, stage and commit to three reads).

exit status: 0 measured and verified; 1 live memory is not what was sent; 2 bad usage;
130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # torch reads it when it is imported
    return frame.run(options, lambda _: run(options), (RuntimeError,))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = frame.make_parser("full_sync", __doc__, _EPILOG)
    frame.add_model_options(parser, runs=7, layers=8)
    return parser.parse_args(arguments)


def _parts(nbytes: dict[str, int]) -> list[list[str]]:
    """Divide tensors, by name with their bytes, into the parts that a sender makes of them."""
    parts: list[list[str]] = []
    free = 0
    for name, size in nbytes.items():
        if size > free:
            parts.append([])
            free = _PART_BYTES
        parts[-1].append(name)
        free -= size
    return parts


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Build, measure and print; return the JSON object.

    Raises:
        RuntimeError: a sync was refused, or left other bits.
    """
    import torch

    from engine_ext.format import Digest, ParamDelta, decode_part, encode_part, tensor_digest
    from engine_ext.kernels import bits_of, host_bits
    from engine_ext.model import StorageIndex
    from engine_ext.placement import TensorSpec, certify_placement, make_plan
    from engine_ext.ranks import SingleRank
    from engine_ext.settings import Settings
    from engine_ext.startup import LoaderDryRun
    from engine_ext.sync import DeltaApplier, UndoLog
    from scripts.bench.loaded_model import checkpoint_of, load_weights, make_model
    from scripts.bench.startup import reading_time

    model = make_model(options.layers)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape).mul_(0.02))
    base = dict(checkpoint_of(model))
    index = StorageIndex(model)
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in base.items()]
    placement = LoaderDryRun(model, lambda found: load_weights(model, found), index).trace(specs)
    certified = certify_placement(placement, base.items(), threads=options.threads)
    plan = make_plan(placement, SingleRank())
    undo_bytes = Settings().undo_bytes
    applier = DeltaApplier(
        *(model, index, plan),
        undo_bytes=undo_bytes,
        threads=options.threads,
        certified=certified,
    )

    def digest() -> Digest:
        return Digest.total(applier.plan.scan(options.threads).values())

    digests = dict(applier.digests)
    groups = _parts({name: tensor.nbytes for name, tensor in base.items()})
    syncs: list[list[bytearray]] = []
    sent = []
    for flipped in (1, 0):
        bodies = []
        for number, names in enumerate(groups):
            deltas = []
            for name in names:
                values = host_bits(bits_of(base[name].view(-1))) ^ flipped
                shape = tuple(base[name].shape)
                deltas.append(ParamDelta(name, "bfloat16", shape, None, values))
                digests[name] = tensor_digest(name, values, threads=options.threads)
            metadata: Any = {"current_version": 1, "full": True}
            metadata |= {"part": number, "num_parts": len(groups)}
            # Memory that could be written to, like the spool file that an engine maps.
            bodies.append(bytearray(encode_part(deltas, encoding="indices", **metadata)))
        syncs.append(bodies)
        sent.append(Digest.total(digests.values()))
    del base

    seconds: dict[str, tuple[float, float]] = {}
    logs: list[UndoLog] = []

    def keep(stage: str, clock: float, processors: float) -> None:
        known = seconds.get(stage, (clock, processors))
        seconds[stage] = min(known[0], clock), min(known[1], processors)

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    pool = ThreadPoolExecutor(options.threads)
    for number in range(2 * options.runs):
        reading = 3 * reading_time(model, options.threads)
        keep(_READ, reading, reading * options.threads)
        times = [now()]
        parts = list(pool.map(decode_part, syncs[number % 2]))
        times.append(now())
        staged = [applier.stage(part) for part in parts]
        times.append(now())
        applier.check_sync(staged, full=True)
        applier.check_base(staged)
        applier.agree(staged, [applier.rank_summary(staged)])
        applier.write(staged, logs)
        log = applier.finish(staged)
        logs = [] if log is None else [log]
        times.append(now())
        for stage, start, end in zip(("decode", "stage", "commit"), times, times[1:], strict=False):
            keep(stage, end[0] - start[0], end[1] - start[1])
        if digest() != sent[number % 2]:
            raise RuntimeError("live memory is not what was sent")
        del parts, staged

    ours = [seconds[stage] for stage in ("decode", "stage", "commit")]
    seconds["full sync"] = sum(one[0] for one in ours), sum(one[1] for one in ours)
    size, ratio = sum(p.nbytes for p in model.parameters()), seconds["full sync"][0]
    ratio /= seconds[_READ][0]
    frame.show(
        f"{size / 1e6:.0f} MB of bfloat16 weights, {options.threads} threads, fastest of "
        f"{2 * options.runs} runs",
        ("stage", "ms", "x read", "CPU ms"),
        (
            (stage, f"{ms * 1e3:.1f}", f"{ms / seconds[_READ][0]:.2f}", f"{cpu * 1e3:.1f}")
            for stage, (ms, cpu) in seconds.items()
        ),
    )
    return {"bytes": size, "threads": options.threads, "seconds": seconds, "ratio": ratio}


if __name__ == "__main__":
    raise SystemExit(main())
