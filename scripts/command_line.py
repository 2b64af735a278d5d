"""Parts that the programs in this folder share: their parser, their errors, and their stop."""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

_INTERRUPTED = 128 + signal.SIGINT


def make_parser(module: str, doc: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make a parser whose help is the module's docstring.

    Args:
        module: what ``python -m`` runs.
        doc: its docstring.
        epilog: shown after the options.
    """
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return an option type for integers that are not below `least`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return number

    return parse


def run(program: Callable[[], int], failures: tuple[type[Exception], ...], interrupted: str) -> int:
    """Run a program that cleans up in ``with`` blocks, which SIGTERM and Ctrl-C leave in order.

    Args:
        program: returns its exit status.
        failures: exceptions that are shown in one line on stderr, without a traceback.
        interrupted: shown on stderr after Ctrl-C.

    Returns:
        The program's exit status; 1 after one of `failures`, 130 after Ctrl-C.

    Raises:
        SystemExit: 143 after SIGTERM.
    """
    errors = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return program()
    except failures as error:
        errors.print(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        errors.print(interrupted)
        return _INTERRUPTED


@contextlib.contextmanager
def working_folder(keep: Path | None, prefix: str) -> Iterator[Path]:
    """Have the folder to keep, or a temporary one whose name begins with `prefix`."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        yield Path(name)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
