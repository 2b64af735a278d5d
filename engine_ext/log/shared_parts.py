"""What an engine hands on of its log: parts by their hash, to engines that ask for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from engine_ext.format import SIGNATURE_SUFFIX, signing_key
from engine_ext.log.catalog import Entry, FileFacts
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
        # Signatures by the part's name and hash, each read once; None: it has none.
        self._signatures: dict[tuple[str, str], str | None] = {}

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
            entries = [one for one in self._log.listing().entries if one.version <= version]
            if signing_key() is None:
                return offer_of(entries, version, digest, lambda name: None)
            signatures = self._read_signatures(entries)
        return offer_of(entries, version, digest, signatures.get)

    def _read_signatures(self, entries: Iterable[Entry]) -> dict[str, str | None]:
        """Return the signatures of all parts, by the part's name; those not read before are read.

        A part's bytes have one signature, so none changes.
        """
        parts = {
            (f"{entry.folder.name}/{name}", facts.xxh3_128)
            for entry in entries
            for name, facts in entry.files.items()
            if facts is not None
        }
        store = self._log.store

        def read(part: tuple[str, str]) -> str | None:
            with contextlib.suppress(FileNotFoundError):
                text = store.read(part[0] + SIGNATURE_SUFFIX, _MOST_BYTES)
                return text.decode("ascii", "replace")
            return None

        new = sorted(parts - self._signatures.keys())
        with ThreadPoolExecutor(store.reads_at_once, "delta-signatures") as pool:
            found = dict(zip(new, pool.map(read, new), strict=True))
        self._signatures = {one: self._signatures[one] for one in parts - found.keys()} | found
        return {name: signature for (name, _), signature in self._signatures.items()}

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
