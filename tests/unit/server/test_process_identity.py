"""The name of an HTTP process shows whether the process still lives."""

from __future__ import annotations

import os
import signal

from delta_server.process_identity import is_alive, new_name, pid_of


def test_this_process_lives() -> None:
    one, other = new_name(), new_name()
    assert one != other
    assert is_alive(one)
    assert is_alive(other)
    assert pid_of(one) == pid_of(other) == os.getpid()


def test_another_process_lives_until_it_is_killed() -> None:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, new_name().encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        name = os.read(reading, 200).decode()
        assert pid_of(name) == process
        assert is_alive(name)
    finally:
        os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert not is_alive(name)  # nobody has reaped it yet
    os.waitpid(process, 0)
    assert not is_alive(name)
    os.close(reading)


def test_another_process_with_the_same_number_is_another() -> None:
    pid, start_time, rest = new_name().split(":")
    assert not is_alive(f"{pid}:{int(start_time) - 1}:{rest}")
