"""A replica that hangs, for servers with several: no other one serves another version meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.faults.harness import Harness
from tests.faults.observed import wait_until
from tests.faults.survivable import rows

HANGS = 1  # the replica
SHORT_S = 3


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, as if it hung, and let it continue afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def hangs_while_it_stages(harness: Harness) -> None:
    """The other replica continues with the old version."""
    with ThreadPoolExecutor(1) as pool:
        with stopped(pid_of(harness, HANGS)):
            answered = pool.submit(harness.expect, harness.parts()[0], "committed")
            for _ in range(5):
                assert harness.generates_on(1 - HANGS) == 200
            assert not answered.done()
        answered.result()


def hangs_in_mid_commit(harness: Harness) -> None:
    """Nothing is generated: the other replica, which waits in the vote, has written."""
    stalled = harness.folder / f"stalled-{HANGS}"
    harness.arm("slow_write", HANGS)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(harness.expect, harness.parts()[0], "committed")
        wait_until(stalled.exists)
        with stopped(int(stalled.read_text())):
            for replica in (HANGS, 1 - HANGS):
                with pytest.raises(httpx.ReadTimeout):
                    harness.generates_on(replica, timeout=SHORT_S)
            assert not answered.done()
        answered.result()
    stalled.unlink()


def pid_of(harness: Harness, rank: int) -> int:
    """Return the process of a rank."""
    harness.arm("show_memory", rank)
    harness.engine.delta_status()
    shown = json.loads((harness.folder / f"memory-{rank}").read_text())
    return int(shown["pid"])


HANGING = [
    *rows(
        "a replica hangs while it stages, and continues",
        "`committed`, once it continues; the other replica serves the old version until then",
        "new",
        ("a replica hangs while it stages", hangs_while_it_stages),
    ),
    *rows(
        "a replica hangs in mid-commit, and continues",
        "`committed`, once it continues; nothing is served until then",
        "new",
        ("a replica hangs in mid-commit", hangs_in_mid_commit),
    ),
]
