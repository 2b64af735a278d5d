"""Let the ranks of a trainer agree: small messages to all, and elements from one to another.

Everything goes over a gloo group of its own, in host memory and with its own timeout, whatever the
trainer's backend is. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from delta_sender.models.ranks import new_gloo_group
from delta_sender.results import EngineBusy, EngineUnreachable, RankError, SyncError
from delta_sender.sharded.copies import differing
from engine_ext.format import Digest

_Result = TypeVar("_Result")

_LEADER: Final = 0
_SHOWN: Final = 8  # names in a message
_CHUNK: Final = 256 << 20  # bytes of one message between two ranks


class Ranks:
    """The ranks of a group, or a single process if torch.distributed is not initialised.

    After a collective has failed, or `leave` was called, the group is gone: all further calls
    raise `RankError`, here and, as connections close, on the other ranks.

    Args:
        group: The ranks; None: all. All of them must make one.
        timeout: Seconds after which a rank that does not answer counts as dead.

    Attributes:
        rank, size: This rank's number in the group, and the number of ranks.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self._timeout, self._lost = timeout, ""
        self._group: Any = None
        self.rank, self.size = 0, 1
        if not (dist.is_available() and dist.is_initialized()):
            return
        numbers = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.size = len(numbers)
        if self.size > 1:
            self.rank = numbers.index(dist.get_rank())
            self._group = new_gloo_group(numbers, self.rank, timedelta(seconds=timeout))

    @property
    def is_leader(self) -> bool:
        """Whether this rank talks to the engine for all."""
        return self.rank == _LEADER

    @property
    def has_left(self) -> bool:
        """Whether the group is gone."""
        return bool(self._lost)

    def leave(self, why: str = "this rank has left") -> None:
        """Close the connections to the other ranks, so that none waits for this one."""
        self._lost = self._lost or why
        self._group = None  # its connections close with it

    def exchange(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, in rank order.

        Args:
            message: What msgspec writes as JSON.

        Raises:
            RankError: A rank has died, or does not answer.
        """
        raw = np.frombuffer(msgspec.json.encode(message), np.uint8)
        with self._collective():
            if self.size == 1:
                return [msgspec.json.decode(raw.tobytes())]
            sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
            self._group.allgather([sizes], [torch.tensor([raw.size], device="cpu")]).wait()
            most = max(int(size) for size in sizes)
            own = torch.zeros(most, dtype=torch.uint8, device="cpu")
            own[: raw.size] = torch.from_numpy(raw.copy())
            found = [torch.empty_like(own) for _ in sizes]
            self._group.allgather([found], [own]).wait()
        texts = (one[: int(size)].numpy() for one, size in zip(found, sizes, strict=True))
        return [msgspec.json.decode(text.tobytes()) for text in texts]

    def agree(
        self,
        facts: dict[str, Any],
        failure: Exception | None = None,
        copies: dict[str, str] | None = None,
    ) -> None:
        """Check that every rank has the same facts and copies, and that none has failed.

        Args:
            copies: Digests of shards that other ranks can hold too; see `Copies.digest`.

        Raises:
            RankError: They differ, or a rank has failed; the same on every rank.
        """
        said = self.exchange([facts, None if failure is None else _text(failure), copies or {}])
        failures = {rank: text for rank, (_, text, _) in enumerate(said) if text is not None}
        if failures:
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            raise RankError(f"not sent, as ranks have failed: {texts}", [*failures]) from failure
        first, *_ = said[0]
        for rank, (other, *_) in enumerate(said):
            for fact in sorted(first.keys() | other.keys()):
                one, two = first.get(fact), other.get(fact)
                if one != two:
                    raise RankError(
                        f"not sent, as ranks disagree about the {fact}: {one} on rank 0, {two} on "
                        f"rank {rank}",
                        [0, rank],
                    )
        if found := differing([digests for *_, digests in said]):
            named = [f"{shard} on ranks {one} and {two}" for shard, (one, two) in found.items()]
            more = f"; and {len(named) - _SHOWN} others" if len(named) > _SHOWN else ""
            raise RankError(
                f"not sent, as copies of a shard differ: {'; '.join(named[:_SHOWN])}{more}",
                sorted({rank for pair in found.values() for rank in pair}),
            )

    def from_leader(self, ask: Callable[[], _Result]) -> _Result:
        """Return on every rank what the leader's call returns, which must be JSON.

        Raises:
            SyncError: What the call raises, on every rank.
            RankError: It has failed in another way.
        """
        result, failure = None, None
        if self.is_leader:
            try:
                result = ask()
            except Exception as error:
                failure = error
        found, failed = self._broadcast([result, None if failure is None else described(failure)])
        if failed is not None:
            raise_first({_LEADER: failed}, failure)
        return found  # type: ignore[no-any-return]

    def _broadcast(self, message: Any) -> Any:
        """Return the leader's message."""
        raw = torch.from_numpy(np.frombuffer(msgspec.json.encode(message), np.uint8).copy())
        with self._collective():
            if self.size > 1:
                size = torch.tensor([raw.numel()], device="cpu")
                self._group.broadcast(size, _LEADER).wait()
                raw = (
                    raw
                    if self.is_leader
                    else torch.empty(int(size), dtype=torch.uint8, device="cpu")
                )
                self._group.broadcast(raw, _LEADER).wait()
        return msgspec.json.decode(raw.numpy().tobytes())

    def sum_of(self, digest: Digest) -> Digest:
        """Return the sum of every rank's digest."""
        lanes = np.array([digest.lane0, digest.lane1], np.uint64).view(np.int64)
        total = torch.from_numpy(lanes)
        with self._collective():
            if self.size > 1:
                self._group.allreduce(total).wait()  # wraps, as the lanes do
        lane0, lane1 = total.numpy().view(np.uint64)
        return Digest(int(lane0), int(lane1))

    def send(self, values: Any, rank: int) -> None:
        """Send an array to another rank, which must `receive` it; blocks until it does."""
        raw = torch.from_numpy(np.require(values, requirements=["C", "W"]).view(np.uint8))
        with self._collective():
            for chunk in _chunks(raw):
                self._group.send([chunk], rank, 0).wait()

    def receive(self, values: Any, rank: int) -> None:
        """Fill an array with what another rank sends; blocks until it is there."""
        raw = torch.from_numpy(values.view(np.uint8))
        with self._collective():
            for chunk in _chunks(raw):
                self._group.recv([chunk], rank, 0).wait()

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        if self._lost:
            raise RankError(f"the ranks of this sender are apart: {self._lost}; make a new one", [])
        try:
            yield
        except Exception as error:
            why = f"a rank has died, or has not answered for {self._timeout:g} s"
            self.leave(why)
            raise RankError(f"{why}: {_text(error)}", []) from error
        except BaseException:
            self.leave("interrupted")
            raise


def described(error: Exception) -> dict[str, Any]:
    """Return what other ranks need to know of an error."""
    if not isinstance(error, SyncError) or isinstance(error, RankError):
        return {"message": _text(error)}
    said = {"message": str(error), "status": error.status, "error": error.error}
    return {**said, "class": type(error).__name__, "unanswered": error.unanswered}


def error_of(said: Mapping[str, Any]) -> SyncError:
    """Return the error that `described` has described."""
    if "status" not in said:
        return RankError(said["message"], [])
    named = {one.__name__: one for one in (EngineBusy, EngineUnreachable)}
    message, status, error = said["message"], said["status"], said["error"]
    make = named.get(said["class"], SyncError.of)
    found = make(message, status, error)
    found.unanswered = said["unanswered"]
    return found


def raise_first(failures: dict[int, dict[str, Any]], own: Exception | None) -> NoReturn:
    """Raise the error that ranks have failed with, the same on every rank.

    Args:
        failures: What `described` has returned, by rank.
        own: This rank's error, if it has one.

    Raises:
        SyncError: The engine's refusal.
        RankError: A rank has failed in another way.
    """
    broken = {rank: one for rank, one in failures.items() if "status" not in one}
    if broken:
        texts = "; ".join(f"rank {rank}: {one['message']}" for rank, one in broken.items())
        raise RankError(f"not sent, as ranks have failed: {texts}", [*broken]) from own
    raise error_of(failures[first_cause(failures)]) from own


def first_cause(failures: dict[int, dict[str, Any]]) -> int:
    """Return the rank whose failure is not just a consequence of another's."""
    return min(failures, key=lambda rank: (_kind(failures[rank]) == "Conflict", rank))


def _kind(failure: dict[str, Any]) -> Any:
    return (failure.get("error") or {}).get("type")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _chunks(raw: torch.Tensor) -> Iterator[torch.Tensor]:
    return (raw[start : start + _CHUNK] for start in range(0, raw.numel(), _CHUNK))
