"""Typed items of the board that the ranks keep for all HTTP processes of an engine.

See `engine_ext.ranks.board`. Each process has its own `Item` of a name, with what the ranks have
answered last. A change made meanwhile by another process is never overwritten: the ranks refuse
the new value then, and it is computed again from theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from delta_server.engine import Engine, call_all_ranks
from delta_server.process_identity import is_alive
from engine_ext.ranks.operations import (
    BoardItem,
    GetItem,
    LeaseItem,
    PutItem,
    RankState,
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


@dataclass(frozen=True, slots=True)
class Lease:
    """The ranks' answer to a process that wants a lease.

    Attributes:
        granted: whether it has the lease now.
        written: whether its value was put.
        states: of the ranks.
    """

    granted: bool
    written: bool
    states: list[RankState]


class Item(Generic[_T]):
    """One item of an engine's board, as one process sees it.

    Args:
        key: its name.
        kind: the type of its value; ``kind()`` if none was put yet.

    Attributes:
        value: the last one that this process has seen.
        holder: the process that had the lease then, or None.
    """

    def __init__(self, engine: Engine, key: str, kind: type[_T]) -> None:
        self._engine, self._key, self._kind = engine, key, kind
        self._revision = 0
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

    async def try_lease(
        self, holder: str, value: _T | None = None, *, instead_of: str | None = None
    ) -> Lease:
        """Acquire the lease, unless another process has it.

        Args:
            value: is put if nothing has happened to the item since this process has seen it, and no
                other process has had the lease since this one has.
            instead_of: a process that is known to be dead.
        """
        return await self._lease(holder, value, instead_of=instead_of)

    async def acquire(self, holder: str, value: _T | None = None) -> bool:
        """Return whether this process gets the lease, or has it; a dead holder loses it.

        Args:
            value: as for `try_lease`.
        """
        dead: str | None = None
        while not (await self.try_lease(holder, value, instead_of=dead)).granted:
            assert self.holder is not None
            if is_alive(self.holder):
                return False
            dead = self.holder
        return True

    async def release(self, holder: str, value: _T | None = None) -> None:
        """Let others acquire the lease, and put a value; nothing if this process has lost it."""
        await self._lease(holder, value, release=True)

    async def _lease(self, holder: str, value: _T | None, **options: Any) -> Lease:
        new = {} if value is None else {"value": msgspec.to_builtins(value)}
        expected = None if value is None else self._revision
        request = LeaseItem(key=self._key, holder=holder, expected=expected, **new, **options)
        replies = await call_all_ranks(self._engine, request)
        self._see(replies[0].item)
        states = [reply.state for reply in replies]
        return Lease(replies[0].granted, replies[0].item.written, states)

    def _see(self, item: BoardItem) -> None:
        self._revision, self.holder = item.revision, item.holder
        self.value = self._kind() if item.value is None else msgspec.convert(item.value, self._kind)


class Nothing(msgspec.Struct, frozen=True):
    """The value of an item that is a lease alone."""


prepare(Nothing)
