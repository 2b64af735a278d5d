"""Typed items of the board that the ranks keep for all HTTP processes of an engine.

See `engine_ext.ranks.board`. Each process has its own `Item` of a name, with what the ranks have
answered last. A change made meanwhile by another process is never overwritten: the ranks refuse
the new value then, and it is computed again from theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from delta_server.engine import Engine, call_all_ranks
from delta_server.process_identity import is_alive, new_name
from engine_ext.ranks.operations import (
    BoardItem,
    BoardLease,
    GetItem,
    LeaseItem,
    PutItem,
)
from engine_ext.structs import prepare

FLEET: Final = "fleet"
FOLLOW: Final = "follow"
HISTORY: Final = "history"
LOG: Final = "log"
PULLS: Final = "pulls"
SCRUB: Final = "scrub"
SERVED: Final = "served"

_T = TypeVar("_T", bound=msgspec.Struct)


class Item(Generic[_T]):
    """One item of an engine's board, as one process sees it.

    Args:
        key: its name.
        kind: the type of its value; ``kind()`` if none was put yet.

    Attributes:
        name: of this process, where it has the lease.
        value: the last one that this process has seen.
        holder: the process that had the lease then, or None.
    """

    def __init__(self, engine: Engine, key: str, kind: type[_T]) -> None:
        self._engine, self._key, self._kind = engine, key, kind
        self.name, self._revision = new_name(), 0
        self.value: _T = kind()
        self.holder: str | None = None

    async def read(self) -> _T:
        """Return the value that the ranks have."""
        await self.entries()
        return self.value

    async def entries(self) -> list[Any]:
        """Return the entries as JSON, the newest one last."""
        [item, *_] = await call_all_ranks(self._engine, GetItem(key=self._key))
        self._see(item)
        return item.entries

    async def update(
        self,
        change: Callable[[_T], _T],
        *,
        append: Callable[[_T], msgspec.Struct | None] = lambda before: None,
        most: int = 0,
    ) -> _T:
        """Replace the value by what `change` returns of it; return the new one.

        That is one call of the ranks, and another one each time that another process was faster.

        Args:
            append: returns a new entry, or None, of the value before.
            most: the number of entries that are kept then.
        """
        while not await self.try_put(change(self.value), append=append(self.value), most=most):
            pass
        return self.value

    async def try_put(
        self, value: _T, *, append: msgspec.Struct | None = None, most: int = 0
    ) -> bool:
        """Put a value that follows from `value`; return whether no other process was faster."""
        request = PutItem(
            key=self._key,
            value=msgspec.to_builtins(value),
            expected=self._revision,
            append=msgspec.to_builtins(append),
            most=most,
        )
        [item, *_] = await call_all_ranks(self._engine, request)
        self._see(item)
        return item.written

    async def try_lease(self, value: _T | None = None) -> list[BoardLease]:
        """Acquire the lease, unless a living process has it; return the ranks' answers.

        Args:
            value: is put if nothing has happened to the item since this process has seen it, and no
                other process has had the lease since this one has.
        """
        answers = await self._lease(value)
        while not answers[0].granted:
            assert self.holder is not None
            if is_alive(self.holder):
                break
            answers = await self._lease(value, instead_of=self.holder)
        return answers

    async def acquire(self, value: _T | None = None) -> bool:
        """Return whether this process gets the lease, or has it; see `try_lease`."""
        return (await self.try_lease(value))[0].granted

    async def release(self, value: _T | None = None) -> None:
        """Let others acquire the lease, and put a value; nothing if this process has lost it."""
        await self._lease(value, release=True)

    async def _lease(self, value: _T | None, **options: Any) -> list[BoardLease]:
        new = {} if value is None else {"value": msgspec.to_builtins(value)}
        expected = None if value is None else self._revision
        request = LeaseItem(key=self._key, holder=self.name, expected=expected, **new, **options)
        answers = await call_all_ranks(self._engine, request)
        self._see(answers[0].item)
        return answers

    def _see(self, item: BoardItem) -> None:
        self._revision, self.holder = item.revision, item.holder
        self.value = self._kind() if item.value is None else msgspec.convert(item.value, self._kind)


class Nothing(msgspec.Struct, frozen=True):
    """The value of an item that is a lease alone."""


prepare(Nothing)
