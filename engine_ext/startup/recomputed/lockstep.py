"""Run the engine's processing on all ranks in step: on all of them it ends, or on all it fails.

Some processing communicates (a scale that all shards of a weight have in common). If it raises on
one rank, the others would wait for that rank for ever, or take part of another operation for their
own. So the ranks vote before each collective operation that processing begins, and at its end.
Ranks that do not have a module (those of other pipeline stages) only take part in the votes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_ext.errors import as_delta_error, from_wire
from engine_ext.ranks import RankGroup
from engine_ext.startup.recomputed.compare import RebuildError

_T = TypeVar("_T")

_COLLECTIVE: Final = re.compile(
    r"^c10d|^_c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_?$|barrier"
)
_END: Final = "the end"


class LockstepRunner:
    """Runs on this rank what the other ranks run at the same time."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._is_alone = len(ranks.all_gather(None)) == 1

    def agree(self, paths: Iterable[str]) -> list[str]:
        """Return the paths of all ranks, in an order that is the same on each."""
        return list(
            dict.fromkeys(path for own in self._ranks.all_gather(list(paths)) for path in own)
        )

    def run(self, what: str, work: Callable[[], _T]) -> _T:
        """Do some work; all ranks must call this or `follow` with the same `what`.

        Raises:
            RebuildError: the ranks are not at the same operation.
            DeltaError: what the work raised on another rank.
            Exception: what it raised on this rank.
        """
        if self._is_alone:
            return work()
        votes = _Votes(self._ranks, what)
        try:
            with votes:
                result = work()
        except Exception as error:
            votes.fail(error)
            raise
        votes.end()
        return result

    def follow(self, path: str, model: torch.nn.Module, what: str = "") -> None:
        """Wait until the ranks that `run` some work on a module have ended it.

        If this rank's model has the module, too, the work must not communicate: it would wait for
        this rank.

        Args:
            what: that of `run`; the path by default.

        Raises:
            RebuildError: the ranks are not at the same operation.
            DeltaError: what the work raised on another rank.
        """
        what = what or path
        if _has_module(model, path):
            self.run(what, lambda: None)
        elif not self._is_alone:
            _Votes(self._ranks, what).follow()


def _has_module(model: torch.nn.Module, path: str) -> bool:
    """Return whether a model has a module there, other than an empty one in its place."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return bool(module._parameters or module._buffers or module._modules)


class _Votes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The votes of one piece of work."""

    def __init__(self, ranks: RankGroup, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks, self._what = ranks, what
        self._failure: Exception | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled processing would run uncompiled, and might give other bits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in ("aten", "prim") and _COLLECTIVE.search(str(func.name())):
            self._vote(str(func))
        return func(*args, **(kwargs or {}))

    def fail(self, error: Exception) -> None:
        """Notify the other ranks that the work has failed, unless all know that it has."""
        if self._failure is None:
            self._failure = error
            vote = {"error": as_delta_error(error, log=False).to_wire()}
            with contextlib.suppress(Exception):  # the error is the one to be raised
                self._ranks.all_gather(vote)

    def end(self) -> None:
        """Wait until the work is done on all ranks."""
        self._vote(_END)

    def follow(self) -> None:
        """Take part in the votes of others, up to the last one."""
        while self._vote(None) not in ([], [f"{_END} of {self._what}"]):
            pass

    def _vote(self, at: str | None) -> list[str]:
        """Return where the ranks are that do the work; `at` is None on one that does not."""
        if self._failure is not None:  # the work continued after a vote that had failed
            raise self._failure
        place = None if at is None else f"{at} of {self._what}"
        try:
            votes = self._ranks.all_gather({"at": place})
        except Exception as error:
            self._failure = error
            raise
        errors = [vote["error"] for vote in votes if "error" in vote]
        places = sorted({vote["at"] for vote in votes if vote.get("at") is not None})
        if errors:
            self._failure = from_wire(errors[0])
        elif len(places) > 1:
            others = ", ".join(other for other in places if other != place)
            self._failure = RebuildError(f"this rank is at {place}, others at {others}")
        if self._failure is not None:
            raise self._failure
        return places
