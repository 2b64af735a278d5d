"""A SGLang plugin that makes things go wrong inside one rank.

A file ``FAULT-RANK`` in the folder that ``DELTA_FAULTS`` names arms one fault of one rank for its
next commit, which removes the file. Faults: ``fail_write`` and ``fail_undo`` raise there,
``raise_handler`` raises out of the receiver, ``die`` kills the rank after one write.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register() -> None:
    """Put the faults in; SGLang calls this in each of its processes."""
    from engine_ext.receiver import Receiver

    original = Receiver.handle

    def handle(receiver: Receiver, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if operation == "commit":
            _arm(receiver)
        return original(receiver, operation, arguments)

    Receiver.handle = handle  # type: ignore[method-assign]


def _arm(receiver: Any) -> None:
    folder = Path(os.environ["DELTA_FAULTS"])

    def armed(fault: str) -> bool:
        file = folder / f"{fault}-{receiver._ranks.rank}"
        found = file.exists()
        file.unlink(missing_ok=True)
        return found

    if armed("raise_handler"):
        raise RuntimeError("the handler went away")
    if armed("fail_undo"):
        _once(receiver._applier, "undo", _fail)
    if armed("fail_write"):
        _once(receiver._applier, "write", _fail)
    if armed("die"):
        _once(receiver._applier, "write", lambda: os.kill(os.getpid(), signal.SIGKILL))


def _fail() -> None:
    raise OSError("the memory went away")


def _once(applier: Any, method: str, then: Callable[[], None]) -> None:
    """Let the next call of a method make one write, if it is one that writes, and then fail."""
    original = getattr(applier, method)

    def call(staged: Any) -> None:
        setattr(applier, method, original)
        if method == "write":
            staged[0].writes[0].put()
        then()

    setattr(applier, method, call)
