"""The benchmarks that need no engine but for a GPU: here on the CPU, with little to do."""

from __future__ import annotations

import json
import os
from unittest import mock

import pytest
import torch

from engine_ext.format import Digest
from scripts.bench import apply, device_digest


def test_the_digests_agree_and_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--elements", "10000", "--runs", "1", "--json"]
    assert device_digest.main(arguments) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert list(found) == ["reading", "operators", "column shard", "host"]
    assert all(found[way] > 0 for way in found)
    assert "x reading" in out


def test_a_wrong_digest_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(device_digest, "device_digest", return_value=Digest(1, 2)):
        assert device_digest.main(["--device", "cpu", "--elements", "10000", "--runs", "1"]) == 1
    assert "the ways disagree" in capsys.readouterr().err


def test_a_missing_device_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        pytest.raises(SystemExit, match="2"),
    ):
        device_digest.main([])
    assert "finds no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_the_apply_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    threads = str(torch.get_num_threads())
    arguments = ["--without-engine", "--layers", "1", "--runs", "1", "--threads", threads, "--json"]
    with mock.patch.dict(os.environ):  # the benchmark sets variables for vLLM
        assert apply.main(arguments) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert set(found["served_vs_masked"]) == {"0.006", "0.02", "0.03"}
    assert "scatter_vs_vllm" not in found
    assert "all ways leave a load's bits" in out
