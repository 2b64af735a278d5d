"""What an engine hands on of its log: parts by their hash, to engines that ask for them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Final

from engine_ext.format import SIGNATURE_SUFFIX, signing_key
from engine_ext.log.catalog import FileFacts
from engine_ext.log.delta_log import DeltaLog
from engine_ext.log.peer_store import Offer, offer_of

_MOST_BYTES: Final = 1 << 12


class SharedParts:
    """The parts of one log. Thread-safe.

    Only what a version of the log has is handed on, whatever else is in the host's cache.

    Args:
        log: for this object alone.
    """

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, FileFacts]] = {}  # name in the store, by hash

    def path(self, content: str, *, reads: bool) -> Path | None:
        """Return a file of this host that has a part, to be opened at once; None if there is none.

        Args:
            content: xxh3_128 of the part, in hex.
            reads: whether it is read from the store if it is not on this host. Who asks for the
                same part meanwhile waits for that.

        Raises:
            LogDamaged: the log cannot be read.
            DeltaError: the part cannot be read now, or not be kept on this host.
            OSError: likewise.
        """
        found = self._find(content)
        try:
            return None if found is None else self._log.store.part(*found, reads=reads)
        except FileNotFoundError:  # deleted since the log was listed
            with self._lock:
                self._known.pop(content, None)
            return None

    def offer(self, version: int, digest: str) -> Offer:
        """Return what leads to the version that the engine holds; see `Offer`.

        Args:
            digest: of the engine's weights.

        Raises:
            LogDamaged: the log cannot be read.
            OSError: likewise.
        """
        with self._lock:
            entries, key = self._log.listing().entries, signing_key()

        def signature(name: str) -> str | None:
            if key is None:
                return None
            with contextlib.suppress(FileNotFoundError):
                return self._log.store.read(name + SIGNATURE_SUFFIX, _MOST_BYTES).decode()
            return None

        return offer_of(entries, version, digest, signature)

    def _find(self, content: str) -> tuple[str, FileFacts] | None:
        with self._lock:
            if content not in self._known:
                self._known = {
                    facts.xxh3_128: (f"{entry.folder.name}/{name}", facts)
                    for entry in self._log.listing().entries
                    for name, facts in entry.files.items()
                    if facts is not None
                }
            return self._known.get(content)
