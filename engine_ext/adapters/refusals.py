"""Tables of what an engine refuses to start with: start-up checks them, the docs print them.

Each adapter has three tables: `ARGUMENTS`, checked against the parsed command line before anything
is loaded, `RESOLVED`, checked against the configuration that the engine makes of it and of the
model, and `LOADED`, found in a worker that has loaded its model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of one attribute of a parsed command line; an absent one counts as None.

    Attributes:
        example: a value that meets the condition.
    """

    name: str
    test: Callable[[Any], bool]
    example: Any

    def holds(self, arguments: Any) -> bool:
        return self.test(getattr(arguments, self.name, None))


def above_one(name: str) -> Condition:
    """Test whether a number is above one."""
    return Condition(name, lambda value: (value or 1) > 1, 2)


def enabled(name: str) -> Condition:
    """Test whether a switch is on, or a list has items."""
    return Condition(name, bool, True)


def given(name: str) -> Condition:
    """Test whether an option without a default is given."""
    return Condition(name, lambda value: value is not None, 0)


def other_than(name: str, *accepted: str) -> Condition:
    """Test whether an option that is given has a value that is not accepted."""
    return Condition(name, lambda value: value not in (None, *accepted), "another")


def equal(name: str, value: str) -> Condition:
    """Test whether an option has a value, in lower or upper case."""
    return Condition(name, lambda found: str(found).lower() == value, value)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A set-up that delta updates do not work with.

    Attributes:
        what: the set-up, as its users write it.
        why: the reason, and what to do instead if there is something.
        conditions: it is refused if all of them hold; none in a table of loaded models.
        shown: the attribute whose value the message shows after `what`; None for no value.
    """

    what: str
    why: str
    conditions: tuple[Condition, ...] = ()
    shown: str | None = None

    @property
    def message(self) -> str:
        return self.message_for(None)

    def message_for(self, arguments: Any) -> str:
        """Return the message for a command line, or a configuration, that is refused."""
        value = None if self.shown is None else getattr(arguments, self.shown, None)
        what = self.what if value is None else f"{self.what} ({value})"
        return f"--enable-delta-updates does not work with {what} yet: {self.why}"

    def applies(self, arguments: Any) -> bool:
        return all(condition.holds(arguments) for condition in self.conditions)

    def example(self) -> argparse.Namespace:
        """Return a command line that is refused for this reason."""
        return argparse.Namespace(**{one.name: one.example for one in self.conditions})


def first(arguments: Any, refusals: Iterable[Refusal]) -> Refusal | None:
    """Return the first reason to refuse a command line, or None."""
    return next((one for one in refusals if one.applies(arguments)), None)


def refuse(arguments: Any, refusals: Iterable[Refusal]) -> None:
    """Refuse a command line that meets one of the refusals.

    Raises:
        ValueError: it does. Nothing is loaded yet, and the engine must not start.
    """
    found = first(arguments, refusals)
    if found is not None:
        raise ValueError(found.message_for(arguments))
