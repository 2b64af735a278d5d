"""The benchmarks of syncs to a live engine on a smaller model: complete, and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from scripts.bench import end_to_end
from scripts.bench.end_to_end import LINKS, SENT_AS
from tests.live.programs import left_in, start

SCRIPT = "bench.end_to_end"
SYNCS = ("delta", "full")  # of the carriers


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name, as the paths of the engine's sockets in it are limited."""
    return tmp_path_factory.mktemp("e2e")


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_way_over_every_link(engine: str, temporary: Path) -> None:
    options = ["--engine", engine, "--layers", "1", "--runs", "2", "--threads", "2", "--json"]
    process = start(SCRIPT, temporary, *options)
    out, err = process.communicate(timeout=580)
    assert process.returncode == 0, err[-4000:]
    found = json.loads(out.splitlines()[-1])
    assert found["engine"] == engine
    assert list(found["syncs"]) == [*LINKS]
    for link, ways in found["syncs"].items():
        assert list(ways) == [*SENT_AS, "full", "reload"]
        for way, row in ways.items():
            assert 0 < row["pause_ms"] <= row["ms"] <= row["slowest_ms"]
            # Without a link a reload is a pause from its begin to its end.
            assert row["pause_ms"] < row["ms"] or (link, way) == ("no link", "reload")
            assert row["ms"] >= 1e3 * row["nbytes"] / LINKS[link]
            assert way in ("full", "reload") or row["nbytes"] < ways["reload"]["nbytes"] / 10
        assert ways["gap8_ulp"]["nbytes"] < ways["gap8_exp"]["nbytes"] < ways["deltas"]["nbytes"]
    assert left_in(temporary) == []


@pytest.mark.full
def test_every_carrier(temporary: Path) -> None:
    """The script itself compares the engine's memory with what was sent."""
    process = start("gpu.carriers", temporary, "--size", "tiny", "--runs", "1", "--json")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]
    rows = json.loads(out.splitlines()[-1])
    kinds = [(carrier, sync) for carrier in ("http", "memory", "gloo") for sync in SYNCS]
    assert [(row["carrier"], row["sync"]) for row in rows] == kinds
    assert len({(row["sync"], row["bytes"]) for row in rows}) == len(SYNCS)
    assert left_in(temporary) == []


@pytest.mark.full
@pytest.mark.usefixtures("interruptible")
def test_interrupted_it_stops_the_engine(temporary: Path) -> None:
    process = start(SCRIPT, temporary, "--layers", "1", "--threads", "2")
    deadline = time.monotonic() + 200
    while not list(temporary.glob("delta-bench-*/engine.log")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-4000:]
    assert "the engine is stopped" in err
    assert left_in(temporary) == []
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(temporary) not in running.stdout


@pytest.mark.parametrize("wrong", [["--engine", "other"], ["--runs", "none"], ["more"]])
def test_bad_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        end_to_end.main(wrong)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err
