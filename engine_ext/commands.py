"""What the commands have in common: their parser, and what Ctrl-C does.

Imports `engine_ext` for its version, and nothing else of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

from engine_ext import __version__

INTERRUPTED: Final = 130


class CommandParser(argparse.ArgumentParser):
    """A parser with ``--version``, whose errors are one line and name the way to the help."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        version = f"{(prog or self.prog).partition(' ')[0]} {__version__}"
        help = "print the version and exit"
        self.add_argument("--version", action="version", version=version, help=help)

    def error(self, message: str) -> NoReturn:
        """Print one line on standard error and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


@contextmanager
def leaving_at_once(prog: str) -> Iterator[None]:
    """End the process on Ctrl-C inside the block, with one line and status 130.

    For imports that take seconds: an exception in them can be caught, or leave a half of a package.
    Nothing must have begun that has to be undone. Outside of the main thread it does nothing.
    """

    def leave(number: int, frame: object) -> None:
        os.write(2, f"{prog}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) in (None, signal.SIG_IGN):  # as in a shell's background
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def output_on_stderr() -> Iterator[None]:
    """Send to standard error what this process and its children print inside the block.

    Engines print to standard output, which is for the command's own result alone.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def positive_seconds(text: str) -> float:
    """Return an argument's number of seconds; argparse prints why it is none."""
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"not a number of seconds above 0: {text!r}")


def without_traceback(prog: str, run: Callable[[], int]) -> int:
    """Return what `run` returns; after Ctrl-C, print one line and return 130."""
    try:
        return run()
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
