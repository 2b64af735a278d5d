"""The background thread of one rank that digests its live tensors, one after another.

A write must never look like a mismatch, and a mismatch must never be taken for a write. So every
write of the receiver is announced (`Scrubber.interrupted`), and counted when it begins. A tensor is
judged only if no write was under way when reading it began, and none had begun when it ended; else
it is read again. After such an interruption it is read without rests, so that frequent syncs do not
keep a large tensor from ever being judged; the rest follows.

A tensor that is not where it was placed is a mismatch, whatever its old memory holds.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Final

import torch

from engine_ext.format import Digest
from engine_ext.kernels import same_device
from engine_ext.placement import Plan
from engine_ext.ranks.operations import ScrubState
from engine_ext.sync.applier import Applier

logger = logging.getLogger(__name__)

SHARE: Final = 0.05
"""The share of one core that scrubbing takes at most."""

_LEAST_WORK_S: Final = 1e-3  # processor time between two rests: fewer, longer ones wake less often
_LONGEST_POLL_S: Final = 1.0

Find = Callable[[], Callable[[], Applier | None] | None]
"""Returns what returns the applier, or None while the weights are asleep or unknown. Itself it
returns None once there is no receiver any more."""


class Scrubber:
    """Scrubs one rank's weights; does nothing until `start`.

    Args:
        find: a weak reference to the receiver's method, so that the thread keeps nothing alive.
        rank: for the log.
    """

    def __init__(self, find: Find, rank: int) -> None:
        self._find, self._rank = find, rank
        self._interval: float | None = None
        # Guards everything below but the two locks.
        self._lock = threading.Lock()
        self._writes = 0  # that have begun
        self._writing = 0  # that have not ended
        self._passes = 0
        self._passed_at: float | None = None
        self._mismatched: set[str] = set()
        self._findings = 0
        self._found: set[str] = set()
        self._error: str | None = None
        # Held while memory is read.
        self._reading = threading.Lock()
        self._stopped = threading.Event()
        self._rested_at = 0.0
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, interval: float) -> None:
        """Read each tensor once per `interval` seconds from now on, if the share allows.

        Calling this again does nothing.
        """
        if self._interval is not None:
            return
        self._interval = interval
        use_device = same_device()

        def run() -> None:
            use_device()
            self._run()

        threading.Thread(target=run, name="delta-scrub", daemon=True).start()

    @property
    def state(self) -> ScrubState | None:
        """The results; None if scrubbing is off."""
        if self._interval is None:
            return None
        with self._lock:
            return ScrubState(
                passes=self._passes,
                passed_at=self._passed_at,
                mismatched=sorted(self._mismatched),
                error=self._error,
            )

    @property
    def findings(self) -> int:
        """How often a tensor was found that was not known to be wrong."""
        with self._lock:
            return self._findings

    def take_found(self) -> set[str]:
        """Return the tensors that were found, once or again, since the last call."""
        with self._lock:
            found, self._found = self._found, set()
        return found

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Return a context in which weights and digests can be written; no tensor is judged."""
        with self._lock:
            self._writes += 1
            self._writing += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing -= 1

    def wait(self) -> None:
        """Wait until no memory is being read. Without an applier to find none is read again."""
        with self._reading:
            pass

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        stop = self._stopped.set
        atexit.register(stop)
        assert self._interval is not None
        try:
            while not self._stopped.is_set() and self._find() is not None:
                began = time.monotonic()
                try:
                    passed = self._pass()
                    error = None
                except Exception as caught:
                    logger.exception("delta updates: scrubbing failed; it continues")
                    passed, error = False, f"{type(caught).__name__}: {caught}"
                with self._lock:
                    self._error = error
                    if passed:
                        self._passes += 1
                        self._passed_at = time.time()
                poll = min(self._interval, _LONGEST_POLL_S)
                wait = began + self._interval - time.monotonic() if passed or error else poll
                while (
                    wait > 0
                    and self._find() is not None
                    and not self._stopped.wait(min(wait, poll))
                ):
                    wait -= poll
        finally:
            atexit.unregister(stop)

    def _applier(self) -> Applier | None:
        """Return the applier of weights that can be read now."""
        current = self._find()
        return None if current is None else current()

    def _pass(self) -> bool:
        """Read every tensor once; return whether it came to the end, with the same applier."""
        applier = self._applier()
        if applier is None or applier.plan is None:
            return False
        plan = applier.plan
        self._rested_at = time.thread_time()
        with self._lock:
            writes, known = self._writes, set(self._mismatched)
        moved = set(applier.moved())
        todo = deque(sorted({n for n in plan.digested if plan.targets.get(n)} - moved))
        for name in sorted(moved.union(known.difference(todo))):  # these are not read
            if not self._judge(applier, plan, name, writes, right=name not in moved):
                return False
        disturbed: set[str] = set()
        while todo:
            name = todo.popleft()
            right = self._read(applier, plan, name, rests=name not in disturbed)
            if right is None:
                if self._is_outdated(applier, plan):
                    return False
                disturbed.add(name)
                todo.append(name)
            if not self._rest():
                return False
        return True

    def _rest(self) -> bool:
        """Sleep for as long as the share demands; return whether to continue."""
        worked = time.thread_time() - self._rested_at
        # A tensor that was disturbed is not read again at once: the write might take a while.
        if worked < _LEAST_WORK_S and not self._writing:
            return True
        stopped = self._stopped.wait(max(worked, _LEAST_WORK_S) * (1 / SHARE - 1))
        self._rested_at = time.thread_time()
        return not stopped

    def _read(self, applier: Applier, plan: Plan, name: str, *, rests: bool) -> bool | None:
        """Return whether the tensor has the tracked digest; None if that cannot be known."""
        with self._lock:
            if self._writing:
                return None
            writes = self._writes
            tracked, copied = applier.digests.get(name), applier.copies.get(name)
        found: dict[tuple[int, int], Digest] = defaultdict(lambda: Digest.ZERO)
        for number, start, copy in plan.pieces(name, copies=True):
            with self._reading:
                if self._writes != writes or self._is_outdated(applier, plan):
                    return None
                with self._beside(plan.targets[name][number].flat.device):
                    found[number, copy] += plan.piece_digest(name, number, start, copy)
            if rests and not self._rest():
                return None
        targets = plan.targets[name]
        right = all(found[targets[n].first, 0] == one for (n, _), one in found.items())
        counted = others = None
        for number, target in enumerate(targets):
            if target.first != number:
                continue
            if target.ranks[0] == plan.rank:
                counted = (counted or Digest.ZERO) + found[number, 0]
            else:
                others = (others or Digest.ZERO) + found[number, 0]
        right &= counted is None or counted == tracked
        right &= others is None or copied is None or others == copied
        right &= all(target.segment.live.in_place for target in targets)
        first = others if copied is None and right else None
        judged = self._judge(applier, plan, name, writes, right=right, copies=first)
        return right if judged else None

    def _is_outdated(self, applier: Applier, plan: Plan) -> bool:
        """Return whether these must not be read any more, or the tensors are elsewhere."""
        return self._applier() is not applier or applier.plan is not plan

    def _beside(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return a context whose work on a device runs next to the engine's own."""
        if device.type == "cpu":
            return contextlib.nullcontext()
        module = torch.get_device_module(device)
        if device not in self._streams:
            # 0 is the lowest priority that there is.
            self._streams[device] = module.Stream(device, priority=0)
        stream: contextlib.AbstractContextManager[object] = module.stream(self._streams[device])
        return stream

    def _judge(
        self,
        applier: Applier,
        plan: Plan,
        name: str,
        writes: int,
        *,
        right: bool,
        copies: Digest | None = None,
    ) -> bool:
        """Record what reading a tensor has shown, unless a write or another plan came in between.

        Args:
            writes: that had begun before it was read.
            copies: the digest of its elements that other ranks count, to be tracked from now on.

        Returns:
            Whether it was recorded.
        """
        with self._lock:
            if self._writes != writes or self._is_outdated(applier, plan):
                return False
            if copies is not None:
                applier.copies[name] = copies
            known = name in self._mismatched
            if right:
                self._mismatched.discard(name)
            else:
                self._found.add(name)
                if not known:
                    self._findings += 1
                self._mismatched.add(name)
        if right and known:
            logger.warning("delta updates: %s holds what the syncs have written again", name)
        elif not right and not known:
            logger.error(
                "delta updates: scrubbing found other bits in %s, on rank %d, than the syncs have "
                "written; send a full sync",
                *(name, self._rank),
            )
        return True
