"""The sender benchmark on little data: what it prints, and that its links are so slow."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from delta_sender.diff import snapshot
from scripts.bench import memory_read, sender, sender_device, synthetic_weights

pytestmark = pytest.mark.slow


def test_the_last_line_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_weights, "PARAM", 1 << 20)
    for name in ("_PROMPTS", "_SAMPLES", "_COMPLETION_TOKENS"):
        monkeypatch.setattr(f"scripts.bench.real_steps.{name}", 2)
    arguments = ["--elements", "2500001", "--threads", "2", "--repeats", "1", "--json"]
    arguments += ["--real-steps", "2"]
    assert sender.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    densities = [str(density) for density in synthetic_weights.DENSITIES]
    for what in ("diff_vs_read", "refresh_vs_read"):
        assert list(found[what]) == densities
        assert all(ratio > 0 for ratio in found[what].values())
    for what in ("sync_ms", "real_sync_ms"):
        assert list(found[what]) == list(sender.LINKS)
        for times in found[what].values():
            assert list(times) == list(sender.SENT_AS)


@pytest.mark.parametrize("speed", [1e6, 1e9])
def test_a_simulated_link(speed: float) -> None:
    old = synthetic_weights.make_weights(100_000, np.random.default_rng(0))
    new = synthetic_weights.change(old, 0.1, np.random.default_rng(1))
    start = time.perf_counter()
    before, after = sender.tensors(old), sender.tensors(new)
    seconds, report = sender.sync_over(speed, "auto", before, [after, before], bucket_bytes=1 << 20)
    assert report.wire_bytes / speed <= seconds <= time.perf_counter() - start
    assert report.nnz == np.count_nonzero(old != new)
    assert report.version == 2  # the first is not counted


@pytest.mark.parametrize("kept_on", ["device", "host"])
def test_the_passes_on_a_device(kept_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on the CPU, taken for a device."""
    monkeypatch.setattr(snapshot, "is_on_device", lambda tensor: True)
    bits = synthetic_weights.make_weights(10_000, np.random.default_rng(0))
    old, new = (sender.tensors(side) for side in (bits, bits ^ np.uint16(1)))
    times = sender_device.measure(
        old, new, kept_on, bits.size, lambda do: memory_read.fastest(do, 2)
    )
    assert list(times) == ["read", "diff", "refresh"]
    assert min(times.values()) > 0
    with pytest.raises(AssertionError, match="did not find every change"):
        sender_device.measure(old, new, kept_on, 1, lambda do: 0.0)


def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_status:
        sender.main(["--device", "cuda"])
    assert exit_status.value.code == 2
    assert "finds no CUDA device; run this on a machine that has one" in capsys.readouterr().err


def test_the_read_is_of_all_words() -> None:
    old = np.zeros(4_000_000, np.uint16)
    read = memory_read.reader()
    assert read(old.view(np.uint64), old.view(np.uint64)) == 0
    with ThreadPoolExecutor(1) as pool:
        assert sender.read_time(old, old, pool, 1) > 0
