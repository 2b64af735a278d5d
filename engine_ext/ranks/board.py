"""What the HTTP processes of an engine share; every rank keeps it.

Several HTTP processes can serve one engine, and each can die at any time. So none of them keeps
what all must know: every rank keeps one `Board`, and gets the same calls in the same order, so that
all ranks answer alike, whichever process asks. A board is empty when its rank starts.

The board does not know what a value means. A process that changes one reads it, computes the new
value and puts it under the revision that it has read; if another process was faster, nothing is
put, and the answer has what is there. `delta_server.board` does that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from engine_ext.ranks.replies import BoardItem

# The items that ranks or several modules of the HTTP side name.
ENGINE: Final = "engine"
"""Whose commit or pause is under way, and a `engine_ext.ranks.replies.EngineUse`."""
LOG_RECORDS: Final = "log_records"
"""A `engine_ext.ranks.replies.LogRecords`; the ranks keep it with the version of their weights."""


@dataclass(slots=True)
class _Item:
    value: Any = None
    revision: int = 0
    holder: str | None = None  # the last one
    held: bool = False
    entries: deque[Any] = field(default_factory=deque)

    def write(self, value: Any) -> None:
        """Replace the value; the same one again is no change that another process must see."""
        if value != self.value:
            self.value, self.revision = value, self.revision + 1


class Board:
    """Named items: a value, the last of many entries, and a lease that one process can hold."""

    def __init__(self) -> None:
        self._items: dict[str, _Item] = {}

    def get(self, key: str) -> BoardItem:
        """Return an item with its entries, the newest one last; an empty one if there is none."""
        item = self._items.get(key, _Item())
        return _shown(item, entries=list(item.entries))

    def put(
        self, key: str, value: Any, *, expected: int, append: Any = None, most: int = 0
    ) -> BoardItem:
        """Replace an item's value, unless the item has another revision than expected.

        Args:
            append: becomes the newest entry then; None adds none.
            most: the number of entries that are kept then.
        """
        assert append is None or most > 0
        item = self._items.setdefault(key, _Item())
        if item.revision != expected:
            return _shown(item)
        item.write(value)
        if append is not None:
            item.entries.append(append)
            while len(item.entries) > most:
                item.entries.popleft()
        return _shown(item, written=True)

    def lease(
        self,
        key: str,
        holder: str,
        *,
        instead_of: str | None = None,
        value: Any = None,
        expected: int | None = None,
    ) -> tuple[bool, BoardItem]:
        """Grant an item's lease, unless another process holds it; return whether it is granted.

        Args:
            holder: names the process; it can acquire a lease that it holds already.
            instead_of: names a process that is known to be dead, and loses the lease.
            value: replaces that of the item if the lease is granted, the item has the expected
                revision, and no other process has held the lease since this one last did. Else
                what the process has seen before it asked might be the other one's work.
        """
        item = self._items.setdefault(key, _Item())
        if item.held and item.holder not in (holder, instead_of):
            return False, _shown(item)
        written = item.holder in (None, holder) and item.revision == expected
        if written:
            item.write(value)
        if item.holder != holder:
            item.revision += 1
        item.holder, item.held = holder, True
        return True, _shown(item, written=written)

    def release(
        self, key: str, holder: str, *, value: Any = None, expected: int | None = None
    ) -> BoardItem:
        """Let others acquire a lease, and replace the value; nothing if `holder` has lost it.

        Args:
            value: as for `lease`.
        """
        item = self._items.setdefault(key, _Item())
        if not item.held or item.holder != holder:
            return _shown(item)
        item.held = False
        written = item.revision == expected
        if written:
            item.write(value)
        return _shown(item, written=written)


def _shown(item: _Item, *, written: bool = False, entries: list[Any] | None = None) -> BoardItem:
    return BoardItem(
        value=item.value,
        revision=item.revision,
        holder=item.holder if item.held else None,
        written=written,
        entries=entries or [],
    )
