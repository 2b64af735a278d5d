"""A server in a process of its own, for the benchmarks that send to one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_LONGEST_START_S: Final = 600


@contextmanager
def process(serve: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, int]]:
    """Run a server in a process of its own; give what it sends through its pipe, and its id.

    Raises:
        EOFError: The process has ended before it has sent anything.
        TimeoutError: It has sent nothing in ten minutes.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(_LONGEST_START_S):
            raise TimeoutError(f"no server was up in {_LONGEST_START_S} s")
        yield ours.recv(), child.pid or 0
    finally:
        child.terminate()
        child.join()
