"""Many cases in one test: a failure names its case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(name: object) -> Iterator[None]:
    """Add the case's name to what a failure says."""
    try:
        yield
    except BaseException as error:  # pytest's own failures are no `Exception`
        error.add_note(f"in the case {name}")
        raise
