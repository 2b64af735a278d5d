"""A whole survey finds what is stored, and one that is interrupted leaves nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import msgspec
import pytest

from scripts.survey.results import Result, stored
from tests.live.programs import left_in, start


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_stored_results_are_current(tmp_path: Path) -> None:
    process = start("survey", tmp_path, "--json")
    out, err = process.communicate(timeout=1700)
    assert process.returncode == 0, err[-4000:]
    found = msgspec.json.decode(out, type=list[Result])
    assert {r.name: r.signature for r in found} == {r.name: r.signature for r in stored()}
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_survey_leaves_nothing(tmp_path: Path) -> None:
    process = start("survey", tmp_path, "--only", "LlamaForCausalLM")
    end = time.monotonic() + 200
    while not list(tmp_path.glob("delta-survey-*/*/model/config.json")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err[-4000:]
    assert "vLLM's processes are stopped" in err
    assert left_in(tmp_path) == []
