"""Votes among the data parallel replicas of one server.

An engine starts its replicas as separate process groups, which do not know each other. They are one
engine to a sender: all commit a sync, or none does. So the server's process keeps a store on the
loopback interface, and the first rank of each replica exchanges votes there. They are signed with a
key that the server's processes inherit, so that another user of the host cannot forge one.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
import socket
from typing import Any, Final

import msgspec

from engine_ext.ranks.group import RankGroup
from engine_ext.structs import prepare

ENVIRONMENT: Final = "DELTA_UPDATES_REPLICAS"

_HOST: Final = "127.0.0.1"
# As long as gloo waits. Replicas can take long to load, one longer than the other.
_TIMEOUT: Final = datetime.timedelta(minutes=30)
# The store refuses values of more than 8 MiB.
_CHUNK: Final = 4 << 20
_COUNT: Final = 4  # bytes of the number of chunks


class _Meeting(msgspec.Struct, frozen=True):
    """Where the replicas of a server meet, how many there are, and the key that they sign with."""

    port: int
    replicas: int
    key: str


prepare(_Meeting)


_hosted: list[Any] = []


def host(replicas: int) -> None:
    """Let as many replicas meet as long as this process lives; one alone meets nobody.

    Processes that this one starts from now on find the replicas by their environment.
    """
    os.environ.pop(ENVIRONMENT, None)
    if replicas == 1:
        return
    listener = socket.socket()
    listener.bind((_HOST, 0))
    port = int(listener.getsockname()[1])
    # Those of other servers that this process has started stay.
    _hosted.append(_store(port, is_master=True, master_listen_fd=listener.detach()))
    meeting = _Meeting(port, replicas, secrets.token_hex())
    os.environ[ENVIRONMENT] = msgspec.json.encode(meeting).decode()


def count() -> int:
    """Return how many replicas the server has that this process belongs to."""
    meeting = _meeting()
    return 1 if meeting is None else meeting.replicas


def among_replicas(replica: int, group: RankGroup) -> RankGroup:
    """Return the ranks of all replicas; those of this one are `group`, and all that there are.

    Args:
        replica: the number of this one, from 0.

    Raises:
        RuntimeError: the replicas of this engine cannot meet.
    """
    meeting = _meeting()
    if meeting is None and replica == 0:
        return group
    if meeting is None or replica >= meeting.replicas:
        raise RuntimeError(
            f"delta updates: replica {replica} cannot meet the others; data parallel replicas need "
            "the engine's own HTTP server, started with --enable-delta-updates"
        )
    store = None
    if group.rank == 0:
        store = _store(meeting.port, is_master=False, timeout=_TIMEOUT)
        if store.add(f"replica {replica}", 1) != 1:
            raise RuntimeError(f"delta updates: there is a replica {replica} already")
    return ReplicaRanks(group, store, replica, meeting.replicas, bytes.fromhex(meeting.key))


class ReplicaRanks:
    """The ranks of all replicas, in the order of their replicas.

    Args:
        group: the ranks of this replica; all replicas have as many.
        store: of the first rank of each replica; None on the others.
        replica: the number of this one.
        replicas: how many there are.
        key: that all of them sign with.
    """

    def __init__(
        self, group: RankGroup, store: Any, replica: int, replicas: int, key: bytes
    ) -> None:
        self.group, self._store, self._key = group, store, key
        self._replica, self._replicas = replica, replicas
        self._turn = 0
        self._said: list[str] = []
        self._broken: str | None = None
        self.rank = replica * len(group.all_gather(None)) + group.rank

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; all ranks of all replicas must call it.

        Values have JSON types; a tuple or a set can come back as a list.

        Raises:
            RuntimeError: another replica did not come in time, now or before. The replicas might be
                at different votes from then on, so nothing is exchanged until a restart.
        """
        own = self.group.all_gather(value)
        found: list[Any] | None = None
        if self.group.rank == 0:
            found = self._exchange(own)
        # An error here must reach the other ranks of this replica.
        found, self._broken = self.group.all_gather((found, self._broken))[0]
        if found is None:
            raise RuntimeError(f"the replicas did not meet: {self._broken}; restart the engine")
        return found

    def _exchange(self, own: list[Any]) -> list[Any] | None:
        if self._broken is not None:
            return None
        self._turn += 1
        try:
            read = self._said
            self._said = self._say(_encoded(own))
            heard = [self._hear(replica) for replica in range(self._replicas)]
            # Every replica has read the earlier values, or it would not be here.
            for key in read:
                self._store.delete_key(key)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            return None
        failures = [failure for failure, _ in heard if failure is not None]
        if failures:
            self._broken = failures[0]
            return None
        return [value for _, values in heard for value in values]

    def _say(self, body: bytes) -> list[str]:
        """Write a body for the other replicas, and return its keys."""
        key = f"{self._turn}/{self._replica}"
        chunks = [body[start : start + _CHUNK] for start in range(0, len(body), _CHUNK)]
        keys = [f"{key}/{number}" for number in range(len(chunks))]
        for name, chunk in zip(keys, chunks, strict=True):
            self._store.set(name, chunk)
        self._store.set(key, len(chunks).to_bytes(_COUNT, "big") + self._signature(key, body))
        return [key, *keys]

    def _hear(self, replica: int) -> Any:
        """Wait for a replica's values."""
        key = f"{self._turn}/{replica}"
        head = self._store.get(key)
        chunks = range(int.from_bytes(head[:_COUNT], "big"))
        body = b"".join(self._store.get(f"{key}/{number}") for number in chunks)
        if not hmac.compare_digest(head[_COUNT:], self._signature(key, body)):
            raise ValueError(f"what replica {replica} says is not signed by it")
        return msgspec.msgpack.decode(body)

    def _signature(self, key: str, body: bytes) -> bytes:
        return hmac.digest(self._key, key.encode() + body, hashlib.sha256)


def _encoded(values: list[Any]) -> bytes:
    """Encode values, or the error if that fails, so that the other replicas do not wait."""
    try:
        return msgspec.msgpack.encode([None, values])
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
        return msgspec.msgpack.encode([failure, []])


def _store(port: int, **options: Any) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(_HOST, port, wait_for_workers=False, **options)


def _meeting() -> _Meeting | None:
    text = os.environ.get(ENVIRONMENT)
    return msgspec.json.decode(text, type=_Meeting) if text else None
