"""The name of an HTTP process shows whether the process still lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from delta_server.process_identity import is_alive, new_name, pid_of

NAMED = """
import sys
from delta_server.process_identity import new_name
print(new_name(), flush=True)
sys.stdin.read()
"""


def test_this_process_lives() -> None:
    one, other = new_name(), new_name()
    assert one != other
    assert is_alive(one)
    assert is_alive(other)
    assert pid_of(one) == pid_of(other) == os.getpid()


@pytest.mark.slow
def test_another_process_lives_until_it_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", NAMED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    name = process.stdout.readline().strip()
    assert is_alive(name)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(name)  # nobody has reaped it yet
    process.wait()
    assert not is_alive(name)
    process.stdin.close()
    process.stdout.close()


def test_another_process_with_the_same_number_is_another() -> None:
    pid, start_time, rest = new_name().split(":")
    assert not is_alive(f"{pid}:{int(start_time) - 1}:{rest}")
