"""vLLM, patched: a copy of the installed package, never the installed one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import apply_patches
import tiny_models
from patch_sets import State
from tests.engines.trainer import Trainer, container
from tests.patches import copies, vllm_facts, vllm_offline
from tests.patches.copies import ROOT
from vllm_process import VllmProcess

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a patched copy of vLLM."""
    folder = tmp_path_factory.mktemp("patched")
    copies.copy_package("vllm", folder)
    copies.patch("vllm", folder)
    yield folder
    shutil.rmtree(folder)  # 100 MB


def facts(folder: Path, out: Path, plugins: str | None) -> dict[str, Any]:
    """What `vllm_facts` finds; `plugins` is the value of VLLM_PLUGINS, None for the default."""
    environment = copies.environment(folder)
    environment.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    command = [sys.executable, vllm_facts.__file__, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("plugins", ["", None], ids=["without-plugins", "with-the-plugin"])
def test_everything_is_there_and_only_once(
    patched: Path, tmp_path: Path, plugins: str | None
) -> None:
    """Flag, endpoint, worker method, load format; the plugin adds no second one of any."""
    found = facts(patched, tmp_path / "facts.json", plugins)
    assert found["package"] == str(patched / "vllm" / "__init__.py")
    assert found["flags"] == 1
    assert (found["asked_for"], found["base_version"]) == (True, 3)
    assert found["routes"].count("/update_weights_delta") == 1
    assert found["wrapped"] == [False, False]
    assert found["worker_method"] is True
    assert found["load_formats"].count("delta") == 1
    assert found["loader"] == "DefaultModelLoader"


def test_half_patched_does_not_start(patched: Path, tmp_path: Path) -> None:
    """Whichever file is missing: never a server with some of the hooks."""
    engine = apply_patches.find("vllm", patched)
    choice = apply_patches.choose(engine, None)
    script = (
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "args = parser.parse_args(['--model', '.', '--enable-delta-updates'])\n"
        "AsyncEngineArgs.from_cli_args(args)\n"
    )
    path = patched / "vllm" / "v1" / "worker" / "worker_base.py"
    after = path.read_bytes()
    path.write_bytes(
        choice.patches.change(
            patched, path.relative_to(patched).as_posix(), revert=True, by_hash=True
        ).after
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=copies.environment(patched),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_bytes(after)
    assert done.returncode == 1
    assert "patched only in part, vllm.v1.worker.worker_base not at all" in done.stderr


def test_hunks_fit_only_one_place() -> None:
    """So that on another version they go in where they belong, or not at all."""
    engine = apply_patches.find("vllm", None)
    (patches,) = (found for found in apply_patches.read_sets("vllm") if found.version == "0.32.0")
    states = patches.states(engine.root, by_hash=False)
    assert set(states.values()) == {State.ORIGINAL}


@pytest.mark.parametrize(
    "selection",
    [
        ["tests/engines/test_refusals.py", "-k", "vllm"],
        pytest.param(
            ["tests/engines/test_syncs.py", "-k", "vllm-qwen3-1-auto"], marks=pytest.mark.full
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
    with VllmProcess(model, extra_args=["--load-format", "delta"], **options) as engine:
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
    status = json.loads(out.read_text())["ok"]
    assert status["version"] == 0
    assert set(status["certification"]) == {"exact"}
