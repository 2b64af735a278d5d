"""The GPU rows' program without a GPU: its order, its results, its table and a row that fails."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from scripts.doc_tables import gpu as doc_table
from scripts.gpu import __main__ as program
from scripts.gpu import results, timing, trees
from scripts.gpu import rows as rows_module
from scripts.gpu.engine import GpuVllm
from scripts.gpu.rows import ROWS, Row
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineError

SYNCS = {f"sync{n}": {"pause_ms": 10.0 + n, "commit_ms": 1.0} for n in (1, 2, 3)}
EXACT: dict[str, Any] = {
    "row": "awq",
    "title": "AWQ",
    "certification": [{"exact": 11, "rebuilt": 42}],
    "verdict": "exact (43 tensors)",
    **SYNCS,
    "rollback": "exact",
    "full": {"verdict": "exact (43 tensors)"},
}
DIFFERS = {**EXACT, "row": "mla", "title": "MLA", "verdict": "DIFFERS: 1 of 40", "rollback": "no"}
FAILED = {"row": "lora", "error": "EngineError: it exited | with 1\nlong text"}
ON, PLAN = "H9, vLLM 1", "11 exact, 42 rebuilt"
RUN = {"device": "H9", "engine": "vLLM 1", "rows": [EXACT, DIFFERS, FAILED]}


def test_the_table_shows_what_ran_where() -> None:
    lines = doc_table.rows_of([RUN]).splitlines()
    assert lines[2:] == [
        f"| AWQ | {ON} | {PLAN} | exact; rollback and full sync exact | 11, 12, 13 |",
        f"| MLA | {ON} | {PLAN} | DIFFERS: 1 of 40; full sync exact; rollback no | 11, 12, 13 |",
        f"| lora | {ON} |  | not done: EngineError: it exited / with 1 |  |",
    ]


def test_rows_that_were_never_exact_come_first() -> None:
    other = {"engine": "SGLang 1", "rows": [{**EXACT, "row": "keep"}]}
    assert results.by_worth(["awq", "keep", "mla"], [RUN, other]) == ["keep", "mla", "awq"]


def test_a_row_is_exact_in_all_that_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "machine", lambda engine: RUN)
    run = program.Run(program.make_parser().parse_args([]), time.monotonic())
    only = {k: one for k, one in EXACT.items() if k not in ("rollback", "full")}
    for row in (EXACT, only, {**EXACT, "full": "exact"}):
        run.facts["rows"] = [row]
        assert run.is_exact
    differs = "DIFFERS: ['a']"
    for wrong in (
        {"rollback": differs},
        {"full": {"verdict": differs}},
        {"full": differs},
        {"error": "EngineError: no answer"},
        {"verdict": None},
        {"buffers": differs},
        {"load": {"answered": 0, "failed": []}},
        {"load": {"answered": 3, "failed": ["HTTP 500"]}},
    ):
        row = {**EXACT, **wrong}
        run.facts["rows"] = [EXACT, row]
        assert not run.is_exact, wrong
        assert not results.is_exact(row)
        if not {"verdict", "load"} & wrong.keys():
            assert (differs in doc_table.rows_of([{**RUN, "rows": [row]}])) is (
                "error" not in wrong
            )


@pytest.mark.parametrize("name", ["sleep-2-w4a16", "sleep-2-moe-fp8-online"])
def test_a_row_rebuilds_modules_after_a_sleep(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    config = json.loads((row.checkpoint(tmp_path / "base") / "config.json").read_text())
    assert ("quantization_config" in config) != ("--quantization" in row.flags)
    assert "--enable-sleep-mode" in row.flags
    assert row.more is not None


def test_timings_are_in_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "machine", lambda engine: RUN)
    run = program.Run(program.make_parser().parse_args([]), time.monotonic())
    sound: dict[str, Any] = {"tree": "new", "syncs": [{"status": "committed"}]}
    sound |= {"corrupted": [], "digest_as_answered": True}
    for good in (sound, {**sound, "verdict": "exact (9 tensors)"}):
        run.facts["timing"] = [good]
        assert run.is_exact
    for wrong in (
        {"error": "it exited"},
        {"verdict": "DIFFERS: ['a']"},
        {"corrupted": ["a"]},
        {"digest_as_answered": False},
        {"syncs": [{"status": "refused"}]},
    ):
        run.facts["timing"] = [sound, {**sound, **wrong}]
        assert not run.is_exact, wrong


def test_the_hardware_has_the_newest_of_each_row() -> None:
    older = {**RUN, "rows": [{**DIFFERS, "verdict": "exact (3)"}, {**EXACT, "row": "moe"}]}
    other = {**RUN, "engine": "SGLang 2", "rows": [EXACT]}
    lines = doc_table.hardware_of([RUN, older]).splitlines()[2:]
    assert lines[1] == "| H9 | vLLM 1: [2 of 4 rows exact](docs/gpu.md); not MLA; not lora |"
    assert "SGLang on a GPU" in lines[2]
    lines = doc_table.hardware_of([other, RUN]).splitlines()[2:]
    assert lines[1].startswith("| H9 | SGLang 2: [1 of 1 rows")
    assert "on a GPU" not in lines[3]


def test_what_was_recorded_can_be_run_again() -> None:
    for run in results.recorded():
        rows = rows_module.rows_of(run["engine"].partition(" ")[0].lower())
        assert {row["row"] for row in run["rows"]} <= rows.keys()
    assert "W8A8" not in doc_table.not_run().partition("SGLang")[0]


def test_a_row_that_fails_keeps_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> Path:
        (folder.parent / "live.log").write_text("x" * 9000 + "the kernel is missing")
        raise RuntimeError("no checkpoint")

    def interrupt(folder: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(rows_module, "ROWS", {"a": Row("", write), "b": Row("", interrupt)})
    found = rows_module.run("a", tmp_path / "a")
    assert found["error"] == "RuntimeError: no checkpoint"
    assert found["logs"]["live"].endswith("the kernel is missing")
    assert (len(found["logs"]["live"]), found["logs"]["fresh"]) == (4000, "")
    assert rows_module.run("b", tmp_path / "b")["error"] == "time ran out"


def test_a_row_of_a_background_job_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(folder: Path) -> Path:
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("not interrupted")

    monkeypatch.setattr(rows_module, "ROWS", {"a": Row("", interrupt)})
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(sys, "argv", ["gpu", "--one", "a", "--folder", str(tmp_path)])
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    try:
        assert program.main() == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert json.loads(shown.getvalue().removeprefix("FACTS "))["error"] == "time ran out"


class Starting:
    """The engine to update is interrupted while it starts; the other one takes its time."""

    came_up = False

    def __init__(self, *arguments: Any, delta: bool, **options: Any) -> None:
        self._delta, self._stopped = delta, threading.Event()

    def __enter__(self) -> Starting:
        if self._delta:
            raise KeyboardInterrupt
        if self._stopped.wait(5):
            raise EngineError("stopped")
        Starting.came_up = True
        return self

    def stop(self, grace_s: float = 0.0) -> None:
        self._stopped.set()


def test_an_interrupted_row_stops_what_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path) -> Path:
        return tiny_models.build("qwen3", folder)

    monkeypatch.setattr(rows_module, "ROWS", {"a": Row("", write)})
    monkeypatch.setattr(rows_module, "ENGINES", {"vllm": Starting})
    found = rows_module.run("a", tmp_path / "a")
    assert found["error"] == "time ran out"
    assert not Starting.came_up


class Process:
    """Stands in for the program that runs one row."""

    def __init__(self, folder: Path, text: str) -> None:
        self.path = folder / "python"
        self.path.write_text(f"#!/bin/sh\n{text}\n")
        self.path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('echo noise; echo \'FACTS {"verdict": "exact (3)"}\'', {"verdict": "exact (3)"}),
        ("echo it broke; exit 3", {"error": "no result: it broke\n"}),
        pytest.param(
            *("trap 'echo FACTS {}; kill $!; exit' INT; sleep 60 & wait", {}),
            marks=pytest.mark.slow,
            id="the time is up",
        ),
    ],
)
def test_what_a_rows_process_prints_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "executable", str(Process(tmp_path, text).path))
    monkeypatch.setattr(program, "machine", lambda engine: {"engine": "vLLM 1"})
    monkeypatch.setattr(program, "_GRACE_S", 5)
    monkeypatch.setattr(program, "_LEAST_S", {"cuda": 0})
    chosen = program.make_parser().parse_args(
        ["--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]
    )
    run = program.Run(chosen, time.monotonic() + 20.0)
    run.prove("awq")
    assert run.facts["rows"] == [{"row": "awq", **expected}]
    assert json.loads((tmp_path / "found.json").read_text()) == run.facts
    assert "awq" in run.table()


def test_a_tree_does_not_wait_for_one_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = [timing.is_up(tmp_path, name) for name in ("new", "base")]
    up[0].touch()  # of an earlier run
    waiting = f"test -e {up[0]} && exit 1; while ! test -e {up[1]}; do sleep 0.05; done"
    text = f"""case "$*" in *"--one base"*) exit 1;; *"--trees new base"*) ;; *) exit 1;; esac
{waiting}; echo 'FACTS {{"verdict": "exact"}}'"""
    monkeypatch.setattr(sys, "executable", str(Process(tmp_path, text).path))
    monkeypatch.setattr(program, "machine", lambda engine: {"engine": "vLLM 1"})
    monkeypatch.setattr(program, "_GRACE_S", 5)
    monkeypatch.setattr(program, "_LEAST_S", {"cuda": 0})
    given = ["--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]
    chosen = program.make_parser().parse_args([*given, "--timing", "tiny", "--base", str(tmp_path)])
    run = program.Run(chosen, time.monotonic() + 20.0)
    run.time(0)
    of_new, of_base = {"verdict": "exact"}, {"error": "no result: "}
    assert run.facts["timing"] == [{"tree": "new", **of_new}, {"tree": "base", **of_base}]


def test_a_runs_file_has_a_line_for_each_row() -> None:
    facts = {"device": "H200", "rows": [{"row": "a", "x": [1, {}]}, {"row": "b"}], "timing": []}
    text = results.as_text(facts)
    assert json.loads(text) == facts
    assert '  {"row": "a", "x": [1, {}]},\n  {"row": "b"}\n ],\n "timing": []\n}' in text


@pytest.mark.parametrize("fits", [True, False])
def test_work_is_in_memory_if_it_has_the_room(fits: bool, tmp_path: Path) -> None:
    """And stays there, whatever it takes of the room itself."""
    room = 0 if fits else 1 << 60
    found = trees.work_folder(room, tmp_path)
    assert found == (tmp_path if fits else Path(tempfile.gettempdir())) / "gpu-rows"
    (tmp_path / "gpu-rows" / "site").mkdir(parents=True)
    assert trees.work_folder(room, tmp_path) == tmp_path / "gpu-rows"


def test_no_row_begins_without_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "machine", lambda engine: {"engine": "vLLM 1"})
    chosen = program.make_parser().parse_args(
        ["--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]
    )
    run = program.Run(chosen, time.monotonic() + 5.0)
    run.prove("awq")
    assert not run.facts["rows"]  # an earlier run of it counts
    assert "no time was left for: awq" in run.table()
    assert not run.is_exact


@pytest.mark.slow
def test_a_row_that_hangs_is_killed_with_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"trap '' INT; setsid sh -c 'echo $$ > {tmp_path}/engine; exec sleep 60'"
    monkeypatch.setattr(sys, "executable", str(Process(tmp_path, text).path))
    monkeypatch.setattr(program, "machine", lambda engine: {"engine": "vLLM 1"})
    monkeypatch.setattr(program, "_GRACE_S", 1)
    monkeypatch.setattr(program, "_LEAST_S", {"cuda": 0})
    given = ["--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]
    run = program.Run(program.make_parser().parse_args(given), time.monotonic() + 10.0)
    run.prove("awq")
    [row] = run.facts["rows"]
    assert row["error"].startswith("no result")
    with contextlib.suppress(psutil.NoSuchProcess):
        engine = psutil.Process(int((tmp_path / "engine").read_text()))
        assert engine.status() == psutil.STATUS_ZOMBIE or engine.wait(20) is None


def test_a_base_that_scripts_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "none", "--timing", "4b", "--base", str(tmp_path)])
    with pytest.raises(SystemExit):
        program.main()
    assert "--base: no engine_ext/conformance/random_weights.py" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(40)
def test_an_interrupted_row_leaves_its_requests() -> None:
    answers, released, facts = iter(range(2)), threading.Event(), dict[str, Any]()

    class Hangs:
        def complete(self, *arguments: Any, **options: Any) -> None:
            if next(answers, None) is None:
                released.wait(300)

    with pytest.raises(KeyboardInterrupt), rows_module.Load(Hangs(), facts):  # type: ignore[arg-type]
        raise KeyboardInterrupt
    assert facts["load"] == {"answered": 2, "failed": []}
    released.set()


def test_a_step_of_the_timing_moves_a_share_of_the_bits() -> None:
    weights = {"a": torch.zeros(40, 500, dtype=torch.bfloat16), "b": torch.ones(7).bfloat16()}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    timing.step(weights, 3)
    moved = (weights["a"].view(torch.int16) ^ before["a"].view(torch.int16)).view(-1)
    assert set(moved.unique().tolist()) == {0, 1, 2, 3}
    assert 0.01 < (moved != 0).float().mean() < 0.03


def test_sizes_of_the_timing_are_what_they_are_called() -> None:
    def count(name: str) -> int:
        return sum(torch.Size(shape).numel() for _, shape in timing.SIZES[name].shapes())

    assert round(count("4b") / 1e9, 1) == 4.0
    assert round(count("8b") / 1e9, 1) == 8.2
    assert {"mla", "moe-fp8-online"} <= ROWS.keys()


def test_the_table_of_syncs_has_the_last_of_each_encoding() -> None:
    times = {"pause_ms": 106.2, "commit_ms": 5.9}
    sync = {"encoding": "gap8_exp", "wire_bytes": 178_195_818, "wall_ms": 3807.0}
    sync |= {"encode_ms": 2125.0, "timings_ms": times, "token_gap_ms": {"largest": 166.4}}
    other = {**sync, "encoding": "gap8_ulp", "token_gap_ms": {}}
    other |= {"sender_cpu_s": 0.21, "engine_cpu_s": 1.48}
    new = {"tree": "new", "weights": 4.02e9, "syncs": [{**sync, "wall_ms": 6570.0}, sync, other]}
    run = {**RUN, "timing": [new, {**new, "tree": "base"}, {"tree": "new", "error": "no"}]}
    assert doc_table.syncs_of([RUN, run]).splitlines()[2:] == [
        "| H9, 4.0 billion weights | `gap8_exp` | 178 | 3807 | 2125 | 106 | 6 | 166 |  |",
        "| H9, 4.0 billion weights | `gap8_ulp` | 178 | 3807 | 2125 | 106 | 6 |  | 0.2, 1.5 |",
    ]


def test_the_table_of_what_syncs_are_compared_with() -> None:
    way = {"way": "ipc", "wall_ms": 900.0, "token_gap_ms": {"largest": 80.2}}
    new: dict[str, Any] = {
        "tree": "new",
        "weights": 4.02e9,
        "own_ways": [way, {**way, "wall_ms": 5}],
    }
    new |= {"read_both_ms": 4.96, "start_s": 31.0, "stock_start_s": 29.5}
    new |= {"gpu_mib": {"before": 9, "stock": 100, "after": 350}}
    new["own_ways"].append({"way": "reload_weights", "error": "HTTPError: 500\nmore"})
    bare = {"tree": "new", "weights": 1e9, "gpu_mib": {"before": 9}, "stock_start_s": None}
    run = {**RUN, "timing": [new, {**new, "tree": "base"}, bare]}
    where = "| H9, 4.0 billion weights |"
    assert doc_table.compared_of([run]).splitlines()[2:] == [
        f"{where} stock vLLM: ipc, ms | 5 | 80 |",
        f"{where} stock vLLM: reload_weights, ms | not done: HTTPError: 500 |  |",
        f"{where} reading both copies of the weights, ms | 5.0 |  |",
        f"{where} start beyond stock, s | 1.5 |  |",
        f"{where} GPU memory beyond stock, MiB | 250 |  |",
    ]
    assert "No recorded run" in doc_table.compared_of([RUN])


@pytest.mark.slow
def test_an_engine_that_cannot_run_ends_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row would take half a minute to find out that a bundle lacks something."""
    monkeypatch.setattr(GpuVllm, "program", "vllm.nonesuch")
    with pytest.raises(SystemExit, match=r"(?s)cannot run vLLM: .*'vllm.nonesuch'"):
        program.machine("vllm")
