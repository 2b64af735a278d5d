"""Tables that one test goes through, where a test per row would cost more than its check."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Test = Callable[..., None]


@contextmanager
def case(name: object) -> Iterator[None]:
    """Add the case's name to what a failure says."""
    try:
        yield
    except BaseException as error:  # pytest's own failures are no `Exception`
        error.add_note(f"in the case {str(name)[:500]}")
        raise


def in_one_test(
    names: str | Sequence[str], table: Iterable[Any], ids: Iterable[str] | None = None
) -> Callable[[Test], Test]:
    """Give a test each row, as ``pytest.mark.parametrize`` does, and name the row that fails.

    Fixtures are made once: a test must leave them as they were.
    """
    keys = [names] if isinstance(names, str) else [*names]
    rows = [dict(zip(keys, [row] if isinstance(names, str) else row, strict=True)) for row in table]
    assert rows, "an empty table"
    called: list[Any] = rows if ids is None else [*ids]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def whole(**given: Any) -> None:
            for name, row in zip(called, rows, strict=True):
                with case(name):
                    test(**row, **given)

        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in keys]
        setattr(whole, "__signature__", signature.replace(parameters=left))  # noqa: B010
        return whole

    return decorate
