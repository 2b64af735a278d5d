"""Time the digest of weights on an accelerator, and compare it with the time to read them.

    python -m scripts.bench.device_digest
    python -m scripts.bench.device_digest --device cpu --elements 2000000   # to see if it works

All ways digest the same random bf16 weights and must agree; each time is the least of --runs runs.

ways:
  reading      PyTorch's largest word of the same memory: the speed of memory, or near it
  kernel       dense elements, by the Triton kernel
  operators    the same by PyTorch's operators, as without Triton
  column shard every eighth of each row, as a rank of eight holds it: gathered, then operators
  host         copied to the host and digested there by one thread, of at most 2 GB
columns:
  ns           nanoseconds per element
  GB/s         weights digested per second
  x reading    over the time of reading as many elements
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable, Sequence
from typing import Any, Final
from unittest import mock

import torch

from engine_ext.format import Digest, device_digest, digest_on_device, tensor_digest
from engine_ext.kernels import bits_of, host_bits
from engine_ext.kernels.triton import runs_kernels
from scripts import command_line
from scripts.bench import frame
from scripts.bench.sender_device import missing_device

_HOST_ELEMENTS: Final = 1 << 30
_ROW: Final = 8192  # elements of a row of the column shards' tensor
_NAME: Final = "model.layers.0.mlp.down_proj.weight"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = frame.make_parser("device_digest", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("--elements", type=positive, metavar="N", default=1 << 32, help="(%(default)s)")
    add("--runs", type=positive, metavar="N", default=10, help="of each way (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of the weights (%(default)s)")
    options = parser.parse_args(arguments)
    if missing := missing_device(options.device):
        parser.error(missing)
    return frame.run(options, lambda _: _measure(options), (RuntimeError,))


def _measure(options: argparse.Namespace) -> dict[str, float]:
    """Print and return the nanoseconds per element of each way.

    Raises:
        RuntimeError: two ways disagree.
    """
    device, size = torch.device(options.device), -(-options.elements // _ROW) * _ROW
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.empty(size, dtype=torch.bfloat16, device=device)
    weights.normal_(0, 0.02, generator=generator)
    bits, found = bits_of(weights), dict[str, float]()

    def timed(way: str, elements: int, digest: Callable[[], Any]) -> Any:
        result = digest()  # compiles what is to be compiled
        found[way] = min(timeit.repeat(digest, repeat=options.runs, number=1)) / elements * 1e9
        return result

    timed("reading", size, lambda: int(bits.amax()))
    digests: dict[str, Digest] = {}
    if device.type == "cuda":
        if not runs_kernels(device):
            raise RuntimeError("the Triton kernels do not run on this device")
        digests["kernel"] = timed("kernel", size, lambda: device_digest(_NAME, bits))
    with mock.patch.object(digest_on_device, "runs_kernels", return_value=False):
        digests["operators"] = timed("operators", size, lambda: device_digest(_NAME, bits))
    places = torch.arange(size, device=device).view(-1, 8, _ROW // 8)
    shard = places[:, 3].reshape(-1)

    def column_shard() -> Digest:
        return device_digest(_NAME, bits[shard], shard)

    timed("column shard", shard.numel(), column_shard)
    some = bits[:_HOST_ELEMENTS]
    timed("host", some.numel(), lambda: tensor_digest(_NAME, host_bits(some.cpu())))
    digests["host"] = tensor_digest(_NAME, host_bits(bits.cpu()), threads=8)
    if len(set(digests.values())) != 1:
        raise RuntimeError(f"the ways disagree: {digests}")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU"
    frame.show(
        f"{options.elements:,} elements of 2 bytes on {name}; fastest of {options.runs}",
        ("way", "ns", "GB/s", "x reading"),
        (
            (way, f"{each:.5f}", f"{2 / each:.1f}", f"{each / found['reading']:.1f}")
            for way, each in found.items()
        ),
    )
    return found


if __name__ == "__main__":
    raise SystemExit(main())
