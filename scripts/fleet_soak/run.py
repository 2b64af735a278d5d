"""The soak's loop: commits, faults, and what is checked after each."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import torch

from scripts.fleet_soak.answers import (
    Answer,
    Tokens,
    may_fail,
    problem_of_versions,
    spans_of,
    unknown_versions,
)
from scripts.fleet_soak.coordinator import Coordinator, CoordinatorDied, Kill, Options, Outcome
from scripts.fleet_soak.engines import Engines, Member, statuses
from scripts.fleet_soak.load import Load
from scripts.fleet_soak.plan import Due, quorum
from scripts.fleet_soak.reference import Reference, weights
from scripts.fleet_soak.router import Router
from scripts.live_engine.tiny_models import digest

_WINDOW_S: Final = 15.0  # two engines that start take both cores
_LAG_S: Final = 5.0
_SETTLED_S: Final = 120.0
_AFTER_DEATH_S: Final = 15.0  # in which requests can fail
_POLL_S: Final = 0.1
_CHECK_EVERY: Final = 2  # tokens of one answer in two are compared, and of all that a commit cuts
_TOLERANCE: Final = 0.15  # of a bf16 engine's log probability; by another step's it is nats off


@dataclass
class Row:
    """A fault, and what has become of it; the times are in seconds."""

    fault: str
    phase: str
    engine: str | None
    outcome: dict[str, str]
    before: int
    after: int
    settled_s: float
    ready_s: float | None = None


@dataclass
class Figures:
    """Results of the soak.

    Attributes:
        rows: a row per fault.
        missed: the faults that were not reached.
        commits, aborts: number of steps that were committed, and that no engine has committed.
        sync_s: seconds of those without a fault.
        states: how engines have ended, summed over all steps.
        requests: number of them by header's kind and state.
        tokens: the comparison of log probabilities.
        reloads: of the router.
        problems: everything that must not be; empty if the soak passed.
    """

    tokens: Tokens
    rows: list[Row] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    commits: int = 0
    aborts: int = 0
    seconds: float = 0.0
    sync_s: list[float] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    requests: dict[str, Counter[str]] = field(default_factory=dict)
    reloads: int = 0
    problems: list[str] = field(default_factory=list)


class Soak:
    """Commits of the fleet under load.

    Args:
        engines: live, with the base.
        router: sends requests to those that are ready.
        load: the clients.
        base: the checkpoint's tensors.
        folder: of the checkpoint.
        logs: folder for the trainer's log.
        due: the faults.
        show: called with a line for the user now and then.
    """

    def __init__(
        self,
        engines: Engines,
        router: Router,
        load: Load,
        base: Mapping[str, torch.Tensor],
        folder: Path,
        *,
        logs: Path,
        due: list[Due],
        show: Callable[[str], None],
    ) -> None:
        self._engines, self._router, self._load = engines, router, load
        self._base, self._folder, self._due, self._show = base, folder, list(due), show
        self._log = logs / "trainer.log"
        self._reference = Reference(folder, base)
        self._coordinator: Coordinator | None = None
        self._leaves_out = True
        self._step = self._version = 0
        self._known = {0: 0}  # version -> step
        self._digests = {0: digest(base)}  # step -> digest
        self._waiting: list[Answer] = []  # for their versions to be known
        self._deaths: list[tuple[float, float]] = []
        self._unready: dict[str, Row] = {}  # rows of faults whose engine is not ready again
        self._answers = itertools.count()
        self.figures = Figures(Tokens(_TOLERANCE))

    def run(self, commits: int, end: float) -> Figures:
        """Commit until that many have been, all faults were and all engines are ready again.

        Args:
            end: when to stop in any case (`time.monotonic`).

        Raises:
            EngineError: An engine that was replaced did not start.
            CoordinatorDied: The trainer has failed, and nobody has killed it.
        """
        start, shown = time.monotonic(), 0
        try:
            while time.monotonic() < end and not self._is_done(commits):
                self._next()
                self._engines.check_starts()
                self._take_answers()
                if self.figures.commits >= shown + max(1, commits // 20):
                    shown = self.figures.commits
                    self._show(f"{shown} commits in {time.monotonic() - start:.0f} s")
        finally:
            self._end_coordinator(failed=False)
        self.figures.seconds = time.monotonic() - start
        self.figures.missed = [f"{one.fault.what}: {one.fault.phase}" for one in self._due]
        return self.figures

    def finish(self) -> Figures:
        """Compare the rest of the answers, after the load has ended, and all live memory."""
        self._take_answers()
        for answer in self._waiting:
            unknown = unknown_versions(answer, self._known)
            self._problem(f"an answer is of versions that nobody has committed: {unknown}")
        for member in self._engines.live:
            status = member.status()
            step = self._known.get(status.version.number, 0)
            if member.scan() != (self._digest_of(step), []):
                self._problem(f"{member.name}: live memory is not that of its version")
        self.figures.problems += self._router.problems
        self.figures.reloads = self._router.reloads
        return self.figures

    def _is_done(self, commits: int) -> bool:
        is_enough = self.figures.commits >= commits and not self._due
        return is_enough and not self._unready and self._all_are_ready()

    def _all_are_ready(self) -> bool:
        return len(self._router.listed) == len(self._engines.members)

    # Steps --------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Send one step, with a fault if one is due and enough engines are ready."""
        if self._due and self._is_due(self._due[0]):
            self._fault(self._due.pop(0))
            return
        outcome = self._sync(None)
        if outcome is not None and len(outcome.states) == len(outcome.versions):
            self.figures.sync_s.append(outcome.seconds)

    def _is_due(self, due: Due) -> bool:
        listed = self._router.listed
        has_victim = not due.fault.hits_engine or self._engines.members[due.victim].url in listed
        return self.figures.commits >= due.commits and has_victim and len(listed) >= due.ready

    def _fault(self, due: Due) -> None:
        fault, member = due.fault, self._engines.members[due.victim]
        self._need(leaves_out=fault.leaves_out)
        before, start = self._version, time.monotonic()
        if fault.what == "engine replaced":
            self._router.leave_out(member.url)
            self._engines.replace(member, grace_s=15.0)
            self._deaths.append((start, time.monotonic()))
        kill = fault.kill
        if kill is not None and fault.hits_engine:
            kill = msgspec.structs.replace(kill, url=member.url, group=member.group)
        victim = member if fault.hits_engine else None
        outcome = self._sync(kill, victim=victim if kill is not None else None)
        row = Row(
            fault=fault.what,
            phase=fault.phase,
            engine=None if victim is None else victim.name,
            outcome=self._described(outcome),
            before=before,
            after=self._version,
            settled_s=time.monotonic() - start,
        )
        self.figures.rows.append(row)
        if (self._version > before) != fault.commits:
            expected = "committed" if fault.commits else "not committed"
            self._problem(f"{fault.what}, {fault.phase}: {expected} was expected, {row.outcome}")
        if victim is not None:
            if kill is not None:
                self._engines.replace(victim, grace_s=0.0)
            self._unready[victim.url] = row
        self._need(leaves_out=True)
        self._show(f"{fault.what}, {fault.phase}: version {before} -> {self._version}")

    def _sync(self, kill: Kill | None, victim: Member | None = None) -> Outcome | None:
        """Send the next step and settle it; None if the trainer was killed."""
        self._step += 1
        coordinator = self._coordinator or self._start_coordinator()
        outcome: Outcome | None = None
        start = time.monotonic()
        try:
            outcome = coordinator.sync(self._step, kill)
        except CoordinatorDied:
            if kill is None or kill.group is not None:
                raise
            self._end_coordinator(failed=True)
        if victim is not None:
            self._deaths.append((start, time.monotonic()))
            victim.is_live = False
            self._router.leave_out(victim.url)
        self._settle(outcome)
        return outcome

    def _settle(self, outcome: Outcome | None) -> None:
        """Wait until no engine has a sync prepared, compare their weights, and let clients know."""
        end = time.monotonic() + _SETTLED_S
        while True:
            found = statuses(self._engines.live)
            held = [status.staged for status in found.values() if status.staged is not None]
            if all(staged.prepared is None for staged in held):  # others are of no group
                break
            if time.monotonic() > end:
                self._problem(f"step {self._step} was not settled in {_SETTLED_S:.0f} s")
                break
            time.sleep(_POLL_S)
        before, versions = self._version, {u: s.version.number for u, s in found.items()}
        highest = max(versions.values(), default=before)
        if outcome is not None:
            self.figures.states.update(outcome.states.values())
            highest = max([highest, *outcome.versions.values()])
        if highest > before:
            if self._known.setdefault(highest, self._step) != self._step:
                self._problem(f"version {highest} is of two steps")
            self.figures.commits += 1
            self._version = highest
        else:
            self.figures.aborts += 1
        for url, status in found.items():
            self._check_engine(url, status.version.number, status.version.digest, before, outcome)
        self._router.require(self._version)
        self._load.publish(self._version)
        for url, row in [*self._unready.items()]:
            since = self._router.since(url)
            if since is not None:
                member = next(one for one in self._engines.members if one.url == url)
                row.ready_s = since - member.begun
                del self._unready[url]

    def _check_engine(
        self, url: str, version: int, held: str, before: int, outcome: Outcome | None
    ) -> None:
        """Check that an engine holds the fleet's version, or was left out of it, and its bytes."""
        name = self._engines.named(url)
        step = self._known.get(version)
        if step is None:
            self._problem(f"{name} is at version {version}, which no step has")
        elif held != self._digest_of(step):
            self._problem(f"{name}: the digest is not that of version {version}")
        was_left_out = url not in self._router.listed or (
            outcome is not None and outcome.states.get(url) == "left out"
        )
        if version != self._version and not was_left_out:
            self._problem(f"{name} is at version {version}, the fleet at {self._version}")
        if version < before and url in self._router.listed:
            self._problem(f"{name} was sent requests at version {version}, below {before}")

    def _described(self, outcome: Outcome | None) -> dict[str, str]:
        """Return what has become of each engine, by name."""
        if outcome is not None:
            return {self._engines.named(url): state for url, state in outcome.states.items()}
        found = statuses(self._engines.live)
        return {self._engines.named(url): f"at {s.version.number}" for url, s in found.items()}

    def _digest_of(self, step: int) -> str:
        if step not in self._digests:
            self._digests[step] = digest(weights(self._base, step))
        return self._digests[step]

    # The trainer --------------------------------------------------------------------------------

    def _need(self, *, leaves_out: bool) -> None:
        """Have a trainer that leaves an engine out, or one that does not."""
        if self._leaves_out != leaves_out:
            self._end_coordinator(failed=False)
            self._leaves_out = leaves_out

    def _start_coordinator(self) -> Coordinator:
        options = Options(
            folder=str(self._folder),
            urls=[member.url for member in self._engines.members],
            step=self._known[self._version],
            version=self._version,
            quorum=quorum(len(self._engines.members)) if self._leaves_out else None,
            window=_WINDOW_S,
            lag_limit=_LAG_S,
        )
        self._coordinator = Coordinator(options, self._router.leave_out, self._log)
        return self._coordinator.__enter__()

    def _end_coordinator(self, *, failed: bool) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.__exit__(CoordinatorDied if failed else None, None, None)

    # Answers ------------------------------------------------------------------------------------

    def _take_answers(self) -> None:
        arrived, self._waiting = [*self._waiting, *self._load.take()], []
        for answer in arrived:
            if unknown_versions(answer, self._known):
                self._waiting.append(answer)
            else:
                self._judge(answer)

    def _judge(self, answer: Answer) -> None:
        kind = _kind(answer.header)
        state = answer.state
        if state == "failed" and may_fail(answer, self._deaths, _AFTER_DEATH_S):
            state_text = "failed as its engine died"
        else:
            state_text = state
            if state == "failed":
                self._problem(f"a request failed: {answer.problem}")
        self.figures.requests.setdefault(kind, Counter())[state_text] += 1
        if (problem := problem_of_versions(answer)) is not None:
            self._problem(problem)
            return
        spans = spans_of(answer)
        if not spans or (len(spans) == 1 and next(self._answers) % _CHECK_EVERY):
            return
        if (problem := self.figures.tokens.check(answer, self._score)) is not None:
            self._problem(problem)

    def _score(self, version: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        return self._reference.logprobs(self._known[version], prompt, tokens)

    def _problem(self, text: str) -> None:
        self.figures.problems.append(text)
        self._show(f"WRONG: {text}")


def _kind(header: str | None) -> str:
    """Return how a request asked, for the table."""
    if header is None:
        return "none"
    if header.startswith(">="):
        return ">=N" if len(header) < 12 else ">=N, which nobody has"
    return "N-M" if "-" in header else "N"
