"""vLLM, patched: a copy of the installed package, never the installed one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_ext.ranks.operations import GetStatus, decode_answers
from engine_ext.ranks.replies import RankReport
from scripts import apply_patches
from scripts.live_engine import tiny_models
from scripts.live_engine.vllm import VllmProcess
from tests.patches import copies, inspect_vllm, vllm_offline
from tests.patches.copies import ROOT
from tests.support.plain_trainer import Trainer, container
from tests.support.present import present

pytestmark = pytest.mark.engine


@pytest.fixture
def patched(patched_copy: Callable[[str], Path]) -> Path:
    """The folder of a patched copy of vLLM."""
    return patched_copy("vllm")


@pytest.mark.versions
@pytest.mark.parametrize("plugins", ["", None], ids=["without-plugins", "with-the-plugin"])
def test_everything_is_there_and_only_once(
    patched: Path, tmp_path: Path, plugins: str | None
) -> None:
    """Flag, endpoint, worker hook; the plugin adds no second one of any."""
    found = copies.facts("vllm", patched, inspect_vllm.__file__, tmp_path / "facts.json", plugins)
    assert found["package"] == str(patched / "vllm" / "__init__.py")
    assert found["flags"] == 1
    assert (found["asked_for"], found["base_version"]) == (True, 3)
    assert found["routes"].count("/update_weights_delta") == 1
    assert found["wrapped"] == [False, False]


@pytest.mark.versions
def test_tests_of_the_series_pass(patched: Path) -> None:
    done = copies.run(
        *("vllm", patched, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"),
        str(apply_patches.PATCHES / "vllm" / "tests"),
        VLLM_PLUGINS="",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    "selection",
    [
        pytest.param(["tests/live/test_refusals.py", "-k", "vllm"], marks=pytest.mark.full),
        pytest.param(
            ["tests/live/test_syncs.py", "-k", "vllm-qwen3-1-scatter"], marks=pytest.mark.full
        ),
    ],
    ids=["refusals", "syncs"],
)
def test_the_endpoint_tests_pass_without_any_plugin(patched: Path, selection: list[str]) -> None:
    """The engine tests themselves, run again on the patched copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
    environment = {**copies.environment(patched), "VLLM_PLUGINS": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.full
def test_load_format_delta_serves_and_takes_deltas(
    patched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands for the flag. The plugin is loaded too, and stands back."""
    for name, value in copies.environment(patched).items():
        monkeypatch.setenv(name, value)
    model = tiny_models.build("qwen3", tmp_path / "model")
    trainer = Trainer(tiny_models.load_tensors(model))
    options: dict[str, Any] = {"log_path": tmp_path / "engine.log"}
    # Checksums are compared, which do not see the weights inside packed kernels.
    arguments = ["--load-format", "delta", "--delta-keep-plain"]
    with VllmProcess(model, extra_args=arguments, **options) as engine:
        body = container(trainer.tensors, trainer.step(), metadata=trainer.metadata())
        answer = engine.post(
            "/update_weights_delta",
            content=body,
            headers={"Content-Type": "application/octet-stream"},
        )
        assert answer.json()["status"] == "committed", answer.text
        updated = engine.checksums()
    target = tiny_models.save_checkpoint(model, tmp_path / "target", trainer.tensors)
    with VllmProcess(target, enable_delta=True, **options) as fresh:
        assert fresh.checksums() == updated


@pytest.mark.full
def test_load_format_delta_without_a_server(patched: Path, tmp_path: Path) -> None:
    model = tiny_models.build("qwen3", tmp_path / "model")
    out = tmp_path / "status.json"
    command = [sys.executable, vllm_offline.__file__, str(model), str(out)]
    environment = {
        **copies.environment(patched),
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [report] = decode_answers(GetStatus(), [json.loads(out.read_text())])
    assert isinstance(report, RankReport)
    status = present(report.status)
    assert status.version == 0
    # On a CPU that packs linear weights they are rebuilt.
    assert set(status.certification) <= {"exact", "rebuilt"}
