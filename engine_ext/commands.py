"""What the commands have in common: their parser, and what ends them besides their own errors.

These are Ctrl-C, a package that is not installed, and a pipe that nobody reads.

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

USAGE: Final = 2
INTERRUPTED: Final = 130
UNREAD: Final = 141  # what a shell shows for SIGPIPE

# The extra of this package that brings a package along which it does not need itself.
_EXTRAS: Final = {"httpx": "sender", "rich": "sender", "tenacity": "sender", "obstore": "store"}


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
    """End the process with one line on Ctrl-C inside the block, or if a package is missing.

    For imports that take seconds: an exception in them can be caught, or leave a half of a package.
    Nothing must have begun that has to be undone. Outside of the main thread Ctrl-C is as before.

    Raises:
        SystemExit: a package is missing that an extra brings along; see `without_traceback`.
    """

    def leave(number: int, frame: object) -> None:
        os.write(2, f"{prog}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    is_main = threading.current_thread() is threading.main_thread()
    # It is ignored in a shell's background.
    takes = is_main and signal.getsignal(signal.SIGINT) not in (None, signal.SIG_IGN)
    before = signal.signal(signal.SIGINT, leave) if takes else None
    try:
        yield
    except ModuleNotFoundError as error:
        _require_extra(prog, error)
        raise SystemExit(USAGE) from error
    finally:
        if takes:
            signal.signal(signal.SIGINT, before)


@contextmanager
def output_may_be_unread() -> Iterator[None]:
    """Print inside the block, which ends if nobody reads standard output any more.

    So the exit status is that of the work, which must be done before.
    """
    try:
        yield
        if sys.stdout is not None:  # as it is if the file was closed from the start
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        if not _is_unread(error):
            raise
        _drop_output()


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
    """Return what `run` returns, whether or not somebody reads the output.

    Print one line and return 130 after Ctrl-C, or 2 if a package is missing that an extra brings
    along. Return 141 if `run` was ended by a closed pipe, see `output_may_be_unread`.
    """
    try:
        return run()
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        _require_extra(prog, error)
        return USAGE
    except (BrokenPipeError, SystemExit) as error:
        if not _is_unread(error):
            raise
        _drop_output()
        return UNREAD
    finally:
        with output_may_be_unread():  # else Python flushes at its end, and complains
            pass


def _require_extra(prog: str, error: ModuleNotFoundError) -> None:
    """Print which extra is missing; raise the error again if it is of another package."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        raise error
    print(f"{prog}: {error}: install this package with its extra {extra!r}", file=sys.stderr)


def _is_unread(error: BaseException) -> bool:
    """Whether an error is of a closed pipe; rich makes a SystemExit of it."""
    return isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)


def _drop_output() -> None:
    """Let what is printed from now on, and what is in the buffer, go nowhere."""
    with suppress(OSError, ValueError):  # standard output is no file
        output = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output)
        os.close(nowhere)
