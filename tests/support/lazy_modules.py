"""Modules that take seconds to import, such as an engine's: only what uses them waits for them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """A module that is imported when a test first asks for one of its public attributes.

    pytest looks for others on all that a test module has.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
