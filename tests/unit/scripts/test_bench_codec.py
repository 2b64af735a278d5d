"""The codec benchmark on little data: what it prints, and that sizes are near what is possible."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine_ext.format import ENCODINGS
from scripts.bench import codec, synthetic_weights

pytestmark = pytest.mark.slow


def test_the_last_line_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("_PROMPTS", "_SAMPLES", "_COMPLETION_TOKENS"):
        monkeypatch.setattr(f"scripts.bench.real_steps.{name}", 2)
    arguments = ["--elements", "2000000", "--threads", "1", "--repeats", "1", "--json"]
    arguments += ["--real-steps", "2", "--plot", str(tmp_path / "sizes.png")]
    assert codec.main(arguments) == 0
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    densities = [str(density) for density in synthetic_weights.DENSITIES]
    ratios = ["decode_and_scatter_vs_scatter", "encode_alone_vs_read", "decode_vs_read"]
    for what in ["bytes_per_element", "floor", *ratios]:
        assert list(found[what]) == list(ENCODINGS)
        assert all(list(row) == densities for row in found[what].values())
    assert found["encode_vs_plain_torch"] > 0
    assert found["encode_vs_read"] > 0
    real, floor = found["real_bytes_per_element"], found["real_floor"]
    for encoding in ("gap8_exp", "gap8_ulp"):
        assert len(real[encoding]) == len(codec.LEARNING_RATES)
        # The header of a small model is some percent.
        assert all(1 < real[encoding][d] / floor[encoding][d] < 1.4 for d in real[encoding])
    for encoding in ENCODINGS:
        for density in densities:
            ratio = (
                found["bytes_per_element"][encoding][density] / found["floor"][encoding][density]
            )
            assert ratio > 1
            if encoding.startswith("gap8") and float(density) >= 0.02:
                assert ratio < 1.03


def test_float16_is_near_what_is_possible_too(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--elements", "2000000", "--threads", "1", "--repeats", "1", "--json"]
    arguments += ["--dtype", "float16", "--real-steps", "0"]
    assert codec.main(arguments) == 0
    out = capsys.readouterr().out
    assert "2,000,000 elements of float16" in out
    found = json.loads(out.splitlines()[-1])
    for encoding, most in (("gap8_exp", 1.02), ("gap8_ulp", 1.03)):
        for density in ("0.02", "0.03", "0.1"):
            size = found["bytes_per_element"][encoding][density]
            assert 1 < size / found["floor"][encoding][density] < most


def test_the_data_is_what_it_says() -> None:
    rng = np.random.default_rng(0)
    old = synthetic_weights.make_weights(1_000_000, rng)
    new = synthetic_weights.change(old, 0.02, rng)
    steps = (new - old)[new != old].view(np.int16)
    assert abs(steps.size / old.size - 0.02) < 0.001
    shares = [np.mean(abs(steps) == size) for size in (1, 2, 3, 4)]
    assert np.allclose(shares, [0.89, 0.05, 0.03, 0.015], atol=0.01)
    assert abs(np.mean(steps > 0) - 0.5) < 0.02
