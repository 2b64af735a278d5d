"""The last syncs of an engine and what became of them, as every rank remembers them.

What a request was answered, and how long its steps took, only the HTTP process knows that took it.
It tells the ranks, so that several HTTP processes have one history.
"""

from __future__ import annotations

from collections import deque
from typing import Any

_MOST = 50
_SUMMED = ("bytes", "parts")


class SyncHistory:
    """What became of the last syncs, the newest one last.

    Args:
        most: how many are remembered.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._syncs: deque[dict[str, Any]] = deque(maxlen=most)
        # What the staged parts of the sync in progress have brought; there is one at a time.
        self._staged: dict[str, Any] | None = None

    def note(self, record: dict[str, Any]) -> dict[str, Any]:
        """Remember what became of one request.

        Args:
            record: JSON with ``outcome``, ``version``, ``sync_id``, ``bytes``, ``parts`` and
                ``timings_ms``. One that is ``staged`` is a share of a later record of the same
                version and ``sync_id``.

        Returns:
            ``record``: the same, with all of the shares that came before it.
        """
        staged = self._staged
        if staged is not None and _key(staged) == _key(record):
            record = _sum(staged, record)
        if record["outcome"] == "staged":
            self._staged = record
        else:
            self._syncs.append(record)
            if staged is not None and record["outcome"] == "committed":
                self._staged = None
        return {"record": record}

    def show(self) -> dict[str, Any]:
        """All that is remembered."""
        return {"syncs": list(self._syncs)}


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["version"], record["sync_id"]


def _sum(staged: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    earlier, later = staged["timings_ms"], record["timings_ms"]
    timings = {k: round(earlier.get(k, 0.0) + later.get(k, 0.0), 3) for k in {**earlier, **later}}
    sums = {key: staged[key] + record[key] for key in _SUMMED}
    return {**record, **sums, "timings_ms": timings}
