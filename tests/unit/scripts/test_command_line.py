"""How programs fail and are stopped: through their `with` blocks, with the documented status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import command_line
from tests.support.lazy_modules import LazyModule

DEMO = LazyModule("scripts.demo.__main__")  # transformers' models

SLEEPS = """
import contextlib, signal, sys, time
from scripts import command_line

# A job in a shell's background ignores SIGINT, and what it starts would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

def program():
    with contextlib.ExitStack() as stack:
        stack.callback(print, "cleaned up", flush=True)
        print("ready", flush=True)
        time.sleep(60)

sys.exit(command_line.run(program, (), "interrupted"))
"""


@pytest.mark.parametrize(
    ("number", "status", "shown"),
    [(signal.SIGTERM, 143, ""), (signal.SIGINT, 130, "interrupted\n")],
)
def test_a_signal_cleans_up(number: signal.Signals, status: int, shown: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (status, "cleaned up\n", shown)


def test_only_expected_failures_are_shown_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    def program() -> int:
        raise ValueError("too small")

    assert command_line.run(program, (ValueError,), "") == 1
    assert capsys.readouterr().err == "ValueError: too small\n"
    with pytest.raises(ValueError, match="too small"):
        command_line.run(program, (KeyError,), "")
    assert command_line.run(lambda: 3, (), "") == 3


def test_demo_keeps_nothing_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as ended:
        DEMO.parse_arguments(["--keep", str(file)])
    assert ended.value.code == 2
    assert f"--keep: {file} is no folder" in capsys.readouterr().err
