"""What a rebuild replaces as a whole, because it has no elements that could be written to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """An object that processing has made, such as a number or the handle of a kernel.

    Attributes:
        keeps: what the object might point to without a reference of its own, kept alive with it.
        nbytes: host memory that both take.
    """

    value: Any
    keeps: Any
    nbytes: int


@dataclass(slots=True)
class AttributeElements:
    """An attribute of the live module; see `engine_ext.placement.LiveElements`.

    Attributes:
        container: the ``__dict__`` of the object that has it, or a dict or list of the module.
        key: the attribute's name, or its key.
        size: host memory that a value of it takes, in bytes.
    """

    container: Any
    key: Any
    size: int
    nbytes: int = 0
    _keeps: Any = field(default=None, init=False)

    def read(self) -> Replacement:
        return Replacement(self.container[self.key], self._keeps, self.size)

    def holds(self, bits: Replacement) -> bool:
        return self.container[self.key] is bits.value

    def put(self, bits: Replacement) -> None:
        self.container[self.key] = bits.value
        self._keeps = bits.keeps
