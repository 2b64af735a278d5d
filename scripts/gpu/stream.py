"""A client that streams tokens without end, and the gaps between them."""

from __future__ import annotations

import contextlib
import threading
import time
from itertools import pairwise
from typing import Any

import httpx

from scripts.gpu.engine import MODEL, GpuVllm, on_cpu


class Stream:
    """A client of an engine; the gaps between its tokens are what a user feels."""

    def __init__(self, engine: GpuVllm) -> None:
        self._url, self._times, self._ended = engine.url, list[float](), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Stream:
        self._thread.start()
        time.sleep(2.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._ended.set()
        self._thread.join(30 if kind is None else 2)  # an interrupted program has little time

    def gaps(self, start: float, end: float) -> dict[str, float]:
        """Return the median and the largest gap, in ms, of the tokens from `start` to `end`."""
        time.sleep(max(0.0, end - time.monotonic()))
        inside = [one for one in self._times if start <= one <= end]
        found = sorted(1e3 * (after - before) for before, after in pairwise(inside))
        if not found:
            return {}
        return {"median": round(found[len(found) // 2], 1), "largest": round(found[-1], 1)}

    def _run(self) -> None:
        body = {
            **{"model": MODEL, "prompt": "x" * 64, "temperature": 0, "ignore_eos": True},
            **{"max_tokens": 100 if on_cpu() else 1800, "stream": True},
        }
        while not self._ended.is_set():
            with contextlib.suppress(httpx.HTTPError):
                self._read(body)
            self._ended.wait(0.05)

    def _read(self, body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    self._times.append(time.monotonic())
                if self._ended.is_set():
                    return
