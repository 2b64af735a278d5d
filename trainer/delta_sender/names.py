"""Words about names of tensors: how many, and which ones are meant if they are not the base's."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_SHOWN = 5


def some_of(names: Iterable[str]) -> str:
    """Return names in order, of many the first five and how many there are besides."""
    ordered = sorted(names)
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def prefix_hint(name: str, known: Collection[str]) -> str:
    """Return how a name would be one that is known, by a prefix less or more; "" if it would not.

    It begins with "; ", as it is appended to what is wrong with the name.
    """
    parts = name.split(".")
    for start in range(1, len(parts)):
        if (rest := ".".join(parts[start:])) in known:
            prefix = ".".join(parts[:start])
            return f"; the base has {rest}: take the prefix '{prefix}.' off the names"
    longer = next((one for one in known if one.endswith(f".{name}")), None)
    if longer is None:
        return ""
    return f"; the base has {longer}: put the prefix '{longer[: -len(name)]}' before the names"
