"""The pipeline benchmark on little data: what it prints, and that its link is so slow."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from delta_sender.encode import sync_round
from scripts.bench import pipeline, pipeline_link, pipeline_receiver

pytestmark = pytest.mark.slow


def test_the_last_line_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its senders post several parts at once to the real endpoints, and every sync commits."""
    monkeypatch.setattr(pipeline, "_PARAM", 1 << 16)
    monkeypatch.setattr(sync_round, "MOST_ENCODERS", sync_round.MOST_ENCODERS)  # restored then
    arguments = ["--elements", "700000", "--repeats", "1", "--round-trip", "4", "--json"]
    arguments += ["--megabytes-per-second", "20", "--bucket-bytes", "65536"]
    assert pipeline.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["20"]
    assert list(found["stages_ms"]) == list(pipeline.STAGES)
    assert list(found["wall_ms"]) == list(pipeline.ways(4))
    assert found["parts"] > 5
    slowest = max(ms for name, ms in found["stages_ms"].items() if name != "cores")
    for way, ms in found["wall_ms"].items():
        assert ms >= 4
        assert found["over_slowest"][way] == pytest.approx(ms / slowest, abs=0.02)


def test_the_link() -> None:
    nbytes = 2_000_000
    with pipeline.process(pipeline_link.serve, 1, 20e6, 0.05) as ((_, sink), _):
        start = time.perf_counter()
        seconds = pipeline_link.send_through(sink, nbytes)
        assert 0.05 + nbytes / 20e6 <= seconds <= time.perf_counter() - start


def test_what_the_receiver_stages_alone_is_the_sync() -> None:
    bits = np.arange(2 * pipeline._PARAM, dtype=np.uint32).astype(np.uint16)
    old, new = pipeline.make_tensors(bits), pipeline.make_tensors(bits ^ np.uint16(1))
    options = pipeline.parse_arguments([])
    ours = pipeline.Stages(old, new, options)
    assert ours.diff() > 0
    bodies = ours.encode()[1]
    theirs = pipeline_receiver.Stages(old, bodies)
    assert theirs.receive() > 0
    assert theirs.stage() > 0
    assert theirs.stage() > 0  # the same parts, as nothing was written
    assert len(theirs._spooled) == len(bodies)
    theirs.close()
