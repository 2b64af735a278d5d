"""``delta-conformance``: the suite and a model, their reports and exit status."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_ext.cli import conformance
from engine_ext.conformance.installed import KINDS
from engine_ext.conformance.sending import Refused
from engine_ext.conformance.subject import Delta, Rank
from engine_ext.ranks.operations import GetPlan, Operation
from engine_ext.ranks.replies import RankPlan


class Careless:
    """Serves, and writes nothing."""

    name = "careless"

    def serve(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            rank.load()
            rank.process()

    def apply(self, deltas: Sequence[Delta]) -> None:
        pass


def outcomes(printed: str) -> set[str]:
    runs = [r for row in json.loads(printed) for c in row["columns"].values() for r in c["runs"]]
    return {run["outcome"] for run in runs}


@pytest.mark.slow
def test_suite_runs_both_receivers(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--only", "fused qkv"]) == 0
    captured = capsys.readouterr()
    for text in ("scatter", "masked", "three tensors in one parameter", "exact, NaN refused"):
        assert text in captured.out
    assert captured.err.endswith("18 syncs: 0 torn or wrong\n")


@pytest.mark.slow
def test_suite_prints_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    own = "engine_ext.conformance.receivers:masked"
    assert conformance.main(["--only", "fused qkv", "--subject", own, "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| the loader | masked |"
    assert lines[2] == "| fused qkv: three tensors in one parameter | exact, NaN refused |"


def test_careless_receiver_fails(capsys: pytest.CaptureFixture[str]) -> None:
    subject = f"{__name__}:Careless"
    assert conformance.main(["--only", "fused qkv", "--subject", subject, "--json"]) == 1
    captured = capsys.readouterr()
    assert outcomes(captured.out) == {"WRONG"}
    assert "careless: fused qkv, FusedQkv, sparse 40 %: WRONG: rank 0: qkv" in captured.err
    assert captured.err.endswith("9 syncs: 9 torn or wrong\n")


def test_subject_is_found_in_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"from {__name__} import Careless\n\n\nclass receivers:\n    make = Careless\n"
    (tmp_path / "somebodys_receiver.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    subject = "somebodys_receiver:receivers.make"
    assert conformance.main(["--only", "AWQ", "--subject", subject]) == 1
    assert "careless" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "fused"], "no case 'fused'; there are: fused qkv"),
        (["--subject", "receivers"], "not module:function: receivers"),
        (["--dtype", "bfloat16"], "engine flags are only for --model: --dtype bfloat16"),
        (["--model", "/nowhere"], "no such folder or file: /nowhere"),
        (["--model", ".", "--subject", "a:b"], "is of the suite"),
        (["--model", ".", "--only", "sparse"], "no case 'sparse'; there are: sparse"),
        (["--json", "--markdown"], "not allowed with argument --json"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        conformance.main(arguments)
    assert exit.value.code == 2
    assert says in capsys.readouterr().err


def test_receiver_that_cannot_be_imported(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--subject", "no_such_module:make"]) == 1
    assert "No module named 'no_such_module'" in capsys.readouterr().err


# A model -------------------------------------------------------------------------------------


class Offline:
    """An adapter's module for engines without a server, whose engine refuses every sync."""

    def __init__(self) -> None:
        self.started: list[tuple[str, list[str], bool]] = []
        self.names: list[str] = []

    def OfflineEngine(self, model: str, flags: list[str], *, prog: str) -> Offline:
        os.write(1, b"the engine says something\n")
        self.started.append((prog, flags, "DELTA_UPDATES_SETTINGS" in os.environ))
        self.names = sorted(path.name for path in Path(model).iterdir())
        return self

    def call(self, request: Operation[Any]) -> list[Any]:
        row = {
            "name": "w",
            "dtype": "bfloat16",
            "shape": [4],
            "status": "uncertified",
            "reason": "the engine moved it",
            "live": ["w"],
            "repacked": False,
            "recomputed": [],
        }
        if isinstance(request, GetPlan):
            return [RankPlan(tensors=[row])]
        raise Refused("not updatable")

    def hashes(self) -> dict[str, str]:
        return {"rank 0: w": "0"}

    def close(self) -> None:
        pass


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Offline:
    made, original = Offline(), importlib.import_module

    def imported(name: str, package: str | None = None) -> Any:
        is_engine = name in ("vllm", "engine_ext.adapters.vllm.offline_engine")
        return made if is_engine else original(name, package)

    monkeypatch.setattr(importlib, "import_module", imported)
    monkeypatch.setenv("DELTA_UPDATES_SETTINGS", "")
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.ones(4).bfloat16()}, tmp_path / "model.safetensors")
    return tmp_path


def test_model_is_loaded_with_engine_flags(
    offline: Offline, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "64M"]
    assert conformance.main(["--model", str(folder), *given, "--json"]) == 0
    flags = ["--skip-tokenizer-init", *given[2:], *given[:2]]
    assert offline.started == [
        ("delta-conformance", flags, False),
        ("delta-conformance", flags, True),
    ]
    captured = capfd.readouterr()
    assert "the engine says something" in captured.err
    found = json.loads(captured.out)
    assert [(one["sync"], one["outcome"]) for one in found["syncs"]] == [
        ("start with delta updates", "exact"),
        ("only w", "refused"),
        *((kind, "not run") for kind in KINDS if kind != "alone"),
    ]


def test_a_model_on_which_nothing_is_judged_fails(
    offline: Offline, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--only", "dense", "--markdown"]
    assert conformance.main(["--model", str(folder), *given]) == 1
    captured = capfd.readouterr()
    why = "no tensor of floating-point numbers can be updated"
    assert f"| dense | not run | 0 | {why} |" in captured.out
    assert "no sync was judged" in captured.err


def test_table_has_refusals_of_the_plan(
    offline: Offline, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert conformance.main(["--model", str(folder), "--markdown"]) == 0
    assert offline.started[0][1] == []
    lines = capfd.readouterr().out.splitlines()
    assert "| only w | refused | 1 | not updatable |" in lines
    assert lines[-2:] == ["1 tensors on 1 rank: 1 uncertified", "  w: the engine moved it"]


def test_without_the_engine(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported(name: str) -> None:
        if name != "rich":
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(importlib, "import_module", imported)
    assert conformance.main(["--model", str(folder)]) == 1
    assert "--model needs vllm, which is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_random_weights_for_configuration(
    offline: Offline, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    conformance.main(["--model", str(path)])
    assert "making random weights" in capfd.readouterr().err
    assert {"config.json", "model.safetensors"} <= set(offline.names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]
    config["quantization_config"] = {"quant_method": "fp8"}
    path.write_text(json.dumps(config))
    assert conformance.main(["--model", str(path)]) == 1
    assert "without quantisation only" in capfd.readouterr().err
