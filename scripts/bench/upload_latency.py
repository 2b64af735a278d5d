"""Time the tokens of a live vLLM with no upload, and while a large part is uploaded to it.

    python -m scripts.bench.upload_latency
    python -m scripts.bench.upload_latency --layers 1 --runs 1      # to see whether it works

Starts --rounds servers of a random Qwen3 with bf16 weights, one after the other; clients stream
completions from each without pause. Turns without other work alternate with turns in which another
process posts one part with nearly all weights, dense: the engine's HTTP process receives it while
it sends tokens, and its rank checks and stages it while it generates. A turn's small second part
completes the sync, outside the measured time, as a commit pauses generation. The values are those
that the engine has.

columns:
  tokens      that arrived in these times, of all clients
  p50, p99    milliseconds from a token to the next one of the same request
  max         the longest of them
  x none      over those without an upload
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from rich.console import Console
from rich.progress import track

from engine_ext.format import ParamDelta, encode_part
from engine_ext.kernels import bits_of, host_bits
from scripts import command_line
from scripts.bench import frame
from scripts.bench.synthetic_weights import QWEN3_SIZES
from scripts.live_engine.process import HOST, EngineError
from scripts.live_engine.tiny_models import build, load_tensors
from scripts.live_engine.vllm import VllmProcess

_WAYS: Final = ("none", "a part")
_TOKENS: Final = 200  # of each request
_ROUTE: Final = "/update_weights_delta"
_OCTETS: Final = {"Content-Type": "application/octet-stream"}
_FIGURES: Final = ("p50", "p99", "max")

Gap = tuple[float, float]
"""When a token came, by `time.monotonic`, and how many seconds after the one before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = frame.make_parser("upload_latency", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("--runs", type=positive, metavar="N", default=8, help="turns of each (%(default)s)")
    add("--layers", type=positive, metavar="N", default=8, help="of the model (%(default)s)")
    add("--clients", type=positive, metavar="N", default=2, help="at once (%(default)s)")
    add("--rounds", type=positive, metavar="N", default=1, help="servers (%(default)s)")
    options = parser.parse_args(arguments)
    failures = (EngineError, OSError, http.client.HTTPException, httpx.HTTPError, RuntimeError)
    stopped = "interrupted; the engine is stopped"
    return frame.run(options, lambda folder: run(options, folder), failures, stopped)


def run(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Build, start, measure and print; return the figures with and without an upload.

    Raises:
        RuntimeError: an engine refused a part, or a client failed.
    """
    sizes = {**QWEN3_SIZES, "num_hidden_layers": options.layers}
    model = build("qwen3", folder / "model", **sizes)
    measured = Measured()
    for _ in track(range(options.rounds), "measuring", console=Console(stderr=True)):
        measure(model, folder, options, measured)
    found = measured.figures()
    rows = []
    for way, figures in found.items():
        cells = [f"{figures[name]:.1f}" for name in _FIGURES]
        ratios = [f"{figures[name] / found['none'][name]:.2f}" for name in _FIGURES]
        rows.append([way, f"{figures['tokens']:,.0f}", *cells, " ".join(ratios)])
    nbytes = (folder / "0").stat().st_size
    frame.show(
        f"parts of {nbytes / 1e6:.0f} MB; {options.clients} clients; {options.runs} turns",
        ("upload", "tokens", "p50, ms", "p99, ms", "max, ms", "x none"),
        rows,
    )
    return found


def measure(model: Path, folder: Path, options: argparse.Namespace, measured: Measured) -> None:
    """Start an engine, and upload to it `options.runs` times."""
    context = multiprocessing.get_context("spawn")
    engine = VllmProcess(model, enable_delta=True, log_path=folder / "engine.log")
    with (
        engine,
        ProcessPoolExecutor(1, context) as uploader,
        Clients(engine.url, options.clients, measured.gaps) as clients,
    ):
        for turn in range(options.runs + 1):
            uploader.submit(write_parts, model, folder, turn).result()
            begin, end = uploader.submit(post, engine.port, folder / "0").result()
            uploader.submit(post, engine.port, folder / "1").result()
            settled = time.monotonic()
            time.sleep(end - begin)
            clients.check()
            if turn:  # the first one warms up
                measured.windows["a part"].append((begin, end))
                measured.windows["none"].append((settled, time.monotonic()))


class Measured:
    """The tokens that the clients of all engines got.

    Attributes:
        gaps: of all tokens but the first one of each request.
        windows: when, by way, the times were that count.
    """

    def __init__(self) -> None:
        self.gaps: list[Gap] = []
        self.windows: dict[str, list[Gap]] = {way: [] for way in _WAYS}

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the figures by way."""
        return {way: _figures(self.gaps, self.windows[way]) for way in _WAYS}


def write_parts(model: Path, folder: Path, version: int) -> None:
    """Write the two parts of a sync to the next version: nearly all weights, and one tensor."""
    tensors = sorted(load_tensors(model).items(), key=lambda item: -item[1].numel())
    for number, some in enumerate((tensors[:-1], tensors[-1:])):
        deltas = [
            ParamDelta(n, "bfloat16", tuple(t.shape), None, host_bits(bits_of(t.reshape(-1))))
            for n, t in some
        ]
        body = encode_part(
            deltas,
            encoding="indices",
            part=number,
            num_parts=2,
            base_version=version,
            current_version=version + 1,
        )
        (folder / str(number)).write_bytes(body)


def post(port: int, file: Path) -> tuple[float, float]:
    """Post a part; return when that began and when it was answered."""
    body = file.read_bytes()
    connection = http.client.HTTPConnection(HOST, port)
    begin = time.monotonic()
    connection.request("POST", _ROUTE, body, _OCTETS)
    answer = connection.getresponse()
    text, end = answer.read(), time.monotonic()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"the engine answered {answer.status}: {text[:500]!r}")
    return begin, end


class Clients:
    """Clients that stream completions without pause, each in a thread, while in the context.

    Args:
        gaps: receives those of all tokens but the first one of each request.
    """

    def __init__(self, url: str, count: int, gaps: list[Gap]) -> None:
        self._gaps = gaps
        self._url = url
        self._ends = threading.Event()
        self._failed: list[Exception] = []
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        if exception[0] is None:
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if a client failed."""
        if self._failed:
            raise RuntimeError(f"a client failed: {self._failed[0]!r}")

    def _work(self, number: int) -> None:
        body = {"prompt": [3 + number, 4], "max_tokens": _TOKENS, "ignore_eos": True}
        body |= {"stream": True, "temperature": 0.0}
        try:
            with httpx.Client(base_url=self._url, timeout=120.0, trust_env=False) as client:
                while not self._ends.is_set():
                    with client.stream("POST", "/v1/completions", json=body) as answer:
                        answer.raise_for_status()
                        self._read(answer)
        except Exception as error:
            self._failed.append(error)

    def _read(self, answer: httpx.Response) -> None:
        last = None
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            if last is not None:
                self._gaps.append((now, now - last))
            last = now


def _figures(gaps: Sequence[Gap], windows: Sequence[Gap]) -> dict[str, float]:
    """Return the figures of the tokens that came within some times."""
    within = [gap for at, gap in gaps if any(begin <= at <= end for begin, end in windows)]
    if not within:
        raise RuntimeError("no token came while a part was uploaded: more layers take longer")
    p50, p99 = np.quantile(within, (0.5, 0.99)) * 1e3
    return {"tokens": len(within), "p50": p50, "p99": p99, "max": max(within) * 1e3}


if __name__ == "__main__":
    raise SystemExit(main())
