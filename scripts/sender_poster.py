"""Posting in a thread of its own, so that the next part is encoded meanwhile."""

from __future__ import annotations

import time
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sender_http import Place

if TYPE_CHECKING:
    from typing_extensions import Self


class Poster:
    """Posts parts to one engine, one after the other.

    The block is left once the last one has been answered, however it is left: nothing is under way
    afterwards. The threads do not keep a program from ending.

    Attributes:
        posting_s: seconds of posting, with retries and waits.
        waited_s: seconds of them that nothing else was done in.
    """

    def __init__(self, server: Place) -> None:
        self.posting_s = self.waited_s = 0.0
        self._server = server
        self._thread: Thread | None = None
        self._outcome: dict[str, Any] | BaseException = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._join()

    def post(self, *part: Any) -> None:
        """Begin; arguments are those of `Place.deliver`. The part before has been waited for."""
        self._thread = Thread(target=self._post, args=part, daemon=True)
        self._thread.start()

    def wait(self) -> dict[str, Any]:
        """The answer to the part that was posted last; {} before the first.

        Raises:
            SyncFailed: The engine refused it or could not be reached.
        """
        start = time.perf_counter()
        self._join()
        self.waited_s += time.perf_counter() - start
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _post(self, *part: Any) -> None:
        start = time.perf_counter()
        try:
            self._outcome = self._server.deliver(*part)
        except BaseException as error:
            self._outcome = error
        self.posting_s += time.perf_counter() - start

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
