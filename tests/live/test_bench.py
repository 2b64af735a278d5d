"""The apply benchmark on a smaller model: complete, and interrupted."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from scripts.bench import apply
from tests.live.programs import left_in, start

SCRIPT = "bench.apply"


@pytest.mark.full
def test_every_way_leaves_the_bits_of_a_load(tmp_path: Path) -> None:
    process = start(SCRIPT, tmp_path, "--layers", "1", "--runs", "1", "--threads", "2", "--json")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]
    found = json.loads(out.splitlines()[-1])
    faster = {f"{way}_vs_{other}" for way in ("scatter", "served") for other in ("masked", "vllm")}
    assert found.keys() == {*faster, "served_vs_scatter"}
    for way in faster:
        assert found[way].keys() == {"0.006", "0.02", "0.03"}
        assert all(times > 1 for times in found[way].values())
    assert left_in(tmp_path) == []


@pytest.mark.full
def test_upload_latency(tmp_path: Path) -> None:
    process = start("bench.upload_latency", tmp_path, "--layers", "1", "--runs", "1", "--json")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]
    found = json.loads(out.splitlines()[-1])
    assert found.keys() == {"none", "a part"}
    assert all(0 < figures["p50"] <= figures["p99"] <= figures["max"] for figures in found.values())
    assert left_in(tmp_path) == []


@pytest.mark.full
@pytest.mark.usefixtures("interruptible")
def test_interrupted_it_cleans_up(tmp_path: Path) -> None:
    process = start(SCRIPT, tmp_path, "--layers", "1")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("delta-bench-*/*/model.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-4000:]
    assert "interrupted" in err
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("wrong", [["--threads", "0"], ["--device", "tpu"], ["more"]])
def test_bad_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        apply.main(wrong)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err
